"""`auto`: valid, within its limit, and never slower than the named schedules."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir import auto
from megalite.pipeline.ir.auto import build_auto
from megalite.pipeline.ir.generators import (
    dualpipe_v,
    gpipe,
    interleaved,
    loop_placement,
    looped_bfs,
    one_f_one_b,
    v_placement,
    with_recompute_ahead,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.pipeline.ir.list_scheduler import Problem, Rules, list_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Action, Kind, Schedule
from megalite.pipeline.ir.simulate import Costs, Link, simulate
from megalite.pipeline.ir.validate import validate


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of `build_auto`."""

    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    sizes: Sizes | None = None
    limit: float | tuple[float, ...] | None = None
    prefetch: int = 1
    window: int = 1
    ahead: bool = False

    @property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    def build(self) -> Schedule:
        return build_auto(
            self.placement,
            self.microbatches,
            self.costs,
            sizes=self.sizes,
            limit=self.limit,
            recv_prefetch=self.prefetch,
            send_window=self.window,
            recompute_ahead=self.ahead,
        )

    def time(self, schedule: Schedule) -> float:
        program = lower(schedule, recv_prefetch=self.prefetch, send_window=self.window)
        return simulate(program, self.costs).makespan

    def peaks(self, schedule: Schedule) -> tuple[float, ...]:
        program = lower(schedule, recv_prefetch=self.prefetch, send_window=self.window)
        sizes = self.sizes or Sizes.uniform(len(self.placement))
        return tuple(peak.size for peak in memory_peaks(program, sizes))

    def fits(self, schedule: Schedule) -> bool:
        if self.limit is None:
            return True
        limits = self.limit if isinstance(self.limit, tuple) else (self.limit,) * self.num_ranks
        return all(peak <= most for peak, most in zip(self.peaks(schedule), limits, strict=True))

    def named(self) -> list[Schedule]:
        schedules = list(_named(self.placement, self.microbatches))
        return [with_recompute_ahead(schedule) for schedule in schedules] if self.ahead else schedules


def _named(placement: tuple[int, ...], m: int) -> Iterator[Schedule]:
    p = max(placement) + 1
    v = len(placement) // p
    if placement == loop_placement(p, 1):
        yield from (gpipe(p, m), one_f_one_b(p, m), one_f_one_b(p, m, "pb"), zb_h1(p, m), zb_h2(p, m))
    elif placement == loop_placement(p, v):
        yield looped_bfs(p, v, m)
        # Few enough that auto tries all of them.
        legal = [n for n in range(p, m) if m % n == 0 or m % n >= p] + [m]
        yield from (interleaved(p, v, m, n) for n in legal)
    if placement == v_placement(p):
        yield zb_v(p, m)
        if m >= 2 * p:
            yield dualpipe_v(p, m)


def _random_case(seed: int) -> Case:
    rnd = random.Random(seed)
    p = rnd.randint(1, 3)
    others = [rnd.randrange(p) for _ in range(rnd.randint(0, 3))]
    arbitrary = rnd.sample([*range(p), *others], p + len(others))
    placement = rnd.choice((loop_placement(p, rnd.randint(1, 3)), v_placement(p), tuple(arbitrary)))
    count, m = len(placement), rnd.randint(1, 6)

    def each(*choices: float) -> tuple[float, ...]:
        return tuple(rnd.choice((*choices, rnd.uniform(0.2, 2.0))) for _ in range(count))

    weight = each(0.0, 1.0)
    costs = Costs(
        forward=each(0.0, 1.0),
        backward=tuple(w + i for w, i in zip(weight, each(0.0, 1.0), strict=True)),
        weight_grad=weight,
        recompute=rnd.choice((None, each(0.5))),
        p2p=rnd.choice((0.0, 0.3, 1.5)),
        links={(0, 1): Link(0.2, 0.4), (1, 0): Link(0.0, 0.7)} if p > 1 and rnd.random() < 0.3 else {},
    )
    sizes = Sizes(
        activation=each(1.0), deferred=each(0.0, 0.5), kept_input=each(0.0, 0.2), message=rnd.choice((0.0, 0.1))
    )
    one = max(sum(sizes.activation[s] for s in range(count) if placement[s] == rank) for rank in range(p))
    limit = rnd.choice((None, one * rnd.uniform(0.9, 2.0), one * rnd.uniform(1.5, m + 1)))
    return Case(
        placement=placement,
        microbatches=m,
        costs=costs,
        sizes=sizes,
        limit=tuple(limit * rnd.uniform(0.9, 1.5) for _ in range(p)) if limit and rnd.random() < 0.3 else limit,
        prefetch=rnd.choice((0, 1, 3)),
        window=rnd.choice((1, 2)),
        ahead=rnd.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(24))
def test_valid_within_limit_and_never_slower_than_named(seed: int) -> None:
    case = _random_case(seed)
    fitting = [case.time(schedule) for schedule in case.named() if case.fits(schedule)]
    try:
        schedule = case.build()
    except ConfigError as error:
        assert "fits the memory limit" in str(error)
        assert not fitting
        return
    validate(lower(schedule, recv_prefetch=case.prefetch, send_window=case.window))
    assert schedule.name == "auto"
    assert case.fits(schedule)
    assert case.time(schedule) <= min(fitting, default=float("inf")) * (1 + 1e-9)


@pytest.mark.parametrize(("placement", "ahead"), [(loop_placement(3, 1), False), (v_placement(3), True)])
def test_same_arguments_same_schedule(placement: tuple[int, ...], ahead: bool) -> None:
    """Earlier searches with other limits must not matter; the search treats some limits as equal and some not."""
    count = len(placement)
    costs = Costs(forward=(1.1,) * count, backward=(2.3,) * count, weight_grad=(0.9,) * count, p2p=0.2)
    sizes = Sizes.uniform(count, deferred=0.3, kept_input=0.1, message=0.01)
    limits = [(size, size + 0.01, size * 1.5) for size in ((1.4, 1.401, 1.7) if ahead else (3.0, 3.001, 3.4, 4.1, 9.0))]
    case = Case(placement=placement, microbatches=6, costs=costs, sizes=sizes, ahead=ahead)
    alone = []
    for limit in limits:
        auto._known.cache_clear()
        auto._bounds.cache_clear()
        alone.append(replace(case, limit=limit).build())
    assert [replace(case, limit=limit).build() for limit in limits] == alone
    assert len(set(alone)) > 1


def test_bubble_rate_of_a_published_profile() -> None:
    """1.5B on 8 ranks, in ms: with the memory of 1F1B, less than the 15.85 % of ZB-H1."""
    p, m, f, i, w = 8, 24, 18.52, 18.09, 9.34
    costs = Costs(forward=(f,) * p, backward=(i + w,) * p, weight_grad=(w,) * p, p2p=0.60)
    case = Case(placement=loop_placement(p, 1), microbatches=m, costs=costs, limit=float(p))
    schedule = case.build()
    assert case.fits(schedule)
    rates = [1 - m * (f + i + w) / case.time(each) for each in (schedule, zb_h1(p, m))]
    assert rates[0] <= 0.1137 and rates[1] == pytest.approx(0.1585, abs=5e-5)


@pytest.mark.parametrize(
    ("placement", "limit", "gain"),
    [(loop_placement(4, 2), 12.0, 1.04), (v_placement(4), 8.0, 1.02)],
    ids=["loop of two", "vee"],
)
def test_faster_than_named_with_unequal_stages(placement: tuple[int, ...], limit: float, gain: float) -> None:
    # A light first stage and a heavy last one, as with embedding and head.
    count = len(placement)
    forward = (0.7, *(1.0,) * (count - 2), 1.5)
    case = Case(
        placement=placement,
        microbatches=16,
        costs=Costs(
            forward=forward,
            backward=tuple(1.8 * cost for cost in forward),
            weight_grad=tuple(0.8 * cost for cost in forward),
            p2p=0.1,
        ),
        limit=limit,
    )
    best = min(case.time(schedule) for schedule in case.named() if case.fits(schedule))
    assert case.time(case.build()) * gain <= best


@pytest.mark.parametrize(
    ("case", "time"),
    [
        # The forwards, then F and I in turn at the end, then the input gradients: no schedule is faster.
        (Case(placement=loop_placement(4, 2), microbatches=3, costs=Costs.uniform(8)), 24.0),
        (Case(placement=(0, 1, 1, 0, 2), microbatches=6, costs=Costs.uniform(5)), 37.0),
    ],
)
def test_times_are_near_the_ideal(case: Case, time: float) -> None:
    """With fewer microbatches than ranks, where named schedules need a quarter more time, and on any placement."""
    assert case.time(case.build()) <= time
    assert all(case.time(named) >= 1.25 * time for named in case.named())


def test_halves_are_joined_if_no_rank_waits() -> None:
    alone = Case(placement=(0,), microbatches=5, costs=Costs.uniform(1), limit=1.0).build()
    assert alone.actions == (tuple(Action(kind, 0, i) for i in range(5) for kind in (Kind.F, Kind.B)),)
    case = Case(placement=loop_placement(4, 1), microbatches=8, costs=Costs.uniform(4))
    schedule = case.build()
    assert case.time(schedule) == case.time(zb_h1(4, 8)) == 27.0
    row = schedule.actions[0]
    pairs = {(row[k].kind, row[k + 1].kind) for k in range(len(row) - 1) if row[k][1:] == row[k + 1][1:]}
    assert (Kind.I, Kind.W) not in pairs
    assert any(action.kind is Kind.B for action in row)


def test_recompute_ahead() -> None:
    case = Case(
        placement=loop_placement(3, 2),
        microbatches=9,
        costs=Costs.uniform(6, recompute=1.0),
        sizes=Sizes.uniform(6, kept_input=0.1),
        limit=2.1,
        ahead=True,
    )
    schedule = case.build()
    assert any(action.kind is Kind.R for row in schedule.actions for action in row)
    assert case.fits(schedule)
    assert case.time(schedule) * 1.02 < min(case.time(each) for each in case.named() if case.fits(each))


def test_messages_count_against_the_limit() -> None:
    case = Case(
        placement=loop_placement(4, 1),
        microbatches=8,
        costs=Costs.uniform(4, p2p=0.3),
        sizes=Sizes.uniform(4, message=0.25),
        limit=3.5,
    )
    schedule = case.build()
    assert max(case.peaks(schedule)) <= 3.5
    # No named schedule uses so little memory.
    assert not any(case.fits(each) for each in case.named())


def test_error_names_the_minimum_memory() -> None:
    case = Case(
        placement=(0, 1, 1, 0),
        microbatches=4,
        costs=Costs.uniform(4),
        sizes=Sizes.uniform(4, activation=3.0),
        limit=5.0,
    )
    with pytest.raises(ConfigError, match=r"rank 0 needs 6 at least, its limit is 5\. A limit of 6 works"):
        case.build()
    assert max(case.peaks(replace(case, limit=6.0).build())) == 6.0


@pytest.mark.parametrize("placement", [loop_placement(3, 2), v_placement(3), (1, 0, 0, 2, 1, 0)])
def test_list_scheduler_predicts_time_and_memory(placement: tuple[int, ...]) -> None:
    costs, sizes = Costs.uniform(6, forward=1.0, backward=3.0), Sizes.uniform(6, deferred=0.5)
    for limit in (2.5, 3.0, 4.5, 100.0):
        room = tuple(max(limit, float(placement.count(rank))) for rank in range(3))
        problem = Problem.of(placement, 5, costs, sizes, room, ahead=False)
        outcome = list_schedule(problem, Rules((5,) * 6, ("backward", "alternate", "forward"), (0.0,) * 3))
        program = lower(Schedule("list", 5, placement, outcome.actions()))
        validate(program)
        timeline = simulate(program, costs)
        assert timeline.makespan == outcome.makespan
        peaks = [peak.size for peak in memory_peaks(program, sizes)]
        assert sum(peaks) == outcome.memory
        assert all(peak <= most for peak, most in zip(peaks, room, strict=True))


def test_early_recomputation_wakes_a_rank_before_its_input() -> None:
    """If the rank starts an I meanwhile, it must still start the F that it waited for."""
    forward, input_grad = (10.7, 8.1, 9.8, 8.4), (2.4, 0.1, 2.9, 0.9)
    backward = tuple(each + 8.0 for each in input_grad)
    costs = Costs(forward=forward, backward=backward, weight_grad=(8.0,) * 4, recompute=forward)
    sizes = Sizes.uniform(4, activation=4.0, deferred=2.0, kept_input=1.0)
    schedule = build_auto((0, 1, 2, 3), 5, costs, sizes=sizes, limit=7.0, recompute_ahead=True, effort="quick")
    validate(lower(schedule))


def test_outcome_holds_in_its_range_of_leads() -> None:
    placement, costs, sizes = v_placement(3), Costs.uniform(6, backward=2.5), Sizes.uniform(6, deferred=0.5)
    problem = Problem.of(placement, 8, costs, sizes, (5.0,) * 3, ahead=False)
    rules = Rules((3, 3, 2, 2, 2, 2), ("backward", "alternate", "forward"), (0.5,) * 3)
    outcome, same = list_schedule(problem, rules), 0
    for lead in product((1, 2, 3, 4), repeat=6):
        limits = (*problem.limits, *lead)
        if all(least <= each < beyond for least, each, beyond in zip(outcome.holds[0], limits, outcome.holds[1])):
            same += 1
            assert list_schedule(problem, rules._replace(lead=lead)).lists == outcome.lists
    assert 1 < same < 4**6

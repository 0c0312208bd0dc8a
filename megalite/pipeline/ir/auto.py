"""Build the schedule `auto`: the best of the named schedules and of those found by a list scheduler.

The search at the end of this file adapts the list scheduler's rules to the costs."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise, product
from math import inf
from operator import itemgetter
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.config.numbers import readable_bytes
from megalite.config.run import cache_by_object
from megalite.pipeline.ir.generators import (
    WARM_UPS,
    dualpipe_v,
    gpipe,
    group_fits,
    interleaved,
    loop_placement,
    looped_bfs,
    one_f_one_b,
    row_by_row,
    v_placement,
    with_recompute_ahead,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.pipeline.ir.list_scheduler import ROUNDING, Order, Outcome, Problem, Rules, list_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, exceeds, memory_peaks, sufficient
from megalite.pipeline.ir.schedule import Action, Kind, Program, Schedule
from megalite.pipeline.ir.simulate import Costs, Timeline, least_makespan, simulate

MOST_GROUPS = 8
"""Microbatch groups tried for interleaved schedules, including the smallest and the largest."""


def named_schedules(placement: tuple[int, ...], num_microbatches: int) -> Iterator[Schedule]:
    """Yield the named schedules of a loop or V placement; none for any other placement."""
    p, m = max(placement) + 1, num_microbatches
    if placement == loop_placement(p, 1):
        yield gpipe(p, m)
        yield from (one_f_one_b(p, m, warm_up) for warm_up in WARM_UPS)
        yield zb_h1(p, m)
        yield zb_h2(p, m)
    elif placement == loop_placement(p, len(placement) // p):
        yield looped_bfs(p, len(placement) // p, m)
        yield from (interleaved(p, len(placement) // p, m, group) for group in _groups(p, m))
    if placement == v_placement(p):
        yield zb_v(p, m)
        if m >= 2 * p:
            yield dualpipe_v(p, m)


def _groups(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return at most `MOST_GROUPS` legal microbatch groups, small ones more densely."""
    legal = [group for group in range(num_ranks, num_microbatches) if group_fits(num_ranks, num_microbatches, group)]
    legal.append(num_microbatches)
    if len(legal) <= MOST_GROUPS:
        return legal
    steps = MOST_GROUPS - 1
    return [legal[(len(legal) - 1) * step * step // (steps * steps)] for step in range(steps + 1)]


def one_by_one(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Run one microbatch after another through all stages and back: slow, but no schedule needs less memory."""
    trip = [(Kind.F, stage) for stage in range(len(placement))]
    trip += [(Kind.B, stage) for stage in reversed(range(len(placement)))]

    def row(rank: int) -> Iterable[Action]:
        own = [(kind, stage) for kind, stage in trip if placement[stage] == rank]
        return (Action(kind, stage, i) for i in range(num_microbatches) for kind, stage in own)

    return row_by_row("auto", placement, num_microbatches, row)


class SearchBudget(NamedTuple):
    work: int
    """Actions that a search may schedule over all attempts. A count rather than a time, so that every rank and machine
    finds the same schedule. No search runs if one step has more actions."""
    attempts: tuple[int, int]  # minimum and maximum per search; they override `work`
    keep: int  # schedules that a search returns
    rounds: int
    """Maximum number of searches, each with less room, until a schedule fits together with its messages."""
    close: float
    """No search runs if a named schedule's time exceeds the lower bound of any schedule by at most this fraction."""


EFFORTS = {
    "thorough": SearchBudget(work=2_500_000, attempts=(32, 800), keep=4, rounds=4, close=0.0),
    "quick": SearchBudget(work=80_000, attempts=(4, 32), keep=1, rounds=2, close=0.01),
}
"""Thorough: a few seconds, up to a minute for large pipelines. Quick: well below a second with 16 ranks and 128
microbatches, because every rank searches when a run starts."""


def build_auto(
    placement: tuple[int, ...],
    num_microbatches: int,
    costs: Costs,
    *,
    sizes: Sizes | None = None,
    limit: float | tuple[float, ...] | None = None,
    recv_prefetch: int = 1,
    send_window: int = 1,
    recompute_ahead: bool = False,
    effort: str = "thorough",
) -> Schedule:
    """Return the fastest schedule found for these costs that fits the memory limit. Raise ConfigError if none fits.

    Candidates are the named schedules of the placement and those of a list scheduler. A search adapts the scheduler's
    rules to the costs: how far each stage runs ahead, whether forwards or backwards go first, which gaps a W may fill.
    Each candidate that can be the fastest is lowered, simulated and replayed as it would run; the one with less memory
    wins a tie. So the result is never slower than a named schedule that fits. It depends on the arguments alone: the
    search is limited by the number of actions it schedules, not by a clock.

    Source of filling gaps with W under a memory limit: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).

    Args:
        placement: Rank of each virtual stage. Only loops and Vs have named candidates.
        costs: Per virtual stage.
        sizes: Per virtual stage, in the unit of `limit`. Default: an activation is 1, all else 0.
        limit: Maximum memory per rank: one number for all, or one each. Default: no limit.
        recompute_ahead: Add an R before every I and B, except right after its own F.
        effort: A key of `EFFORTS`."""
    sizes = Sizes.uniform(len(placement)) if sizes is None else sizes
    num_ranks = max(placement) + 1
    limits = limit if isinstance(limit, tuple) else (inf if limit is None else limit,) * num_ranks

    def judge(schedule: Schedule) -> _Judged:
        program, timeline = _run(schedule, costs, recv_prefetch, send_window)
        peaks = tuple(peak.size for peak in memory_peaks(program, sizes))
        above = [peak - most if exceeds(peak, most) else 0.0 for peak, most in zip(peaks, limits, strict=True)]
        return _Judged(schedule, timeline, peaks, max(above))

    def complete(schedule: Schedule) -> Schedule:
        return with_recompute_ahead(schedule) if recompute_ahead else schedule

    plain = one_by_one(placement, num_microbatches)
    candidates: list[_Judged] = []
    for bound, schedule in _bounds(placement, num_microbatches, costs, ahead=recompute_ahead):
        if bound <= _fastest(candidates) * (1.0 + ROUNDING):
            candidates.append(judge(schedule))
    work, attempts, keep, rounds, close = EFFORTS[effort]
    room = _without_messages(placement, limits, sizes, send_window)
    ideal = _ideal(placement, num_microbatches, costs, ahead=recompute_ahead)
    if 3 * len(placement) * num_microbatches > work or _fastest(candidates) <= ideal * (1.0 + close + ROUNDING):
        rounds = 0
    for _ in range(rounds):
        problem = Problem.of(placement, num_microbatches, costs, sizes, room, ahead=recompute_ahead)
        room = tuple(map(max, room, problem.least))
        outcomes = search(replace(problem, room=room), work, attempts, keep)
        found = [judge(complete(replace(plain, actions=outcome.actions()))) for outcome in outcomes]
        candidates += found
        nearest = min(found, key=lambda candidate: candidate.excess)
        if nearest.excess <= 0.0 or room == problem.least:
            break
        over = (max(0.0, peak - most) for peak, most in zip(nearest.peaks, limits, strict=True))
        room, work = tuple(have - much for have, much in zip(room, over, strict=True)), work // 4

    return replace(_joined(_chosen(candidates, limits), judge, costs).schedule, name="auto")


@lru_cache(maxsize=4)
def _bounds(
    placement: tuple[int, ...], num_microbatches: int, costs: Costs, *, ahead: bool
) -> list[tuple[float, Schedule]]:
    """Return the schedules that need no search with their least makespan (without messages), fastest first."""
    named = (one_by_one(placement, num_microbatches), *named_schedules(placement, num_microbatches))
    complete = map(with_recompute_ahead, named) if ahead else named
    return sorted(((least_makespan(each, costs), each) for each in complete), key=itemgetter(0))


@cache_by_object(maxsize=16)
def _run(schedule: Schedule, costs: Costs, recv_prefetch: int, send_window: int) -> tuple[Program, Timeline]:
    """Lower and simulate a schedule. Cached for searches with other sizes and limits."""
    program = lower(schedule, recv_prefetch=recv_prefetch, send_window=send_window)
    return program, simulate(program, costs)


class _Judged(NamedTuple):
    """A candidate with its predicted time and memory."""

    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]  # per rank
    excess: float  # the largest amount by which a rank's peak exceeds its limit; 0 if the candidate fits


def _fastest(candidates: Iterable[_Judged]) -> float:
    return min((candidate.timeline.makespan for candidate in candidates if candidate.excess <= 0.0), default=inf)


def _chosen(candidates: Iterable[_Judged], limits: tuple[float, ...]) -> _Judged:
    """Return the candidate with the least memory among the fastest that fit."""
    fitting = [candidate for candidate in candidates if candidate.excess <= 0.0]
    if not fitting:
        raise _no_room(min(candidates, key=lambda candidate: candidate.excess), limits)
    fastest = _fastest(fitting)
    return min(
        (candidate for candidate in fitting if candidate.timeline.makespan <= fastest * (1.0 + ROUNDING)),
        key=lambda candidate: (sum(candidate.peaks), sum(map(len, candidate.schedule.actions))),
    )


def _ideal(placement: tuple[int, ...], num_microbatches: int, costs: Costs, *, ahead: bool) -> float:
    """Return a lower bound on the makespan: each rank waits for its first input, then computes without a pause."""
    seconds = costs.of_actions(ahead=ahead)
    busy: dict[int, float] = defaultdict(float)
    first: dict[int, float] = {}
    arrival = 0.0
    for rank, forward, inner, weight in zip(
        placement, *(seconds[kind] for kind in (Kind.F, Kind.I, Kind.W)), strict=True
    ):
        first.setdefault(rank, arrival)
        arrival += forward
        busy[rank] += forward + inner + weight
    return max(first[rank] + num_microbatches * busy[rank] for rank in busy)


def _joined(candidate: _Judged, judge: Callable[[Schedule], _Judged], costs: Costs) -> _Judged:
    """Replace each I directly followed by its W by a B, unless another rank would wait longer for its gradient."""
    schedule, placement = candidate.schedule, candidate.schedule.placement
    times = {event.action: event for event in candidate.timeline.events}
    rows = []
    for row in schedule.actions:
        joined: list[Action] = []
        for action in row:
            kind, stage, microbatch = action
            join = kind is Kind.W and joined[-1] == (Kind.I, stage, microbatch)
            if join and stage > 0:
                source, destination = placement[stage], placement[stage - 1]
                hop = 0.0 if source == destination else sum(costs.link(source, destination))
                reader = times[schedule.input_gradient(stage - 1, microbatch)]
                join = reader.start >= times[action].end + hop
            if join:
                joined[-1] = Action(Kind.B, stage, microbatch)
            else:
                joined.append(action)
        rows.append(tuple(joined))
    if tuple(rows) == schedule.actions:
        return candidate
    # Simulated again, because receives move with the actions around them.
    found = judge(replace(schedule, actions=tuple(rows)))
    slower = found.timeline.makespan > candidate.timeline.makespan * (1.0 + ROUNDING)
    return candidate if slower or found.excess > 0.0 else found


def _without_messages(
    placement: tuple[int, ...], limits: tuple[float, ...], sizes: Sizes, send_window: int
) -> tuple[float, ...]:
    """Return each rank's limit minus the messages that its channels usually hold and the workspace of a backward."""
    workspace = [0.0] * len(limits)
    for rank, size in zip(placement, sizes.workspace or (), strict=False):
        workspace[rank] = max(workspace[rank], size)
    hops = {(here, there) for here, there in pairwise(placement) if here != there}
    channels = hops | {(there, here) for here, there in hops}
    return tuple(
        most
        - workspace[rank]
        - sizes.message * sum(send_window if rank == here else rank == there for here, there in channels)
        for rank, most in enumerate(limits)
    )


def _no_room(leanest: _Judged, limits: tuple[float, ...]) -> ConfigError:
    rank = max(range(len(limits)), key=lambda rank: leanest.peaks[rank] - limits[rank])
    need, most = readable_bytes(leanest.peaks[rank]), readable_bytes(limits[rank])
    return ConfigError(
        f"schedule auto: nothing fits the memory limit: rank {rank} needs {need} at least, its limit is {most}. A "
        f"limit of {sufficient(max(leanest.peaks))} works for {leanest.schedule.num_ranks} ranks and "
        f"{leanest.schedule.num_microbatches} microbatches; so may smaller microbatches, recomputation or more ranks"
    )


_ORDERS: tuple[Order, ...] = ("backward", "alternate", "forward")
_FILLS = (0.0, 0.25, 0.5, 0.75, 1.0)

REHEARSAL = 4  # microbatches per rank, enough to compare rules


def search(problem: Problem, work: int, attempts: tuple[int, int], keep: int) -> list[Outcome]:
    """Return the best `keep` schedules found, the fastest first, then those with less memory.

    The search schedules `work` actions, but stays within the minimum and maximum of `attempts`.

    It tries a grid of rules, then changes the best ones step by step and keeps each change that helps. Rules do not
    depend on the number of microbatches, so most attempts use few of them."""
    starts = list(_grid(problem))
    rehearsal = REHEARSAL * len(problem.stages)
    if problem.num_microbatches > 1.5 * rehearsal:
        short = _Attempts(replace(problem, num_microbatches=rehearsal), work // 2, attempts, keep)
        short.climb(starts)
        starts = short.best_rules(8) + starts[:8]
        work //= 2
    full = _Attempts(problem, work, attempts, keep)
    full.climb(starts)
    return full.found()


Value = tuple[float, float]  # time and memory; smaller is better
Range = tuple[tuple[float, ...], tuple[float, ...]]  # `Outcome.holds`


@lru_cache(maxsize=16)
def _known(problem: Problem) -> dict[Rules, list[tuple[Range, Value]]]:
    """Return the cache of a problem without room: rules without lead -> values, each with the range of room and lead in
    which it applies."""
    return {}


class _Attempts:
    """Evaluates rules within a budget of attempts, and keeps the best."""

    def __init__(self, problem: Problem, work: int, attempts: tuple[int, int], keep: int) -> None:
        self.problem = problem
        self.keep = keep
        actions = 3 * len(problem.placement) * problem.num_microbatches
        least, most = attempts
        self.budget = min(most, max(least, work // actions))
        self.values: dict[Rules, Value] = {}
        self.best: dict[Value, Rules] = {}
        self.known = _known(replace(problem, room=()))

    def value(self, rules: Rules) -> Value:
        if rules not in self.values:
            self.values[rules] = value = self._evaluate(rules)
            self.best.setdefault(value, rules)
            if len(self.best) > self.keep:
                del self.best[max(self.best)]
        return self.values[rules]

    def _evaluate(self, rules: Rules) -> Value:
        known, limits = self.known.setdefault(rules._replace(lead=()), []), [*self.problem.limits, *rules.lead]
        for (least, beyond), value in known:
            if all(low <= limit < high for low, limit, high in zip(least, limits, beyond)):
                return value
        outcome = list_schedule(self.problem, rules)
        known.append((outcome.holds, (outcome.makespan, outcome.memory)))
        return known[-1][1]

    def found(self) -> list[Outcome]:
        return [list_schedule(self.problem, self.best[value]) for value in sorted(self.best)]

    def climb(self, starts: list[Rules]) -> None:
        """Try the starts, on at most half of the budget, and change the best three as long as that helps."""
        for rules in starts[: self.budget // 2]:
            self.value(rules)
        for rules in self.best_rules(3):
            self._climb_from(rules)

    def _climb_from(self, rules: Rules) -> None:
        value = self.value(rules)
        improved = True
        while improved:
            improved = False
            for change in _changes(self.problem):
                if len(self.values) >= self.budget:
                    return
                changed = change(rules)
                found = self.value(changed)
                if _better(found, value):
                    rules, value, improved = changed, found, True

    def best_rules(self, keep: int) -> list[Rules]:
        return sorted(self.values, key=self.values.__getitem__)[:keep]


def _better(value: Value, than: Value) -> bool:
    margin = than[0] * ROUNDING
    return value[0] < than[0] - margin or (value[0] <= than[0] + margin and value[1] < than[1])


def _grid(problem: Problem) -> Iterator[Rules]:
    """Yield rules to start from, the most promising first."""
    num_ranks = len(problem.stages)
    several = max(map(len, problem.stages)) > 1
    directions = ((True, False), (True, True), (False, False), (False, True)) if several else ((True, True),)
    for deepest, fill, order, lead in product(directions, (0.0, 0.5, 1.0), _ORDERS, _leads(problem)):
        yield Rules(lead, (order,) * num_ranks, (fill,) * num_ranks, *deepest)


def _leads(problem: Problem) -> list[tuple[int, ...]]:
    """Return leads that cover the time until a microbatch's gradient returns, at a steady or a forward-only pace."""
    most = problem.num_microbatches
    steady = max(
        sum(problem.forward[stage] + problem.input_grad[stage] + problem.weight_grad[stage] for stage in own)
        for own in problem.stages
    )
    ramp = [sum(problem.forward[stage] for stage in own) for own in problem.stages]
    trips: list[float] = []
    trip = 0.0
    for stage in reversed(range(len(problem.placement))):
        trip += problem.forward[stage] + sum(problem.forward_links[stage]) + problem.input_grad[stage]
        trips.insert(0, trip)
        trip += sum(problem.backward_links[stage])

    def lead(pace: list[float], share: float) -> tuple[int, ...]:
        paces = [pace[rank] for rank in problem.placement]
        return tuple(
            int(min(most, 1.0 + share * time / each)) if each else most for time, each in zip(trips, paces, strict=True)
        )

    level = [steady] * len(ramp)
    shapes = [lead(ramp, 1.0), lead(level, 1.0), lead(level, 1.5), (most,) * len(trips), lead(level, 2.5)]
    return list(dict.fromkeys(shapes))


Change = Callable[[Rules], Rules]


def _changes(problem: Problem) -> Iterator[Change]:
    """Yield small changes of rules, those with a large effect first."""
    num_stages, num_ranks, most = len(problem.placement), len(problem.stages), problem.num_microbatches
    ranks = range(num_ranks)
    yield from (partial(_reordered, ranks=ranks, order=order) for order in _ORDERS)
    yield from (partial(_refilled, ranks=ranks, fill=fill) for fill in _FILLS)
    if num_stages > num_ranks:
        yield lambda rules: rules._replace(forward_deepest=not rules.forward_deepest)
        yield lambda rules: rules._replace(backward_deepest=not rules.backward_deepest)
    groups = [range(num_stages)]
    groups += [range(first, min(first + num_ranks, num_stages)) for first in range(0, num_stages, num_ranks)]
    groups += [range(stage, stage + 1) for stage in range(num_stages)]
    groups += [range(stage + 1) for stage in range(num_stages)]
    for stages in dict.fromkeys(groups):
        yield from (partial(_shifted, stages=stages, step=step, most=most) for step in (1, -1, 3, -3))
    for one in (range(rank, rank + 1) for rank in ranks):
        yield from (partial(_reordered, ranks=one, order=order) for order in _ORDERS)
        yield from (partial(_refilled, ranks=one, fill=fill) for fill in _FILLS)


def _reordered(rules: Rules, *, ranks: range, order: Order) -> Rules:
    return rules._replace(order=tuple(order if rank in ranks else own for rank, own in enumerate(rules.order)))


def _refilled(rules: Rules, *, ranks: range, fill: float) -> Rules:
    return rules._replace(fill=tuple(fill if rank in ranks else own for rank, own in enumerate(rules.fill)))


def _shifted(rules: Rules, *, stages: range, step: int, most: int) -> Rules:
    lead = tuple(min(most, max(1, own + step)) if stage in stages else own for stage, own in enumerate(rules.lead))
    return rules._replace(lead=lead)

"""The schedules that `auto` is measured against: all that have a name and take the placement."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from megalite.config.byte_size import readable_bytes
from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.auto_search import WORK, Objective, search
from megalite.pipeline.ir.generators.list_scheduler import ROUNDING, Problem
from megalite.pipeline.ir.generators.many_chunks import dualpipe_v, interleaved, looped_bfs, zb_v
from megalite.pipeline.ir.generators.one_chunk import (
    WARM_UPS,
    gpipe,
    loop_placement,
    one_f_one_b,
    v_placement,
    zb_h1,
    zb_h2,
)
from megalite.pipeline.ir.generators.registry import with_recompute_ahead
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, exceeds, memory_peaks, sufficient
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.ir.simulate import Costs, Event, simulate

MOST_GROUPS = 8
"""Of interleaved schedules, that many microbatch groups, the smallest and the largest among them."""


def named_schedules(placement: tuple[int, ...], num_microbatches: int) -> Iterator[Schedule]:
    """The named schedules of a loop or V; none of another placement."""
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


def one_by_one(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """One microbatch after the other through all stages and back: slow, but nothing holds less."""
    num_ranks, num_stages = max(placement) + 1, len(placement)
    trip = [(Kind.F, stage) for stage in range(num_stages)]
    trip += [(Kind.B, stage) for stage in reversed(range(num_stages))]
    return Schedule(
        name="auto",
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=placement,
        actions=tuple(
            tuple(
                Action(kind, stage, microbatch)
                for microbatch in range(num_microbatches)
                for kind, stage in trip
                if placement[stage] == rank
            )
            for rank in range(num_ranks)
        ),
    )


def _groups(num_ranks: int, num_microbatches: int) -> list[int]:
    """Legal microbatch groups; where there are many, smaller ones more densely."""
    legal = [
        group
        for group in range(num_ranks, num_microbatches)
        if num_microbatches % group == 0 or num_microbatches % group >= num_ranks
    ]
    legal.append(num_microbatches)
    if len(legal) <= MOST_GROUPS:
        return legal
    steps = MOST_GROUPS - 1
    return [legal[(len(legal) - 1) * step * step // (steps * steps)] for step in range(steps + 1)]


_ROUNDS = 4
"""Searches that may follow each other, each with less room, until one's schedules fit with their messages."""


def build_auto(
    placement: tuple[int, ...],
    num_microbatches: int,
    costs: Costs,
    *,
    sizes: Sizes | None = None,
    limit: float | tuple[float, ...] | None = None,
    objective: Objective = "makespan",
    recv_prefetch: int = 1,
    send_window: int = 1,
    recompute_ahead: bool = False,
) -> Schedule:
    """The fastest schedule found for these costs that fits the memory limit.

    Candidates are the named schedules of the placement and those of a list scheduler, whose rules a search fits to the
    costs: how far each stage runs ahead, whether forwards or backwards go first, which gaps a W may fill. Each
    candidate is lowered, simulated and replayed as it would run; of equally fast ones the one that holds least is
    taken. So the result is never slower than a named schedule that fits. It depends on the arguments alone: the search
    is bounded by the actions it schedules, not by a clock.

    To fill gaps with W under a memory limit is the idea of Qi et al., "Zero Bubble Pipeline Parallelism" (2023).

    Args:
        placement: Per virtual stage, its rank. One that is neither loop nor V has no named candidates.
        num_microbatches: In a step.
        costs: Per virtual stage, equal or not.
        sizes: In the unit of `limit`, per virtual stage. Default: an activation is 1, all else 0.
        limit: The most that a rank may hold, one number or one a rank. Default: no limit.
        objective: "makespan", the time of a step whose end all ranks await; or "span", the longest time from a rank's
            first start to its last end, for steps that follow each other without a barrier.
        recv_prefetch: What `lower` will be given.
        send_window: What `lower` will be given.
        recompute_ahead: Give every I and B an R, except right after its own F.

    Raises:
        ConfigError: no schedule fits the limit (the message says what the leanest one needs); costs, sizes or limits
            of another number of stages or ranks; no microbatch; a rank without a stage.
    """
    _check_placement(placement, num_microbatches)
    sizes = Sizes.uniform(len(placement)) if sizes is None else sizes
    limits = _limits(limit, max(placement) + 1)
    judge = _Judge(costs, sizes, limits, objective, recv_prefetch, send_window)

    def judged(schedule: Schedule) -> _Judged:
        return judge(with_recompute_ahead(schedule) if recompute_ahead else schedule)

    plain = one_by_one(placement, num_microbatches)
    # The first, because it also finds what is wrong with costs and sizes.
    candidates = [judged(plain)]
    candidates += map(judged, named_schedules(placement, num_microbatches))
    room, work = _without_messages(placement, limits, sizes, send_window), WORK
    for _ in range(_ROUNDS):
        problem = Problem.of(placement, num_microbatches, costs, sizes, room, ahead=recompute_ahead)
        room = tuple(map(max, room, problem.least))
        found = [
            judged(replace(plain, actions=outcome.actions()))
            for outcome in search(replace(problem, room=room), objective, work=work)
        ]
        candidates += found
        nearest = min(found, key=lambda candidate: candidate.excess)
        if nearest.excess <= 0.0 or room == problem.least:
            break
        over = map(_positive_part, nearest.peaks, limits)
        room, work = tuple(have - much for have, much in zip(room, over, strict=True)), work // 4

    fitting = [candidate for candidate in candidates if candidate.excess <= 0.0]
    if not fitting:
        raise _no_room(min(candidates, key=lambda candidate: candidate.excess), limits)
    fastest = min(candidate.time for candidate in fitting)
    best = min(
        (candidate for candidate in fitting if candidate.time <= fastest * (1.0 + ROUNDING)),
        key=lambda candidate: (sum(candidate.peaks), sum(map(len, candidate.schedule.actions))),
    )
    return replace(_joined(best, judge).schedule, name="auto")


class _Judged(NamedTuple):
    """A candidate as it would run."""

    schedule: Schedule
    time: float
    """Of the objective."""
    peaks: tuple[float, ...]
    """Per rank."""
    excess: float
    """The most by which a rank's peak is above its limit; not positive if the candidate fits."""


class _Judge:
    """Lowers, simulates and replays: the same measure for all candidates."""

    def __init__(
        self,
        costs: Costs,
        sizes: Sizes,
        limits: tuple[float, ...],
        objective: Objective,
        recv_prefetch: int,
        send_window: int,
    ) -> None:
        self.costs, self.sizes, self.limits, self.objective = costs, sizes, limits, objective
        self.recv_prefetch, self.send_window = recv_prefetch, send_window

    def __call__(self, schedule: Schedule) -> _Judged:
        program = self._lower(schedule)
        timeline = simulate(program, self.costs)
        peaks = tuple(peak.size for peak in memory_peaks(program, self.sizes))
        return _Judged(
            schedule=schedule,
            time=timeline.makespan if self.objective == "makespan" else max(timeline.spans),
            peaks=peaks,
            excess=max(
                peak - most if exceeds(peak, most) else 0.0 for peak, most in zip(peaks, self.limits, strict=True)
            ),
        )

    def events(self, schedule: Schedule) -> tuple[Event, ...]:
        return simulate(self._lower(schedule), self.costs).events

    def _lower(self, schedule: Schedule) -> Program:
        return lower(schedule, recv_prefetch=self.recv_prefetch, send_window=self.send_window)


def _joined(candidate: _Judged, judge: _Judge) -> _Judged:
    """The candidate with B for each I and W in a row, as far as nobody has to wait longer for that."""
    schedule = candidate.schedule
    events = judge.events(schedule)
    starts = {event.action: event.start for event in events}
    ends = {event.action: event.end for event in events}
    joined = replace(
        schedule, actions=tuple(_join(row, schedule, judge.costs, starts, ends) for row in schedule.actions)
    )
    if joined.actions == schedule.actions:
        return candidate
    # Receives move with the actions around them, so this is to be seen, not assumed.
    found = judge(joined)
    slower = found.time > candidate.time * (1.0 + ROUNDING)
    return candidate if slower or found.excess > 0.0 else found


def _join(
    row: tuple[Action, ...],
    schedule: Schedule,
    costs: Costs,
    starts: Mapping[Action, float],
    ends: Mapping[Action, float],
) -> tuple[Action, ...]:
    joined: list[Action] = []
    for action in row:
        kind, stage, microbatch = action
        if kind is Kind.W and joined[-1] == Action(Kind.I, stage, microbatch):
            waiting = schedule.input_gradient(stage - 1, microbatch) if stage > 0 else None
            if waiting is None or starts[waiting] >= ends[action] + _hop(schedule, costs, stage):
                joined[-1] = Action(Kind.B, stage, microbatch)
                continue
        joined.append(action)
    return tuple(joined)


def _hop(schedule: Schedule, costs: Costs, stage: int) -> float:
    """How long the gradient of a stage's input travels."""
    here, there = schedule.placement[stage], schedule.placement[stage - 1]
    return 0.0 if here == there else sum(costs.link(here, there))


def _check_placement(placement: tuple[int, ...], num_microbatches: int) -> None:
    if not placement:
        raise ConfigError("schedule auto: placement is empty; give the rank of each stage, such as (0, 1)")
    if min(placement) < 0:
        raise ConfigError(f"schedule auto: placement {placement} names rank {min(placement)}; ranks count from 0")
    missing = sorted(set(range(max(placement))) - set(placement))
    if missing:
        raise ConfigError(
            f"schedule auto: placement {placement} leaves rank {missing[0]} without a stage: give it one, or number the "
            f"ranks without it"
        )
    if num_microbatches < 1:
        raise ConfigError(f"schedule auto: the number of microbatches is {num_microbatches}; it must be 1 or more")


def _limits(limit: float | tuple[float, ...] | None, num_ranks: int) -> tuple[float, ...]:
    if limit is None:
        return (inf,) * num_ranks
    if not isinstance(limit, tuple):
        return (limit,) * num_ranks
    if len(limit) != num_ranks:
        raise ConfigError(
            f"schedule auto: {len(limit)} memory limits are given for {num_ranks} ranks: give one, or one a rank"
        )
    return limit


def _without_messages(
    placement: tuple[int, ...], limits: tuple[float, ...], sizes: Sizes, send_window: int
) -> tuple[float, ...]:
    """Per rank, what the limit leaves if each channel holds its usual number of messages, and a backward runs."""
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


def _positive_part(peak: float, most: float) -> float:
    return max(0.0, peak - most)


def _no_room(leanest: _Judged, limits: tuple[float, ...]) -> ConfigError:
    rank = max(range(len(limits)), key=lambda rank: leanest.peaks[rank] - limits[rank])
    need, most = readable_bytes(leanest.peaks[rank]), readable_bytes(limits[rank])
    enough = sufficient(max(leanest.peaks))
    return ConfigError(
        f"schedule auto: no schedule of {leanest.schedule.num_ranks} ranks and {leanest.schedule.num_microbatches} "
        f"microbatches fits the memory limit: rank {rank} needs {need} at least, its limit is {most}. A limit of {enough} "
        f"works; so may smaller microbatches, recomputation or more ranks"
    )

"""Simulate a config's schedule; the time of a step of very many microbatches is extrapolated from shorter steps.

That is exact only in a steady state, so the steady state is tested: a rank that is slightly slower than the others sets
the pace only after the queues before it are full, and until then a microbatch takes less time than it will.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.describe import replace
from megalite.config.run import RunConfig, cache_by_object
from megalite.partition.pipeline import costs_of, lowered, schedule_of
from megalite.partition.stages import StagePlan
from megalite.pipeline.ir.generators import smallest_group
from megalite.pipeline.ir.schedule import Kind, Program
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate

SIMULATED_ACTIONS = 6_000  # forwards and backwards up to which a step is simulated whole
MOST_ACTIONS = 100_000  # simulated at most if no steady state is found (about two seconds)
_WHOLE = ("auto", "file")  # built or read schedules need not be periodic
_NEVER_STEADY = ("looped-bfs",)  # each phase runs all microbatches of one chunk, so nothing repeats
_EQUAL = 1e-9  # tolerance for rounding, as a fraction of a step


class Run(NamedTuple):
    timeline: Timeline
    scale: float  # microbatches of the step divided by those simulated
    shift: float  # seconds that the step takes beyond the simulation
    cycle: int  # microbatches per period of the steady state; 0 if the step is simulated whole

    @property
    def seconds(self) -> float:
        return self.timeline.makespan + self.shift

    @property
    def bubble(self) -> float:
        return max(0.0, 1.0 - self.scale * max(self.timeline.busy) / self.seconds)  # rounding may make it negative


def bubble_fraction(config: RunConfig, stages: tuple[StagePlan, ...], num_microbatches: int) -> float:
    """Return the idle fraction of the busiest pipeline rank in one step, by FLOPs (or the costs file) without messages. A
    backward counts as two forwards plus what it recomputes."""
    return Clock(config, len(stages), num_microbatches).run(costs_of(config, stages)).bubble


class Clock:
    """Times a config's step with a number of microbatches; simulated programs are cached for further costs."""

    def __init__(self, config: RunConfig, num_stages: int, num_microbatches: int) -> None:
        p = config.parallel
        self._period, self._each = 1, 2 * num_stages
        if p.schedule_name == "interleaved":
            configured = p.microbatch_group_size_per_virtual_pipeline_stage
            self._period = configured or smallest_group(p.pp, num_microbatches)
            # A smaller number of microbatches would change the default.
            config = replace(config, microbatch_group_size_per_virtual_pipeline_stage=self._period)
        self._config, self._num_microbatches = config, num_microbatches
        self._programs: dict[int, Program] = {}

    def program(self, num_microbatches: int) -> Program:
        if num_microbatches not in self._programs:
            schedule = schedule_of(self._config, num_microbatches)
            self._programs[num_microbatches] = lowered(self._config, schedule)
        return self._programs[num_microbatches]

    def run(self, costs: Costs) -> Run:
        """Simulate the whole step, or extrapolate from two steps, one cycle apart, with equal ends."""
        p, wanted = self._config.parallel, self._num_microbatches
        # In-flight microbatches grow with pp; four times as many reach a steady state after the ramp-up.
        count = max(4 * max(p.pp, self._period), SIMULATED_ACTIONS // self._each)
        most = max(count, MOST_ACTIONS // self._each)
        if p.schedule_name in _NEVER_STEADY:
            count = most
        while count < wanted and p.schedule_name not in _WHOLE:
            timeline = self._simulate(self._aligned(count, self._period), costs)
            if count == most:
                # No steady state: assume that a rank that is always busy stays busy in the added microbatches.
                shorter = self._simulate(timeline.schedule.num_microbatches - self._period, costs)
                return self._extended(timeline, shorter, at_least=max(timeline.busy))
            cycle = _cycle(timeline, self._period)
            start = self._aligned(count, cycle)
            if start != timeline.schedule.num_microbatches:
                timeline = self._simulate(start, costs)
            shorter = self._simulate(start - cycle, costs)
            if _end_alike(timeline, shorter):
                return self._extended(timeline, shorter)
            count = min(2 * count, most)
        return Run(self._simulate(wanted, costs), 1.0, 0.0, 0)

    def extended(self, run: Run, seconds: Callable[[Program], float]) -> float:
        """Return the seconds of the step by another clock, extrapolated as `run` was."""
        count = run.timeline.schedule.num_microbatches
        taken = seconds(self.program(count))
        if not run.cycle:
            return taken
        each = (taken - seconds(self.program(count - run.cycle))) / run.cycle
        return taken + each * (self._num_microbatches - count)

    def _aligned(self, count: int, cycle: int) -> int:
        """Return the largest number up to `count` that differs from the step's by whole cycles."""
        return count - (count - self._num_microbatches) % cycle

    def _simulate(self, count: int, costs: Costs) -> Timeline:
        return _simulated(self.program(count), costs)

    def _extended(self, timeline: Timeline, shorter: Timeline, *, at_least: float = 0.0) -> Run:
        count, wanted = timeline.schedule.num_microbatches, self._num_microbatches
        cycle = count - shorter.schedule.num_microbatches
        each = max((timeline.makespan - shorter.makespan) / cycle, at_least / count)
        return Run(timeline, wanted / count, each * (wanted - count), cycle)


@cache_by_object(maxsize=8)
def _simulated(program: Program, costs: Costs) -> Timeline:
    # Configs with equal pipelines share their programs.
    return simulate(program, costs)


def _cycle(timeline: Timeline, period: int) -> int:
    """Return the number of microbatches, a multiple of `period`, after which the last stage's forwards repeat in the
    middle of the step: a guess, `period` if nothing repeats."""
    schedule = timeline.schedule
    wanted = (Kind.F, schedule.num_stages - 1)
    starts = np.array([event.start for event in timeline.events if event.action[:2] == wanted])
    # In a V schedule, the last stage's forwards come faster after those of the first stage have finished.
    starts = starts[len(starts) // 2 : len(starts) - 2 * schedule.num_ranks]
    for cycle in range(period, len(starts) // 2 + 1, period):
        if np.ptp(starts[cycle:] - starts[:-cycle]) <= _EQUAL * timeline.makespan:
            return cycle
    return period


def _end_alike(longer: Timeline, shorter: Timeline) -> bool:
    """Test whether the last half of each rank's actions starts later by the same time. Steps with further cycles begin
    in the same way; if all inputs of the end moved by one time, the end moves by that time for each further cycle."""
    moved = [
        later[-(len(sooner) // 2) :] - sooner[-(len(sooner) // 2) :]
        for later, sooner in zip(_starts(longer), _starts(shorter), strict=True)
    ]
    return bool(np.ptp(np.concatenate(moved)) <= _EQUAL * longer.makespan)


def _starts(timeline: Timeline) -> list[npt.NDArray[np.float64]]:
    rows: list[list[float]] = [[] for _ in range(timeline.schedule.num_ranks)]
    for event in timeline.events:
        rows[event.rank].append(event.start)
    return [np.array(row) for row in rows]

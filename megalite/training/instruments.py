"""Measures a run: phase timings and stragglers, traces, the profiler, goodput."""

import bisect
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.config.errors import ConfigError
from megalite.config.run import profile_folder, resumes
from megalite.pipeline.executor import Tracer
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology
from megalite.training.memory import memory_now, peak_memory_bytes
from megalite.training.records import FAILED, FINISHED, STOPPED, SessionLog
from megalite.training.replica import Replica
from megalite.training.trace import PHASES, PhaseClock, StepProfiler, TraceWriter

_EACH_STEP = ("forward", "backward", "reduce", "optimizer", "data_wait", "other")
"""Phases reported in ms per step; `_NOW_AND_THEN` are reported in seconds of the interval."""
_LABELS = {"data_wait": "data"}
_NOW_AND_THEN = ("evaluation", "save")
_COLUMNS = (*PHASES, "other", "memory")
_NAMED_PEERS = 8
_HISTORY = 200_000  # allocations recorded with record_memory_history

Report = tuple[dict[str, float], list[str]]
"""Fields that an interval adds to its record, and lines for the log. Fields: `<phase>_ms` and `<phase>_ms_min`, maximum
and minimum over ranks; `evaluation_seconds`, `save_seconds`, `memory_bytes_max` and `straggler_factor`."""


@dataclass(frozen=True)
class Straggler:
    """Ranks that wait for each other in every layer, and are slower than their peers with the same stages."""

    ranks: tuple[int, ...]
    seconds: float  # forward and backward of a step on the slowest rank, without waiting for other stages
    factor: float  # `seconds` over the median of the peers
    place: Sequence[tuple[int, ...]]  # these ranks and their peers

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(rank for unit in self.place if unit != self.ranks for rank in unit)


class Timings:
    """Collects every rank's phases once per interval.

    If ranks step `independent` of one another, rank 0 reports its own phases, and nothing is gathered. A
    rank is a straggler from a factor of `threshold`. Phases are logged if `log_phases` or if there is a straggler.

    Collectives: a gather of the hosts' names, unless `independent`."""

    def __init__(
        self, clock: PhaseClock, topology: Topology, *, independent: bool, threshold: float, log_phases: bool = False
    ) -> None:
        self._clock, self._topology, self._threshold, self._log_phases = clock, topology, threshold, log_phases
        self._gathers = not independent and topology.world.size > 1
        self._hosts = topology.world.gather_json(platform.node()) if self._gathers else []
        self._units = units(topology.layout) if topology.world.rank == 0 else []  # only rank 0 compares

    def interval(self, *, steps: int, seconds: float) -> Report:
        """Report the interval that ends now; its `steps` took `seconds` on this rank. Only rank 0 gets a report.

        Collectives: an all-gather of a few numbers over the world, unless ranks step independently."""
        rows = self._gather(steps, seconds)
        if not rows:
            return {}, []
        columns = {name: [row[index] for row in rows] for index, name in enumerate(_COLUMNS)}
        fields: dict[str, float] = {}
        for name in _EACH_STEP:
            if name != "data_wait":  # each step reports that itself
                fields[f"{name}_ms"] = 1e3 * max(columns[name])
                fields[f"{name}_ms_min"] = 1e3 * min(columns[name])
        fields |= {f"{name}_seconds": max(columns[name]) for name in _NOW_AND_THEN}
        fields["memory_bytes_max"] = max(columns["memory"])
        lines = []
        if self._gathers:
            computes = [a + b for a, b in zip(columns["forward"], columns["backward"])]
            found = compare(computes, self._units, 1.0)
            fields["straggler_factor"] = max((one.factor for one in found), default=1.0)
            lines = [self._describe(one) for one in found if one.factor >= self._threshold]
        return fields, [_line(columns, len(rows)), *lines] if self._log_phases or lines else []

    def _gather(self, steps: int, seconds: float) -> list[list[float]]:
        """Return one row of `_COLUMNS` per rank on rank 0, in seconds (per step or of the interval) and bytes."""
        world, device = self._topology.world, self._topology.device
        taken = self._clock.take()
        phases = {name: taken[name] / steps if name in _EACH_STEP else taken[name] for name in PHASES}
        busy = sum(phases[name] for name in _EACH_STEP if name in phases)
        row = [*phases.values(), max(0.0, seconds / steps - busy), float(peak_memory_bytes(device))]
        if not self._gathers:
            return [row]
        every = torch.empty(world.size * len(row), dtype=torch.float64, device=device)
        world.all_gather(every, torch.tensor(row, dtype=torch.float64, device=device))
        if world.rank > 0:
            return []
        with world.heartbeat.synchronise():
            return every.view(world.size, len(row)).tolist()

    def _describe(self, one: Straggler) -> str:
        several, peers = len(one.ranks) > 1, " ".join(map(str, one.peers[:_NAMED_PEERS]))
        hosts = " ".join(dict.fromkeys(self._hosts[rank] for rank in one.ranks))
        return (
            f"straggler: {_ranks(one.ranks)} {' '.join(map(str, one.ranks))} (host {hosts})"
            f"{', which wait for each other in every layer,' if several else ''} took {1e3 * one.seconds:.1f} ms per step "
            f"for forward and backward, {one.factor:.2f} times the median of {'their' if several else 'its'} peers "
            f"({_ranks(one.peers)} {peers}{' ...' if len(one.peers) > _NAMED_PEERS else ''})"
        )


def _ranks(some: Sequence[int]) -> str:
    return "rank" if len(some) == 1 else "ranks"


def units(layout: ParallelLayout) -> list[list[tuple[int, ...]]]:
    """Return, for each pipeline rank, the groups of ranks that wait for each other within a layer: over tp and cp, and
    over ep. Different units of a pipeline rank have the same stages, but other samples."""
    unit: dict[int, frozenset[int]] = {rank: frozenset([rank]) for rank in range(layout.world_size)}
    for kind in ("tp-cp", "ep", "expert-tp"):
        for group in layout.groups(kind):
            joined = frozenset().union(*(unit[rank] for rank in group))
            unit |= dict.fromkeys(joined, joined)
    places: dict[int, dict[frozenset[int], None]] = {}
    for rank, members in unit.items():
        places.setdefault(layout.coordinate(rank).pp, {})[members] = None
    return [[tuple(sorted(members)) for members in places[place]] for place in sorted(places)]


def compare(seconds: Sequence[float], places: Sequence[Sequence[tuple[int, ...]]], threshold: float) -> list[Straggler]:
    """Return the units that take at least `threshold` times the median of their peers, slowest first."""
    found = []
    for place in places:
        times = [max(seconds[rank] for rank in unit) for unit in place]
        ordered, last = sorted(times), len(times) - 2
        for unit, time_ in zip(place, times, strict=True) if last >= 0 else ():
            # The k-th of the peers is the k-th or next of all, so one sorting serves for all their medians.
            own = bisect.bisect_left(ordered, time_)
            low, high = (ordered[k + (k >= own)] for k in (last // 2, (last + 1) // 2))
            median = (low + high) / 2
            if median > 0.0 and time_ >= threshold * median:
                found.append(Straggler(unit, time_, time_ / median, place))
    return sorted(found, key=lambda one: -one.factor)


def _line(columns: Mapping[str, Sequence[float]], ranks: int) -> str:
    ranges = {_LABELS.get(name, name): _range(columns[name], 1e3, 1) for name in _EACH_STEP}
    parts = [f"{name} {range_}" for name, range_ in ranges.items() if range_ != "0.0"]
    parts.append(f"mem {_range(columns['memory'], 2.0**-20, 0)} MiB")
    parts += [f"{name} {longest:.2f} s" for name in _NOW_AND_THEN if (longest := max(columns[name])) > 0.0]
    return f"  ms/step{'' if ranks == 1 else f' of {ranks} ranks'}: {'  '.join(parts)}"


def _range(values: Sequence[float], scale: float, digits: int) -> str:
    least, most = (f"{scale * value:.{digits}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least}–{most}"


class Instruments:
    """The instruments of one rank. All ranks construct them and call the same methods.

    Collectives: those of `Timings`."""

    def __init__(
        self, replica: Replica, *, started: float, step: int, independent: bool, log: Callable[[str], None]
    ) -> None:
        self._replica, self._log = replica, log
        self._started, self._first = started, step
        topology, logging = replica.topology, replica.config.logging
        self.clock = PhaseClock(topology.device)
        self._timings: Timings | None = None
        self._sessions: SessionLog | None = None
        self._profiler: StepProfiler | None = None
        self.traces: TraceWriter | None = None
        if logging.trace:
            assert logging.run_dir is not None, "validate() asks for it"
            steps = [step + traced for traced in logging.trace_steps]
            self.traces = TraceWriter(self.clock, topology, steps=steps, folder=Path(logging.run_dir), log=log)
        if logging.timing_log_level:
            self._timings = Timings(
                self.clock,
                topology,
                independent=independent,
                threshold=logging.straggler_threshold,
                log_phases=logging.log_phases,
            )
        if logging.profile and topology.rank in logging.profile_ranks:
            folder = profile_folder(replica.config)
            assert folder is not None, "validate() asks for it"
            self._profiler = StepProfiler(
                Path(folder),
                rank=topology.rank,
                first=step + logging.profile_step_start,
                last=step + logging.profile_step_end - 1,
                clock=self.clock,
            )

        self._times = self._timings is not None or self._profiler is not None

    @property
    def tracer(self) -> Tracer | None:
        """The executor's tracer, if computations are timed."""
        return self.clock if self._times or self.traces is not None else None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the enclosed code, a part of the step outside the pipeline's program."""
        return self.clock.phase(name) if self._times else nullcontext()

    def open(self, total_steps: int) -> None:
        """Start the account of the run's time, before the first step and before the sinks open their files. A ConfigError
        may occur on some ranks only."""
        topology, config = self._replica.topology, self._replica.config
        for traced in sorted(self.traces.steps if self.traces else ()):
            if traced > total_steps:
                self._log(f"step {traced} is beyond the last step, {total_steps}: it will not be traced")
        if self._profiler is not None:
            self._profiler.make_folder()
            if self._profiler.last > total_steps:
                self._log(
                    f"step {self._profiler.last} is beyond the last step, {total_steps}: no profile will be written"
                )
        if config.logging.record_memory_history:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY, device=topology.device)
        if topology.rank != 0:
            return
        folder, layout = config.logging.run_dir, topology.layout
        axes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp", "ep")}
        try:
            self._sessions = SessionLog(
                None if folder is None else Path(folder),
                started=self._started,
                step=self._first,
                resumes=resumes(config),
                ranks=layout.world_size,
                layout=" ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "dp 1",
                log=self._log,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot write {error.filename or folder}: {error.strerror}; give a folder that can be written with "
                "--run-dir"
            ) from None

    @contextmanager
    def stall(self, name: str) -> Iterator[None]:
        """Time code that delays the steps: `evaluation` or `save`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.clock.add(name, seconds)
            if self._sessions is not None:
                self._sessions.spend(name, seconds)

    def begin(self, step: int) -> None:
        """Call before each step. Collectives: those of `TraceWriter.begin`."""
        if self.traces is not None:
            self.traces.begin(step)
        if self._sessions is not None:
            self._sessions.ready()
        if self._profiler is not None:
            self._profiler.begin(step)

    def count_step(self, step: int, *, seconds: float, waited: float) -> None:
        """Count a completed step; `waited`: its seconds of waiting for data."""
        self.clock.add("data_wait", waited)
        if self._sessions is not None:
            self._sessions.step(step, seconds)

    def finish(self, step: int) -> bool:
        """Call after each step and its report. Returns True if it wrote a profile: this time belongs to no step."""
        if self._profiler is None or (line := self._profiler.finish(step)) is None:
            return False
        self._log(line)
        return True

    def interval(self, *, steps: int, seconds: float) -> Report:
        """Report the interval that ends now. Collectives: those of `Timings.interval`."""
        fields: dict[str, float] = {}
        lines: list[str] = []
        if self._timings is not None:
            fields, lines = self._timings.interval(steps=steps, seconds=seconds)
        fields |= memory_now(self._replica.topology.device)
        if self._sessions is not None:
            fields["goodput"] = self._sessions.note().fraction
        return fields, lines

    def close(self, *, finished: bool) -> None:
        """End the session, also while an exception propagates. `finished`: the last step is done."""
        if self._profiler is not None:
            self._profiler.close()
        if self._sessions is None:
            return
        error = sys.exception()
        ended = FINISHED if finished else STOPPED
        if error is not None:
            ended = FAILED if isinstance(error, Exception) else STOPPED
        made = self._sessions.session.last_step > self._first
        found = self._sessions.close(ended)
        if made and ended != FAILED:
            self._log(found.in_words())

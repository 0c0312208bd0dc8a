"""Times the phases of each rank's steps; writes traces, beside the simulated schedule, and torch profiles of steps."""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.draw import merge_traces
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Action, Kind, Schedule
from megalite.pipeline.ir.simulate import Costs, Event, simulate
from megalite.topology.topology import Topology

PHASES = ("forward", "backward", "reduce", "optimizer", "data_wait", "evaluation", "save")
"""`reduce`: part of the gradient reduction that no computation hides. `save`: time by which saves delay the steps."""

_FOLD_AT = 4096  # most pairs of unread CUDA events


_Mark = Any  # a host time in seconds, or on CUDA an event


class PhaseClock:
    """Adds up seconds by phase; the host never waits for the device.

    It is a tracer for the executor: time in which a computation waits for its input belongs to no phase. On CUDA a
    phase lies between two events of its stream, and counts once both are complete. So the optimizer phase of an
    interval's last step may count in the next interval.

    `named`: name computations and phases in the profiler's trace: `1F0 stage 1 microbatch 0`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._opened: _Mark = 0.0
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._origin: _Mark | None = None  # set between `keep` and `kept`
        self._kept: list[tuple[Action, _Mark, _Mark]] = []
        self.named = False
        self._name: record_function | None = None

    def start(self, action: Action) -> None:
        if self.named:
            self._name = record_function(f"{action} stage {action.stage} microbatch {action.microbatch}")
            self._name.__enter__()
        self._opened = self._now()

    def end(self, action: Action) -> None:
        """End a computation. All that are no forwards, also recomputation ahead, belong to the backward phase."""
        closed = self._close("forward" if action.kind is Kind.F else "backward")
        if self._origin is not None:
            self._kept.append((action, self._opened, closed))
        if self._name is not None:
            self._name.__exit__(None, None, None)
            self._name = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the enclosed device work as this phase. Phases and actions must not nest."""
        with record_function(name) if self.named else nullcontext():
            self._opened = self._now()
            yield
            self._close(name)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured on the host."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of each of `PHASES` since the last call."""
        self._fold()
        taken, self._seconds = self._seconds, defaultdict(float)
        return {name: taken[name] for name in PHASES}

    def keep(self) -> None:
        """Record start and end of each computation until `kept`. Both calls wait for the device."""
        self._wait()
        self._kept.clear()
        self._origin = self._now()

    def kept(self) -> list[tuple[Action, float, float]]:
        """Stop recording, and return (action, start, end) in seconds since `keep`."""
        origin, self._origin = self._origin, None
        assert origin is not None, "kept without keep"
        self._wait()
        return [(action, self._between(origin, start), self._between(origin, end)) for action, start, end in self._kept]

    def _now(self) -> _Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: _Mark, end: _Mark) -> float:
        return start.elapsed_time(end) / 1e3 if self._on_cuda else end - start

    def _wait(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self.device)

    def _close(self, name: str) -> _Mark:
        closed = self._now()
        if not self._on_cuda:
            self._seconds[name] += closed - self._opened
            return closed
        self._pending.append((name, self._opened, closed))
        if len(self._pending) >= _FOLD_AT:
            self._fold()
        return closed

    def _fold(self) -> None:
        """Add up completed phases; `query` does not wait."""
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.popleft()
            self._seconds[name] += self._between(start, end)
            if self._origin is None:  # recorded computations still need their events
                self._free += (start, end)


SHOWN_PIPELINES = 8
"""Most pipelines in a trace: data-parallel ones are similar, and viewers are limited."""
_PROFILE_ROWS = 40  # operations in a table


class TraceWriter:
    """Writes a trace file for each of some steps, with measured and simulated tracks per pipeline rank, on rank 0."""

    def __init__(
        self, clock: PhaseClock, topology: Topology, *, steps: Sequence[int], folder: Path, log: Callable[[str], None]
    ) -> None:
        self._clock, self._topology, self._folder, self._log = clock, topology, folder, log
        self.steps = frozenset(steps)

    def begin(self, step: int) -> None:
        """Call before each step on every rank.

        Collectives: before a traced step an all-reduce of one number over the world, which aligns the clocks."""
        if step in self.steps:
            self._topology.world.all_reduce(torch.zeros(1, device=self._topology.device))
            self._clock.keep()

    def finish(self, step: int, schedule: Schedule) -> float | None:
        """Call after each step on every rank. Returns the measured bubble fraction of the first pipeline on rank 0.

        Collectives: after a traced step a gather of all ranks' times."""
        if step not in self.steps:
            return None
        times = [(str(action), start, end) for action, start, end in self._clock.kept()]
        gathered = self._topology.world.gather_json(times)
        if self._topology.rank != 0:
            return None
        layout = self._topology.layout
        pipelines: dict[str, list[Event]] = {}
        for ranks in layout.groups("pp")[:SHOWN_PIPELINES]:
            place = layout.coordinate(ranks[0])
            pipelines[f"measured: tp {place.tp} cp {place.cp} dp {place.dp}"] = [
                Event(index, Action.parse(text), start, end)
                for index, rank in enumerate(ranks)
                for text, start, end in gathered[rank]
            ]
        first = next(iter(pipelines.values()))
        ideal = simulate(lower(schedule), measured_costs(first, schedule))
        path = self._folder / f"trace-{step}.json"
        try:
            path.write_text(json.dumps(merge_traces({**pipelines, "simulated": ideal.events})))
            written = f"wrote {path} for ui.perfetto.dev"
        except OSError as error:
            written = f"warning: cannot write {path}: {error.strerror}"
        bubble = bubble_fraction(first)
        self._log(
            f"step {step}: measured bubble {bubble:.1%}, simulated with the measured times of each action "
            f"{ideal.bubble_fraction:.1%}; {written}"
        )
        return bubble


def bubble_fraction(events: Sequence[Event]) -> float:
    """Return 1 - (computing time of the busiest rank) / (first start to last end) of one pipeline."""
    busy: dict[int, float] = defaultdict(float)
    for event in events:
        busy[event.rank] += event.end - event.start
    makespan = max(event.end for event in events) - min(event.start for event in events)
    return 1.0 - max(busy.values()) / makespan


def measured_costs(events: Sequence[Event], schedule: Schedule) -> Costs:
    """Return the mean time of each kind of action on each stage; messages take no time."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for event in events:
        times[event.action.kind, event.action.stage].append(event.end - event.start)

    def means(kind: Kind) -> tuple[float, ...]:
        found = [times.get((kind, stage), [0.0]) for stage in range(schedule.num_stages)]
        return tuple(sum(seconds) / len(seconds) for seconds in found)

    weight = means(Kind.W)
    # If a stage has both split and whole backwards, use the split ones.
    backward = [i + w or b for i, w, b in zip(means(Kind.I), weight, means(Kind.B), strict=True)]
    return Costs(forward=means(Kind.F), backward=tuple(backward), weight_grad=weight, recompute=means(Kind.R))


class StepProfiler:
    """Profiles the steps from `first` to `last` of this rank. Call both `begin` and `finish` for each step.

    The profiler warms up in the step before, so its startup is not in the trace. Rank R writes
    `<run_dir>/profile/rank-R-steps-A-B.json` in Chrome's format, for ui.perfetto.dev, and a table for each device. The
    clock names computations and phases while the profiler runs."""

    def __init__(self, run_dir: Path, *, rank: int, first: int, last: int, clock: PhaseClock) -> None:
        self._folder, self._clock = run_dir / "profile", clock
        self._trace = self._folder / f"rank-{rank}-steps-{first}-{last}.json"
        self.first, self.last = first, last
        self._devices = ("cpu", "cuda") if clock.device.type == "cuda" else ("cpu",)
        self._running: torch.profiler.profile | None = None

    def make_folder(self) -> None:
        """Create the folder. Raises ConfigError if it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write profiles to {self._folder}: {error.strerror}; give a --run-dir that can be written, or "
                "remove --profile"
            ) from None

    def begin(self, step: int) -> None:
        if self._running is not None or not self.first - 1 <= step < self.last:
            return
        self.first = step + 1  # later if steps are skipped
        known = torch.profiler.ProfilerActivity
        self._running = torch.profiler.profile(
            activities=[known.CPU, known.CUDA][: len(self._devices)],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.last - self.first + 1, repeat=1),
            record_shapes=True,
            acc_events=True,
        )
        self._running.start()
        self._clock.named = True

    def finish(self, step: int) -> str | None:
        """Call after each step. Writes the files after the last one, and returns a log line."""
        running = self._running
        if running is None:
            return None
        if step < self.last:
            running.step()
            return None
        self._clock.named = False
        self.close()
        try:
            running.export_chrome_trace(str(self._trace))
            averages, tables = running.key_averages(), []
            for device in self._devices:
                table = self._trace.with_name(f"{self._trace.stem}-{device}.txt")
                table.write_text(averages.table(sort_by=f"self_{device}_time_total", row_limit=_PROFILE_ROWS))
                tables.append(table.name)
        except OSError as error:
            return f"warning: cannot write the profile to {self._folder}: {error.strerror}"
        return (
            f"profiled steps {self.first} to {step}: wrote {self._trace} for ui.perfetto.dev, tables in "
            f"{' and '.join(tables)}"
        )

    def close(self) -> None:
        """Stop the profiler, and drop unwritten results."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

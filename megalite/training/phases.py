"""How long this rank is in each phase of its steps, and the profiler that names the phases in a trace."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd.profiler import record_function

from megalite.config.errors import ConfigError
from megalite.pipeline.executor import Tracer
from megalite.pipeline.ir.actions import Action, Kind

PHASES = ("forward", "backward", "reduce", "optimizer", "data_wait", "evaluation", "save")
"""`reduce` is what no computation hides of the gradients' reduction; `save` is what a save holds the steps up."""

_OF_KIND: Mapping[Kind, str] = {Kind.F: "forward"}
"""All else that computes (recomputation ahead too) belongs to the backward."""

_FOLD_AT = 4096
"""Pairs of CUDA events that may wait to be read."""


class PhaseClock:
    """Adds up seconds by phase; the host never waits for the device.

    It is a tracer of the executor: time in which a computation waits for its input is in no phase. On CUDA a phase is
    between two events of its stream, and counts once they have passed: of the last step of an interval the optimizer may
    count in the next.

    `named`: while the profiler runs, computations and phases have names in its trace: `1F0 stage 1 microbatch 0`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._opened = 0.0
        self._opened_event: torch.cuda.Event | None = None
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self.named = False
        self._name: record_function | None = None

    # ---- a tracer

    def start(self, action: Action) -> None:
        """The action runs from here."""
        if self.named:
            self._name = record_function(f"{action} stage {action.stage} microbatch {action.microbatch}")
            self._name.__enter__()
        self._open()

    def end(self, action: Action) -> None:
        """It has ended."""
        self._close(_OF_KIND.get(action.kind, "backward"))
        if self._name is not None:
            self._name.__exit__(None, None, None)
            self._name = None

    # ---- around the program

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside, on the device, is this phase. Phases and actions do not nest."""
        with record_function(name) if self.named else _no_name():
            self._open()
            yield
            self._close(name)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds of the host's."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds of each of `PHASES` since the last call."""
        self._fold()
        taken, self._seconds = self._seconds, defaultdict(float)
        return {name: taken[name] for name in PHASES}

    def _open(self) -> None:
        if self._on_cuda:
            self._opened_event = self._event()
        else:
            self._opened = time.perf_counter()

    def _close(self, name: str) -> None:
        if not self._on_cuda:
            self._seconds[name] += time.perf_counter() - self._opened
            return
        assert self._opened_event is not None, name
        self._pending.append((name, self._opened_event, self._event()))
        if len(self._pending) >= _FOLD_AT:
            self._fold()

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _fold(self) -> None:
        """Count what has passed; `query` does not wait."""
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.popleft()
            self._seconds[name] += start.elapsed_time(end) / 1e3
            self._free += (start, end)


@contextmanager
def _no_name() -> Iterator[None]:
    yield


class Together:
    """Several tracers as one."""

    def __init__(self, *tracers: Tracer) -> None:
        self._tracers = tracers

    def start(self, action: Action) -> None:
        """Tell each of them."""
        for tracer in self._tracers:
            tracer.start(action)

    def end(self, action: Action) -> None:
        """Tell each of them, the other way round: the first one's time holds the others'."""
        for tracer in reversed(self._tracers):
            tracer.end(action)


FOLDER = "profile"
_ROWS = 40
"""Operations in a table."""


class StepProfiler:
    """Profiles the steps from `first` to `last` of this rank; both begin and finish are called for each step.

    In the step before, the profiler warms up: what its start costs is not in the trace. The file of rank
    R is `rank-R-steps-A-B.json`, Chrome's format, for ui.perfetto.dev; beside it a table for each device.

    Args:
        clock: gives computations and phases names while the profiler runs.
    """

    def __init__(
        self, folder: Path, *, rank: int, first: int, last: int, device: torch.device, clock: PhaseClock
    ) -> None:
        self._folder, self._rank, self._clock = folder, rank, clock
        self.first, self.last = first, last
        self._on_cuda = device.type == "cuda"
        self._running: torch.profiler.profile | None = None

    def make_folder(self) -> None:
        """Find out now whether the traces can be written.

        Raises:
            ConfigError: they cannot.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write profiles to {self._folder}: {error.strerror}; give a --run-dir that can be written, or "
                "remove --profile"
            ) from None

    def begin(self, step: int) -> None:
        """Before a step."""
        if step != self.first - 1:
            return
        self._running = torch.profiler.profile(
            activities=self._activities(),
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.last - self.first + 1, repeat=1),
            record_shapes=True,
            acc_events=True,
        )
        self._running.start()
        self._clock.named = True

    def finish(self, step: int) -> str | None:
        """After a step; after the last one the files are written. Returns what the log should say of it."""
        if self._running is None:
            return None
        if step < self.last:
            self._running.step()
            return None
        try:
            return self._write()
        except OSError as error:
            return f"warning: cannot write the profile to {self._folder}: {error.strerror}"

    def close(self) -> None:
        """The run ends; what was profiled until here is dropped."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def _write(self) -> str:
        running, self._running = self._running, None
        assert running is not None
        self._clock.named = False
        running.stop()
        trace = self._folder / f"rank-{self._rank}-steps-{self.first}-{self.last}.json"
        running.export_chrome_trace(str(trace))
        written = [trace]
        averages = running.key_averages()
        for device in ("cpu", "cuda") if self._on_cuda else ("cpu",):
            table = trace.with_name(f"{trace.stem}-{device}.txt")
            table.write_text(averages.table(sort_by=f"self_{device}_time_total", row_limit=_ROWS))
            written.append(table)
        names = " and ".join(path.name for path in written[1:])
        return f"profiled steps {self.first} to {self.last}: wrote {trace} for ui.perfetto.dev, tables in {names}"

    def _activities(self) -> Sequence[torch.profiler.ProfilerActivity]:
        known = torch.profiler.ProfilerActivity
        return [known.CPU, known.CUDA] if self._on_cuda else [known.CPU]

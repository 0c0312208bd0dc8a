"""How long this rank is in each phase of its steps."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.profiler import record_function

from megalite.pipeline.executor import Tracer
from megalite.pipeline.ir.actions import Action, Kind

PHASES = ("forward", "backward", "reduce", "optimizer", "data_wait", "evaluation", "save")
"""`reduce` is what no computation hides of the gradients' reduction; `save` is what a save holds the steps up."""

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
        self.device = device
        self._on_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._opened = 0.0
        self._opened_event: torch.cuda.Event | None = None
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self.named = False
        self._name: record_function | None = None

    def start(self, action: Action) -> None:
        if self.named:
            self._name = record_function(f"{action} stage {action.stage} microbatch {action.microbatch}")
            self._name.__enter__()
        self._open()

    def end(self, action: Action) -> None:
        """It has ended. What computes and is no forward (recomputation ahead too) belongs to the backward."""
        self._close("forward" if action.kind is Kind.F else "backward")
        if self._name is not None:
            self._name.__exit__(None, None, None)
            self._name = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside, on the device, is this phase. Phases and actions do not nest."""
        with record_function(name) if self.named else nullcontext():
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


class Together:
    """Several tracers as one; the first one's time holds the others'."""

    def __init__(self, *tracers: Tracer) -> None:
        self._tracers = tracers

    def start(self, action: Action) -> None:
        for tracer in self._tracers:
            tracer.start(action)

    def end(self, action: Action) -> None:
        for tracer in reversed(self._tracers):
            tracer.end(action)

"""Time work on a device: medians by CUDA events with cold caches, launched from Python and replayed as a CUDA graph."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Times in ms: median and percentiles of launches from Python, as in a training step, and the median of a CUDA
    graph's replays, which need no such launch, or why there is no graph."""

    ms: float
    p20: float
    p80: float
    graph_ms: float | None
    graph_reason: str | None
    repeats: int

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class Clock:
    """Times work on one device.

    Args:
        repeats: repetitions of each measurement.
        graphs: measure replays too."""

    WARM_UP = 3

    def __init__(self, device: torch.device, *, repeats: int, graphs: bool = True) -> None:
        self.device, self.repeats = device, repeats
        self._graphs = graphs and device.type == "cuda"
        self._flushed: torch.Tensor | None = None
        self._copies: dict[int, float] = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flushed = torch.empty(max(2 * cache, 1 << 27), dtype=torch.uint8, device=device)

    def own_stream(self) -> AbstractContextManager[Any]:
        """Set up timed work in this context: a backward runs on the stream of its forward, and a graph needs one stream
        that is not the default one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def time(self, work: Work, prepare: Work | None = None) -> Timing:
        """Time `work`; the untimed `prepare` restores its inputs before each repetition."""
        for _ in range(self.WARM_UP if self.device.type == "cuda" else 1):
            self._ready(prepare)
            work()
        spread = self._repeat(work, prepare)
        graph_ms, reason = None, "a CPU has no CUDA graphs" if self.device.type == "cpu" else "not asked for"
        if self._graphs:
            try:
                graph_ms, reason = self._replayed(work, prepare), ""
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                torch.cuda.synchronize(self.device)
        return Timing(*spread, graph_ms, reason or None, self.repeats)

    def copy_ms(self, moved: int) -> float:
        """Return the time of a kernel that reads half of `moved` bytes and writes the other half: a limit for others."""
        if moved not in self._copies:
            source = torch.ones(max(moved // 8, 1), dtype=torch.int32, device=self.device)
            timing = self.time(partial(torch.neg, source, out=torch.empty_like(source)))
            self._copies[moved] = min(timing.ms, timing.graph_ms or timing.ms)
        return self._copies[moved]

    def _ready(self, prepare: Work | None) -> None:
        """Restore the inputs and clear the cache."""
        if prepare is not None:
            prepare()
        if self._flushed is not None:
            self._flushed.fill_(1)

    def _repeat(self, work: Work, prepare: Work | None) -> tuple[float, float, float]:
        """Return (median, 20th, 80th percentile) in ms."""
        taken = []
        if self.device.type == "cpu":
            for _ in range(self.repeats):
                self._ready(prepare)
                began = time.perf_counter()
                work()
                taken.append(1e3 * (time.perf_counter() - began))
            return _spread(taken)
        marks = []
        for _ in range(self.repeats):
            # Without synchronisation: Python launches while the device clears its cache.
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._ready(prepare)
            start.record()
            work()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize(self.device)
        return _spread([start.elapsed_time(end) for start, end in marks])

    def _replayed(self, work: Work, prepare: Work | None) -> float:
        self._ready(prepare)
        # Work that waits for the device cannot be captured, and after a failed capture torch draws no random numbers.
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self._ready(prepare)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            kept = work()
        median = self._repeat(graph.replay, prepare)[0]
        del kept
        graph.reset()
        return median


def _spread(values: list[float]) -> tuple[float, float, float]:
    ordered, last = sorted(values), len(values) - 1
    low, high = (ordered[min(int(share * len(ordered)), last)] for share in (0.2, 0.8))
    return statistics.median(ordered), low, high

"""How long a piece of work takes on a device: medians by CUDA events, cold caches, and again as a replayed CUDA graph."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Of one piece of work, in ms: the median and percentiles of launches from Python, as in a training step, and the
    median of a CUDA graph's replays, which need no such launch, or the reason why there is no graph."""

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
        repeats: of each measurement.
        graphs: measure replays too.
    """

    WARM_UP = 3

    def __init__(self, device: torch.device, *, repeats: int, graphs: bool = True) -> None:
        self.device, self.repeats = device, repeats
        self._graphs = graphs and device.type == "cuda"
        self._flushed: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flushed = torch.empty(max(2 * cache, 1 << 27), dtype=torch.uint8, device=device)

    def own_stream(self) -> AbstractContextManager[Any]:
        """Where what is to be timed must be set up: a backward runs on the stream on which its forward ran, and a graph
        can only be made of what runs on one stream that is not the default one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def time(self, work: Work, prepare: Work | None = None) -> Timing:
        """Time `work`; `prepare` restores before each repetition what it uses up, outside the measured stretch."""
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

    def _ready(self, prepare: Work | None) -> None:
        """Inputs as they should be, and nothing of them in the cache."""
        if prepare is not None:
            prepare()
        if self._flushed is not None:
            self._flushed.fill_(1)

    def _repeat(self, work: Work, prepare: Work | None) -> tuple[float, float, float]:
        """(median, 20th, 80th percentile) in ms."""
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
            # Not synchronised in between: while the device empties its cache, Python is already launching.
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
        # What waits for the device cannot be captured, and after a capture that fails torch draws no random numbers.
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

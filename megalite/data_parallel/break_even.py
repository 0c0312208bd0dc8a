"""Measure the cost of a step with whole gradients and with lossy means, and find the link rate at which they break even."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.codec import Codec
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.data_parallel.wire import Channel, WireCounter
from megalite.optimizers.base import FlatParameter, Optimizer, Segment, Update
from megalite.topology.group import DONE, Work

ASSUMED_WARMUP = 0.15  # share of the run, if training determines the end of the warm-up


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes of one step with whole gradients and of lossy means that replace them, on the slowest rank."""

    step: float
    exposed: float  # wait for the reduction, a part of the step
    reduction: float  # the reduction alone
    codec: float
    latency: float  # collectives of lossy means with almost no data
    optimizer: float  # additional work of the optimizer
    whole_bytes: float
    lossy_bytes: float
    assumed: bool = False  # no step had whole gradients: `exposed` is computed

    @property
    def extra(self) -> float:
        """Additional seconds of a step with lossy means that do not depend on the link's rate."""
        return self.codec + self.latency + self.optimizer

    def speed(self, warmup: float) -> float:
        """Return the speedup of a run: 1/(w + (1-w)(c + (1-c)/k + o)), with the warm-up's share w of the run, the share c
        of the step that does not wait, the ratio of volumes k, and `extra` as a share o of the step. Lossy means do not
        overlap with computation."""
        waits = self.exposed / self.step
        lossy = 1.0 - waits + waits * self.lossy_bytes / self.whole_bytes + self.extra / self.step
        return 1.0 / (warmup + (1.0 - warmup) * lossy)

    @property
    def break_even(self) -> float:
        """Bytes per second R below which lossy means pay, if the hidden part of the reduction stays the same:

        extra + bytes/(k·R) = bytes/R - hidden."""
        hidden = max(self.reduction - self.exposed, 0.0)
        return (self.whole_bytes - self.lossy_bytes) / max(self.extra + hidden, 1e-9)

    def line(self, warmup: float | None, *, name: str = "1-bit") -> str:
        """Return a line for the log; `name`: of the lossy means."""
        share = ASSUMED_WARMUP if warmup is None else warmup
        speed = self.speed(share)
        verdict = f"the run will be about {speed:.2f} times as fast as with whole gradients"
        if speed <= 1.0:
            verdict = f"{name} will be slower here: the run will take about {1.0 / speed:.2f} times as long as with whole gradients"
        assumption = "; no step had whole gradients, which are assumed to hide behind the backward" * self.assumed
        step, codec, latency, own = (1e3 * each for each in (self.step, self.codec, self.latency, self.optimizer))
        return (
            f"break-even: {verdict}; it pays where ranks send at less than {self.break_even * 8e-6:.0f} Mbit/s (step "
            f"{step:.1f} ms, compute c {1.0 - self.exposed / self.step:.3f}, overhead o {self.extra / self.step:.3f}: codec "
            f"{codec:.1f} ms, latency {latency:.1f} ms, optimizer {own:.1f} ms; reduction at R "
            f"{self.whole_bytes / self.reduction * 8e-6:.0f} Mbit/s, volume 1/k with k "
            f"{self.whole_bytes / self.lossy_bytes:.1f}, warm-up w {share:.2f}{' assumed' * (warmup is None)}{assumption})"
        )


SETTLING_STEPS = 2
"""Steps before the measurement: they touch memory for the first time and choose kernels."""
MEASURED_STEPS = 5
CALLS = 3  # calls of codec and exchanges when they are measured alone
REHEARSED = 1 << 20
"""Most parameters for measurements of the optimizer and the reduction: both grow linearly, and a whole reduction would
send the bytes of another step."""
ASSUMED_HIDDEN = 2.0 / 3.0
"""Share of the computation that hides a reduction if no step has whole gradients: the backward's share."""


class _Loopback(Channel):
    """A channel that returns sent data at once, as if all ranks were this process."""

    def exchange_raw_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        self._counter.add((self.size - 1) / self.size * tensor.nbytes)
        return tensor.clone(), DONE

    def gather_raw_async(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        self._counter.add((self.size - 1) * part.nbytes)
        output.view(self.size, -1).copy_(part.reshape(1, -1).expand(self.size, -1).clone())
        return DONE


class BreakEven:
    """Times the first steps, then the reduction and the codec alone on scratch memory, and adds a line to the strategy's
    notes. Later it times steps with lossy means, and a second line reports their measured speedup.

    All ranks call it at the same points. Its bytes count for the current step; it changes no state. Times are medians,
    which on a busy machine include the share of the cores that the run gets.

    `buckets`: those with lossy means. `warmup`: share of the run with whole gradients; None: not known yet. `name`: of the
    lossy means, for the line. `all_alike`: all steps with lossy means have equal costs, so they can be measured even if no
    step with whole gradients precedes them."""

    def __init__(
        self,
        strategy: DataParallelStrategy,
        buckets: Iterable[Bucket],
        make: Callable[[Bucket, Channel], Codec],
        *,
        warmup: float | None,
        name: str = "1-bit",
        all_alike: bool = False,
    ) -> None:
        self._strategy, self._make, self._warmup, self._name = strategy, make, warmup, name
        self._buckets, self._all_alike = list(buckets), all_alike
        self._elements = sum(bucket.grad.numel() for bucket in self._buckets)
        self.optimizer: Optimizer | None = None
        self._done = all(strategy.channel(bucket).size == 1 for bucket in self._buckets)
        self._lossy = False  # steps with lossy means are being measured
        self._before: float | None = None  # seconds of a step with whole gradients
        self._steps, self._began = 0, 0.0
        self._times: list[float] = []
        self._waits: list[float] = []

    def begin(self, *, whole: bool) -> None:
        """Begin a step, which reduces gradients if it is `whole`.

        Collectives: after enough steps, some reductions (of `REHEARSED` numbers in all) and a maximum over the world."""
        if self._done or (whole and not self._lossy and self._before is not None):  # until steps with lossy means come
            return
        if self._steps > SETTLING_STEPS:
            self._times.append(self._now() - self._began)
        changes = whole == self._lossy
        if len(self._times) == MEASURED_STEPS or changes:
            if self._times:
                self._add_note()
            self._done |= changes and (whole or (self._before is None and not self._all_alike))
            self._lossy |= changes
            self._steps = 0
            self._times.clear()
            self._waits.clear()
        self._steps += 1
        self._began = self._now()

    def _add_note(self) -> None:
        """Add a line to the notes; it is the last one if it covers steps with lossy means."""
        self._done = self._lossy
        if self._before is None:
            costs = self._costs()
            self._before = costs.step
            self._strategy.notes.append(costs.line(self._warmup, name=self._name))
            return
        after = self._slowest([statistics.median(self._times)])[0]
        self._strategy.notes.append(
            f"break-even, measured: a step takes {1e3 * after:.1f} ms with {self._name}; with whole gradients it took "
            f"{1e3 * self._before:.1f} ms: {self._before / after:.2f} times as fast"
        )

    def wait(self, reductions: Callable[[], None]) -> None:
        if self._done or self._steps <= SETTLING_STEPS:
            reductions()
        else:
            self._waits.append(self._typical(1, reductions))

    def _now(self) -> float:
        if self._buckets[0].grad.is_cuda:
            torch.cuda.synchronize(self._buckets[0].grad.device)
        return time.perf_counter()

    def _typical(self, times: int, work: Callable[[], object]) -> float:
        """Return the median seconds of a call."""
        taken = []
        for _ in range(times):
            before = self._now()
            work()
            taken.append(self._now() - before)
        return statistics.median(taken)

    def _costs(self) -> Costs:
        lossy = WireCounter()
        reductions = [self._reduction(bucket) for bucket in self._buckets]
        codec = sum(self._codec(bucket, lossy) for bucket in self._buckets)
        found = {
            "step": statistics.median(self._times),
            "exposed": statistics.median(self._waits),
            "reduction": sum(seconds for seconds, _ in reductions),
            "codec": codec,
            "latency": sum(self._latency(bucket) for bucket in self._buckets),
            "optimizer": self._optimizer_extra(),
            "whole_bytes": sum(nbytes for _, nbytes in reductions),
            "lossy_bytes": lossy.take() / CALLS,
        }
        found = dict(zip(found, self._slowest(found.values()), strict=True))
        step, wait, reduction = found["step"], found["exposed"], found["reduction"]
        found["exposed"] = min(wait, reduction, step)
        if self._lossy:
            computing = max(step - wait, 0.0)
            found["exposed"] = max(reduction - ASSUMED_HIDDEN * computing, 0.0)
            found["step"] = computing + found["exposed"]
        return Costs(**found, assumed=self._lossy)

    def _slowest(self, seconds: Iterable[float]) -> list[float]:
        """Return the maxima over ranks."""
        found = torch.tensor(list(seconds), dtype=torch.float64, device=self._buckets[0].grad.device)
        self._strategy.groups.world.all_reduce(found, op="max")
        return list(map(float, found.tolist()))

    def _channel(self, bucket: Bucket, counter: WireCounter, kind: type[Channel] = Channel) -> Channel:
        return self._strategy.new_channel(self._strategy.groups.replicas(bucket.kind), counter, kind)

    def _reduction(self, bucket: Bucket) -> tuple[float, float]:
        """Return (seconds, bytes) of a bucket's reduction, estimated from one reduction of a part of it. The run's first
        steps have warmed up the connections."""
        counter, size = WireCounter(), bucket.grad.numel()
        channel = self._channel(bucket, counter)
        share = size * REHEARSED // self._elements
        part = min(size, max(1, -(-share // channel.size)) * channel.size)
        scratch = bucket.grad.new_zeros(part)
        seconds = self._typical(1, lambda: channel.all_reduce_async(scratch).wait())
        sent = counter.take()
        self._strategy.wire_counter.add(sent)
        return seconds * size / part, sent * size / part

    def _codec(self, bucket: Bucket, counter: WireCounter) -> float:
        codec = self._make(bucket, self._channel(bucket, counter, _Loopback))
        values = _signed(bucket.grad.numel(), bucket.grad)
        return self._typical(CALLS, lambda: codec.mean(values.clone()))

    def _latency(self, bucket: Bucket) -> float:
        """Return the seconds of an exchange and a gather of a byte per rank."""
        channel = self._channel(bucket, self._strategy.wire_counter)
        sent = torch.zeros(channel.size, dtype=torch.uint8, device=bucket.grad.device)
        return self._typical(CALLS, lambda: channel.gather_raw(channel.exchange_raw(sent), sent[:1]))

    def _optimizer_extra(self) -> float:
        """Return the additional seconds that the optimizer needs without reduced gradients, on scratch memory."""
        total = self._elements
        size = min(total, REHEARSED)
        param = torch.nn.Parameter(_signed(size, self._buckets[0].grad))
        param.grad = param.data.clone()
        segment = Segment("scratch", 0, size, 0, (size,), ((0, size),), counts=True)
        flat = FlatParameter(param, True, (segment,))
        alone = None if self.optimizer is None else self.optimizer.for_measurement([flat], freeze_step=3)
        if alone is None:
            return 0.0
        taken = []
        for step in range(1, 7):
            update, before = Update(step=step, lr=1e-3, weight_decay=0.1), self._now()
            alone.step(update, None if alone.reduces_gradients(step) else lambda flat, values: None)
            taken.append(self._now() - before)
        return max(statistics.median(taken[4:]) - statistics.median(taken[1:3]), 0.0) * total / size


def _signed(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return numbers of both signs, without a generator that the run uses."""
    return torch.arange(size, device=like.device).to(like.dtype).sin_()

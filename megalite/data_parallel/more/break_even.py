"""What a step costs with whole gradients and with lossy means in their place, and where the one overtakes the other."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.codec import Codec
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.data_parallel.wire import Channel, WireCounter
from megalite.optimizers.base import FlatParameter, Optimizer, Segment, Update
from megalite.topology.group import DONE, Work

ASSUMED_WARMUP = 0.15
"""Share of the run, where its end is to be found while training."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes of one step with whole gradients, and of lossy means in its place; the slowest rank's."""

    step: float
    """From one step to the next."""
    exposed: float
    """Of these, waiting for the reduction."""
    reduction: float
    """The reduction by itself."""
    codec: float
    """Coding and decoding."""
    latency: float
    """The collectives of lossy means when next to nothing is sent."""
    optimizer: float
    """By which the optimizer's own work is longer."""
    whole_bytes: float
    """That a rank sends in a reduction."""
    lossy_bytes: float
    """That it sends instead."""
    assumed: bool = False
    """No step with whole gradients was seen: what they would wait is computed."""

    @property
    def compute(self) -> float:
        """c: share of the step that does not wait."""
        return 1.0 - self.exposed / self.step

    @property
    def extra(self) -> float:
        """Seconds of a step with lossy means that do not depend on the link's rate and that others do not have."""
        return self.codec + self.latency + self.optimizer

    @property
    def overhead(self) -> float:
        """o: `extra` as a share of the step."""
        return self.extra / self.step

    @property
    def volume_ratio(self) -> float:
        """k: bytes of a reduction over those of lossy means."""
        return self.whole_bytes / self.lossy_bytes

    @property
    def bytes_per_second(self) -> float:
        """R: what the reduction by itself got out of the link."""
        return self.whole_bytes / self.reduction

    def speed(self, warmup: float) -> float:
        """How many times as fast a run is: 1/(w + (1-w)(c + (1-c)/k + o)). Lossy means hide behind nothing."""
        c, k = self.compute, self.volume_ratio
        return 1.0 / (warmup + (1.0 - warmup) * (c + (1.0 - c) / k + self.overhead))

    @property
    def break_even(self) -> float:
        """Bytes per second below which lossy means pay, if what hides of the reduction stays as it is: there

        extra + bytes/(k·R) = bytes/R - hidden.
        """
        hidden = max(self.reduction - self.exposed, 0.0)
        return (self.whole_bytes - self.lossy_bytes) / max(self.extra + hidden, 1e-9)

    def line(self, warmup: float | None, *, name: str = "1-bit") -> str:
        """For the log; `name` is that of the lossy means."""
        share = ASSUMED_WARMUP if warmup is None else warmup
        speed = self.speed(share)
        verdict = f"the run will be about {speed:.2f} times as fast as with whole gradients"
        if speed <= 1.0:
            verdict = (
                f"{name} will be slower here: the run will take about {1.0 / speed:.2f} times as long as with whole "
                "gradients"
            )
        assumption = "; no step had whole gradients, which are taken to hide behind the backward" * self.assumed
        step, codec, latency, own = (1e3 * each for each in (self.step, self.codec, self.latency, self.optimizer))
        return (
            f"break-even: {verdict}; it pays where ranks send at less than {self.break_even * 8e-6:.0f} Mbit/s (step "
            f"{step:.1f} ms, compute c {self.compute:.3f}, overhead o {self.overhead:.3f}: codec {codec:.1f} ms, latency "
            f"{latency:.1f} ms, optimizer {own:.1f} ms; reduction at R {self.bytes_per_second * 8e-6:.0f} Mbit/s, volume "
            f"1/k with k {self.volume_ratio:.1f}, warm-up w {share:.2f}{' assumed' if warmup is None else ''}{assumption})"
        )


SETTLING_STEPS = 2
"""Steps that are not looked at: memory is touched first and kernels are chosen in them."""
MEASURED_STEPS = 5
REHEARSED = 1 << 20
"""Parameters that the optimizer's work and the reduction are measured with, at most: both grow as their number, and a whole
reduction more is a step's worth of bytes."""
ASSUMED_HIDDEN = 2.0 / 3.0
"""Share of the computation behind which a reduction hides, where no step with whole gradients is seen: the backward's."""


class _Loopback(Channel):
    """As many ranks, all of them here: what would be sent comes back at once."""

    def all_reduce_async(self, tensor: torch.Tensor) -> Work:
        self._counter.add(2 * (self.size - 1) / self.size * tensor.nbytes)
        return DONE

    def exchange_raw_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        self._counter.add((self.size - 1) / self.size * tensor.nbytes)
        return tensor.clone(), DONE

    def gather_raw_async(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        self._counter.add((self.size - 1) * part.nbytes)
        output.view(self.size, -1).copy_(part.reshape(1, -1).expand(self.size, -1).clone())
        return DONE


class BreakEven:
    """Times the first steps, then the reduction and the codec by themselves on scratch memory.

    All ranks call it at the same places. It counts no bytes for the run and touches no state.

    Args:
        strategy: the run's; its optimizer, where one is attached, may work otherwise with lossy means than without.
        buckets: those that lossy means are made of.
        make: the codec of a bucket.
        warmup: share of the run with whole gradients; None: not known yet.
        name: of the lossy means, for the line.
        all_alike: steps with lossy means are like each other, and say enough where none before them was seen.
    """

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
        self.optimizer: Optimizer | None = None
        self._done = all(strategy.channel(bucket).size == 1 for bucket in self._buckets)
        self._lossy = False
        """Steps with lossy means are being looked at."""
        self._steps, self._began = 0, 0.0
        self._times: list[float] = []
        self._waits: list[float] = []

    def begin(self, *, whole: bool) -> str | None:
        """A step begins; the line, once enough of them have been seen.

        Args:
            whole: it reduces gradients.

        Collectives: once, some reductions (of `REHEARSED` numbers in all) and a maximum over the world.
        """
        if self._done:
            return None
        now = self._now()
        if self._steps > SETTLING_STEPS:
            self._times.append(now - self._began)
        if self._all_alike and not (whole or self._lossy or self._times):
            self._lossy, self._steps = True, 0
            self._waits.clear()
        self._steps += 1
        self._began = now
        if (whole or self._lossy) and len(self._times) < MEASURED_STEPS:
            return None
        self._done = True
        return self._costs().line(self._warmup, name=self._name) if self._times else None

    def wait(self, reductions: Callable[[], None]) -> None:
        """Run what waits for the step's reductions."""
        if self._done or self._steps <= SETTLING_STEPS:
            reductions()
            return
        before = self._now()
        reductions()
        self._waits.append(self._now() - before)

    def _now(self) -> float:
        device = self._buckets[0].grad.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _costs(self) -> Costs:
        lossy = WireCounter()
        reductions = [self._reduction(bucket) for bucket in self._buckets]
        codec = sum(self._codec(bucket, lossy) for bucket in self._buckets)
        slowest = torch.tensor(
            [
                *(min(self._times), min(self._waits), sum(seconds for seconds, _ in reductions), codec),
                *(sum(self._latency(bucket) for bucket in self._buckets), self._optimizer_extra()),
                *(sum(nbytes for _, nbytes in reductions), lossy.take() / 2),
            ],
            dtype=torch.float64,
            device=self._buckets[0].grad.device,
        )
        self._strategy.groups.world.all_reduce(slowest, op="max")
        step, wait, reduction, codec, latency, optimizer, whole_bytes, lossy_bytes = slowest.tolist()
        exposed = min(wait, reduction, step)
        if self._lossy:
            computing = max(step - wait, 0.0)
            exposed = max(reduction - ASSUMED_HIDDEN * computing, 0.0)
            step = computing + exposed
        return Costs(
            step=step,
            exposed=exposed,
            reduction=reduction,
            codec=codec,
            latency=latency,
            optimizer=optimizer,
            whole_bytes=whole_bytes,
            lossy_bytes=lossy_bytes,
            assumed=self._lossy,
        )

    @property
    def _elements(self) -> int:
        return sum(bucket.grad.numel() for bucket in self._buckets)

    def _channel(self, kind: type[Channel], bucket: Bucket, counter: WireCounter) -> Channel:
        strategy, options = self._strategy, self._strategy.options
        return kind(
            strategy.groups.replicas(bucket.kind),
            counter,
            strategy.background,
            wire_dtype=options.wire_dtype,
            by_rank=options.by_rank,
        )

    def _least(self, times: int, work: Callable[[], object]) -> float:
        """Seconds of the fastest of some calls."""
        taken = []
        for _ in range(times):
            before = self._now()
            work()
            taken.append(self._now() - before)
        return min(taken)

    def _reduction(self, bucket: Bucket) -> tuple[float, float]:
        """(seconds, bytes) of a bucket's, from a part of it. Once: the run's first steps have warmed the connections up."""
        counter, size = WireCounter(), bucket.grad.numel()
        channel = self._channel(Channel, bucket, counter)
        share = size * REHEARSED // self._elements
        part = min(size, max(1, -(-share // channel.size)) * channel.size)
        scratch = bucket.grad.new_zeros(part)
        seconds = self._least(1, lambda: channel.all_reduce_async(scratch).wait())
        return seconds * size / part, counter.take() * size / part

    def _codec(self, bucket: Bucket, counter: WireCounter) -> float:
        codec = self._make(bucket, self._channel(_Loopback, bucket, counter))
        # Of either sign, and not from a generator that the run uses.
        values = torch.arange(bucket.grad.numel(), device=bucket.grad.device).to(bucket.grad.dtype).sin_()
        return self._least(2, lambda: codec.mean(values.clone()))

    def _latency(self, bucket: Bucket) -> float:
        """Of an exchange and a gather of a byte per rank."""
        channel = self._channel(Channel, bucket, WireCounter())
        sent = torch.zeros(channel.size, dtype=torch.uint8, device=bucket.grad.device)
        return self._least(3, lambda: channel.gather_raw(channel.exchange_raw(sent), sent[:1]))

    def _optimizer_extra(self) -> float:
        """On scratch memory, alone: a step without reduced gradients against one with them."""
        total = self._elements
        size = min(total, REHEARSED)
        flat = _scratch(size, self._buckets[0].grad)
        alone = None if self.optimizer is None else self.optimizer.alone([flat], freeze_step=3)
        if alone is None:
            return 0.0
        taken = []
        for step in range(1, 7):
            update, before = Update(step=step, lr=1e-3, weight_decay=0.1), self._now()
            if alone.reduces_gradients(step):
                alone.step(update)
            else:
                alone.step(update, lambda flat, values: None)
            taken.append(self._now() - before)
        return max(min(taken[4:]) - min(taken[1:3]), 0.0) * total / size


def _scratch(size: int, like: torch.Tensor) -> FlatParameter:
    values = torch.arange(size, device=like.device).to(like.dtype).sin_()
    param = torch.nn.Parameter(values)
    param.grad = values.clone()
    whole = Segment("scratch", 0, size, 0, (size,), (size,), None, ((0, size),), counts=True)
    return FlatParameter(param, True, (whole,))

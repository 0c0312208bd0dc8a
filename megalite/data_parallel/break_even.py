"""Whether lossy means pay here: measured in the first steps of a run, said in one line, changing no number."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from megalite.data_parallel.background import Background
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.compression.codec import Codec
from megalite.data_parallel.shards import StrategyOptions
from megalite.data_parallel.wire import Channel, WireCounter
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import FlatParameter, Segment, Update
from megalite.topology.group import DONE, Group, Work

SETTLING_STEPS = 2
"""Steps that are not looked at: memory is touched first and kernels are chosen in them."""
MEASURED_STEPS = 5
REHEARSED = 1 << 20
"""Parameters that the optimizer's work is measured with, at most: it grows as their number."""
ASSUMED_WARMUP = 0.15
"""Share of the run, where its end is to be found while training."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one step with whole gradients, and of lossy means in its place; the slowest rank's."""

    step: float
    """Seconds from one step to the next."""
    exposed: float
    """Of these, spent waiting for the reduction."""
    reduction: float
    """Seconds of the reduction by itself."""
    codec: float
    """Seconds that coding and decoding take."""
    latency: float
    """Seconds of the collectives of lossy means when next to nothing is sent."""
    optimizer: float
    """Seconds by which the optimizer's own work is longer."""
    whole_bytes: float
    """That a rank sends in a reduction."""
    lossy_bytes: float
    """That it sends instead."""

    @property
    def compute(self) -> float:
        """c: share of the step that does not wait."""
        return 1.0 - self.exposed / self.step

    @property
    def overhead(self) -> float:
        """o: what comes on top, as a share of the step."""
        return self.extra / self.step

    @property
    def extra(self) -> float:
        """Seconds of a step with lossy means that do not depend on the link's rate and that others do not have."""
        return self.codec + self.latency + self.optimizer

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
        saved = self.whole_bytes - self.lossy_bytes
        return saved / max(self.extra + hidden, 1e-9)

    def line(self, warmup: float | None, *, name: str = "1-bit") -> str:
        """For the log.

        Args:
            name: of the lossy means.
        """
        share = ASSUMED_WARMUP if warmup is None else warmup
        speed, limit = self.speed(share), self.break_even * 8e-6
        verdict = (
            f"the run will be about {speed:.2f} times as fast as with whole gradients"
            if speed > 1.0
            else f"{name} will be slower here: the run will take about {1.0 / speed:.2f} times as long as with whole "
            "gradients"
        )
        return (
            f"break-even: {verdict}; it pays where ranks send at less than {limit:.0f} Mbit/s (step "
            f"{self.step * 1e3:.1f} ms, compute c {self.compute:.3f}, overhead o {self.overhead:.3f}: codec "
            f"{self.codec * 1e3:.1f} ms, latency {self.latency * 1e3:.1f} ms, optimizer "
            f"{self.optimizer * 1e3:.1f} ms; reduction at R "
            f"{self.bytes_per_second * 8e-6:.0f} Mbit/s, volume 1/k with k {self.volume_ratio:.1f}, warm-up w "
            f"{share:.2f}{' assumed' if warmup is None else ''})"
        )


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


@dataclass(kw_only=True)
class BreakEven:
    """Times the first steps, then the reduction and the codec by themselves on scratch memory.

    All ranks call it at the same places. It counts no bytes for the run and touches no state.

    Args:
        groups: the buckets, and who holds each of them too.
        make: the codec of a bucket.
        background: the run's.
        world: all ranks.
        warmup: share of the run with whole gradients; None: not known yet.
        name: of the lossy means, for the line.
    """

    groups: Mapping[Bucket, Group]
    make: Callable[[Bucket, Channel], Codec]
    options: StrategyOptions
    background: Background
    world: Group
    warmup: float | None
    name: str = "1-bit"
    _optimizer: Optimizer | None = field(default=None, init=False)
    _done: bool = field(default=False, init=False)
    _steps: int = field(default=0, init=False)
    _began: float | None = field(default=None, init=False)
    _times: list[float] = field(default_factory=list, init=False)
    _waits: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._done = all(group.size == 1 for group in self.groups.values())

    def follow(self, optimizer: Optimizer) -> None:
        """The run's optimizer, if it works otherwise with lossy means than without."""
        self._optimizer = optimizer

    def begin(self, *, whole: bool) -> str | None:
        """A step begins; the line, once enough of them have been seen.

        Args:
            whole: it reduces gradients.

        Collectives: once, some reductions and a maximum over the world.
        """
        if self._done:
            return None
        now = self._now()
        if self._began is not None and self._steps > SETTLING_STEPS:
            self._times.append(now - self._began)
        self._steps += 1
        self._began = now if whole else None
        if whole and len(self._times) < MEASURED_STEPS:
            return None
        self._done = True
        return self._costs().line(self.warmup, name=self.name) if self._times else None

    def wait(self, reductions: Callable[[], None]) -> None:
        """Run what waits for the step's reductions."""
        if self._done or self._steps <= SETTLING_STEPS:
            reductions()
            return
        before = self._now()
        reductions()
        self._waits.append(self._now() - before)

    def _now(self) -> float:
        device = self._device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.groups)).grad.device

    def _costs(self) -> Costs:
        whole, lossy = WireCounter(), WireCounter()
        # Once: on a slow link it takes as long as a step, and the run's first steps have warmed the connections up.
        reduction = sum(self._reduction(bucket, whole) for bucket in self.groups)
        codec = sum(self._codec(bucket, lossy) for bucket in self.groups)
        slowest = torch.tensor(
            [
                *(min(self._times), min(self._waits), reduction, codec),
                *(sum(self._latency(bucket) for bucket in self.groups), self._optimizer_extra()),
                *(whole.take(), lossy.take() / 2),
            ],
            dtype=torch.float64,
            device=self._device,
        )
        self.world.all_reduce(slowest, op="max")
        step, wait, reduction, codec, latency, optimizer, whole_bytes, lossy_bytes = slowest.tolist()
        return Costs(
            step=step,
            exposed=min(wait, reduction, step),
            reduction=reduction,
            codec=codec,
            latency=latency,
            optimizer=optimizer,
            whole_bytes=whole_bytes,
            lossy_bytes=lossy_bytes,
        )

    def _channel(self, kind: type[Channel], bucket: Bucket, counter: WireCounter) -> Channel:
        return kind(
            self.groups[bucket],
            counter,
            self.background,
            wire_dtype=self.options.wire_dtype,
            by_rank=self.options.by_rank,
        )

    def _reduction(self, bucket: Bucket, counter: WireCounter) -> float:
        channel, scratch = self._channel(Channel, bucket, counter), torch.zeros_like(bucket.grad)
        before = self._now()
        channel.all_reduce_async(scratch).wait()
        return self._now() - before

    def _codec(self, bucket: Bucket, counter: WireCounter) -> float:
        codec = self.make(bucket, self._channel(_Loopback, bucket, counter))
        # Of either sign, and not from a generator whose numbers the run counts on.
        values = torch.arange(bucket.grad.numel(), device=bucket.grad.device).to(bucket.grad.dtype).sin_()
        taken = []
        for _ in range(2):
            before = self._now()
            codec.mean(values.clone())
            taken.append(self._now() - before)
        return min(taken)

    def _latency(self, bucket: Bucket) -> float:
        """Of an exchange and a gather of a byte a rank."""
        channel = self._channel(Channel, bucket, WireCounter())
        sent = torch.zeros(channel.size, dtype=torch.uint8, device=bucket.grad.device)
        taken = []
        for _ in range(3):
            before = self._now()
            received = channel.exchange_raw(sent)
            channel.gather_raw(received, sent[:1])
            taken.append(self._now() - before)
        return min(taken)

    def _optimizer_extra(self) -> float:
        """On scratch memory, alone: a step without reduced gradients against one with them."""
        total = sum(bucket.grad.numel() for bucket in self.groups)
        size = min(total, REHEARSED)
        flat = _scratch(size, next(iter(self.groups)).grad)
        alone = None if self._optimizer is None else self._optimizer.alone([flat], freeze_step=3)
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
    """A flat parameter of one tensor, with a gradient."""
    values = torch.arange(size, device=like.device).to(like.dtype).sin_()
    param = torch.nn.Parameter(values)
    param.grad = values.clone()
    whole = Segment("scratch", 0, size, 0, (size,), (size,), None, ((0, size),), counts=True)
    return FlatParameter(param, True, (whole,))

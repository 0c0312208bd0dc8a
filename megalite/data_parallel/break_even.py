"""Whether lossy means pay here: measured in the first steps of a run, said in one line, changing no number."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from megalite.data_parallel.background import Background
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.compression.codec import Codec
from megalite.data_parallel.means_costs import Costs
from megalite.data_parallel.shards import StrategyOptions
from megalite.data_parallel.wire import Channel, WireCounter
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import FlatParameter, Segment, Update
from megalite.topology.group import DONE, Group, Work

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
        all_alike: steps with lossy means are like each other, and tell enough where none before them was seen.
    """

    groups: Mapping[Bucket, Group]
    make: Callable[[Bucket, Channel], Codec]
    options: StrategyOptions
    background: Background
    world: Group
    warmup: float | None
    name: str = "1-bit"
    all_alike: bool = False
    _optimizer: Optimizer | None = field(default=None, init=False)
    _done: bool = field(default=False, init=False)
    _lossy: bool = field(default=False, init=False)
    """Steps with lossy means are being looked at."""
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

        Collectives: once, some reductions (of `REHEARSED` numbers in all) and a maximum over the world.
        """
        if self._done:
            return None
        now = self._now()
        if self._began is not None and self._steps > SETTLING_STEPS:
            self._times.append(now - self._began)
        if self.all_alike and not (whole or self._lossy or self._times):
            self._lossy, self._steps = True, 0
            self._waits.clear()
        self._steps += 1
        goes_on = whole or self._lossy
        self._began = now if goes_on else None
        if goes_on and len(self._times) < MEASURED_STEPS:
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
        lossy = WireCounter()
        reductions = [self._reduction(bucket) for bucket in self.groups]
        codec = sum(self._codec(bucket, lossy) for bucket in self.groups)
        slowest = torch.tensor(
            [
                *(min(self._times), min(self._waits), sum(seconds for seconds, _ in reductions), codec),
                *(sum(self._latency(bucket) for bucket in self.groups), self._optimizer_extra()),
                *(sum(nbytes for _, nbytes in reductions), lossy.take() / 2),
            ],
            dtype=torch.float64,
            device=self._device,
        )
        self.world.all_reduce(slowest, op="max")
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
        return sum(bucket.grad.numel() for bucket in self.groups)

    def _channel(self, kind: type[Channel], bucket: Bucket, counter: WireCounter) -> Channel:
        return kind(
            self.groups[bucket],
            counter,
            self.background,
            wire_dtype=self.options.wire_dtype,
            by_rank=self.options.by_rank,
        )

    def _reduction(self, bucket: Bucket) -> tuple[float, float]:
        """(seconds, bytes) of a bucket's, from a part of it. Once: the run's first steps have warmed the connections up."""
        counter, size = WireCounter(), bucket.grad.numel()
        channel = self._channel(Channel, bucket, counter)
        share = size * REHEARSED // self._elements
        part = min(size, max(1, -(-share // channel.size)) * channel.size)
        scratch = bucket.grad.new_zeros(part)
        before = self._now()
        channel.all_reduce_async(scratch).wait()
        return (self._now() - before) * size / part, counter.take() * size / part

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
        total = self._elements
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

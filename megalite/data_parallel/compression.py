"""Replace the sum of gradients, or of a 1-bit optimizer's momentum, by lossy means."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config.batch import total_steps
from megalite.config.parallel import DataParallelConfig
from megalite.config.run import RunConfig
from megalite.data_parallel.break_even import BreakEven
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.codec import Codec, PowerSGD, TopK, Uint8
from megalite.data_parallel.local_weights import OwnWeights
from megalite.data_parallel.onebit import OneBit
from megalite.data_parallel.shards import Norms
from megalite.data_parallel.strategy import AllReduce, DataParallelStrategy, FlatState, TensorState
from megalite.data_parallel.wire import Channel
from megalite.optimizers.base import FlatParameter, Optimizer, Update
from megalite.topology.group import DONE, Work
from megalite.topology.topology import Topology


def build_codec(name: str, bucket: Bucket, channel: Channel, settings: DataParallelConfig) -> Codec:
    """Return the codec of a `grad_compression` other than `none`."""
    if name == "topk":
        return TopK(bucket, channel, density=settings.topk_density)
    if name == "powersgd":
        return PowerSGD(bucket, channel, rank=settings.powersgd_rank)
    plain: dict[str, type[Codec]] = {"onebit": OneBit, "uint8": Uint8}
    return plain[name](bucket, channel)


class CompressedAllReduce(AllReduce):
    """Averages buckets of weight matrices by a codec (1-bit, 8-bit, top-k, low rank) after the first steps, overlapped
    with the backward.

    A rank's estimate of the gradient is n times its part. `codec.mean` averages the estimates, plus the errors of earlier
    steps, into the gradient that every rank steps and clips by. Errors are in the gradient's unit, without the loss scale.

    Biases and the weights of norms, under 1 % of the bytes, are sent whole.

    With fp16 an overflow must not change errors: all ranks first agree that no gradient has overflowed, and compression
    does not overlap with the backward.

    Wire: see the codecs; `wire_dtype` applies to buckets sent whole."""

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        settings, name = self.options.settings, self.options.settings.grad_compression
        self._warmup = settings.compression_warmup_steps
        make = functools.partial(build_codec, name, settings=settings)
        self._codecs: dict[Bucket, Codec] = {
            bucket: make(bucket, self.channel(bucket))
            for bucket in self.all_buckets()
            if self.channel(bucket).size > 1
            and bucket.kind.decay
            and any(len(placed.parameter.info.spec.global_shape) > 1 for placed in bucket.placed)
        }
        self._break_even = BreakEven(
            self, self._codecs, make, warmup=0.0, name=f"grad_compression {name}", all_alike=True
        )
        self._may_overflow = self.all_buckets()[0].data.dtype == torch.float16
        self._full: list[Bucket] = []  # to compress when all ranks agree that no gradient has overflowed

    def phase(self, step: int) -> str:
        return "gradients" if step <= self._warmup else "compressed"

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        super().begin_step(step, loss_scale=loss_scale)
        self._break_even.begin(whole=self.phase(step) == "gradients")

    def zero_grad(self) -> None:
        super().zero_grad()
        self._full.clear()

    def _reduce(self, bucket: Bucket) -> Work:
        channel = self.channel(bucket)
        if channel.size == 1 or self.phase(self.step) == "gradients":
            return super()._reduce(bucket)
        if bucket not in self._codecs:
            # The means run in the background thread. Two threads must not use one group, so this sum runs there too.
            if channel.sums_in_parts(bucket.grad.dtype):
                return super()._reduce(bucket)  # already uses that thread
            return channel.in_background(lambda: channel.all_reduce_async(bucket.grad).wait())
        if self._may_overflow:
            self._full.append(bucket)
            return DONE
        return channel.in_background(lambda: self._compress(bucket))

    def _compress(self, bucket: Bucket) -> None:
        bucket.grad.mul_(self.channel(bucket).size / self.loss_scale)
        self._codecs[bucket].mean(bucket.grad)
        if self.loss_scale != 1.0:
            bucket.grad.mul_(self.loss_scale)

    def finish_grad_sync(self) -> None:
        self._break_even.wait(super().finish_grad_sync)
        if not self._may_overflow or self.phase(self.step) == "gradients":
            return
        # On every rank of the world. Infinities and NaN make a sum infinite or NaN.
        sums = torch.stack([bucket.grad.sum() for bucket in self.all_buckets()])
        overflow = sums.isfinite().logical_not_().any().float()
        self.groups.world.all_reduce(overflow, op="max")
        with self.groups.world.heartbeat.synchronise():
            overflowed = bool(overflow.item())
        for bucket in self._full:
            if overflowed:
                # Possibly only one rank overflowed, but every rank's norm must be NaN.
                bucket.grad.fill_(torch.nan)
            else:
                self._compress(bucket)
        self._full.clear()

    def states(self) -> list[FlatState]:
        return [state for codec in self._codecs.values() for state in codec.states()]

    def tensor_states(self) -> list[TensorState]:
        return [state for codec in self._codecs.values() for state in codec.tensor_states()]


SMOOTHING = 0.9  # weight of the previous gradient ratio ρ in its average over steps


class MomentumExchange(AllReduce):
    """Exchanges the momentum of 1-bit optimizers. In steps in which the optimizer reduces gradients, it is `AllReduce`.
    In other steps each rank's estimate of the mean gradient is the number of replicas times its part (parts over tp and
    of tied embeddings are still summed), and the optimizer averages one of its states by signs, with one `OneBit` per
    bucket. Buckets that are equal on tp ranks contain no other parameters, so they decode to equal bits on all of them.

    Clipping: the mean gradient's norm is unknown while gradients stay local. Steps with whole gradients track
    ρ = ‖ḡ‖/√(mean_i ‖g_i‖²), smoothed over about 10 steps; other steps use ρ·√(mean_i ‖g_i‖²) instead, the same number on
    every rank. Before any step with whole gradients ρ is 1. With `own_clipping`, DeepSpeed's rule, each replica clips by
    its ‖g_i‖, and the log shows √(mean_i ‖g_i‖²).

    Wire: 2·(d-1)/d of the gradient bytes in steps with whole gradients; else 0.25·(d-1)/d bytes per parameter, and 4 bytes
    twice per tensor and peer.

    `scale`: of the codecs. `warmup`: share of the run with whole gradients, if known, for the break-even line of the
    log."""

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module],
        *,
        scale: str = "tensor",
        own_clipping: bool = False,
        warmup: float | None,
        **common: Any,
    ) -> None:
        super().__init__(stages, **common)
        self._own_clipping = own_clipping
        make = functools.partial(OneBit, scale=scale)
        self._codecs = {shard.main_param: make(shard.bucket, self.channel(shard.bucket)) for shard in self.shards}
        self._break_even = BreakEven(self, self.all_buckets(), make, warmup=warmup)
        self._optimizer: Optimizer | None = None
        self._whole = True  # the current step sums gradients
        self._own_squares: dict[Bucket, torch.Tensor] = {}
        self._ratio: float | None = None  # ρ
        self._found: float | None = None  # the ratio of the current step

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> DataParallelStrategy:
        freeze, training = config.optimizer.freeze_step, config.training
        warmup = None
        if freeze is not None and (training.train_iters or training.train_samples):
            warmup = min(freeze / max(total_steps(config), 1), 1.0)
        published = config.optimizer.deepspeed_onebit
        scale = "buffer" if published else config.optimizer.onebit_scale
        return cls(stages, scale=scale, own_clipping=published, warmup=warmup, **common)

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = self._break_even.optimizer = optimizer

    def phase(self, step: int) -> str:
        assert self._optimizer is not None, "call attach() first"
        return "gradients" if self._optimizer.reduces_gradients(step) else "momentum"

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        super().begin_step(step, loss_scale=loss_scale)
        self._whole, self._found = self.phase(step) == "gradients", None
        self._own_squares.clear()
        self._break_even.begin(whole=self._whole)

    def finish_grad_sync(self) -> None:
        self._break_even.wait(super().finish_grad_sync)

    def _reduce(self, bucket: Bucket) -> Work:
        # Here the gradient is final on this rank, and not yet summed over replicas.
        if self._counts(bucket):
            replicas = self.groups.replicas(bucket.kind).size
            self._own_squares[bucket] = replicas * self.options.l2norm([bucket.grad]).square()
        return super()._reduce(bucket) if self._whole else DONE

    def norm_terms(self) -> torch.Tensor:
        own = self.total(self._own_squares)
        whole = self.local_norm_squared() if self._whole else torch.zeros_like(own)
        each = own.new_zeros(self.groups.dp.size if self._own_clipping else 0)
        each[self.groups.dp.rank : self.groups.dp.rank + 1] = own
        return torch.cat([torch.stack([whole, own]), each])

    def norms(self, sums: Sequence[float]) -> Norms:
        if not all(math.isfinite(each) and each >= 0.0 for each in sums):
            return Norms(logged=math.nan, clipping=math.nan)
        norm, own, *each = (math.sqrt(each) for each in sums)
        if each and not self._whole:
            return Norms(logged=own, clipping=math.sqrt(len(each)) * each[self.groups.dp.rank])
        if not self._whole:
            norm = own * (1.0 if self._ratio is None else self._ratio)
        elif own > 0.0:
            self._found = norm / own
        return Norms(logged=norm, clipping=norm)

    def update(self, optimizer: Optimizer, update: Update) -> None:
        """Step by whole gradients, or by this rank's gradients with the optimizer's exchange."""
        if self._whole:
            super().update(optimizer, update)
            if self._found is not None:
                before = self._found if self._ratio is None else self._ratio
                self._ratio = SMOOTHING * before + (1.0 - SMOOTHING) * self._found
            return
        for shard in self.shards:
            shard.grad.mul_(update.factor * self.groups.replicas(shard.bucket.kind).size)
        with self.main_in_memory():
            optimizer.step(dataclasses.replace(update, factor=1.0), self._exchange)
            optimizer.average()
            self.publish_parameters()

    def _exchange(self, flat: FlatParameter, values: torch.Tensor) -> None:
        self._codecs[flat.param].mean(values)

    def states(self) -> list[FlatState]:
        return [state for codec in self._codecs.values() for state in codec.states()]

    def counters(self) -> dict[str, Any]:
        return {"gradient_ratio": self._ratio}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        ratio = counters.get("gradient_ratio")
        if ratio is not None:
            self._ratio = float(ratio)


class LocalMomentumExchange(OwnWeights, MomentumExchange):
    """A `MomentumExchange` for an optimizer that also steps without an exchange, so that replicas have different weights
    and states.

    Wire: as `MomentumExchange` in steps with an exchange; nothing in the others."""

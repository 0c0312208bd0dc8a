"""Data parallelism for 1-bit optimizers: gradients are all-reduced in the warm-up; then momentum is averaged by signs."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config.batch import total_steps
from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.break_even import BreakEven
from megalite.data_parallel.more.local_weights import OwnWeights
from megalite.data_parallel.more.onebit import OneBit
from megalite.data_parallel.shards import Norms
from megalite.data_parallel.strategy import AllReduce, DataParallelStrategy, FlatState
from megalite.optimizers.base import FlatParameter, Optimizer, Update
from megalite.topology.group import DONE, Work
from megalite.topology.topology import Topology

SMOOTHING = 0.9
"""Of the gradients' ratio, from step to step."""


class MomentumExchange(AllReduce):
    """Where the optimizer reduces gradients it is `AllReduce`. In other steps each rank's estimate of the mean gradient is
    the number of replicas times its part (parts over tp and of tied embeddings are still summed), and the optimizer is
    given a mean by signs, one `OneBit` a bucket, for one of its states. Buckets that tp ranks hold alike hold nothing
    else, and so equal inputs decode to equal bits on all of them.

    Clipping: the mean gradient's norm is not known while gradients stay local. Steps with whole gradients track
    ρ = ‖ḡ‖/√(mean_i ‖g_i‖²), smoothed over about 10 of them; others take ρ·√(mean_i ‖g_i‖²) for it, the same number
    on every rank. Before any step with whole gradients ρ is 1.

    Wire: 2·(d-1)/d of the gradient bytes in steps with whole gradients, else 0.25·(d-1)/d bytes a parameter and 4 bytes
    twice a tensor and peer.

    Args:
        scale: of the codecs, `tensor` or `bucket`.
        warmup: share of the run with whole gradients, if it is known: for the log's line on whether this pays.
    """

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module],
        *,
        scale: str = "tensor",
        warmup: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(stages, **common)
        self._codecs = {
            shard.main_param: OneBit(shard.bucket, self.channel(shard.bucket), scale=scale) for shard in self.shards
        }
        make = functools.partial(OneBit, scale=scale)
        self._break_even = BreakEven(self, self.all_buckets(), make, warmup=warmup)
        self._optimizer: Optimizer | None = None
        self._whole = True
        """The current step sums gradients."""
        self._own_square = torch.zeros((), dtype=torch.float64, device=self.all_buckets()[0].data.device)
        self._ratio: float | None = None
        """ρ."""
        self._found: float | None = None
        """The ratio of the current step."""

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> DataParallelStrategy:
        return cls(stages, scale=config.optimizer.onebit_scale, warmup=_warmup_share(config), **common)

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._break_even.optimizer = optimizer

    def _reduces(self, step: int) -> bool:
        assert self._optimizer is not None, "call attach() first"
        return self._optimizer.reduces_gradients(step)

    def phase(self, step: int) -> str:
        return "gradients" if self._reduces(step) else "momentum"

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        super().begin_step(step, loss_scale=loss_scale)
        self._whole, self._found = self._reduces(step), None
        self._own_square.zero_()
        line = self._break_even.begin(whole=self._whole)
        if line is not None:
            self.notes.append(line)

    def finish_grad_sync(self) -> None:
        self._break_even.wait(super().finish_grad_sync)

    def _reduce(self, bucket: Bucket) -> Work:
        # The gradient is final on this rank here, and not yet summed over replicas.
        if self._counts(bucket):
            replicas = self.groups.replicas(bucket.kind).size
            self._own_square += replicas * self.options.l2norm([bucket.grad]).square()
        return super()._reduce(bucket) if self._whole else DONE

    def norm_terms(self) -> torch.Tensor:
        whole = self.local_norm_squared() if self._whole else torch.zeros_like(self._own_square)
        return torch.stack([whole, self._own_square])

    def norms(self, sums: Sequence[float]) -> Norms:
        if not all(math.isfinite(each) and each >= 0.0 for each in sums):
            return Norms(shown=math.nan, clipping=math.nan)
        whole, own = (math.sqrt(each) for each in sums)
        if not self._whole:
            estimate = own * (1.0 if self._ratio is None else self._ratio)
            return Norms(shown=estimate, clipping=estimate)
        self._found = whole / own if own > 0.0 else None
        return Norms(shown=whole, clipping=whole)

    def update(self, optimizer: Optimizer, update: Update) -> None:
        """A step by whole gradients, or one by this rank's own and what the optimizer exchanges.

        Collectives: in the latter an exchange and a gather over the replicas for each bucket.
        """
        if self._whole:
            super().update(optimizer, update)
            if self._found is not None:
                before = self._found if self._ratio is None else self._ratio
                self._ratio = SMOOTHING * before + (1.0 - SMOOTHING) * self._found
            return
        for shard in self.shards:
            assert shard.main_param.grad is not None
            shard.main_param.grad.mul_(update.factor * self.groups.replicas(shard.bucket.kind).size)
        with self.main_in_memory():
            optimizer.step(dataclasses.replace(update, factor=1.0), self._exchange)
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
    """`MomentumExchange` for an optimizer that steps without an exchange too. Replicas then have weights and states of
    their own.

    Wire: as `MomentumExchange` in steps with an exchange; nothing in the others.
    """


def _warmup_share(config: RunConfig) -> float | None:
    """Share of the run before a 1-bit optimizer is frozen, if it is known before the run."""
    freeze, training = config.optimizer.freeze_step, config.training
    if freeze is None or (training.train_iters is None and training.train_samples is None):
        return None
    return min(freeze / max(total_steps(config), 1), 1.0)

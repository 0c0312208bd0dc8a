"""Parameters that know which slice of which tensor they are and how their gradients combine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megalite.tensor_parallel.random import fill_normal
from megalite.topology.group import Group
from megalite.topology.sharding import ShardSpec


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """Facts that optimizer, gradient reduction and checkpoints need of one parameter."""

    spec: ShardSpec
    """Name, global shape and local slice."""
    shard_dim: int | None
    """Dimension that tensor parallelism splits; None: replicated over tp."""
    decay: bool
    """Weight decay applies."""
    partial_over_tp: bool
    """Replicated, but each tp rank's gradient covers its part of the sequence alone: sum them over tp."""
    tied: bool = False
    """The word embedding where two stages hold a copy: sum the gradients over the embedding group."""
    uses: int = 1
    """Gradient contributions of one microbatch: 2 where one parameter is both embedding and head."""


class ShardedParameter(torch.nn.Parameter):
    """A `Parameter` with `info`; data-parallel code adds where its gradient goes.

    `main_grad`, once set, is the buffer that gradients are summed in, and `grad_ready` is called each time one
    microbatch's contribution is in it.
    """

    info: ParameterInfo
    main_grad: torch.Tensor | None
    grad_ready: Callable[[], None] | None

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add a finished gradient to `main_grad`."""
        assert self.main_grad is not None
        self.main_grad.add_(grad.view(self.main_grad.shape))
        if self.grad_ready is not None:
            self.grad_ready()


@dataclass(frozen=True, kw_only=True)
class ParameterFactory:
    """How the parameters of a model are made: where, in which type, from which seed, split over which group."""

    tp: Group
    seed: int
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool = False

    def make(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        shard_dim: int | None = None,
        std: float | None = None,
        value: float = 0.0,
        decay: bool = True,
        in_sequence_region: bool = False,
        tied: bool = False,
        uses: int = 1,
    ) -> ShardedParameter:
        """A parameter of global `shape`, split along `shard_dim` over tp.

        Args:
            std: draw from N(0, std²); None: fill with `value`.
            in_sequence_region: it acts on activations that sequence parallelism splits.
        """
        spec = ShardSpec.whole(name, shape)
        if shard_dim is not None:
            spec = ShardSpec.split(name, shape, dim=shard_dim, index=self.tp.rank, parts=self.tp.size)
        data = torch.full(spec.shape, value, dtype=self.dtype, device=self.device)
        if std is not None:
            fill_normal(data, spec, dim=shard_dim or 0, std=std, seed=self.seed)
        parameter = ShardedParameter(data)
        parameter.info = ParameterInfo(
            spec=spec,
            shard_dim=shard_dim,
            decay=decay,
            partial_over_tp=in_sequence_region and self.sequence_parallel,
            tied=tied,
            uses=uses,
        )
        parameter.main_grad = None
        parameter.grad_ready = None
        return parameter

"""Parameters that know which slice of which tensor they are and how their gradients combine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.matmul import WeightProduct, accumulate_weight_grad
from megalite.kernels.registry import Kernels
from megalite.tensor_parallel.deferred_weight_gradients import DeferredWeightGradients
from megalite.tensor_parallel.random import fill_normal
from megalite.topology.group import DONE, Group
from megalite.topology.layout import ShardSpec


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """Facts that optimizer, gradient reduction and checkpoints need of one parameter."""

    spec: ShardSpec  # name, global shape and local slice
    shard_dim: int | None
    """Dimension that tensor parallelism (of experts: expert tensor parallelism) splits; None: replicated over tp."""
    decay: bool  # weight decay applies
    partial_over_tp: bool  # replicated, but each tp rank's gradient covers its part of the work alone: sum them over tp
    expert: bool = False
    """Dimension 0 runs over experts, which expert parallelism splits; gradients are summed over expert-dp, not dp."""
    tied: bool = False  # the word embedding where two stages hold a copy: sum the gradients over the embedding group
    uses: int = 1  # gradient contributions of one microbatch: 2 where one parameter is both embedding and head
    orthogonal: bool = False
    """The optimizer orthogonalises its update, so it keeps other states than the rest and shares no bucket with it."""
    learning_rate: tuple[bool, float] = (False, 1.0)
    """A `models.shapes.LearningRate`: it shares no bucket with those that have another."""
    fp8: bool = False
    """It is gathered in fp8, so it shares no bucket with what is not."""


class ShardedParameter(torch.nn.Parameter):
    """A `Parameter` with `info`; data-parallel code adds where its gradient goes.

    `main_grad`, once set, is the buffer that gradients are summed in. `deferred`, once set, can put off the products that
    make the gradient. `accumulate_product` is the kernel that adds grad_yᵀ·x to a main gradient.
    """

    info: ParameterInfo
    main_grad: Tensor | None = None
    grad_wanted: Callable[[], None] | None = None
    """Called before anything is added to `main_grad`: a buffer that comes and goes is there afterwards."""
    grad_ready: Callable[[], None] | None = None
    """Called each time one microbatch's contribution is in `main_grad`; None while none are counted."""
    grad_given: Callable[[], None]
    """Called after autograd has put a gradient into `grad`, once the parameter is in a bucket."""
    deferred: DeferredWeightGradients | None = None
    successor: torch.nn.Parameter | None = None
    """What has taken its place in a module."""
    draw: Callable[[Tensor], None] | None = None
    """Fills a tensor of its shape with its first values; None: it has them."""
    accumulate_product: Callable[[Tensor, Tensor, Tensor], None] = staticmethod(accumulate_weight_grad)

    def contribute(self, product: Callable[[Tensor | None], Tensor | None]) -> Tensor | None:
        """Have a `WeightGradient.product` computed: what a backward returns, None where it is in `main_grad`."""
        if self.grad_wanted is not None:
            self.grad_wanted()
        main_grad = self.main_grad
        grad = product(main_grad)
        if main_grad is not None and self.grad_ready is not None:
            self.grad_ready()
        return grad

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        copied: ShardedParameter = super().__deepcopy__(memo)  # which is in no bucket
        vars(copied).update(self._kept())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_in_bucket("pickled; save model.state_dict()")
        return _restored, (self.data, self.requires_grad, self._kept())

    def replaced_by(self, other: torch.nn.Parameter) -> torch.nn.Parameter:
        """`other` with the info of this one, for its place in a module. In several places it stays one."""
        if other is self:
            return self
        self._refuse_in_bucket("replaced; load_state_dict() without assign=True copies into it")
        if type(other) is not ShardedParameter:
            if self.successor is None:
                other.__class__ = ShardedParameter
                vars(other).update(self._kept())
                self.successor = other
            self.successor.data = other.data
            return self.successor
        return other

    def _refuse_in_bucket(self, what: str) -> None:
        if self.main_grad is not None:
            raise TypeError(f"{self.info.spec.name} is in a bucket of a run, and cannot be {what}")

    def _kept(self) -> dict[str, Any]:
        """What it is wherever it goes."""
        return {name: vars(self)[name] for name in ("info", "accumulate_product") if name in vars(self)}

    def changed(self, since: int) -> RuntimeError:
        """What a backward raises that is to multiply by another weight than its forward. Layers keep `_version` by themselves:
        what `save_for_backward` keeps must stay in memory, and a sharded weight does not."""
        name = self.info.spec.name if "info" in vars(self) else "a computed weight"
        return RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} "
            f"{list(self.shape)} is at version {self._version}; expected version {since} instead. Call backward first"
        )

    def accumulate(self, grad: Tensor) -> None:
        """Add a finished gradient to `main_grad`."""
        main_grad = self.main_grad
        assert main_grad is not None
        self.contribute(lambda _: main_grad.add_(grad.view(main_grad.shape)))


def _restored(data: Tensor, requires_grad: bool, kept: dict[str, Any]) -> ShardedParameter:
    made = ShardedParameter(data, requires_grad)
    vars(made).update(kept)
    return made


def _nothing() -> None:
    pass


@dataclass(slots=True)
class WeightGradient:
    """One contribution to a weight's gradient, with all that it takes to compute it; see `DeferredGradient`.

    The tensors in `product` are detached: they hold memory, not the graph that the backward has just freed.
    """

    parameter: ShardedParameter
    product: Callable[[Tensor | None], Tensor | None]
    """Adds the gradient to the main gradient; without one returns it, like the weight in shape."""
    start: Callable[[], None] = _nothing  # starts the communication that `product` needs

    def compute(self) -> Tensor | None:
        return self.parameter.contribute(self.product)

    def compute_or_defer(self, deferred: DeferredWeightGradients | None) -> Tensor | None:
        """What a backward returns for its weight: the gradient, or None where it is deferred or in `main_grad`."""
        if deferred is not None and deferred.is_deferring:
            deferred.append(self)
            return None
        return self.compute()


def linear_weight_gradient(
    weight: ShardedParameter, x: Tensor, grad_rows: Tensor, gather: Group | None, multiply: WeightProduct | None = None
) -> WeightGradient:
    """grad_rowsᵀ·x; x [s/tp, b, i] is gathered over the sequence first where there is a `gather` group. `multiply` makes
    the product, if that is not the kernel that adds to the main gradient."""
    x, gathering = x.detach(), DONE

    def start() -> None:
        nonlocal x, gathering
        if gather is not None:
            part = x.contiguous()
            x = part.new_empty(part.shape[0] * gather.size, *part.shape[1:])
            gathering = gather.all_gather_async(x, part)

    def product(main_grad: Tensor | None) -> Tensor | None:
        if gathering is not DONE:
            gathering.wait()
        return linear_product(weight, x, grad_rows, multiply, main_grad)

    return WeightGradient(weight, product, start)


def linear_product(
    weight: ShardedParameter, x: Tensor, grad_rows: Tensor, multiply: WeightProduct | None, main_grad: Tensor | None
) -> Tensor | None:
    """grad_rowsᵀ·x for x [..., i] as a `WeightGradient.product`."""
    x_rows = x.flatten(0, -2)
    if main_grad is not None and main_grad.dim() > 2:
        main_grad = main_grad.flatten(0, -2)
    if main_grad is not None and multiply is None:
        weight.accumulate_product(main_grad, grad_rows, x_rows)
        return None
    grad = grad_rows.t() @ x_rows if multiply is None else multiply(grad_rows, x_rows)
    if main_grad is None:
        return grad.view(weight.shape).to(weight.dtype)
    main_grad.add_(grad)
    return None


def attach_deferred(module: torch.nn.Module, deferred: DeferredWeightGradients | None) -> None:
    """Let `deferred` take the weight gradients of a stage. None: they are computed in the backward, as at first.

    Of stages that share a parameter the one that multiplies with it must come last.
    """
    for parameter in module.parameters():
        if isinstance(parameter, ShardedParameter):
            parameter.deferred = deferred


@dataclass(frozen=True, kw_only=True)
class ParameterFactory:
    """How the parameters of a model are made: where, in which type, from which seed, split over which group.

    Modules take the groups that they communicate over from here as well: `cp` splits the sequence, `cp_heads` and `cp_keys` exchange it in attention, `tp_cp` are all the
    ranks that one sequence can be on, `ep` splits the experts and `expert_tp` each expert's matrices. With `blank`
    nothing is drawn: the weights come from elsewhere. With `late` parameters have a shape alone until their bucket draws
    them (`ShardedParameter.draw`): a model that is sharded at once need not be whole in memory before.
    """

    tp: Group
    seed: int
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool = False
    cp: Group = field(default_factory=lambda: Group.solo("cp"))
    cp_heads: Group = field(default_factory=lambda: Group.solo("cp-heads"))
    cp_keys: Group = field(default_factory=lambda: Group.solo("cp-keys"))
    tp_cp: Group = field(default_factory=lambda: Group.solo("tp-cp"))
    ep: Group = field(default_factory=lambda: Group.solo("ep"))
    expert_tp: Group = field(default_factory=lambda: Group.solo("expert-tp"))
    kernels: Kernels = field(default_factory=Kernels)
    blank: bool = False
    late: bool = False

    @property
    def sequence_region(self) -> Group:
        """The ranks over which activations between the parallel layers are split by sequence parallelism, if it is on."""
        return self.tp if self.sequence_parallel else Group.solo("tp")

    def kernel(self, operation: str, size: int) -> Any:
        """`Kernels.get` for activations with a last dimension of `size`."""
        return self.kernels.get(operation, device=self.device, dtype=self.dtype, size=size)

    def fuses(self, operation: str, size: int) -> bool:
        return self.kernels.fuses(operation, device=self.device, dtype=self.dtype, size=size)

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        shard_dim: int | None = None,
        std: float | None = None,
        value: float = 0.0,
        decay: bool = True,
        in_sequence_region: bool = False,
        always_partial: bool = False,
        expert: bool = False,
        tied: bool = False,
        uses: int = 1,
    ) -> ShardedParameter:
        """A parameter of global `shape`, split along `shard_dim` over tp.

        Args:
            std: draw from N(0, std²); None: fill with `value`.
            in_sequence_region: it acts on activations that sequence parallelism splits.
            always_partial: each tp rank uses it on its own part of the work, with sequence parallelism or without.
            expert: dimension 0 runs over experts and is split over ep; `shard_dim` is split over expert_tp.
        """
        spec = self._spec(name, shape, shard_dim=shard_dim, expert=expert)

        def draw(data: Tensor) -> None:
            data.fill_(value)
            if std is not None and not (data.is_meta or self.blank):  # on meta there are shapes alone
                fill_normal(data, spec, dim=shard_dim or int(expert), std=std, seed=self.seed, expert=expert)

        if self.late:
            parameter = ShardedParameter(torch.empty((), dtype=self.dtype, device=self.device).expand(spec.shape))
            parameter.draw = draw
        else:
            parameter = ShardedParameter(torch.empty(spec.shape, dtype=self.dtype, device=self.device))
            draw(parameter.data)
        parameter.info = ParameterInfo(
            spec=spec,
            shard_dim=shard_dim,
            decay=decay,
            partial_over_tp=(in_sequence_region and self.sequence_parallel) or (always_partial and self.tp.size > 1),
            expert=expert,
            tied=tied,
            uses=uses,
        )
        if len(shape) > 1:
            parameter.accumulate_product = self.kernel("weight_grad", shape[-1])
        return parameter

    def buffer(self, name: str, shape: tuple[int, ...]) -> ShardedParameter:
        """A tensor of the model that has no gradient and is the same on all ranks of its stage, from 0 on, in fp32 (fp64 for
        fp64). No optimizer sees it: what changes it is written where it is used."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        found = ShardedParameter(torch.zeros(shape, dtype=dtype, device=self.device), requires_grad=False)
        spec = ShardSpec.whole(name, shape)
        found.info = ParameterInfo(spec=spec, shard_dim=None, decay=False, partial_over_tp=False)
        return found

    def _spec(self, name: str, shape: tuple[int, ...], *, shard_dim: int | None, expert: bool) -> ShardSpec:
        """Which slice of the tensor this rank has."""
        spec = ShardSpec.whole(name, shape)
        if shard_dim is not None:
            group = self.expert_tp if expert else self.tp
            spec = ShardSpec.split(name, shape, dim=shard_dim, index=group.rank, parts=group.size)
        if expert:
            assert shard_dim != 0, name
            own = ShardSpec.split(name, shape, dim=0, index=self.ep.rank, parts=self.ep.size).slice[0]
            spec = ShardSpec(name=name, global_shape=spec.global_shape, slice=(own, *spec.slice[1:]))
        return spec

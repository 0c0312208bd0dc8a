"""Sharded parameters: the slice of a global tensor, and the path of its gradients.

Pipeline schedules that split the backward defer weight gradients (arXiv 2401.10241): input gradients run early, because
other ranks wait for them; weight gradients fill idle time. Two autograd calls would run every product of a custom function
twice, and each recomputed region once per parameter. A deferred gradient costs only two references."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.matmul import WeightProduct, accumulate_weight_grad
from megalite.kernels.registry import Kernels
from megalite.tensor_parallel.random import fill_normal
from megalite.topology.group import DONE, Group
from megalite.topology.layout import ShardSpec


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """Properties of a parameter for optimizer, gradient reduction and checkpoints."""

    spec: ShardSpec  # name, global shape and local slice
    shard_dim: int | None
    """Dimension split by tensor parallelism (for experts: expert tensor parallelism); None: replicated over tp."""
    decay: bool  # weight decay applies
    partial_over_tp: bool  # replicated, but each tp rank computes only a part of the gradient: sum over tp
    expert: bool = False
    """Dimension 0 is the experts, split by expert parallelism; gradients are summed over expert-dp instead of dp."""
    tied: bool = False  # word embedding with a copy on two stages: sum gradients over the embedding group
    uses: int = 1  # gradient contributions per microbatch: 2 if the parameter is both embedding and head
    orthogonal: bool = False
    """The optimizer orthogonalizes its update. It has other optimizer states and shares no bucket with other kinds."""
    learning_rate: tuple[bool, float] = (False, 1.0)
    """A `models.shapes.LearningRate`; all parameters of a bucket have the same."""
    fp8: bool = False
    """Gathered in fp8; all parameters of a bucket have the same value."""


class ShardedParameter(torch.nn.Parameter):
    """A `Parameter` with `info`; data-parallel code sets the destination of its gradient.

    `main_grad`, once set, is the buffer in which gradients are summed. `deferred`, once set, can defer the gradient's
    products. `accumulate_product` is the kernel that adds grad_yᵀ·x to a main gradient."""

    info: ParameterInfo
    main_grad: Tensor | None = None
    before_accumulation: Callable[[], None] | None = None
    """Called before each sum into `main_grad`, to allocate a temporary buffer."""
    grad_ready: Callable[[], None] | None = None
    """Called after each microbatch's contribution to `main_grad`; None while contributions are not counted."""
    after_autograd: Callable[[], None]
    """Called after autograd has written `grad`, once the parameter is in a bucket."""
    deferred: "DeferredWeightGradients | None" = None
    successor: torch.nn.Parameter | None = None
    """The parameter that replaced it in a module."""
    draw: Callable[[Tensor], None] | None = None
    """Fills a tensor of its shape with initial values; None: already initialized."""
    accumulate_product: Callable[[Tensor, Tensor, Tensor], None] = staticmethod(accumulate_weight_grad)

    def contribute(self, product: Callable[[Tensor | None], Tensor | None]) -> Tensor | None:
        """Compute a `WeightGradient.product`; return the backward's result: the gradient, or None with `main_grad`."""
        if self.before_accumulation is not None:
            self.before_accumulation()
        main_grad = self.main_grad
        grad = product(main_grad)
        if main_grad is not None and self.grad_ready is not None:
            self.grad_ready()
        return grad

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        copied: ShardedParameter = super().__deepcopy__(memo)  # the copy is in no bucket
        vars(copied).update(self._own_attributes())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_in_bucket("pickled; save model.state_dict()")
        return _restored, (self.data, self.requires_grad, self._own_attributes())

    def replaced_by(self, other: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return `other` with this parameter's info, to replace it in a module; the same one for all modules."""
        if other is self:
            return self
        self._refuse_in_bucket("replaced; load_state_dict() without assign=True copies into it")
        if type(other) is not ShardedParameter:
            if self.successor is None:
                other.__class__ = ShardedParameter
                vars(other).update(self._own_attributes())
                self.successor = other
            self.successor.data = other.data
            return self.successor
        return other

    def _refuse_in_bucket(self, what: str) -> None:
        if self.main_grad is not None:
            raise TypeError(f"{self.info.spec.name} is in a bucket of a run, and cannot be {what}")

    def _own_attributes(self) -> dict[str, Any]:
        """Return the attributes that copies keep."""
        return {name: vars(self)[name] for name in ("info", "accumulate_product") if name in vars(self)}

    def changed(self, since: int) -> RuntimeError:
        """Build the error of a backward with a weight that changed after the forward.

        Layers store `_version` themselves: `save_for_backward` would keep the weight in memory, even a sharded one."""
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


def as_sharded(weight: Tensor) -> ShardedParameter:
    """Return a weight itself, or a computed one (parametrized, masked) as its subclass."""
    return weight if type(weight) is ShardedParameter else weight.as_subclass(ShardedParameter)


def _restored(data: Tensor, requires_grad: bool, attributes: dict[str, Any]) -> ShardedParameter:
    parameter = ShardedParameter(data, requires_grad)
    vars(parameter).update(attributes)
    return parameter


def _nothing() -> None:
    pass


@dataclass(slots=True)
class WeightGradient:
    """One contribution to a weight's gradient, with everything needed to compute it.

    The tensors in `product` are detached: they keep memory alive, but not the graph."""

    parameter: ShardedParameter
    product: Callable[[Tensor | None], Tensor | None]
    """Adds the gradient to the main gradient; without one, returns it in the weight's shape."""
    start: Callable[[], None] = _nothing  # starts the communication that `product` needs

    def compute(self) -> Tensor | None:
        """Add the gradient to `main_grad` and report it; without `main_grad` return it in the weight's shape."""
        return self.parameter.contribute(self.product)

    def compute_or_defer(self, deferred: "DeferredWeightGradients | None") -> Tensor | None:
        """Return the backward's result: the gradient, or None if it is deferred or in `main_grad`."""
        if deferred is not None and deferred.is_deferring:
            deferred.append(self)
            return None
        return self.compute()


class DeferredWeightGradients:
    """Deferred weight gradients of one virtual stage, by microbatch.

    Inputs and output gradients of the layers stay alive until `run`. This object contains all state, because autograd
    runs backwards of CUDA tensors in separate threads."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[WeightGradient]] = {}
        self._current: deque[WeightGradient] | None = None
        self.is_deferring = False
        """Whether a backward that defers its weight gradients is running."""

    @property
    def pending(self) -> int:
        """Number of microbatches with deferred gradients."""
        return len(self._waiting)

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Defer weight gradients of the backward inside, if they are matrix products (not norms, biases, tables)."""
        assert self._current is None, f"another backward is deferred while that of microbatch {microbatch} starts"
        assert microbatch not in self._waiting, f"microbatch {microbatch} is deferred already and has not been run"
        self._current = self._waiting[microbatch] = deque()
        self.is_deferring = True
        try:
            yield
        finally:
            self._current, self.is_deferring = None, False

    def append(self, gradient: WeightGradient) -> None:
        """Defer a contribution of the current microbatch."""
        assert self._current is not None, "nothing is being deferred"
        self._current.append(gradient)

    def parameters(self, microbatch: int) -> list[torch.nn.Parameter]:
        """Return the weights that `run` will report, in order and with repetitions."""
        return [gradient.parameter for gradient in self._of(microbatch)]

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute the microbatch's gradients in the order of an unsplit backward.

        They are added to `main_grad`, else to `.grad`, with the same bits as in an unsplit backward.

        Collectives: with sequence parallelism an all-gather of each column-parallel layer's input, each started before
        the previous product."""
        waiting = self._of(microbatch)
        del self._waiting[microbatch]
        # Like autograd, sum the contributions of one backward before adding them to .grad.
        returned: dict[torch.nn.Parameter, Tensor] = {}
        if waiting:
            waiting[0].start()
        while waiting:
            current = waiting.popleft()
            if waiting:
                waiting[0].start()
            grad = current.compute()
            if grad is not None:
                owner = current.parameter
                returned[owner] = returned[owner] + grad if owner in returned else grad
        for parameter, grad in returned.items():
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def clear(self) -> None:
        """Drop the gradients that a failed step left."""
        self._waiting.clear()

    def _of(self, microbatch: int) -> deque[WeightGradient]:
        assert microbatch in self._waiting, (
            f"microbatch {microbatch} is not deferred, or already run; deferred: {sorted(self._waiting)}"
        )
        return self._waiting[microbatch]


def linear_weight_gradient(
    weight: ShardedParameter, x: Tensor, grad_rows: Tensor, gather: Group | None, multiply: WeightProduct | None = None
) -> WeightGradient:
    """Return the contribution grad_rowsᵀ·x; a `gather` group first gathers x [s/tp, b, i] over the sequence.

    `multiply` computes the product instead of the kernel that adds to the main gradient."""
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
    """Compute grad_rowsᵀ·x for x [..., i] as a `WeightGradient.product`."""
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
    """Set the object that defers a stage's weight gradients. None: compute them in the backward, the default.

    If stages share a parameter, the stage that multiplies by it must come last."""
    for parameter in module.parameters():
        if isinstance(parameter, ShardedParameter):
            parameter.deferred = deferred


@dataclass(frozen=True, kw_only=True)
class ParameterFactory:
    """Creates a model's parameters: device, type, seed and groups; also the source of kernels and groups for modules.

    `cp` splits the sequence, `cp_heads` and `cp_keys` exchange it in attention, `tp_cp` contains all ranks of one
    sequence, `ep` splits the experts and `expert_tp` each expert's matrices. With `blank` parameters are not drawn,
    because weights are loaded. With `late` parameters have only a shape until their bucket draws them
    (`ShardedParameter.draw`), so a sharded model is never whole in memory."""

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
        """Ranks over which sequence parallelism splits activations between the parallel layers; without it one rank."""
        return self.tp if self.sequence_parallel else Group.solo("tp")

    def kernel(self, operation: str, size: int) -> Any:
        """Return `Kernels.get` for activations with a last dimension of `size`."""
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
        transform: Callable[[Tensor], Tensor] | None = None,
        decay: bool = True,
        in_sequence_region: bool = False,
        always_partial: bool = False,
        expert: bool = False,
        tied: bool = False,
        uses: int = 1,
    ) -> ShardedParameter:
        """Create a parameter of global `shape`, split along `shard_dim` over tp.

        Args:
            std: draw from N(0, std²); None: fill with `value`.
            transform: applied to the drawn numbers.
            in_sequence_region: it is applied to activations that sequence parallelism splits.
            always_partial: each tp rank computes a part of its gradient, with or without sequence parallelism.
            expert: dimension 0 is the experts, split over ep; `shard_dim` is split over expert_tp."""
        spec = self._spec(name, shape, shard_dim=shard_dim, expert=expert)

        def draw(data: Tensor) -> None:
            data.fill_(value)
            if std is not None and not (data.is_meta or self.blank):  # meta tensors have no data
                fill_normal(data, spec, dim=shard_dim or int(expert), std=std, seed=self.seed, expert=expert)
                if transform is not None:  # in fp64: rounding must not depend on the part of the tensor
                    data.copy_(transform(data.double()))

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
        """Create a zero tensor without gradient, replicated on all ranks of its stage, in fp32 (fp64 for fp64).

        No optimizer updates it; the module that uses it does."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        buffer = ShardedParameter(torch.zeros(shape, dtype=dtype, device=self.device), requires_grad=False)
        spec = ShardSpec.whole(name, shape)
        buffer.info = ParameterInfo(spec=spec, shard_dim=None, decay=False, partial_over_tp=False)
        return buffer

    def _spec(self, name: str, shape: tuple[int, ...], *, shard_dim: int | None, expert: bool) -> ShardSpec:
        """Return the spec of this rank's slice."""
        spec = ShardSpec.whole(name, shape)
        if shard_dim is not None:
            group = self.expert_tp if expert else self.tp
            spec = ShardSpec.split(name, shape, dim=shard_dim, index=group.rank, parts=group.size)
        if expert:
            assert shard_dim != 0, name
            own = ShardSpec.split(name, shape, dim=0, index=self.ep.rank, parts=self.ep.size).slice[0]
            spec = ShardSpec(name=name, global_shape=spec.global_shape, slice=(own, *spec.slice[1:]))
        return spec

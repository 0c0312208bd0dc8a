"""Apply the config section `compute` to the process and to the layers of a stage, once when they are built.

torch.compile fuses the torch kernels between matrix products. The plain formulas are compiled: the compiler's partitioner
chooses what to save for the backward and what to recompute, which the autograd functions of these kernels do by hand. Sums
and norms are in fp32 for half types (fp64 for fp64), as in those kernels; a fused result is rounded once. Matrix products,
attention, collectives and sums into main gradients stay outside: each is one kernel already, and they call back into the run
during the backward, which a graph cannot do."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megalite.config.compute import ComputeConfig
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig, attention_in_tiles
from megalite.kernels import layer_ops
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.attention_backends import AttentionShape, choose_attention, varlen_attention, why_not_varlen
from megalite.kernels.matmul import Matmul
from megalite.kernels.probes import why_not_capability
from megalite.kernels.quantization import (
    BlockProducts,
    Fp8Products,
    cast,
    cast_rows,
    largest,
    why_not_blockwise,
    why_not_fp8,
)
from megalite.models.attention import AttentionCore
from megalite.models.gpt import GPTStage
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.overlapped_linear import OverlappedProducts, Ring, SymmetricMemory, why_not_symmetric
from megalite.topology.group import Group

_LINEAR = (ColumnParallelLinear, RowParallelLinear)

_INTENDED = (
    "An unbatched P2P op .*2-rank NCCL communicator",
    "Attempting to run cuBLAS, but there was no current CUDA context",
)
"""torch's warnings on CUDA: each pipeline edge has its own communicator, and each thread sets its context on first use."""


def use_numerics(compute: ComputeConfig, device: torch.device) -> list[str]:
    """Apply `tf32` and `deterministic` to the whole process, and hide intended warnings; return lines for the log.

    Raises:
        ConfigError: the device does not support TF32."""
    lines = []
    for message in _INTENDED:
        warnings.filterwarnings("ignore", message)
    if compute.tf32:
        reason = None if device.type == "meta" else why_not_capability(device, (8, 0), "products in TF32")
        if reason is not None:
            raise ConfigError(f"tf32 cannot be used: {reason}; remove it")
        # torch's older setting also sets the newer one, and torch.compile still reads the older.
        torch.backends.cuda.matmul.allow_tf32 = True
        lines.append("fp32 products in TF32")
    if compute.deterministic:
        torch.use_deterministic_algorithms(True)
        # By default torch would fill each new tensor with NaN, which wastes time: nothing is read before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        lines.append("deterministic: torch uses repeatable operations, or raises an error")
    return lines


def apply_compute(stage: GPTStage, config: RunConfig) -> list[str]:
    """Set the kernels of a stage's modules; a second call changes nothing.

    Returns lines for the log: the attention kernel, and every choice that is not the default. Raises ConfigError if the
    device or the model does not support a setting."""
    compute = config.compute
    lines = _use_attention(stage, config)
    if compute.tp_comm_overlap:
        lines.append(_use_overlap(stage, compute))
    if compute.compile:
        reason = None if stage.device.type == "meta" else why_not_compile(stage.device)
        if reason is not None:
            raise ConfigError(f"compile cannot be used: {reason}; remove it")
    if compute.fp8:
        lines.append(_use_fp8(stage, config))
    if compute.compile:
        for module in stage.modules():
            for name, kernel in list(vars(module).items()):
                if callable(kernel):
                    setattr(module, name, compiled(kernel))
        lines.append("compiled: norms, activations, rotary embedding, dropout with residual sums")
    return lines


def _use_overlap(stage: GPTStage, compute: ComputeConfig) -> str:
    """Set the overlap backend of linear layers. Collectives: those of `why_not_symmetric`, except for `ring`."""
    requested, reason = compute.tp_comm_overlap_backend, "requested"
    linears = [module for module in stage.modules() if isinstance(module, _LINEAR)]
    by: Callable[[Group, Matmul], OverlappedProducts] = Ring
    if requested != "ring" and stage.device.type != "meta":  # a rehearsal has no memory to share
        found = why_not_symmetric(stage.tp)
        if requested == "symmetric" and found is not None:
            raise ConfigError(f"tp_comm_overlap_backend symmetric cannot be used: {found}; use ring or auto")
        by, reason = (SymmetricMemory, "available") if found is None else (Ring, found)
    for linear in linears:
        linear.overlap_by = by
    how = "by a ring" if by is Ring else "by symmetric memory"
    return f"sequence-parallel gathers and scatters {how}, in pieces under the layers' matrix products ({reason})"


def _use_attention(stage: GPTStage, config: RunConfig) -> list[str]:
    layers = [module for module in stage.modules() if isinstance(module, AttentionCore)]
    if not layers:
        return []
    if config.model.is_sparse:
        return ["attention with its scores in memory, for experimental_attention_variant dsa"]
    if config.model.attention_dropout > 0.0:
        return ["attention with its probabilities in memory, for attention_dropout"]
    first, factory = layers[0], stage.factory
    shared = first.cp_heads.size
    shape = AttentionShape(
        device=factory.device,
        dtype=factory.dtype,
        heads=first.groups * first.queries // shared,
        groups=max(1, first.groups // shared),
        head_size=first.head_size,
    )
    choice = choose_attention(config.compute.attention_backend, shape, seq=stage.seq_length)
    for layer in layers:
        layer.causal_attention = choice.kernel
    tiled = attention_in_tiles(config)
    if tiled is not None:
        reason = why_not_varlen(shape) if first.core_cp.size == 1 else None
        if first.softcap is not None:
            reason = "no kernel supports a softcap"
        if not first.plain_softmax:
            reason = "no kernel supports sinks"
        if first.core_cp.size == 1 and reason is None:
            for layer in layers:
                layer.masked_attention = varlen_attention
            return [f"attention flash, with document lengths and window in the kernel, for {tiled}"]
        # A CPU has no such kernel, so its log line needs no reason.
        missed = f" (not in one kernel: {reason})" if reason is not None and shape.device.type == "cuda" else ""
        return [f"attention in tiles that are merged, for {tiled}{missed}"]
    return [f"attention {choice.backend} ({choice.why})"]


def _use_fp8(stage: GPTStage, config: RunConfig) -> str:
    reason = None if stage.device.type == "meta" else why_not_fp8(stage.device)
    if reason is not None:
        raise ConfigError(f"fp8 cannot be used: {reason}; remove it")
    compute, kernels = config.compute, stage.factory.kernel("fp8", config.model.hidden_size)
    recipe = compute.fp8_recipe
    if recipe == "blockwise" and (reason := why_not_blockwise(stage.device)) is not None:
        raise ConfigError(reason)
    of_recipe = BlockProducts if recipe == "blockwise" else Fp8Products
    products = of_recipe(
        tuple(map(compiled, kernels)) if compute.compile else kernels,
        rowwise=recipe == "rowwise",
        weight_grads=compute.fp8_wgrad,
    )
    if not config.parallel.strategy.shards_parameters:  # a cache would keep unsharded fp8 copies of sharded weights
        stage.fp8 = products
    last = config.model.num_layers - 1
    for index, block in stage.layers.items():
        if int(index) in (0, last):
            continue
        for linear in (module for module in block.modules() if isinstance(module, _LINEAR)):
            spec, shape = linear.weight.info.spec, linear.weight.flatten(0, -2).shape
            if any(size % products.alignment for size in shape):
                raise ConfigError(
                    f"fp8 requires weight dimensions per rank that are multiples of {products.alignment}, but "
                    f"{spec.name} has {shape[0]} x {shape[1]}; use other sizes or another tp"
                )
            linear.products = products
    return f"fp8 linear layers in layers 1 to {last - 1} of {last + 1}, one scale per {recipe.removesuffix('wise')}"


Kernel = Callable[..., Any]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_TYPES else x


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    exact, factor = _wide(x), _wide(weight) + float(zero_centered)
    return (exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps) * factor).to(x.dtype)


def _add_dropped(
    residual: Tensor, branch: Tensor, bias: Tensor | None, keep: Tensor | None, p: float, factor: float = 1.0
) -> Tensor:
    if bias is not None:
        branch = branch + bias
    if keep is not None:
        branch, factor = branch * keep, factor / (1.0 - p)
    return torch.add(residual, branch, alpha=factor)


def _add_norm(
    branch: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    p: float,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    x = _add_dropped(residual, branch, bias, keep, p, factor)
    if norm_bias is None:
        return _rms_norm(x, weight, eps, zero_centered=zero_centered), x
    return layer_ops.layer_norm(x, weight, norm_bias, eps, zero_centered=zero_centered), x


def _gated(x: Tensor, *, kind: str, limit: float | None, offset: float) -> Tensor:
    gate, up = layer_ops.gate_and_up(x, limit, offset)
    return layer_ops.activate(gate, kind) * up


def _swiglu(x: Tensor) -> Tensor:
    return _gated(x, kind="silu", limit=None, offset=0.0)


def _geglu(x: Tensor, *, tanh: bool = False) -> Tensor:
    return _gated(x, kind="tanh" if tanh else "none", limit=None, offset=0.0)


FORMULAS: dict[Kernel, Kernel] = {
    **{
        kernel: kernel
        for kernel in (layer_ops.layer_norm, layer_ops.bias_gelu, layer_ops.apply_rope, largest, cast, cast_rows)
    },
    layer_ops.rms_norm: _rms_norm,
    layer_ops.add_norm: _add_norm,
    layer_ops.add_dropped: _add_dropped,
    layer_ops.swiglu: _swiglu,
    layer_ops.geglu: _geglu,
    layer_ops.gated: _gated,
}  # torch kernel -> the formula that is compiled in its place


def why_not_compile(device: torch.device) -> str | None:
    """Return why torch.compile cannot be used on the device, or None; it is tried on one addition."""
    try:
        torch.compile(lambda x: x + 1, fullgraph=True, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def compiled(kernel: Any) -> Any:
    """Return the compiled form of a torch kernel or of a `partial` of one; any other kernel unchanged.

    It is compiled at the first call with each shape, type and set of options."""
    if isinstance(kernel, partial):
        return partial(compiled(kernel.func), *kernel.args, **kernel.keywords)
    formula = FORMULAS.get(kernel) if isinstance(kernel, FunctionType) else None
    return kernel if formula is None else _compile(formula)


@cache
def _compile(formula: Kernel) -> Kernel:
    """Compile once per process; all modules share the result."""
    graph = torch.compile(formula, fullgraph=True, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Plain views: the graph must not depend on a parameter's attributes or Python class.
        plain = (arg.view_as(arg) if isinstance(arg, torch.nn.Parameter) else arg for arg in args)
        return graph(*plain, **kwargs)

    return call

"""Apply the config section `compute` to the process and to the layers of a stage, once when they are built."""

import warnings
from collections.abc import Callable

import torch

from megalite.config.compute import ComputeConfig
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig, attention_in_tiles
from megalite.kernels.attention_backends import AttentionShape, choose_attention, varlen_attention, why_not_varlen
from megalite.kernels.compiled import compiled, why_not_compile
from megalite.kernels.matmul import Matmul
from megalite.kernels.probes import why_not_capability
from megalite.kernels.quantization import BlockProducts, Fp8Products, why_not_blockwise, why_not_fp8
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

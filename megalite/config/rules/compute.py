"""Rules about how layers compute: kernels, recompute, and what goes together.

Whether a kernel works on the device is known when it is built.
"""

from megalite.config.compute import BACKENDS, OPERATIONS, kernel_requests
from megalite.config.errors import Findings
from megalite.config.rules.effect import refuse_idle
from megalite.config.rules.pipeline import stage_layers
from megalite.config.run import RunConfig
from megalite.config.values import nearest

MODULES = ("core_attn", "mlp_act", "layernorm", "mlp", "moe")
"""What selective recompute can run again."""


def check_recompute(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Modules are for selective recompute, method and number of layers for full recompute."""
    granularity = config.training.recompute_granularity
    cause = f"with recompute_granularity {granularity}"
    if granularity != "selective":
        remedy = "use --recompute-granularity selective"
        yield refuse_idle(config, explicit, ["recompute_modules"], cause=cause, remedy=remedy)
    if granularity != "full":
        remedy = "use --recompute-granularity full"
        names = ["recompute_method", "recompute_num_layers"]
        yield refuse_idle(config, explicit, names, cause=cause, remedy=remedy)
    yield _check_modules(config)
    if granularity == "full":
        yield _check_layers(config)


def _check_modules(config: RunConfig) -> Findings:
    modules = config.training.recompute_modules
    if not modules:
        yield f"recompute_modules is empty; name some of {', '.join(MODULES)}"
    for module in modules:
        if module not in MODULES:
            yield (f"recompute_modules has {module} in it{nearest(module, MODULES)} (one of {', '.join(MODULES)})")
        if modules.count(module) > 1:
            yield f"recompute_modules names {module} twice; keep one of them"
    if config.training.recompute_granularity == "selective":
        yield _check_covered(config)


def _check_covered(config: RunConfig) -> Findings:
    """A module that another one contains, or that the model has not, would be named in vain."""
    model, modules = config.model, config.training.recompute_modules
    if "moe" in modules and model.num_experts is None:
        yield "recompute_modules moe has no effect without experts; add --num-experts 8 or remove it"
    with_experts = {model.is_moe_layer(index) for index in range(model.num_layers)}
    if "mlp" in modules and False not in with_experts:
        yield (
            f"recompute_modules mlp has no effect with num_experts {model.num_experts}: no layer has a dense MLP; use "
            f"moe or remove it"
        )
    around = ["moe" if has_experts else "mlp" for has_experts in sorted(with_experts)]
    if "mlp_act" in modules and set(around) <= set(modules):
        yield (
            f"recompute_modules mlp_act has no effect with {' and '.join(around)}, which runs the activation again too; "
            f"remove one of them"
        )


def _check_layers(config: RunConfig) -> Findings:
    p, layers = config.parallel, config.model.num_layers
    stages, count = p.pp * p.vpp, config.training.recompute_num_layers
    # Without pipeline_layers the cut is not known here, but no stage can have more than this.
    cut = stage_layers(config)
    largest = max(cut) if cut else layers - (stages - 1)
    if count > largest:
        where = f"a stage of num_layers {layers} cut over pp·vpp = {stages}" if stages > 1 else "the model"
        yield (f"recompute_num_layers {count} is more than the {largest} layers of {where}; use at most {largest}")


FP8_LEAST_LAYERS = 3
"""The first and the last layer stay in bf16."""


def check_compute(config: RunConfig, _: frozenset[str]) -> Findings:
    """The settings of section `compute` are known, do something and go together."""
    yield _check_kernels(config)
    yield _check_attention(config)
    yield _check_overlap(config)
    yield _check_fp8(config)


def _check_kernels(config: RunConfig) -> Findings:
    for operation, backend in kernel_requests(config.compute.kernels).items():
        if operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            yield f"kernels: no operation {operation}{nearest(operation, OPERATIONS)} (one of {known})"
        if backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            yield (f"kernels: no backend {backend} for {operation}{nearest(backend, BACKENDS)} (one of {known})")


def _check_attention(config: RunConfig) -> Findings:
    backend = config.compute.attention_backend
    if backend == "auto":
        return
    if config.model.attention_dropout > 0.0:
        yield (
            f"attention_backend {backend} has no effect with attention_dropout {config.model.attention_dropout:g}, for which "
            "the probabilities are kept in memory; set attention_dropout 0 or remove it"
        )
    tiled = attention_in_tiles(config)
    if tiled is not None and backend != "flash":
        yield (
            f"attention_backend {backend} cannot serve {tiled}, whose pieces are merged by what flash alone gives; "
            "use flash or auto"
        )


def attention_in_tiles(config: RunConfig) -> str | None:
    """The setting for which attention is computed in pieces that are merged, or None."""
    model, data, parallel = config.model, config.data, config.parallel
    if model.sliding_window is not None and model.sliding_window < config.training.seq_length:
        return f"sliding_window {model.sliding_window}"
    if data.packing == "best-fit":
        return "packing best-fit"
    if data.reset_attention_mask:
        return "reset_attention_mask"
    if parallel.cp > 1 and parallel.cp_comm_type == "p2p":
        return f"cp {parallel.cp} with cp_comm_type p2p"
    return None


def _check_overlap(config: RunConfig) -> Findings:
    if not config.compute.tp_comm_overlap:
        return
    if config.parallel.tp == 1 or not config.parallel.sequence_parallel:
        yield (
            "tp_comm_overlap has no effect without sequence parallelism; add --tp 2 --sequence-parallel or remove it"
            if config.parallel.tp == 1
            else "tp_comm_overlap has no effect without sequence_parallel; add --sequence-parallel or remove it"
        )
    if config.compute.fp8:
        yield (
            "tp_comm_overlap and fp8 do not go together: a tensor that comes in pieces has no one scale; keep one of them"
        )


def _check_fp8(config: RunConfig) -> Findings:
    if not config.compute.fp8:
        return
    if config.training.precision != "bf16":
        yield f"fp8 needs precision bf16, not {config.training.precision}; add --bf16"
    if config.model.num_layers < FP8_LEAST_LAYERS:
        yield (
            f"fp8 has no effect with num_layers {config.model.num_layers}, as the first and the last layer stay in bf16; "
            f"use num_layers {FP8_LEAST_LAYERS} or more, or remove it"
        )

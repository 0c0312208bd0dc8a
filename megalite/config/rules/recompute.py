"""Rules about recomputed activations: each setting belongs to one granularity."""

from megalite.config.errors import ConfigError
from megalite.config.rules.effect import refuse_idle
from megalite.config.rules.pipeline import stage_layers
from megalite.config.run import RunConfig
from megalite.config.values import nearest

MODULES = ("core_attn", "mlp_act", "layernorm", "mlp", "moe")
"""What selective recompute can run again."""


def check_recompute(config: RunConfig, explicit: frozenset[str]) -> None:
    """Modules are for selective recompute, method and number of layers for full recompute."""
    granularity = config.training.recompute_granularity
    cause = f"with recompute_granularity {granularity}"
    if granularity != "selective":
        remedy = "use --recompute-granularity selective"
        refuse_idle(config, explicit, ["recompute_modules"], cause=cause, remedy=remedy)
    if granularity != "full":
        remedy = "use --recompute-granularity full"
        names = ["recompute_method", "recompute_num_layers"]
        refuse_idle(config, explicit, names, cause=cause, remedy=remedy)
    _check_modules(config)
    if granularity == "full":
        _check_layers(config)


def _check_modules(config: RunConfig) -> None:
    modules = config.training.recompute_modules
    if not modules:
        raise ConfigError(f"recompute_modules is empty; name some of {', '.join(MODULES)}")
    for module in modules:
        if module not in MODULES:
            raise ConfigError(
                f"recompute_modules has {module} in it{nearest(module, MODULES)} (one of {', '.join(MODULES)})"
            )
        if modules.count(module) > 1:
            raise ConfigError(f"recompute_modules names {module} twice; keep one of them")
    if config.training.recompute_granularity == "selective":
        _check_covered(config)


def _check_covered(config: RunConfig) -> None:
    """A module that another one contains, or that the model has not, would be named in vain."""
    model, modules = config.model, config.training.recompute_modules
    if "moe" in modules and model.num_experts is None:
        raise ConfigError(
            "recompute_modules moe has no effect without experts; add --num-experts 8 or remove it"
        )
    with_experts = {model.is_moe_layer(index) for index in range(model.num_layers)}
    if "mlp" in modules and False not in with_experts:
        raise ConfigError(
            f"recompute_modules mlp has no effect with num_experts {model.num_experts}: no layer has a dense MLP; use "
            f"moe or remove it"
        )
    around = ["moe" if has_experts else "mlp" for has_experts in sorted(with_experts)]
    if "mlp_act" in modules and set(around) <= set(modules):
        raise ConfigError(
            f"recompute_modules mlp_act has no effect with {' and '.join(around)}, which runs the activation again too; "
            f"remove one of them"
        )


def _check_layers(config: RunConfig) -> None:
    p, layers = config.parallel, config.model.num_layers
    stages, count = p.pp * p.vpp, config.training.recompute_num_layers
    # Without pipeline_layers the cut is not known here, but no stage can have more than this.
    cut = stage_layers(config)
    largest = max(cut) if cut else layers - (stages - 1)
    if count > largest:
        where = f"a stage of num_layers {layers} cut over pp·vpp = {stages}" if stages > 1 else "the model"
        raise ConfigError(
            f"recompute_num_layers {count} is more than the {largest} layers of {where}; use at most {largest}"
        )

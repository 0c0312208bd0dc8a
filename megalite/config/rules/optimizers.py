"""Rules about optimizers, their settings and number formats, and the strategies that they go with."""

from collections.abc import Mapping
from types import MappingProxyType

from megalite.config.errors import Findings
from megalite.config.optimizer import ONEBIT_OPTIMIZERS, OPTIMIZERS
from megalite.config.parallel import LOCAL_STRATEGIES
from megalite.config.rules.effect import refuse_elsewhere, refuse_idle
from megalite.config.run import RunConfig

SPLITS_MAIN = (
    *("all-reduce", "fused-all-reduce", "distributed-optimizer", "fully-sharded"),
    "sharded-parameter-server",
)
"""They can keep main parameters as the bits that bf16 parameters lack."""

ADAM_SETTINGS = ("adam_beta1", "adam_beta2", "adam_eps")
"""What every optimizer but SGD goes by: presets give them for Adam."""

OF_OPTIMIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(ADAM_SETTINGS, tuple(name for name in OPTIMIZERS if name != "sgd")),
        "sgd_momentum": ("sgd",),
        "sgd_nesterov": ("sgd",),
        "lamb_min_coeff": ("lamb", "onebit-lamb"),
        "lamb_max_coeff": ("lamb", "onebit-lamb"),
        "muon_momentum": ("muon",),
        "muon_steps": ("muon",),
        "muon_scale": ("muon",),
        "freeze_step": ONEBIT_OPTIMIZERS,
        "freeze_threshold": ONEBIT_OPTIMIZERS,
        "onebit_scale": ONEBIT_OPTIMIZERS,
        "local_step_clipper": ("zero-one-adam",),
        "local_step_scaler": ("zero-one-adam",),
        "variance_update_scaler": ("zero-one-adam",),
        "exp_avg_dtype": ("adam",),
        "exp_avg_sq_dtype": ("adam",),
        "stochastic_rounding": ("adam",),
    }
)
"""Setting -> the optimizers that it means something to."""


def check_optimizer(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """The optimizer, its settings and its number formats fit together and to the strategy."""
    yield _check_settings(config, explicit)
    yield _check_strategy(config)
    yield _check_formats(config)


def _check_settings(config: RunConfig, explicit: frozenset[str]) -> Findings:
    o = config.optimizer
    yield refuse_elsewhere(config, explicit, "optimizer", OF_OPTIMIZERS)
    if o.freeze_step is not None:
        cause = f"with freeze_step {o.freeze_step}, which says when the warm-up ends"
        yield refuse_idle(config, explicit, ["freeze_threshold"], cause=cause, remedy="leave freeze_step out,")
    if o.optimizer == "sgd" and o.sgd_momentum == 0.0:
        if o.sgd_nesterov:
            yield (
                "sgd_nesterov is a form of momentum, but sgd_momentum is 0; use --sgd-momentum 0.9, or "
                "--no-sgd-nesterov"
            )
        cause = "with optimizer sgd and sgd_momentum 0, which has no state"
        remedy = "use --sgd-momentum 0.9,"
        yield refuse_idle(config, explicit, ["average_optimizer_state"], cause=cause, remedy=remedy)
    if o.optimizer in ("lamb", "onebit-lamb") and o.lamb_min_coeff > o.lamb_max_coeff:
        yield (
            f"lamb_min_coeff {o.lamb_min_coeff:g} is above lamb_max_coeff {o.lamb_max_coeff:g}; use "
            f"--lamb-min-coeff {min(0.01, o.lamb_max_coeff):g}"
        )


def _check_strategy(config: RunConfig) -> Findings:
    o, p, d = config.optimizer, config.parallel, config.data_parallel
    name, strategy = o.optimizer, p.dp_strategy
    if name in ONEBIT_OPTIMIZERS:
        if strategy != "all-reduce":
            why = {
                "distributed-optimizer": "every rank needs the whole second moment to read what others send",
                "fully-sharded": "every rank needs the whole second moment to read what others send",
            }.get(strategy, "both say what ranks exchange")
            yield (
                f"optimizer {name} does not go with dp_strategy {strategy}: {why}; use --dp-strategy all-reduce, or "
                f"--optimizer {'lamb' if name == 'onebit-lamb' else 'adam'}"
            )
        if d.grad_compression != "none":
            yield (
                f"grad_compression {d.grad_compression} does not go with optimizer {name}, which exchanges no gradients once "
                "it is frozen; use --grad-compression none"
            )
        for axis, size in (("cp", p.cp), ("ep", p.ep)):
            if name == "zero-one-adam" and size > 1:
                yield (
                    f"{axis} {size} does not go with optimizer zero-one-adam, whose ranks take steps of their own; use --{axis} "
                    "1, or --optimizer onebit-adam"
                )
    if name in ("lamb", "muon") and strategy == "async-parameter-server":
        yield (
            f"optimizer {name} does not go with dp_strategy async-parameter-server: it needs whole tensors, of which servers "
            "hold parts that change at different times; use --optimizer adam"
        )
    if name == "lamb" and strategy in LOCAL_STRATEGIES:
        yield (
            f"optimizer lamb does not go with dp_strategy {strategy}: its trust ratios are of weights that all ranks share; "
            "use --optimizer adam, or --dp-strategy all-reduce"
        )
    if strategy == "gossip" and d.gossip_algorithm == "decentlam" and name != "sgd":
        yield (
            f"gossip_algorithm decentlam corrects the momentum of SGD, but optimizer is {name}; use --optimizer sgd, or "
            "--gossip-algorithm d-psgd"
        )
    if strategy == "gossip" and d.gossip_algorithm == "decentlam" and o.sgd_nesterov:
        yield (
            "sgd_nesterov does not go with gossip_algorithm decentlam, which corrects plain momentum; use --no-sgd-nesterov"
        )


def _check_formats(config: RunConfig) -> Findings:
    o, precision, strategy = config.optimizer, config.training.precision, config.parallel.dp_strategy
    if o.main_params == "split":
        if precision != "bf16":
            yield (
                f"main_params split keeps the 16 bits that bf16 parameters lack, but precision is {precision}; use "
                "--precision bf16 or remove it"
            )
        if strategy not in SPLITS_MAIN:
            yield (
                f"main_params split does not go with dp_strategy {strategy}; use --dp-strategy distributed-optimizer, or "
                "--main-params fp32"
            )
        if o.optimizer == "zero-one-adam":
            yield (
                "main_params split does not go with optimizer zero-one-adam, which keeps parameters of its own; use "
                "--main-params fp32"
            )
    narrow = "bf16" in (o.exp_avg_dtype, o.exp_avg_sq_dtype)
    if narrow and precision == "fp64":
        yield ("bf16 moments (exp_avg_dtype, exp_avg_sq_dtype) do not go with precision fp64; use --precision fp32")
    if o.exp_avg_sq_dtype == "bf16" and not o.stochastic_rounding and o.adam_beta2 > 1.0 - 2.0**-8:
        yield (
            f"exp_avg_sq_dtype bf16 with adam_beta2 {o.adam_beta2:g} stands still when rounded to the nearest, since a step "
            "changes less than bf16 resolves; add --stochastic-rounding, or use --adam-beta2 0.99"
        )
    if o.stochastic_rounding and not narrow:
        yield (
            "stochastic_rounding has no effect with exp_avg_dtype fp32 and exp_avg_sq_dtype fp32; use --exp-avg-dtype bf16 "
            "or remove it"
        )

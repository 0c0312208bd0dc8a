"""Rules about combinations of data-parallel strategies, optimizers and number formats."""

from typing import Any

from megalite.config.describe import settings
from megalite.config.errors import Findings, Idle
from megalite.config.optimizer import ONEBIT_OPTIMIZERS, OPTIMIZERS
from megalite.config.registry import Registry
from megalite.config.rules.rule import Check, Settings, divisors, owned, rules, without
from megalite.config.strategies import STRATEGIES


def _unused_settings(chooser: str, registry: Registry[Any]) -> Check:
    """Build a rule for settings that only other strategies, or optimizers, use."""

    def check(c: Settings) -> Findings:
        owners: dict[str, list[str]] = {}
        for name in registry:
            for setting in registry.facts(name).settings.split():
                owners.setdefault(setting, []).append(name)
        for setting, names in owners.items():
            if getattr(c, chooser) in names:
                continue
            if c.gives(setting):
                remedy = f"use --{chooser.replace('_', '-')} {names[0]} or remove it"
                yield f"{{{setting}}} has no effect with {{{chooser}}}; {remedy}"
            elif c.uses(setting) and getattr(c, setting) != settings()[setting].default:
                yield Idle("", setting)

    return check


def _fragments(c: Settings) -> Findings:
    """Check the fragments of the model and the times of their exchanges."""
    if not c.strategy.has("sync_delay"):
        return
    between, rest = divmod(c.sync_interval, c.sync_fragments)
    if rest:
        works = divisors(c.sync_interval)
        yield f"{{sync_interval}} is not divisible by {{sync_fragments}}; use fragments {works}"
    elif c.sync_delay >= between:
        yield (
            f"{{sync_delay}} is not below sync_interval / sync_fragments = {{=sync_interval}}/{{=sync_fragments}} = {between}: "
            f"the next exchange would start before this one's result is used; use --sync-delay {between - 1} or less"
        )
    if c.sync_fragments > c.num_layers:
        yield "{sync_fragments} is more than {num_layers}: some would be empty; use --sync-fragments {=num_layers} or less"


def _pairs(c: Settings) -> Findings:
    count = c.distinct_replicas or 1
    if c.dp_strategy == "gossip" and c.gossip_graph == "one-peer" and count > 1 and count % 2:
        name = "dp_instances" if c.instances > 1 else "dp"
        yield f"{{gossip_graph}} pairs up replicas, but {name} is {{={name}}}; use --gossip-graph ring, or {name} {count - 1}"


def _corrects_momentum(c: Settings) -> bool:
    return c.dp_strategy == "gossip" and c.gossip_algorithm == "decentlam"


def _sends_integers(c: Settings) -> bool:
    return c.dp_strategy == "gossip" and c.gossip_algorithm == "choco-sgd"


def _has_no_state(c: Settings) -> bool:
    return c.optimizer == "sgd" and not c.sgd_momentum


def _averages(c: Settings) -> bool:
    return OPTIMIZERS.facts(c.optimizer).averaged


STRATEGY: tuple[Check, ...] = (
    _unused_settings("dp_strategy", STRATEGIES),
    *owned("grad_compression", {"topk_density": ("topk",), "powersgd_rank": ("powersgd",)}),
    *without({"!compression_warmup_steps": "--grad-compression onebit"}),
    *rules(
        {
            # Weights are always averaged by rank.
            "{!reduction_order} has no effect with {dp_strategy} and {sync_warmup_steps}; use --sync-warmup-steps 100, or "
            "remove it": lambda c: c.strategy.weights == "local" and not c.sync_warmup_steps and c.instances == 1,
            "{?cp|ep} does not go with {dp_strategy}: its ranks update separately; leave it out, or use --dp-strategy "
            "all-reduce": lambda c: c.strategy.weights != "equal",
            "{etp} does not go with {dp_strategy} and {tp}: experts would be replicated on other ranks than the rest; use --etp {=tp}": (
                lambda c: c.strategy.weights != "equal" and c.num_experts and c.expert_tp != c.tp
            ),
            "{precision} does not go with {dp_strategy}: its ranks never agree on a loss scale; use --precision bf16": (
                lambda c: c.strategy.weights == "stale" and c.precision == "fp16"
            ),
            "{wire_dtype} does not go with {dp_strategy}, which sends weights or never agrees on a loss scale; use --wire-dtype "
            "bf16": lambda c: c.strategy.weights != "equal" and c.wire_dtype == "fp16",
            "{?grad_compression} does not go with {wire_dtype}: compression errors have no loss scale; use --wire-dtype bf16": (
                lambda c: c.wire_dtype == "fp16"
            ),
            "{?average_optimizer_state} does not go with {sync_delay}: moments are averaged immediately, so the run would wait; use "
            "--sync-delay 0, or remove it": lambda c: c.sync_delay > 0,
            "{?average_optimizer_state} does not go with {optimizer}: the mean of two eigenbases is not a basis; remove it": (
                lambda c: OPTIMIZERS.facts(c.optimizer).sides
            ),
            "{gossip_algorithm} does not go with {gossip_graph}: its correction grows without bound from 6 ranks on; use "
            "--gossip-graph ring": lambda c: _corrects_momentum(c) and c.gossip_graph == "one-peer",
            "{gossip_algorithm} does not go with {gossip_graph}: it keeps a copy of each peer's weights, but the peers would change; use "
            "--gossip-graph ring": lambda c: _sends_integers(c) and c.gossip_graph == "one-peer",
            "{?wire_dtype} has no effect with {gossip_algorithm}, which sends 8-bit integers, and {sync_warmup_steps}; use "
            "--sync-warmup-steps 100, or remove it": lambda c: (
                _sends_integers(c) and not c.sync_warmup_steps and c.instances == 1
            ),
            "{!check_replicas_interval} has no effect with dp 1, where no weight has a replica; start more ranks or remove it": (
                lambda c: c.dp is not None and c.dp * c.cp == 1
            ),
            "{?check_replicas_interval} does not go with {dp_strategy}, which keeps no replicas of weights; remove it": (
                lambda c: c.strategy.weights != "equal" or (c.strategy.shards_parameters and c.instances == 1)
            ),
            "{?check_replicas_interval} does not go with {optimizer}: its ranks take local steps; remove it": (
                lambda c: c.optimizer == "zero-one-adam"
            ),
            "{?log_gradient_noise_scale} compares the gradients of data-parallel ranks, but the run has dp 1; start more ranks or "
            "remove it": lambda c: c.dp == 1,
            "{?log_gradient_noise_scale} does not go with {cp}: no rank has the gradient of whole samples; use --cp 1 or remove it": (
                lambda c: c.cp > 1
            ),
            "{?log_gradient_noise_scale} does not go with {ep} and etp {=expert_tp}: expert gradients come from other samples than the "
            "rest; use --ep 1 with --etp {=tp}, or remove it": lambda c: (
                c.num_experts and (c.ep > 1 or c.expert_tp != c.tp)
            ),
            "{?log_gradient_noise_scale} does not go with {dp_strategy}, which lacks each rank's whole gradient or their sum; "
            "use --dp-strategy all-reduce or distributed-optimizer": (
                lambda c: c.dp_strategy not in ("all-reduce", "distributed-optimizer")
            ),
            "{?log_gradient_noise_scale} does not go with {shard_gradients}, which sums every microbatch over ranks; use "
            "--no-shard-gradients or remove it": lambda c: c.shard_gradients,
            "{?log_gradient_noise_scale} does not go with {grad_compression}: compression errors would count as noise; use "
            "--grad-compression none or remove it": lambda c: c.grad_compression != "none",
            "{?log_gradient_noise_scale} does not go with {optimizer}, which does not exchange gradients; use --optimizer adam or "
            "remove it": lambda c: c.optimizer in ONEBIT_OPTIMIZERS,
        }
    ),
    _pairs,
    _fragments,
)

OPTIMIZER: tuple[Check, ...] = (
    _unused_settings("optimizer", OPTIMIZERS),
    *without(
        {
            "!qk_clip_threshold|qk_clip_alpha": "--qk-clip",
            "!optimizer_offload_fraction": "--optimizer-cpu-offload",
            "?eval_ema": "--ema-decay 0.9999",
        }
    ),
    *rules(
        {
            "{!freeze_threshold} has no effect with {freeze_step}, which ends the warm-up; remove one of them": (
                lambda c: c.freeze_step is not None
            ),
            "{!onebit_scale} has no effect with {onebit_rule}, which has one magnitude per bucket; remove it": (
                lambda c: c.deepspeed_onebit
            ),
            "{?cp|ep} does not go with {onebit_rule}, which clips each replica separately; leave it out, or use --onebit-rule "
            "megalite": lambda c: c.deepspeed_onebit,
            "{?sgd_nesterov} is a form of momentum, but the run has {sgd_momentum}; use --sgd-momentum 0.9, or --no-sgd-nesterov": (
                _has_no_state
            ),
            "{!average_optimizer_state} has no effect with {optimizer} and {sgd_momentum}, which has no state; use "
            "--sgd-momentum 0.9, or remove it": _has_no_state,
            "{lamb_min_coeff} is above {lamb_max_coeff}; use at most {=lamb_max_coeff}": (
                lambda c: c.optimizer in ("lamb", "onebit-lamb") and c.lamb_min_coeff > c.lamb_max_coeff
            ),
            "{optimizer} does not go with {dp_strategy}: every rank exchanges its whole optimizer state; use --dp-strategy "
            "all-reduce, or --optimizer adam": lambda c: (
                c.optimizer in ONEBIT_OPTIMIZERS and c.dp_strategy != "all-reduce"
            ),
            "{?grad_compression} does not go with {optimizer}, which exchanges no gradients after its warm-up; use "
            "--grad-compression none": lambda c: c.optimizer in ONEBIT_OPTIMIZERS,
            "{?cp|ep} does not go with {optimizer}: its ranks take local steps; leave it out, or use --optimizer "
            "onebit-adam": lambda c: c.optimizer == "zero-one-adam",
            "{optimizer} does not go with {dp_strategy}: it needs whole tensors, but servers update their parts at "
            "different times; use --optimizer adam": (
                lambda c: (
                    (c.optimizer == "lamb" or OPTIMIZERS.facts(c.optimizer).separate_matrices)
                    and c.strategy.weights == "stale"
                )
            ),
            "{optimizer} does not go with {dp_strategy}: its trust ratios need weights that all ranks share; use --optimizer "
            "adam, or --dp-strategy all-reduce": lambda c: c.optimizer == "lamb" and c.strategy.weights == "local",
            "{gossip_algorithm} corrects the momentum of SGD, not {optimizer}; use --optimizer sgd, or --gossip-algorithm "
            "d-psgd": lambda c: _corrects_momentum(c) and c.optimizer != "sgd",
            "{?sgd_nesterov} does not go with {gossip_algorithm}, which corrects plain momentum; use --no-sgd-nesterov": (
                _corrects_momentum
            ),
            "{main_params} keeps the 16 bits that bf16 parameters lack, but this run has {precision}; use --precision bf16 or remove it": (
                lambda c: c.main_params == "split" and c.precision != "bf16"
            ),
            "{main_params} does not go with {dp_strategy}; use --dp-strategy distributed-optimizer, or --main-params fp32": (
                lambda c: c.main_params == "split" and (c.strategy.served or c.strategy.weights != "equal")
            ),
            "{main_params} does not go with {optimizer}, which keeps separate parameters; use --main-params fp32": (
                lambda c: c.main_params == "split" and c.optimizer == "zero-one-adam"
            ),
            "{?ema_decay} does not go with {dp_strategy}: replicas have different weights; use --dp-strategy all-reduce, or "
            "remove it": lambda c: c.strategy.weights != "equal",
            "{?ema_decay} does not go with {optimizer}: its ranks take local steps; use --optimizer onebit-adam, or remove it": (
                lambda c: c.optimizer == "zero-one-adam"
            ),
            "{?ema_decay} does not go with {optimizer}, which averages its weights itself; remove it": _averages,
            "{optimizer} does not go with {dp_strategy}: replicas have different weights; use --dp-strategy all-reduce": (
                lambda c: _averages(c) and c.strategy.weights != "equal"
            ),
            "{optimizer} does not go with {main_params}: the trained weights are not the saved ones; use --main-params fp32": (
                lambda c: _averages(c) and c.main_params == "split"
            ),
            "{optimizer} averages instead of decaying, but the run has {lr_decay_style}; use --lr-decay-style constant": (
                lambda c: c.optimizer == "schedule-free-adamw" and c.lr_decay_style != "constant"
            ),
            "{optimizer} needs {adam_beta1} above 0; use --adam-beta1 0.9": (
                lambda c: c.optimizer == "schedule-free-adamw" and c.adam_beta1 == 0.0
            ),
            "{?qk_clip} does not go with {dp_strategy}: replicas have different weights; use --dp-strategy all-reduce, or remove "
            "it": lambda c: c.strategy.weights != "equal",
            "{?qk_clip} does not go with {optimizer}, which keeps separate weights; use --optimizer muon, or remove it": (
                lambda c: c.optimizer in ONEBIT_OPTIMIZERS or _averages(c)
            ),
            "{?qk_clip} has no effect with {qk_norm}, after which the weights' size does not matter; remove one of them": (
                lambda c: c.qk_norm and not c.multi_latent_attention
            ),
            "{?optimizer_cpu_offload} does not go with {optimizer}, which needs its whole states at once; use --optimizer "
            "adam or remove it": lambda c: not OPTIMIZERS.facts(c.optimizer).host_passes,
            "{?optimizer_cpu_offload} does not go with {dp_strategy}: its replicas exchange main parameters; use --dp-strategy "
            "distributed-optimizer or remove it": lambda c: c.strategy.weights != "equal",
            "{?optimizer_cpu_offload} does not go with {main_params}: fp32 main parameters in host memory take no device "
            "memory; use --main-params fp32": lambda c: c.main_params == "split",
            "{?optimizer_cpu_offload} has no effect with {optimizer} and {sgd_momentum} in {precision}, which has no states; use "
            "--sgd-momentum 0.9 or remove it": lambda c: (
                _has_no_state(c) and c.precision in ("fp32", "fp64") and c.ema_decay is None
            ),
            "{?exp_avg_dtype|exp_avg_sq_dtype} does not go with {precision}; use --precision fp32": (
                lambda c: c.precision == "fp64"
            ),
            "{?exp_avg_sq_dtype} with {adam_beta2} would never change: a step is below the resolution of bf16 and is rounded "
            "away; add --stochastic-rounding, or use --adam-beta2 0.99": (
                lambda c: not c.stochastic_rounding and c.adam_beta2 > 1.0 - 2.0**-8
            ),
            "{?stochastic_rounding} has no effect with {exp_avg_dtype} and {exp_avg_sq_dtype}; use --exp-avg-dtype bf16 or "
            "remove it": lambda c: "bf16" not in (c.exp_avg_dtype, c.exp_avg_sq_dtype),
        }
    ),
)

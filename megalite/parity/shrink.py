"""Shrink a user's config to fit a laptop; its model family, switches and layout are kept.

Small sizes stay as they are, so shrinking a small or shrunk config changes nothing."""

import itertools
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megalite.config.batch import microbatch_counts, samples_per_microbatch
from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.model import LAYER_LISTS
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig, stage_layers
from megalite.config.strategies import STRATEGIES
from megalite.config.validate import validate
from megalite.partition.pipeline import schedule_of
from megalite.topology.layout import ParallelLayout

Changes = dict[str, Any]  # setting -> new value

MAX_LAYERS, MAX_HEADS, MAX_HIDDEN, MAX_FFN, MAX_VOCAB = 12, 16, 128, 256, 256
MAX_EXPERTS, MAX_EXPERT_FFN, MAX_SEQ = 8, 64, 64


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def layer_changes(config: RunConfig) -> Changes:
    """Two layers per stage (one if there are many stages), uneven if they were uneven, with dense and expert layers."""
    model, p = config.model, config.parallel
    if model.num_layers <= MAX_LAYERS:
        return {}
    changes: Changes = {}
    stages = p.pp * p.vpp
    cut = stage_layers(config)
    if cut is not None:
        counts = sorted({count for count in cut if count})
        small = [min(counts.index(count) + 1, 3) if count else 0 for count in cut]
        changes |= {"pipeline_layers": small, "pipeline_layout": None}
        layers = sum(small)
    else:
        layers = stages * (2 if 2 * stages <= MAX_LAYERS else 1) + bool(model.num_layers % stages)
    if model.num_experts:
        changes["moe_layer_freq"] = min(model.moe_layer_freq, 2)
        changes["moe_first_dense_layers"] = min(model.moe_first_dense_layers, 1, layers - 1)
        if cut is None:
            layers = max(layers, changes["moe_first_dense_layers"] + 2)
    changes["num_layers"] = layers
    for name in LAYER_LISTS:
        pattern = getattr(model, name)
        if pattern is not None:  # every second layer at least, to keep both kinds
            changes[name] = [min(pattern[0], 2)] if len(pattern) == 1 else [index % 2 for index in range(layers)]
    for name in ("recompute_num_layers", "cpu_offloading_num_layers"):
        changes[name] = min(getattr(config.training, name), max(1, layers // stages))
    return changes


def attention_changes(config: RunConfig) -> Changes:
    """Heads that the layout divides, still grouped, and still wider or narrower than the hidden size, if they were."""
    model, p = config.model, config.parallel
    heads, groups = model.num_attention_heads, model.query_groups
    changes: Changes = {}
    if model.multi_latent_attention and max(model.q_lora_rank or 0, model.kv_lora_rank, model.head_size) > MAX_HIDDEN:
        changes |= {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4}
        changes["v_head_dim"] = 7 if model.v_head_dim < model.head_size else 10
        changes["q_lora_rank"] = None if model.q_lora_rank is None else 12
    if model.is_sparse:
        changes["dsa_indexer_n_heads"] = min(model.dsa_indexer_n_heads, 3)
        changes["dsa_indexer_topk"] = min(model.dsa_indexer_topk, 5)
        rotary = changes.get("qk_pos_emb_head_dim", model.qk_pos_emb_head_dim)
        changes["dsa_indexer_head_dim"] = min(model.dsa_indexer_head_dim, max(rotary, 8))
    if model.linear_attention_freq is not None and model.linear_channels[0] > MAX_HIDDEN:
        keys, shared = _up(2, p.tp * p.cp), min(2, model.linear_num_value_heads // model.linear_num_key_heads)
        changes |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * shared}
        changes |= {"linear_key_head_dim": 6, "linear_value_head_dim": 8}
    if heads <= MAX_HEADS and model.hidden_size <= MAX_HIDDEN:
        return changes
    if heads > MAX_HEADS:
        share = p.tp * p.cp_heads
        sharing = min(heads // groups, 2)
        small_groups = 1 if groups == 1 else _up(2 if sharing > 1 else 4, share)
        heads = small_groups * sharing if groups > 1 else _up(4, share)
        if groups < p.tp:  # ranks share key/value heads
            small_groups, heads = groups, _up(4, share)
        changes["num_attention_heads"] = heads
        if model.num_query_groups is not None:
            changes["num_query_groups"] = small_groups
    # Heads of 8 channels, or such that all heads together are wider or narrower than the hidden size if they were.
    all_heads = model.head_size * model.num_attention_heads
    per_head = 6 if all_heads > model.hidden_size else 12 if all_heads < model.hidden_size else 8
    changes["hidden_size"] = heads * per_head
    if model.kv_channels is not None:
        changes["kv_channels"] = 8
    return changes


def width_changes(config: RunConfig) -> Changes:
    """Small MLP and vocabulary sizes that are not powers of two."""
    model, p = config.model, config.parallel
    changes: Changes = {}
    if model.ffn_size > MAX_FFN or model.ffn_size < 1:
        changes["ffn_hidden_size"] = _up(48, 2 * math.lcm(p.tp, p.expert_tp))
    if model.vocab_size is None or model.vocab_size > MAX_VOCAB:
        changes["vocab_size"] = 93
        changes["make_vocab_size_divisible_by"] = math.lcm(8, p.tp)
    return changes


def expert_changes(config: RunConfig) -> Changes:
    """Few narrow experts, several per token if there were several, with a capacity that still drops tokens."""
    model, p = config.model, config.parallel
    if model.num_experts is None:
        return {}
    changes: Changes = {}
    experts, topk = model.num_experts, model.moe_router_topk
    if experts > MAX_EXPERTS:
        experts = _up(MAX_EXPERTS, p.ep)
        topk = min(topk, 3)
        changes |= {"num_experts": experts, "moe_router_topk": topk}
        if model.moe_router_num_groups is not None:
            fits = experts % 4 == 0 and topk > 1
            changes |= {"moe_router_num_groups": 4 if fits else None, "moe_router_group_topk": 2 if fits else None}
            changes["moe_router_topk"] = 2 if fits else topk
    if model.moe_ffn_hidden_size is not None and model.moe_ffn_hidden_size > MAX_EXPERT_FFN:
        changes["moe_ffn_hidden_size"] = _up(24, 2 * p.expert_tp)
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared > MAX_EXPERT_FFN:
        changes["moe_shared_expert_intermediate_size"] = _up(16, 2 * p.tp)
    capacity = model.moe_expert_capacity_factor
    if capacity is not None and capacity >= experts / topk:
        changes["moe_expert_capacity_factor"] = (1 + experts / topk) / 2
    return changes


def sequence_changes(config: RunConfig) -> Changes:
    """A sequence length that cp and tp divide; window and position limits in proportion."""
    model, p, s = config.model, config.parallel, config.training.seq_length
    over_tp = p.tp * p.cp if p.sequence_parallel or model.num_experts else 1
    unit = math.lcm(2 * p.cp if p.cp > 1 else 1, over_tp)
    small = s if s <= MAX_SEQ else _up(24, unit)
    changes: Changes = {"seq_length": small} if small < s else {}
    if config.training.seq_length_warmup is not None:  # finished after few steps
        first = config.training.seq_length_warmup[0] if small == s else small // unit // 2 * unit
        changes["seq_length_warmup"] = [first, 2] if first else None
    if small == s:
        return changes
    if model.sliding_window is not None:
        changes["sliding_window"] = max(2, round(model.sliding_window * small / s))
    if model.max_position_embeddings is not None:
        changes["max_position_embeddings"] = max(small, round(model.max_position_embeddings * small / s))
    if model.rope_scaling in ("llama3", "yarn"):
        changes["rope_original_max_positions"] = small // 2
    return changes


MAX_WORLD = 8  # largest number of ranks, unless --world-size sets more

MAX_BATCH, MAX_MICRO_BATCH, MAX_GROUP = 32, 2, 8

EXACT_STRATEGIES = tuple(name for name in STRATEGIES if STRATEGIES.facts(name).weights == "equal")
"""Strategies that step with the whole batch's mean gradient, taken at weights that are equal on all ranks."""

_LOSS_SCALE = 1024.0  # largest initial value of a dynamic loss scale
_LOSS_SCALES = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Only for fp16."""
_SECTIONS_LEFT_OUT = ("data", "checkpoint", "logging")
_KEPT_DATA = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids", "packing", "sft")
_KEPT_OPTIMIZER = (
    *("optimizer", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "sgd_momentum", "sgd_nesterov"),
    *("lamb_min_coeff", "lamb_max_coeff", "muon_momentum", "muon_nesterov", "muon_steps", "muon_scale"),
    *("muon_scale_mode", "muon_split_qkv", "soap_frequency", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("ema_decay", "eval_ema", "qk_clip", "qk_clip_threshold", "qk_clip_alpha"),
    "lr_multipliers",
)
_FORMATS = ("main_params", "exp_avg_dtype", "exp_avg_sq_dtype", "stochastic_rounding")
"""Number formats of optimizer states, which depend on the precision."""


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    config: RunConfig  # validated for `world_size` ranks
    world_size: int
    changes: dict[str, tuple[Any, Any]]
    """Changed sizes, and changed settings that the user set: setting -> (before, after); None if it was unset."""


def shrink(
    config: RunConfig,
    *,
    world_size: int | None = None,
    keep: frozenset[str] = frozenset(),
    explicit: frozenset[str] = frozenset(),
) -> Shrunk:
    """Return the config to run on this machine.

    Sizes shrink. Data, checkpoints, logging, evaluation and the learning-rate schedule are removed: samples are
    synthetic, the learning rate is 0.01 (a warm-up would hide the optimizer), init_method_std is at least 0.1 (so that
    gradients of narrow layers matter) and adam_eps at least 1e-5 (a smaller one turns gradients that are zero except
    for rounding into steps). A ramp-up grows the batch after the first step. Masks are uneven (eod_mask_loss), and
    numbers are fp64.

    `world_size`: number of ranks; default: the layout's, with dp at most 2 and at most `MAX_WORLD` ranks. `keep`:
    settings that stay as they are, of precision (with the optimizer's number formats) and eod_mask_loss. `explicit`:
    `Invocation.explicit`. Raises ConfigError if the user's config is not legal, deliberately differs from one rank, or
    needs more than `MAX_WORLD` ranks."""
    _check_exact(config)
    dp = _data_parallel(config, world_size)
    p = config.parallel
    world = p.tp * p.pp * p.cp * dp
    changes: Changes = _run_changes(config, keep)
    _check_original(replace(config, **changes), explicit - set(changes), dp)
    changes["dp"] = dp
    for rule in (layer_changes, attention_changes, width_changes, expert_changes, sequence_changes):
        changes |= rule(replace(config, **changes))
    changes |= _batch_changes(replace(config, **changes), world)
    shrunk = validate(replace(config, **changes), world)
    before, after = values_of(config), values_of(replace(config, **changes))
    shown = {
        name: (before[name], after[name])
        for name, setting in settings().items()
        if before[name] != after[name]
        and (
            setting.section in ("model", "parallel", "training")
            or name in _FORMATS
            or (setting.section == "optimizer" and name in explicit)
        )
        and name not in ("device", "train_iters", "train_samples")
        and not (name == "dp" and before[name] is None)
    }
    return Shrunk(config=shrunk, world_size=world, changes=shown)


def _check_exact(config: RunConfig) -> None:
    """Raise ConfigError if the config deliberately differs from one rank; name the setting and a comparable value."""
    d, optimizer, strategy = config.data_parallel, config.optimizer.optimizer, config.parallel.dp_strategy
    messages = config.parallel.pipeline_compression
    base = "lamb" if optimizer == "onebit-lamb" else "adam"
    why = ""
    if strategy not in EXACT_STRATEGIES:
        why = f"dp_strategy {strategy} takes other steps; use one of {', '.join(EXACT_STRATEGIES)}"
    elif optimizer in ONEBIT_OPTIMIZERS:
        why = f"optimizer {optimizer} takes other steps; use --optimizer {base}"
    elif d.grad_compression != "none":
        why = f"grad_compression {d.grad_compression} loses a part of the gradient; use --grad-compression none"
    elif messages != "none":
        why = f"pipeline_compression {messages} changes messages between stages; use --pipeline-compression none"
    elif d.wire_dtype != "fp32":
        why = f"wire_dtype {d.wire_dtype} rounds summands; use --wire-dtype fp32"
    if why:
        raise ConfigError(f"megalite parity compares with one rank, and {why}")


def _check_original(config: RunConfig, explicit: frozenset[str], dp: int) -> None:
    """Validate the user's own sizes, so that errors contain the user's numbers."""
    p = config.parallel
    config = replace(config, vocab_size=config.model.vocab_size or 50257)
    if p.dp is None:  # the batch is for an unknown world size
        config = replace(config, dp=dp, global_batch_size=None, rampup_batch_size=None, step_batch_size_schedule=None)
    dp, batch_given = p.dp or dp, config.training.global_batch_size is not None
    config = validate(config, p.tp * p.pp * p.cp * dp, explicit)
    etp = config.parallel.etp
    ParallelLayout(tp=p.tp, pp=p.pp, cp=p.cp, dp=dp, ep=p.ep, etp=etp, order=p.rank_order)
    if batch_given:
        for count in microbatch_counts(config):
            schedule_of(config, count)


def _data_parallel(config: RunConfig, world_size: int | None) -> int:
    """Return a data-parallel size near the config's (2 if unset) with whole expert grids and a small world."""
    p = config.parallel
    replica = p.tp * p.pp * p.cp
    if world_size is not None:
        if world_size % replica:
            works = max(1, world_size // replica) * replica
            raise ConfigError(f"--world-size {world_size} is not a multiple of tp·pp·cp = {replica}; use {works}")
        if p.dp not in (None, world_size // replica):
            raise ConfigError(f"--world-size {world_size} does not match dp {p.dp}; use {replica * (p.dp or 1)}")
        return world_size // replica
    whole = p.expert_tp * p.ep if config.model.num_experts else 1
    wanted, most = min(p.dp or 2, MAX_WORLD // replica), MAX_WORLD // replica

    def fits(dp: int) -> bool:
        instances = p.instances == 1 or (p.cp * dp % p.instances == 0 and p.cp * dp > p.instances)
        return instances and p.tp * p.cp * dp % (whole * (p.instances if whole > 1 else 1)) == 0

    for dp in [*range(wanted, 0, -1), *range(wanted + 1, most + 1)]:
        if fits(dp):
            return dp
    least = next(dp for dp in itertools.count(1) if fits(dp))
    raise ConfigError(f"the layout needs over {MAX_WORLD} ranks; shrink it, or use --world-size {replica * least}")


def _run_changes(config: RunConfig, keep: frozenset[str]) -> Changes:
    defaults = {name: setting.default for name, setting in settings().items()}
    kept = _KEPT_OPTIMIZER + (_FORMATS if "precision" in keep else ())
    changes: Changes = {
        name: defaults[name]
        for name, setting in settings().items()
        if (setting.section in _SECTIONS_LEFT_OUT and name not in _KEPT_DATA)
        or (setting.section == "optimizer" and name not in kept)
        or name in ("train_samples", "eval_interval", "eval_iters", "exit_interval")
        or name in ("distributed_backend", "pipeline_memory_limit", "check_replicas_interval")
    }
    changes |= {"train_iters": 1000, "lr": 1e-2, "lr_decay_style": "constant", "device": "cpu"}
    changes["adam_eps"] = max(config.optimizer.adam_eps, 1e-5)
    changes["init_method_std"] = max(config.model.init_method_std, 0.1)
    changes["ddp_bucket_size"] = min(config.parallel.ddp_bucket_size, 3000)
    if "eod_mask_loss" not in keep:
        changes["eod_mask_loss"] = True
    if "precision" not in keep:
        changes |= {"precision": "fp64", **{name: defaults[name] for name in _LOSS_SCALES}}
    elif config.training.precision == "fp16" and config.training.loss_scale is None:
        # A dynamic loss scale needs many steps to come down from its default.
        low, first = config.training.min_loss_scale, config.training.initial_loss_scale
        changes["initial_loss_scale"] = min(first, max(low, _LOSS_SCALE))
    return changes


def _batch_changes(config: RunConfig, world: int) -> Changes:
    """Few microbatches, but more than pipeline ranks, and a number that the schedule supports."""
    p, training = config.parallel, config.training
    micro = min(training.micro_batch_size, MAX_MICRO_BATCH)
    sequences = math.gcd(micro, training.moe_aux_loss_sequences)
    changes: Changes = {"micro_batch_size": micro, "moe_aux_loss_sequences": sequences}
    group = p.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and group > MAX_GROUP:
        changes["microbatch_group_size_per_virtual_pipeline_stage"] = None
    config = replace(config, **changes, global_batch_size=None, rampup_batch_size=None, step_batch_size_schedule=None)
    unit = samples_per_microbatch(config)
    counts = list(range(p.pp + 1, 4 * MAX_BATCH))
    size, ramp = training.global_batch_size, training.rampup_batch_size
    if ramp and size and max(size, ramp[2]) <= MAX_BATCH:
        with suppress(ConfigError):
            _check_counts(replace(config, global_batch_size=size, rampup_batch_size=ramp), world)
            return changes
    elif not ramp and size and size <= MAX_BATCH:
        whole, rest = divmod(size, unit)
        counts = counts if rest else [whole, *counts]
    legal: list[int] = []
    refused = ConfigError("")
    for count in counts:
        try:
            _check_counts(replace(config, global_batch_size=count * unit), world)
        except ConfigError as error:
            refused = error
            continue
        legal.append(count * unit)
        if not ramp:
            return changes | {"global_batch_size": legal[0]}
        if len(legal) == 2:
            first, last = legal
            return changes | {"global_batch_size": last, "rampup_batch_size": [first, last - first, first]}
    raise refused


def _check_counts(config: RunConfig, world: int) -> None:
    """Raise ConfigError if the schedule does not support each size of the batch."""
    config = validate(config, world)
    for count in microbatch_counts(config):
        schedule_of(config, count)

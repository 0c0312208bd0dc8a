"""A user's config made small enough for a laptop, with its family, every switch and its layout kept.

What is already small stays as it is, so a config that has been shrunk, or was drawn small, is not changed again.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megalite.config.batch import microbatch_counts, samples_per_microbatch
from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.config.strategies import STRATEGIES
from megalite.config.validate import validate
from megalite.parity.sizes import (
    Changes,
    attention_changes,
    expert_changes,
    layer_changes,
    sequence_changes,
    width_changes,
)
from megalite.partition.pipeline import schedule_of
from megalite.topology.layout import ParallelLayout

MAX_WORLD = 8
"""Ranks that are started unless --world-size asks for more."""

MAX_BATCH, MAX_MICRO_BATCH, MAX_GROUP = 32, 2, 8

EXACT_STRATEGIES = tuple(name for name, facts in STRATEGIES.items() if facts.weights == "equal")
"""Each step takes the mean gradient of the batch, whole, at the weights that all ranks have."""

_LOSS_SCALE = 1024.0
"""The highest that a dynamic loss scale starts from."""
_LOSS_SCALES = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Of fp16 alone."""
_SECTIONS_LEFT_OUT = ("data", "checkpoint", "logging")
_KEPT_DATA = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids", "packing")
_KEPT_OPTIMIZER = (
    *("optimizer", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "sgd_momentum", "sgd_nesterov"),
    *("lamb_min_coeff", "lamb_max_coeff", "muon_momentum", "muon_steps", "muon_scale"),
)
_FORMATS = ("main_params", "exp_avg_dtype", "exp_avg_sq_dtype", "stochastic_rounding")
"""Of what the optimizer keeps: they go with the precision."""


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """What is run in place of the user's config."""

    config: RunConfig
    """Validated for `world_size` ranks."""
    world_size: int
    changes: dict[str, tuple[Any, Any]]
    """Sizes, and settings that were asked for, that were changed: setting -> (before, after), None where it was left
    open."""


def shrink(
    config: RunConfig,
    *,
    world_size: int | None = None,
    keep: frozenset[str] = frozenset(),
    explicit: frozenset[str] = frozenset(),
) -> Shrunk:
    """The config to run on this machine.

    Sizes come down; data, checkpoints, logging, evaluation and the schedule of the learning rate are left out: samples
    are made up, the learning rate is a constant 0.01 (a warm-up would hide what the optimizer does), initial weights are
    at least 0.1 wide (so that narrow layers still have gradients that matter) and adam_eps is at least 1e-5 (a smaller
    one makes steps out of gradients that are zero but for rounding). A ramp-up grows the batch after the first step.
    Masks are uneven (eod_mask_loss), and numbers are fp64.

    Args:
        world_size: ranks to run on; default: those of the layout, with dp at most 2 and the world at most `MAX_WORLD`.
        keep: of precision (and the formats of the optimizer's numbers with it) and eod_mask_loss those that stay as
            the config has them.
        explicit: `Invocation.explicit`.

    Raises:
        ConfigError: the user's own config is not legal, is not meant to give the numbers of one rank, or needs more
            ranks than `MAX_WORLD`.
    """
    _check_exact(config)
    dp = _data_parallel(config, world_size)
    p = config.parallel
    world = p.tp * p.pp * p.cp * dp
    changes: Changes = _run_changes(config, keep)
    _check_asked(replace(config, **changes), explicit - set(changes), dp)
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
    """Refuse what takes other steps than one rank, by design.

    Raises:
        ConfigError: naming the setting and what can be compared.
    """
    d, optimizer, strategy = config.data_parallel, config.optimizer.optimizer, config.parallel.dp_strategy
    base = "lamb" if optimizer == "onebit-lamb" else "adam"
    refused = {
        f"dp_strategy {strategy} takes other steps; use one of {', '.join(EXACT_STRATEGIES)}": (
            strategy not in EXACT_STRATEGIES
        ),
        f"optimizer {optimizer} takes other steps; use --optimizer {base}": optimizer in ONEBIT_OPTIMIZERS,
        f"grad_compression {d.grad_compression} loses a part of the gradient; use --grad-compression none": (
            d.grad_compression != "none"
        ),
        f"wire_dtype {d.wire_dtype} rounds what is added; use --wire-dtype fp32": d.wire_dtype != "fp32",
    }
    for why, applies in refused.items():
        if applies:
            raise ConfigError(f"megalite parity compares with one rank, and {why}")


def _check_asked(config: RunConfig, explicit: frozenset[str], dp: int) -> None:
    """What is wrong with the user's own sizes is said in the user's own numbers."""
    p = config.parallel
    config = replace(config, vocab_size=config.model.vocab_size or 50257)
    if p.dp is None:  # the batch belongs to a world that we do not know
        config = replace(config, dp=dp, global_batch_size=None, rampup_batch_size=None, step_batch_size_schedule=None)
    dp, batch_given = p.dp or dp, config.training.global_batch_size is not None
    config = validate(config, p.tp * p.pp * p.cp * dp, explicit)
    etp = config.parallel.etp
    ParallelLayout(tp=p.tp, pp=p.pp, cp=p.cp, dp=dp, ep=p.ep, etp=etp, order=p.rank_order)
    if batch_given:
        for count in microbatch_counts(config):
            schedule_of(config, count)


def _data_parallel(config: RunConfig, world_size: int | None) -> int:
    """The data-parallel size to run with: near the config's (2 if open), experts' grid whole, world small."""
    p = config.parallel
    replica = p.tp * p.pp * p.cp
    if world_size is not None:
        if world_size % replica:
            raise ConfigError(
                f"--world-size {world_size} is not a multiple of tp·pp·cp = {p.tp}·{p.pp}·{p.cp} = {replica}; use "
                f"{max(1, world_size // replica) * replica}"
            )
        if p.dp not in (None, world_size // replica):
            raise ConfigError(
                f"--world-size {world_size} / (tp·pp·cp = {replica}) is {world_size // replica}, not dp {p.dp}; use "
                f"--world-size {replica * (p.dp or 1)}"
            )
        return world_size // replica
    whole = p.expert_tp * p.ep if config.model.num_experts else 1
    wanted, most = min(p.dp or 2, MAX_WORLD // replica), MAX_WORLD // replica
    for dp in [*range(wanted, 0, -1), *range(wanted + 1, most + 1)]:
        if p.tp * p.cp * dp % whole == 0:
            return dp
    least = next(dp for dp in range(1, whole + 1) if p.tp * p.cp * dp % whole == 0)
    raise ConfigError(
        f"the layout needs {replica * least} ranks, more than the {MAX_WORLD} that megalite parity starts by itself; "
        f"use smaller sizes of tp {p.tp}, pp {p.pp}, cp {p.cp}"
        + (f", ep {p.ep}" if whole > 1 else "")
        + f", or --world-size {replica * least} if this machine can run so many processes"
    )


def _run_changes(config: RunConfig, keep: frozenset[str]) -> Changes:
    """Everything about the run that is not its sizes."""
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
        # The default takes a run of any length to come down from.
        low, first = config.training.min_loss_scale, config.training.initial_loss_scale
        changes["initial_loss_scale"] = min(first, max(low, _LOSS_SCALE))
    return changes


def _batch_changes(config: RunConfig, world: int) -> Changes:
    """Few microbatches, but more than pipeline ranks, and a number that the schedule takes."""
    p, training = config.parallel, config.training
    changes: Changes = {"micro_batch_size": min(training.micro_batch_size, MAX_MICRO_BATCH)}
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
    """Raises ConfigError unless the schedule takes every size of the batch."""
    config = validate(config, world)
    for count in microbatch_counts(config):
        schedule_of(config, count)

"""Rules about batch sizes, length and schedules. `BATCH` and `LENGTHS` need dp and global_batch_size resolved."""

from megalite.config.batch import batch_sizes, decay_length, samples_per_microbatch, steps_until, total_steps
from megalite.config.errors import Findings
from megalite.config.optimizer import ONEBIT_OPTIMIZERS, parse_lr_multipliers
from megalite.config.rules.rule import Check, Settings, multiples, owned, parsed, rules, without
from megalite.config.run import scales_loss
from megalite.config.training import parse_batch_schedule

_MOST_SIZES = 10_000
"""Most batch sizes of a ramp-up."""
_MOST_SAMPLES = 2**40


def check_rampup_form(c: Settings) -> Findings:
    """Check START INCREMENT SAMPLES before other code divides by them."""
    ramp, example = c.rampup_batch_size, "e.g. 16 16 100000"
    if ramp is None:
        return
    if len(ramp) != 3:
        yield f"rampup_batch_size takes three numbers, START INCREMENT SAMPLES, got {len(ramp)}; {example}"
        return
    for what, value, low in (("START", ramp[0], 1), ("INCREMENT", ramp[1], 1), ("SAMPLES", ramp[2], 0)):
        if value < low:
            yield f"rampup_batch_size {what} is {value}; it must be at least {low}, {example}"
        if value >= _MOST_SAMPLES:
            yield f"rampup_batch_size {what} is {value}; it must be below {_MOST_SAMPLES}"
    if c.step_batch_size_schedule is not None:
        yield "{rampup_batch_size} and {step_batch_size_schedule} both set the batch size; keep one of them"
        return
    if c.global_batch_size is None:
        yield f"rampup_batch_size needs the batch size to grow to; add --global-batch-size, e.g. {ramp[0] + ramp[1]}"
    elif ramp[1] > 0 and (sizes := (c.global_batch_size - ramp[0]) // ramp[1]) > _MOST_SIZES:
        works = -(-sizes * ramp[1] // _MOST_SIZES)
        yield f"rampup_batch_size INCREMENT {ramp[1]} makes {sizes} batch sizes up to {{global_batch_size}}; use {works} or more"


def check_schedule_form(c: Settings) -> Findings:
    """Check FROM:SIZE pairs before other code divides by them."""
    if c.step_batch_size_schedule is None:
        return
    *_, (_, last) = steps = parse_batch_schedule(c.step_batch_size_schedule)
    if c.global_batch_size not in (None, last):
        yield f"{{global_batch_size}} is not the last size of {{step_batch_size_schedule}}; use {last} or leave it out"
    if len({tokens // c.seq_length for tokens, _ in steps}) < len(steps):
        yield "{step_batch_size_schedule} has two sizes within one sequence of {seq_length} tokens; leave one out"


def _whole_microbatches(c: Settings) -> Findings:
    """Check that every batch of the run consists of whole microbatches."""
    unit, final = samples_per_microbatch(c.run), c.global_batch_size
    assert final is not None
    product = f"micro_batch_size·dp = {c.micro_batch_size}·{c.dp} = {unit}"
    if final % unit and c.step_batch_size_schedule is None:
        yield f"global_batch_size {final} is not a multiple of {product}; use {multiples(final, unit)}"
    for size in batch_sizes(c.run) if c.step_batch_size_schedule is not None else ():
        if size % unit:
            yield f"step_batch_size_schedule has the size {size}, which is not a multiple of {product}; use {multiples(size, unit)}"
    if c.rampup_batch_size is None:
        return
    start, increment, _ = c.rampup_batch_size
    if start > final:
        yield f"rampup_batch_size starts at {start}, above global_batch_size {final}; start at {final // unit * unit or unit} or less"
        return
    if start % unit:
        yield f"rampup_batch_size START {start} is not a multiple of {product}; use {multiples(start, unit)}"
    if increment % unit and start < final:
        yield f"rampup_batch_size INCREMENT {increment} is not a multiple of {product}; use {multiples(increment, unit)}"
    elif (final - start) % increment and not start % unit:
        yield (
            f"rampup_batch_size cannot go from {start} to global_batch_size {final} in increments of {increment}; use "
            f"an increment of {unit} or global_batch_size {multiples(final - start, increment, start)}"
        )


def _one_batch(c: Settings) -> Findings:
    if c.train_samples is not None and total_steps(c.run) == 0:
        first = batch_sizes(c.run)[0]
        yield f"{{train_samples}} is less than one batch of {first}; use at least {first}"


BATCH: tuple[Check, ...] = (
    _whole_microbatches,
    _one_batch,
    *rules(
        {
            "{?train_iters} and {train_samples} both set the length of the run; keep one of them": lambda c: (
                c.train_samples
            )
        }
    ),
)


def _units(c: Settings) -> Findings:
    """Check that lengths use the unit (steps or samples) of the run's length."""
    other = "samples" if c.train_iters is not None else "iters" if c.train_samples is not None else None
    unit = "iters" if other == "samples" else "samples"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        given = [kind for kind in ("iters", "samples") if getattr(c, f"{name}_{kind}")]
        if len(given) == 2:
            yield f"{{{name}_iters}} and {{{name}_samples}} set the same length; keep one of them"
        if other in given:
            yield f"{{{name}_{other}}} does not go with train_{unit}, which sets the length of this run; use {name}_{unit}"


def _warmup(c: Settings) -> Findings:
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    given = [f"{{{name}}}" for name in names if getattr(c, name)]
    if len(given) > 1:
        yield f"{' and '.join(given)} both set the length of the warm-up; keep one of them"
    if c.lr_warmup_init and not given:
        yield "{lr_warmup_init} has no effect without a warm-up; add --lr-warmup-iters 100 or remove it"
    length, unit = decay_length(c.run)
    warmup = getattr(c, f"lr_warmup_{unit}")
    if length is not None and warmup and warmup >= length:
        yield f"lr_warmup_{unit} {warmup} is not shorter than the decay of {length} {unit}; use at most {length - 1}"


def _final_decay(c: Settings) -> Findings:
    if c.lr_decay_style != "WSD":
        return
    length, unit = decay_length(c.run)
    final = getattr(c, f"lr_wsd_decay_{unit}")
    if final is None:
        example = max(1, length // 10) if length else 100
        yield f"lr_decay_style WSD needs the length of its final decay; add --lr-wsd-decay-{unit} {example}"
    elif length is not None and final > length:
        yield f"lr_wsd_decay_{unit} {final} is longer than the decay of {length} {unit}; use at most {length}"


_RATES = ("adam", "sgd", "lamb", "muon", "soap", "one-sided-soap", "schedule-free-adamw")
"""Optimizers with a learning rate per parameter."""
_WHOLE = ("all-reduce", "fused-all-reduce", "distributed-optimizer", "fully-sharded")
"""Strategies in which all ranks make the same update in each step."""
_DYNAMIC_SCALE = "initial_loss_scale|min_loss_scale|loss_scale_window|hysteresis"
SCHEDULES: tuple[Check, ...] = (
    _units,
    _warmup,
    _final_decay,
    parsed(parse_lr_multipliers, "lr_multipliers"),
    *without({"?decoupled_min_lr": "--decoupled-lr 1e-4"}),
    *owned("lr_decay_style", {"lr_wsd_decay_style": ("WSD",), "?lr_wsd_decay_iters|lr_wsd_decay_samples": ("WSD",)}),
    *owned("weight_decay_incr_style", {"?start_weight_decay|end_weight_decay": ("linear", "cosine")}),
    *owned("weight_decay_incr_style", {"weight_decay": ("constant",)}),
    *rules(
        {
            "{min_lr} is above {lr}; use at most {=lr}": lambda c: c.min_lr > c.lr,
            "{?decoupled_lr} is below its final value; use --decoupled-min-lr 0": (
                lambda c: (c.min_lr if c.decoupled_min_lr is None else c.decoupled_min_lr) > (c.decoupled_lr or 0.0)
            ),
            "{?decoupled_lr} does not go with {optimizer}; use --optimizer adam": lambda c: c.optimizer != "adam",
            "{?lr_multipliers} does not go with {optimizer}; use --optimizer adam": lambda c: c.optimizer not in _RATES,
            "{?decoupled_lr|lr_multipliers|log_params_norm|log_num_zeros_in_grad} does not go with {dp_strategy}; use --dp-strategy "
            "all-reduce, distributed-optimizer or fully-sharded": lambda c: c.dp_strategy not in _WHOLE,
            "{!min_lr|lr_decay_iters|lr_decay_samples} has no effect with {lr_decay_style}; use cosine or remove it": (
                lambda c: c.lr_decay_style == "constant"
            ),
            "{lr_warmup_init} is above {lr}; use 0": lambda c: c.lr_warmup_init > c.lr,
            "{?weight_decay_incr_style} needs start_weight_decay; add --start-weight-decay {=weight_decay}": (
                lambda c: c.start_weight_decay is None
            ),
            "{?weight_decay_incr_style} needs end_weight_decay; add --end-weight-decay {=weight_decay}": (
                lambda c: c.end_weight_decay is None
            ),
            "{?loss_scale} has no effect with {precision} and {wire_dtype}; use --fp16 or remove it": (
                lambda c: not scales_loss(c.run)
            ),
            f"{{!{_DYNAMIC_SCALE}}} has no effect with {{precision}} and {{wire_dtype}}; use --fp16 or remove it": (
                lambda c: not scales_loss(c.run)
            ),
            f"{{!{_DYNAMIC_SCALE}}} has no effect with a fixed {{loss_scale}}; remove one of them": (
                lambda c: scales_loss(c.run) and c.loss_scale is not None
            ),
            "{min_loss_scale} is above {initial_loss_scale}; use at most {=initial_loss_scale}": (
                lambda c: scales_loss(c.run) and c.min_loss_scale > c.initial_loss_scale
            ),
        }
    ),
)


def _length(c: Settings) -> str:
    samples, total = c.train_samples, total_steps(c.run)
    return f"train_iters {total}" if samples is None else f"train_samples {samples} ({total} step{'s' * (total > 1)})"


def _has_length(c: Settings) -> bool:
    return (c.train_iters is not None or c.train_samples is not None) and total_steps(c.run) > 0


def _warmups(c: Settings) -> Findings:
    """Check that each warm-up ends before the run does."""
    if not _has_length(c):
        return  # reported for train_samples
    if c.grad_compression != "none":
        yield _shorter(c, "compression_warmup_steps")
    if c.strategy.weights == "local":
        yield _shorter(c, "sync_warmup_steps")
    if c.optimizer in ONEBIT_OPTIMIZERS:
        yield _onebit_warmup(c) if c.freeze_step is None else _shorter(c, "freeze_step")


def _shorter(c: Settings, name: str) -> Findings:
    total = total_steps(c.run)
    if getattr(c, name) >= total:
        yield f"{{{name}}} is not below {_length(c)}: the run ends within this warm-up; {_fitting(name, total)}"


def _fitting(name: str, total: int) -> str:
    if name == "freeze_step" and total < 2:
        return "for so short a run use --optimizer adam"
    return f"use --{name.replace('_', '-')} {max(total // 6, int(name == 'freeze_step'))}"


def _onebit_warmup(c: Settings) -> Findings:
    """Check that at least one step is left after the first at which optimizers/onebit.py may find the second moment
    stable: the second multiple of 1/(1-beta2), or the first one after the learning rate's warm-up."""
    total, every = total_steps(c.run), max(round(1.0 / (1.0 - c.adam_beta2)), 1)
    earliest = every * max(2, _lr_warmup_steps(c) // every + 1)
    if earliest >= total:
        yield (
            f"{{optimizer}} without freeze_step ends its warm-up after step {earliest} at the earliest (a multiple of "
            f"1/(1-adam_beta2) = {every}, from the second on, after the warm-up of the learning rate), but the run is "
            f"{_length(c)}; {_fitting('freeze_step', total)}"
        )


def _lr_warmup_steps(c: Settings) -> int:
    length, unit = decay_length(c.run)
    warmup: int = getattr(c, f"lr_warmup_{unit}") or 0
    if c.lr_warmup_fraction is not None:
        assert length is not None, "the length of the run is given"
        warmup = int(c.lr_warmup_fraction * length)
    return warmup if unit == "iters" else steps_until(c.run, warmup)


def _exchanges(c: Settings) -> Findings:
    """Check that all weights are exchanged and used at least once."""
    if not _has_length(c) or not c.strategy.has("sync_interval"):
        return
    total, streams = total_steps(c.run), c.strategy.has("sync_delay")
    delay, fragments = (c.sync_delay, c.sync_fragments) if streams else (0, 1)
    first = c.sync_interval + c.sync_warmup_steps + delay
    if first > total:
        each = (total - c.sync_warmup_steps - delay) // fragments
        remedy = f"--sync-interval {each * fragments}" if each > delay else f"a run of {first} steps or more"
        yield (
            f"{{sync_interval}} with {{sync_warmup_steps}} and sync_delay {delay} is {first} steps, more than {_length(c)}: "
            f"some weights would never be exchanged; use {remedy}"
        )


def _replica_checks(c: Settings) -> Findings:
    if _has_length(c) and c.gives("check_replicas_interval") and (c.check_replicas_interval or 0) > total_steps(c.run):
        works = max(total_steps(c.run) // 6, 1)
        yield f"{{check_replicas_interval}} has no effect with {_length(c)}; use --check-replicas-interval {works} or remove it"


LENGTHS: tuple[Check, ...] = (_warmups, _exchanges, _replica_checks)

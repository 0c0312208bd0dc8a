"""Rules about batch sizes, ramp-up and the length of the run; needs dp and global_batch_size resolved."""

from megalite.config.batch import samples_per_microbatch, steps_until, total_steps
from megalite.config.errors import Findings
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.parallel import LOCAL_STRATEGIES
from megalite.config.rules.effect import refuse_idle
from megalite.config.rules.ranges import BOUNDS
from megalite.config.rules.schedules import decay_length
from megalite.config.run import RunConfig


def check_run_lengths(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """What is to begin after a warm-up, or to happen every so many steps, begins and happens."""
    if config.training.train_iters is None and config.training.train_samples is None:
        return
    if total_steps(config) == 0:
        return  # that is said of train_samples
    d, o, strategy = config.data_parallel, config.optimizer, config.parallel.dp_strategy
    if d.grad_compression != "none":
        never = "nothing would ever be compressed"
        yield _check_warmup(config, "compression_warmup_steps", d.compression_warmup_steps, never)
    if strategy in LOCAL_STRATEGIES:
        never = "no rank would ever go by its own gradient"
        yield _check_warmup(config, "sync_warmup_steps", d.sync_warmup_steps, never)
    if strategy in ("local-sgd", "diloco"):
        yield _check_exchanges(config)
    if o.optimizer in ONEBIT_OPTIMIZERS:
        if o.freeze_step is None:
            yield _check_freeze(config)
        else:
            yield _check_warmup(config, "freeze_step", o.freeze_step, "nothing would ever be compressed")
    total = total_steps(config)
    if d.check_replicas_interval is not None and d.check_replicas_interval > total:
        remedy = f"use --check-replicas-interval {_share(total)}"
        names = ["check_replicas_interval"]
        yield refuse_idle(config, explicit, names, cause=f"with {_length(config)}", remedy=remedy)


def _length(config: RunConfig) -> str:
    samples, total = config.training.train_samples, total_steps(config)
    if samples is None:
        return f"train_iters {total}"
    return f"train_samples {samples}, which is {total} step{'s' if total > 1 else ''}"


def _share(total: int) -> int:
    return max(total // 6, 1)


def _freeze_step(total: int) -> str:
    return f"use --freeze-step {_share(total)}" if total > 1 else "for so short a run use --optimizer adam"


def _check_warmup(config: RunConfig, name: str, last: int, never: str) -> Findings:
    """A warm-up that lasts as long as the run."""
    total = total_steps(config)
    if last >= total:
        share = f"use --{name.replace('_', '-')} {total // 6}"
        remedy = _freeze_step(total) if name == "freeze_step" else share
        yield f"{name} {last} is not below {_length(config)}: {never}; {remedy}"


def _check_exchanges(config: RunConfig) -> Findings:
    """Weights that would not be exchanged once, or not be used."""
    d, total = config.data_parallel, total_steps(config)
    streams = config.parallel.dp_strategy == "diloco"
    delay, fragments = (d.sync_delay, d.sync_fragments) if streams else (0, 1)
    first = d.sync_warmup_steps + d.sync_interval + delay
    if first > total:
        terms = {"sync_warmup_steps": d.sync_warmup_steps, "sync_delay": delay}
        terms = {"sync_interval": d.sync_interval} | {name: size for name, size in terms.items() if size}
        equals = f" = {first}" if len(terms) > 1 else ""
        each = (total - d.sync_warmup_steps - delay) // fragments
        remedy = f"--sync-interval {each * fragments}" if each > delay else f"a run of {first} steps or more"
        yield (
            f"{' + '.join(f'{name} {size}' for name, size in terms.items())}{equals} is more than {_length(config)}: "
            f"some weights would never be exchanged; use {remedy}"
        )


def _check_freeze(config: RunConfig) -> Findings:
    """The first step at which optimizers/onebit.py may find the second moment stable must leave one to compress.

    That is the second multiple of 1/(1-beta2), or the first one after the warm-up of the learning rate.
    """
    o, total = config.optimizer, total_steps(config)
    every = max(round(1.0 / (1.0 - o.adam_beta2)), 1)
    earliest = every * max(2, _lr_warmup_steps(config) // every + 1)
    if earliest >= total:
        yield (
            f"optimizer {o.optimizer} without freeze_step ends its warm-up after step {earliest} at the earliest (a multiple "
            f"of 1/(1-adam_beta2) = {every}, from the second on, after the warm-up of the learning rate), but the run is "
            f"{_length(config)}: nothing would ever be compressed; {_freeze_step(total)}"
        )


def _lr_warmup_steps(config: RunConfig) -> int:
    o = config.optimizer
    length, unit = decay_length(config)
    warmup = (o.lr_warmup_iters if unit == "iters" else o.lr_warmup_samples) or 0
    if o.lr_warmup_fraction is not None:
        assert length is not None, "the length of the run is given"
        warmup = int(o.lr_warmup_fraction * length)
    return warmup if unit == "iters" else steps_until(config, warmup)


_MOST_SIZES = 10_000
"""Of a ramp-up."""


def check_batch(config: RunConfig, _: frozenset[str]) -> Findings:
    """The global batch must be whole microbatches, at every step of a ramp-up; the run has one length."""
    yield _check_whole(config)
    yield _check_length(config)


def _check_whole(config: RunConfig) -> Findings:
    t = config.training
    unit = samples_per_microbatch(config)
    product = f"micro_batch_size·dp = {t.micro_batch_size}·{config.parallel.dp} = {unit}"
    assert t.global_batch_size is not None
    if t.global_batch_size % unit:
        yield (
            f"global_batch_size {t.global_batch_size} is not a multiple of {product}; use "
            f"{_multiples(t.global_batch_size, unit)}"
        )
    if t.rampup_batch_size is not None:
        yield _check_rampup(config, unit, product)


def _check_length(config: RunConfig) -> Findings:
    t = config.training
    if t.train_iters is not None and t.train_samples is not None:
        yield (
            f"train_iters {t.train_iters} and train_samples {t.train_samples} both set the length of the run; keep one "
            f"of them"
        )
    if t.train_samples is not None and total_steps(config) == 0:
        yield (
            f"train_samples {t.train_samples} is less than one batch of {_first_batch(config)}; use at least "
            f"{_first_batch(config)}"
        )


def check_rampup_form(config: RunConfig) -> Findings:
    """START INCREMENT SAMPLES, before anything divides by them."""
    t = config.training
    ramp = t.rampup_batch_size
    if ramp is None:
        return
    if len(ramp) != 3:
        yield (f"rampup_batch_size takes three numbers, START INCREMENT SAMPLES, got {len(ramp)}; e.g. 16 16 100000")
        return
    for what, value, low in (("START", ramp[0], 1), ("INCREMENT", ramp[1], 1), ("SAMPLES", ramp[2], 0)):
        if value < low:
            yield f"rampup_batch_size {what} is {value}; it must be at least {low}, e.g. 16 16 100000"
        if value >= BOUNDS["train_samples"].high:
            yield f"rampup_batch_size {what} is {value}; it must be below {BOUNDS['train_samples'].high:.0f}"
    if t.global_batch_size is None:
        yield (f"rampup_batch_size needs the batch size to grow to; add --global-batch-size, e.g. {ramp[0] + ramp[1]}")
    elif ramp[1] > 0 and (t.global_batch_size - ramp[0]) // ramp[1] > _MOST_SIZES:
        sizes = (t.global_batch_size - ramp[0]) // ramp[1]
        yield (
            f"rampup_batch_size INCREMENT {ramp[1]} makes {sizes} batch sizes from {ramp[0]} to global_batch_size "
            f"{t.global_batch_size}, each with a schedule of its own; use {-(-sizes * ramp[1] // _MOST_SIZES)} or more"
        )


def _check_rampup(config: RunConfig, unit: int, product: str) -> Findings:
    t = config.training
    assert t.rampup_batch_size is not None and t.global_batch_size is not None
    start, increment, _ = t.rampup_batch_size
    final = t.global_batch_size
    if start > final:
        yield (
            f"rampup_batch_size starts at {start}, above global_batch_size {final}; start at a multiple of {unit} up to "
            f"{final}"
        )
        return
    if start % unit:
        yield (f"rampup_batch_size START {start} is not a multiple of {product}; use {_multiples(start, unit)}")
    if increment % unit and start < final:
        yield (
            f"rampup_batch_size INCREMENT {increment} is not a multiple of {product}; use {_multiples(increment, unit)}"
        )
    elif (final - start) % increment and not start % unit:
        yield (
            f"rampup_batch_size cannot go from {start} to global_batch_size {final} in increments of {increment}; use "
            f"an increment of {unit} or global_batch_size {_multiples(final - start, increment, start)}"
        )


def _first_batch(config: RunConfig) -> int:
    t = config.training
    assert t.global_batch_size is not None
    return t.rampup_batch_size[0] if t.rampup_batch_size else t.global_batch_size


def _multiples(number: int, unit: int, offset: int = 0) -> str:
    """`8 or 12`: offset plus the multiples of `unit` around `number`."""
    below = number // unit * unit
    return f"{below + offset} or {below + unit + offset}" if below else str(unit + offset)

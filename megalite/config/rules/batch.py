"""Rules about batch sizes, ramp-up and the length of the run; needs dp and global_batch_size resolved."""

from megalite.config.batch import samples_per_microbatch, total_steps
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig


def check_batch(config: RunConfig) -> None:
    """The global batch must be whole microbatches, at every step of a ramp-up."""
    t = config.training
    unit = samples_per_microbatch(config)
    product = f"micro_batch_size·dp = {t.micro_batch_size}·{config.parallel.dp} = {unit}"
    assert t.global_batch_size is not None
    if t.global_batch_size % unit:
        raise ConfigError(
            f"global_batch_size {t.global_batch_size} is not a multiple of {product}; use "
            f"{_multiples(t.global_batch_size, unit)}"
        )
    if t.rampup_batch_size is not None:
        _check_rampup(config, unit, product)
    if t.train_iters is not None and t.train_samples is not None:
        raise ConfigError(
            f"train_iters {t.train_iters} and train_samples {t.train_samples} both set the length of the run; keep one "
            f"of them"
        )
    if t.train_samples is not None and total_steps(config) == 0:
        raise ConfigError(
            f"train_samples {t.train_samples} is less than one batch of {_first_batch(config)}; use at least "
            f"{_first_batch(config)}"
        )


def check_rampup_form(config: RunConfig) -> None:
    """START INCREMENT SAMPLES, before anything divides by them."""
    t = config.training
    ramp = t.rampup_batch_size
    if ramp is None:
        return
    if len(ramp) != 3:
        raise ConfigError(
            f"rampup_batch_size takes three numbers, START INCREMENT SAMPLES, got {len(ramp)}; e.g. 16 16 100000"
        )
    for what, value, low in (("START", ramp[0], 1), ("INCREMENT", ramp[1], 1), ("SAMPLES", ramp[2], 0)):
        if value < low:
            raise ConfigError(
                f"rampup_batch_size {what} is {value}; it must be at least {low}, e.g. 16 16 100000"
            )
    if t.global_batch_size is None:
        raise ConfigError(
            f"rampup_batch_size needs the batch size to grow to; add --global-batch-size, e.g. {ramp[0] + ramp[1]}"
        )


def _check_rampup(config: RunConfig, unit: int, product: str) -> None:
    t = config.training
    assert t.rampup_batch_size is not None and t.global_batch_size is not None
    start, increment, _ = t.rampup_batch_size
    final = t.global_batch_size
    if start > final:
        raise ConfigError(
            f"rampup_batch_size starts at {start}, above global_batch_size {final}; start at a multiple of {unit} up to "
            f"{final}"
        )
    if start % unit:
        raise ConfigError(
            f"rampup_batch_size START {start} is not a multiple of {product}; use {_multiples(start, unit)}"
        )
    if increment % unit and start < final:
        raise ConfigError(
            f"rampup_batch_size INCREMENT {increment} is not a multiple of {product}; use "
            f"{_multiples(increment, unit)}"
        )
    if (final - start) % increment:
        raise ConfigError(
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

"""Rules about phases of a run that its length leaves no step for; needs dp and global_batch_size resolved."""

from megalite.config.batch import batch_size, total_steps
from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.parallel import LOCAL_STRATEGIES
from megalite.config.rules.effect import refuse_idle
from megalite.config.rules.schedules import decay_length
from megalite.config.run import RunConfig


def check_run_lengths(config: RunConfig, explicit: frozenset[str]) -> None:
    """What is to begin after a warm-up, or to happen every so many steps, begins and happens.

    Raises:
        ConfigError: naming the setting, the length of the run and a value that works.
    """
    if config.training.train_iters is None and config.training.train_samples is None:
        return
    d, o, strategy = config.data_parallel, config.optimizer, config.parallel.dp_strategy
    if d.grad_compression != "none":
        never = "nothing would ever be compressed"
        _check_warmup(config, "compression_warmup_steps", d.compression_warmup_steps, never)
    if strategy in LOCAL_STRATEGIES:
        never = "no rank would ever go by its own gradient"
        _check_warmup(config, "sync_warmup_steps", d.sync_warmup_steps, never)
    if strategy in ("local-sgd", "diloco"):
        _check_exchanges(config)
    if o.optimizer in ONEBIT_OPTIMIZERS:
        if o.freeze_step is None:
            _check_freeze(config)
        else:
            _check_warmup(config, "freeze_step", o.freeze_step, "nothing would ever be compressed")
    total = total_steps(config)
    if d.check_replicas_interval is not None and d.check_replicas_interval > total:
        remedy = f"use --check-replicas-interval {_share(total)}"
        names = ["check_replicas_interval"]
        refuse_idle(config, explicit, names, cause=f"with {_length(config)}", remedy=remedy)


def _length(config: RunConfig) -> str:
    samples, total = config.training.train_samples, total_steps(config)
    if samples is None:
        return f"train_iters {total}"
    return f"train_samples {samples}, which is {total} step{'s' if total > 1 else ''}"


def _share(total: int) -> int:
    return max(total // 6, 1)


def _freeze_step(total: int) -> str:
    return f"use --freeze-step {_share(total)}" if total > 1 else "for so short a run use --optimizer adam"


def _check_warmup(config: RunConfig, name: str, last: int, never: str) -> None:
    """A warm-up that lasts as long as the run."""
    total = total_steps(config)
    if last >= total:
        share = f"use --{name.replace('_', '-')} {total // 6}"
        remedy = _freeze_step(total) if name == "freeze_step" else share
        raise ConfigError(f"{name} {last} is not below {_length(config)}: {never}; {remedy}")


def _check_exchanges(config: RunConfig) -> None:
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
        raise ConfigError(
            f"{' + '.join(f'{name} {size}' for name, size in terms.items())}{equals} is more than {_length(config)}: "
            f"some weights would never be exchanged; use {remedy}"
        )


def _check_freeze(config: RunConfig) -> None:
    """The first step at which optimizers/freeze.py may find the second moment stable must leave one to compress.

    That is the second multiple of 1/(1-beta2), or the first one after the warm-up of the learning rate.
    """
    o, total = config.optimizer, total_steps(config)
    every = max(round(1.0 / (1.0 - o.adam_beta2)), 1)
    earliest = every * max(2, _lr_warmup_steps(config) // every + 1)
    if earliest >= total:
        raise ConfigError(
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
    if unit == "iters":
        return warmup
    steps = samples = 0
    while samples < warmup:
        samples += batch_size(config, samples)
        steps += 1
    return steps

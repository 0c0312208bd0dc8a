"""Batch-size arithmetic: how many samples and microbatches each step has, and how long the run is.

Everything is a pure function of the resolved config and of the samples consumed so far, so that a resumed run, the
dry run and the learning-rate schedule agree.
"""

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig


def samples_per_microbatch(config: RunConfig) -> int:
    """Sequences that all data-parallel ranks together take in one microbatch: micro_batch_size · dp."""
    assert config.parallel.dp is not None, "validate() resolves dp"
    return config.training.micro_batch_size * config.parallel.dp


def batch_size(config: RunConfig, consumed_samples: int) -> int:
    """Sequences in the step that starts after `consumed_samples` (of a validated config).

    With ramp-up START INCREMENT SAMPLES the batch grows in n = (global - START) / INCREMENT increments, the k-th after
    k·SAMPLES/n samples (Megatron-LM's rule, in whole numbers).
    """
    final = config.training.global_batch_size
    assert final is not None, "validate() resolves global_batch_size"
    if not config.training.rampup_batch_size:
        return final
    start, increment, samples = config.training.rampup_batch_size
    if consumed_samples >= samples or start >= final:
        return final
    return start + consumed_samples * ((final - start) // increment) // samples * increment


def batch_sizes(config: RunConfig) -> tuple[int, ...]:
    """Every batch size of the run, in order: one, or all steps of the ramp-up."""
    final = config.training.global_batch_size
    assert final is not None, "validate() resolves global_batch_size"
    if not config.training.rampup_batch_size:
        return (final,)
    start, increment, samples = config.training.rampup_batch_size
    return (*range(start, final, increment), final) if samples else (final,)


def microbatch_counts(config: RunConfig) -> tuple[int, ...]:
    """Every number of microbatches that a step of the run can have, sorted: each needs its schedule."""
    return tuple(sorted({size // samples_per_microbatch(config) for size in batch_sizes(config)}))


def _ramp(config: RunConfig) -> tuple[int, int]:
    """(steps, samples) until the batch has its final size."""
    steps = consumed = 0
    while batch_size(config, consumed) != batch_sizes(config)[-1]:
        consumed += batch_size(config, consumed)
        steps += 1
    return steps, consumed


def total_steps(config: RunConfig) -> int:
    """Steps of the whole run. With train_samples: as many whole steps as fit into them.

    Raises:
        ConfigError: neither train_iters nor train_samples is set.
    """
    training = config.training
    if training.train_iters is not None:
        return training.train_iters
    if training.train_samples is None:
        raise ConfigError("the length of the run is not set; add --train-iters 1000 (or --train-samples)")
    return steps_left(config, step=0, samples=0)


def steps_left(config: RunConfig, *, step: int, samples: int) -> int:
    """Whole steps that remain of the run after `step` steps that consumed `samples`, with this config's batches.

    With train_samples it is the samples that count: a run resumed with another batch size still uses all of them.
    """
    training = config.training
    if training.train_iters is not None:
        return max(training.train_iters - step, 0)
    assert training.train_samples is not None, "a validated, startable config has a length"
    final, steps = batch_sizes(config)[-1], 0
    while (size := batch_size(config, samples)) != final and samples + size <= training.train_samples:
        samples += size
        steps += 1
    return steps + (max(training.train_samples - samples, 0) // final if size == final else 0)


def total_samples(config: RunConfig) -> int:
    """Samples that the steps of the whole run consume."""
    return samples_after(config, total_steps(config))


def samples_after(config: RunConfig, steps: int) -> int:
    """Samples consumed by the first `steps` steps."""
    ramp_steps, consumed = _ramp(config)
    if steps >= ramp_steps:
        return consumed + (steps - ramp_steps) * batch_sizes(config)[-1]
    consumed = 0
    for _ in range(steps):
        consumed += batch_size(config, consumed)
    return consumed

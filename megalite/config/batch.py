"""Batch-size arithmetic: samples and microbatches of each step, and the length of the run.

Everything is a pure function of the resolved config and of the samples consumed so far, so a resumed run, the dry run
and the learning-rate schedule agree."""

from collections.abc import Iterator

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.training import parse_batch_schedule


def samples_per_microbatch(config: RunConfig) -> int:
    """Return the sequences of one microbatch, over all data-parallel ranks."""
    assert config.parallel.dp is not None, "validate() resolves dp"
    return config.training.micro_batch_size * config.parallel.dp


def batch_size(config: RunConfig, consumed_samples: int) -> int:
    """Return the batch size of the step that starts after `consumed_samples` (validated config).

    With rampup_batch_size START INCREMENT SAMPLES the batch grows in n = (global - START) / INCREMENT increments, the
    k-th after k·SAMPLES/n samples (Megatron-LM's rule, in integers). With step_batch_size_schedule it is the last size
    reached."""
    final = config.training.global_batch_size
    assert final is not None, "validate() resolves global_batch_size"
    if schedule := schedule_in_samples(config):
        return next(size for start, size in reversed(schedule) if consumed_samples >= start)
    if not config.training.rampup_batch_size:
        return final
    start, increment, samples = config.training.rampup_batch_size
    if consumed_samples >= samples or start >= final:
        return final
    return start + consumed_samples * ((final - start) // increment) // samples * increment


def sequence_length(config: RunConfig, step: int) -> int:
    """Return the sequence length of the step that follows `step` steps.

    With seq_length_warmup START STEPS it grows linearly from START to seq_length over STEPS steps, rounded down to
    multiples of START. Source: sequence-length warm-up (arXiv 2108.06084), DeepSpeed's `seqlen` curriculum with a step
    of START."""
    final, warmup = config.training.seq_length, config.training.seq_length_warmup
    if warmup is None or step >= warmup[1]:
        return final
    start, steps = warmup
    return (start + (final - start) * step // steps) // start * start


def tokens_after(config: RunConfig, step: int, samples: int) -> int:
    """Return the tokens of the first `step` steps, which consumed `samples`, if all used this config."""
    tokens, consumed = samples * config.training.seq_length, 0
    for each in range(min(step, (config.training.seq_length_warmup or (0, 0))[1])):
        size = batch_size(config, consumed)
        tokens -= size * (config.training.seq_length - sequence_length(config, each))
        consumed += size
    return tokens


def batch_sizes(config: RunConfig) -> tuple[int, ...]:
    """Return all batch sizes of the run, in order: one, or those of the ramp-up or the schedule."""
    final = config.training.global_batch_size
    assert final is not None, "validate() resolves global_batch_size"
    if schedule := schedule_in_samples(config):
        return tuple(size for _, size in schedule)
    if not config.training.rampup_batch_size:
        return (final,)
    start, increment, samples = config.training.rampup_batch_size
    return (*range(start, final, increment), final) if samples else (final,)


def microbatch_counts(config: RunConfig) -> tuple[int, ...]:
    """Return all microbatch counts of the run's steps, sorted; each needs its own schedule."""
    return tuple(sorted({size // samples_per_microbatch(config) for size in batch_sizes(config)}))


def ramp(config: RunConfig, consumed: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (batch size, number of steps with it) from `consumed` samples until the batch has its final size.

    The number of pairs depends on the sizes of the ramp-up or the schedule, not on the number of steps."""
    while (ends := _next_size(config, consumed)) is not None:
        size = batch_size(config, consumed)
        steps = -(-(ends - consumed) // size)
        yield size, steps
        consumed += steps * size


def _next_size(config: RunConfig, consumed: int) -> int | None:
    """Return the sample count at which the batch size changes next; None: it is final."""
    if schedule := schedule_in_samples(config):
        return next((start for start, _ in schedule if start > consumed), None)
    final, size = config.training.global_batch_size, batch_size(config, consumed)
    if not config.training.rampup_batch_size or size == final:
        return None
    assert final is not None, "validate() resolves global_batch_size"
    start, increment, samples = config.training.rampup_batch_size
    # The next size starts at k·SAMPLES/n samples, rounded up.
    return -(-((size - start) // increment + 1) * samples // ((final - start) // increment))


def schedule_in_samples(config: RunConfig) -> list[tuple[int, int]]:
    """Return step_batch_size_schedule as (first sample, batch size) pairs; empty if it is not set."""
    text, length = config.training.step_batch_size_schedule, config.training.seq_length
    return [] if text is None else [(tokens // length, size) for tokens, size in parse_batch_schedule(text)]


def total_steps(config: RunConfig) -> int:
    """Return the steps of the whole run; with train_samples, the whole steps that fit. Raises ConfigError: neither
    train_iters nor train_samples is set."""
    training = config.training
    if training.train_iters is not None:
        return training.train_iters
    if training.train_samples is None:
        raise ConfigError("the length of the run is not set; add --train-iters 1000 (or --train-samples)")
    return steps_left(config, step=0, samples=0)


def steps_left(config: RunConfig, *, step: int, samples: int) -> int:
    """Return the whole steps left after `step` steps that consumed `samples`, with this config's batches.

    With train_samples the samples count: a run resumed with another batch size still uses all of them."""
    training = config.training
    if training.train_iters is not None:
        return max(training.train_iters - step, 0)
    assert training.train_samples is not None, "a validated, startable config has a length"
    room, left = max(training.train_samples - samples, 0), 0
    for size, steps in ramp(config, samples):
        taken = min(steps, room // size)
        left, room = left + taken, room - taken * size
        if taken < steps:
            return left
    return left + room // batch_sizes(config)[-1]


def total_samples(config: RunConfig) -> int:
    """Return the samples that the whole run consumes."""
    return samples_after(config, total_steps(config))


def samples_after(config: RunConfig, steps: int, *, consumed: int = 0) -> int:
    """Return the samples consumed after `steps` more steps."""
    for size, count in ramp(config, consumed):
        taken = min(steps, count)
        consumed, steps = consumed + taken * size, steps - taken
        if not steps:
            return consumed
    return consumed + steps * batch_sizes(config)[-1]


def steps_until(config: RunConfig, samples: int) -> int:
    """Return the steps after which at least `samples` samples are consumed."""
    done = 0
    for size, count in ramp(config):
        taken = min(count, -(-samples // size))
        done, samples = done + taken, max(samples - taken * size, 0)
    return done + -(-samples // batch_sizes(config)[-1])


def decay_length(config: RunConfig) -> tuple[int | None, str]:
    """Return (steps or samples at which decay ends, "iters" or "samples"); None if the run has no length."""
    t, o = config.training, config.optimizer
    if t.train_samples is not None or (t.train_iters is None and o.lr_decay_samples is not None):
        return o.lr_decay_samples or t.train_samples, "samples"
    return o.lr_decay_iters or t.train_iters, "iters"

"""Batch-size arithmetic: how many samples and microbatches each step has, and how long the run is.

Everything is a pure function of the resolved config and of the samples consumed so far, so that a resumed run, the
dry run and the learning-rate schedule agree.
"""

from collections.abc import Iterator

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.training import parse_batch_schedule


def samples_per_microbatch(config: RunConfig) -> int:
    """Sequences of one microbatch on all data-parallel ranks."""
    assert config.parallel.dp is not None, "validate() resolves dp"
    return config.training.micro_batch_size * config.parallel.dp


def batch_size(config: RunConfig, consumed_samples: int) -> int:
    """Sequences in the step that starts after `consumed_samples` (of a validated config).

    With ramp-up START INCREMENT SAMPLES the batch grows in n = (global - START) / INCREMENT increments, the k-th after
    k·SAMPLES/n samples (Megatron-LM's rule, in whole numbers). With step_batch_size_schedule it is the last size that the
    samples have reached.
    """
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
    """Tokens of each sequence in the step that follows `step` steps.

    With seq_length_warmup START STEPS it grows in a line from START to seq_length over STEPS steps, rounded down to multiples of
    START. Source: sequence-length warm-up (arXiv 2108.06084), DeepSpeed's `seqlen` curriculum with the step START.
    """
    final, warmup = config.training.seq_length, config.training.seq_length_warmup
    if warmup is None or step >= warmup[1]:
        return final
    start, steps = warmup
    return (start + (final - start) * step // steps) // start * start


def tokens_after(config: RunConfig, step: int, samples: int) -> int:
    """Tokens of the first `step` steps, which consumed `samples`, if all of them were of this config."""
    tokens, consumed = samples * config.training.seq_length, 0
    for each in range(min(step, (config.training.seq_length_warmup or (0, 0))[1])):
        size = batch_size(config, consumed)
        tokens -= size * (config.training.seq_length - sequence_length(config, each))
        consumed += size
    return tokens


def batch_sizes(config: RunConfig) -> tuple[int, ...]:
    """Every batch size of the run, in order: one, or all steps of the ramp-up or the schedule."""
    final = config.training.global_batch_size
    assert final is not None, "validate() resolves global_batch_size"
    if schedule := schedule_in_samples(config):
        return tuple(size for _, size in schedule)
    if not config.training.rampup_batch_size:
        return (final,)
    start, increment, samples = config.training.rampup_batch_size
    return (*range(start, final, increment), final) if samples else (final,)


def microbatch_counts(config: RunConfig) -> tuple[int, ...]:
    """Every number of microbatches that a step of the run can have, sorted: each needs its schedule."""
    return tuple(sorted({size // samples_per_microbatch(config) for size in batch_sizes(config)}))


def ramp(config: RunConfig, consumed: int = 0) -> Iterator[tuple[int, int]]:
    """(batch size, steps of it) one after the other, from `consumed` samples until the batch has its final size.

    There are as many as the ramp-up or the schedule has sizes, however many steps it takes.
    """
    while (ends := _next_size(config, consumed)) is not None:
        size = batch_size(config, consumed)
        steps = -(-(ends - consumed) // size)
        yield size, steps
        consumed += steps * size


def _next_size(config: RunConfig, consumed: int) -> int | None:
    """Samples from which on the batch has another size than after `consumed`; None: it has its final size."""
    if schedule := schedule_in_samples(config):
        return next((start for start, _ in schedule if start > consumed), None)
    final, size = config.training.global_batch_size, batch_size(config, consumed)
    if not config.training.rampup_batch_size or size == final:
        return None
    assert final is not None, "validate() resolves global_batch_size"
    start, increment, samples = config.training.rampup_batch_size
    # The size after this one comes from k·SAMPLES/n samples on, rounded up.
    return -(-((size - start) // increment + 1) * samples // ((final - start) // increment))


def schedule_in_samples(config: RunConfig) -> list[tuple[int, int]]:
    """(samples from which on, batch size) of step_batch_size_schedule; empty without one."""
    text, length = config.training.step_batch_size_schedule, config.training.seq_length
    return [] if text is None else [(tokens // length, size) for tokens, size in parse_batch_schedule(text)]


def total_steps(config: RunConfig) -> int:
    """Steps of the whole run. With train_samples: as many whole steps as fit into them.
    Raises ConfigError: neither train_iters nor train_samples is set."""
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
    room, left = max(training.train_samples - samples, 0), 0
    for size, steps in ramp(config, samples):
        taken = min(steps, room // size)
        left, room = left + taken, room - taken * size
        if taken < steps:
            return left
    return left + room // batch_sizes(config)[-1]


def total_samples(config: RunConfig) -> int:
    """Samples that the steps of the whole run consume."""
    return samples_after(config, total_steps(config))


def samples_after(config: RunConfig, steps: int, *, consumed: int = 0) -> int:
    """Samples consumed once `steps` steps follow on the first `consumed` samples."""
    for size, count in ramp(config, consumed):
        taken = min(steps, count)
        consumed, steps = consumed + taken * size, steps - taken
        if not steps:
            return consumed
    return consumed + steps * batch_sizes(config)[-1]


def steps_until(config: RunConfig, samples: int) -> int:
    """Steps after which at least so many samples have been consumed."""
    done = 0
    for size, count in ramp(config):
        taken = min(count, -(-samples // size))
        done, samples = done + taken, max(samples - taken * size, 0)
    return done + -(-samples // batch_sizes(config)[-1])


def decay_length(config: RunConfig) -> tuple[int | None, str]:
    """(steps or samples at which decay ends, "iters" or "samples"); None if the length of the run is not given."""
    t, o = config.training, config.optimizer
    if t.train_samples is not None or (t.train_iters is None and o.lr_decay_samples is not None):
        return o.lr_decay_samples or t.train_samples, "samples"
    return o.lr_decay_iters or t.train_iters, "iters"

"""Batch-size arithmetic: samples and microbatches of each step, and the length of the run.

Everything is a pure function of the resolved config and of the samples consumed so far, so a resumed run, the dry run
and the learning-rate schedule agree."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig, cache_by_object
from megalite.config.training import parse_batch_schedule


def samples_per_microbatch(config: RunConfig) -> int:
    """Return the sequences of one microbatch, over all data-parallel ranks."""
    assert config.parallel.dp is not None, "validate() resolves dp"
    return config.training.micro_batch_size * config.parallel.dp


@cache_by_object()
def size_changes(config: RunConfig) -> list[tuple[int, int]]:
    """Return (first sample, batch size) for each batch size of the run, in order: one, or those of the ramp-up or the
    schedule (validated config).

    With rampup_batch_size START INCREMENT SAMPLES the batch grows in n = (global - START) / INCREMENT increments, the
    k-th after k·SAMPLES/n samples, rounded up (Megatron-LM's rule, in integers)."""
    training, final = config.training, config.training.global_batch_size
    if training.step_batch_size_schedule is not None:
        pairs = parse_batch_schedule(training.step_batch_size_schedule)
        return [(tokens // training.seq_length, size) for tokens, size in pairs]
    assert final is not None, "validate() resolves global_batch_size"
    start, increment, samples = training.rampup_batch_size or (final, 1, 0)
    growing = range(start, final, increment) if samples else ()
    return [
        *((-(-k * samples // len(growing)), size) for k, size in enumerate(growing)),
        (samples if growing else 0, final),
    ]


def batch_size(config: RunConfig, consumed_samples: int) -> int:
    """Return the batch size of the step that starts after `consumed_samples` (validated config)."""
    changes = size_changes(config)
    return changes[bisect_right(changes, consumed_samples, key=itemgetter(0)) - 1][1]


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
    return tuple(size for _, size in size_changes(config))


def ramp_in_words(sizes: Sequence[int], samples: int) -> str:
    """Return the text for batch sizes that change over the first `samples`, in the start line and the dry run."""
    shown = map(str, sizes if len(sizes) < 4 else [sizes[0], f"{sizes[1]}, ... {sizes[-1]}"])
    return f"ramp-up: {', '.join(shown)} sequences over {samples:,} samples"


def microbatch_counts(config: RunConfig) -> tuple[int, ...]:
    """Return all microbatch counts of the run's steps, sorted; each needs its own schedule."""
    return tuple(sorted({size // samples_per_microbatch(config) for size in batch_sizes(config)}))


def ramp(config: RunConfig, consumed: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (batch size, number of steps with it) from `consumed` samples until the batch has its final size.

    The number of pairs depends on the sizes of the ramp-up or the schedule, not on the number of steps."""
    for (_, size), (ends, _) in pairwise(size_changes(config)):
        if consumed < ends:
            steps = -(-(ends - consumed) // size)
            yield size, steps
            consumed += steps * size


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

"""Which samples of each split a run reads, and how many Megatron-LM would lay out for it."""

from megalite.config.batch import batch_size, batch_sizes, steps_left, total_steps
from megalite.config.run import RunConfig


def samples_to_read(config: RunConfig, *, step: int = 0, samples: int = 0) -> dict[str, tuple[int, int]]:
    """[first, stop) of each split for a run that goes on after `step` steps and `samples` samples."""
    left, stop = steps_left(config, step=step, samples=samples), samples
    while left and batch_size(config, stop) != batch_sizes(config)[-1]:
        stop += batch_size(config, stop)
        left -= 1
    found = {"train": (samples, stop + left * batch_sizes(config)[-1])}
    if config.training.eval_interval is not None:
        # The same samples at each evaluation.
        evaluation = config.training.eval_iters * batch_sizes(config)[-1]
        found |= {"valid": (0, evaluation), "test": (0, evaluation)}
    return found


def megatron_lengths(config: RunConfig) -> dict[str, int]:
    """Samples that Megatron-LM asks of each split: its order depends on them.

    Train: train_samples, or train_iters·global_batch_size. Validation: (train_iters // eval_interval + 1)·eval_iters global
    batches, of which this run reads the first eval_iters again and again. Test: eval_iters global batches.
    """
    training, size = config.training, batch_sizes(config)[-1]
    steps = total_steps(config)
    train = steps * size if training.train_samples is None else training.train_samples
    lengths = {"train": train}
    if training.eval_interval is not None:
        evaluations = steps // training.eval_interval + 1
        lengths |= {
            "valid": evaluations * training.eval_iters * size,
            "test": training.eval_iters * size,
        }
    return lengths

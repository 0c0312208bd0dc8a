"""Learning rate and weight decay as pure functions of how far the run is.

Lengths are in steps, or in samples where the run's length is: `Progress` says which. The position is that *after*
the step that is about to be made, so the first step already learns.
"""

import math
from dataclasses import dataclass

from megalite.config.batch import total_samples, total_steps
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig


@dataclass(frozen=True)
class Progress:
    """A position in the run: after `step` steps and `samples` samples."""

    step: int
    samples: int


class Schedules:
    """lr(progress) and weight_decay(progress) of one run.

    Raises:
        ConfigError: warm-up that does not end before the decay does.
    """

    def __init__(self, config: RunConfig) -> None:
        c = config.optimizer
        self._config = c
        self._by_samples = config.training.train_samples is not None
        if self._by_samples:
            self._length = c.lr_decay_samples or total_samples(config)
            warmup, self._wsd_decay = c.lr_warmup_samples, c.lr_wsd_decay_samples
        else:
            self._length = c.lr_decay_iters or total_steps(config)
            warmup, self._wsd_decay = c.lr_warmup_iters, c.lr_wsd_decay_iters
        if c.lr_warmup_fraction is not None:
            warmup = int(c.lr_warmup_fraction * self._length)
        self._warmup = warmup or 0
        if self._warmup >= self._length:
            unit = "samples" if self._by_samples else "steps"
            raise ConfigError(
                f"learning-rate warm-up takes {self._warmup} {unit} but the decay ends after {self._length}; warm up "
                f"for fewer than {self._length}, e.g. --lr-warmup-fraction 0.01"
            )

    def _position(self, progress: Progress) -> int:
        return progress.samples if self._by_samples else progress.step

    @property
    def warmup(self) -> int:
        """Length of the learning rate's warm-up, in what the run's length is in."""
        return self._warmup

    def lr(self, progress: Progress) -> float:
        """Learning rate of the step that ends at `progress`."""
        c, x = self._config, self._position(progress)
        if self._warmup and x <= self._warmup:
            return c.lr_warmup_init + (c.lr - c.lr_warmup_init) * x / self._warmup
        if c.lr_decay_style == "constant":
            return c.lr
        if c.lr_decay_style == "inverse-square-root":
            return max(c.min_lr, c.lr * math.sqrt(max(self._warmup, 1) / max(x, 1)))
        if x >= self._length:
            return c.min_lr
        if c.lr_decay_style == "WSD":
            return self._wsd(x)
        ratio = (x - self._warmup) / (self._length - self._warmup)
        remaining = 1.0 - ratio if c.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return c.min_lr + (c.lr - c.min_lr) * remaining

    def _wsd(self, x: int) -> float:
        """Warm-up, stable, decay (arXiv 2404.06395); the four decays are Megatron-LM's."""
        c = self._config
        assert self._wsd_decay is not None
        start = self._length - self._wsd_decay
        if x <= start:
            return c.lr
        ratio = (x - start) / self._wsd_decay
        remaining = {
            "linear": 1.0 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
            "exponential": 2.0 * 0.5**ratio - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }[c.lr_wsd_decay_style]
        return c.min_lr + (c.lr - c.min_lr) * remaining

    def weight_decay(self, progress: Progress) -> float:
        """Weight decay of the step that ends at `progress`; it moves over the length of the learning-rate decay."""
        c = self._config
        if c.weight_decay_incr_style == "constant":
            return c.weight_decay
        assert c.start_weight_decay is not None
        assert c.end_weight_decay is not None
        ratio = min(self._position(progress) / self._length, 1.0)
        if c.weight_decay_incr_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return c.start_weight_decay + (c.end_weight_decay - c.start_weight_decay) * ratio

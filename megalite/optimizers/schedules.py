"""Compute learning rate, weight decay and loss scale; the first two are pure functions of the run's progress.

The formulas, including their rounding, are Megatron-LM's (`OptimizerParamScheduler`): lengths are in samples, and a run
with a length in steps has full batches."""

import math
from dataclasses import dataclass
from numbers import Real

from megalite.config.batch import batch_sizes, total_steps
from megalite.config.errors import ConfigError
from megalite.config.optimizer import LR_SCHEDULES, OptimizerConfig
from megalite.config.run import RunConfig, scales_loss

_SKIPPED = ("skipped_steps", "skipped_samples", "faults_in_a_row", "overflows_in_a_row")


class LossScaler:
    """The factor that keeps fp16 gradients in range (arXiv 1710.03740).

    It is 1 if neither the network nor the wire is in fp16, and constant if `loss_scale` is set. Otherwise it halves after
    `hysteresis` overflows (good steps in between do not reset the count before a whole window) and doubles after
    `loss_scale_window` good steps, as in Megatron-LM. All ranks detect the same overflows, so they have the same scale
    without communication.

    Learning rate and weight decay do not advance in a skipped step, as in Megatron-LM; `skipped_steps` and
    `skipped_samples` count their lag. `faults_in_a_row` and `overflows_in_a_row` count steps since the last good one that
    were skipped for a reason other than the scale, and those that overflowed at the smallest scale."""

    def __init__(self, config: RunConfig) -> None:
        training = config.training
        scales = scales_loss(config)
        self.dynamic = scales and training.loss_scale is None
        self.scale = (training.loss_scale or training.initial_loss_scale) if scales else 1.0
        self._min = training.min_loss_scale
        self._window = training.loss_scale_window
        self._hysteresis = training.hysteresis
        self._good_steps = 0
        self._overflows_left = training.hysteresis
        self.skipped_steps = self.skipped_samples = self.faults_in_a_row = self.overflows_in_a_row = 0

    def update(self, *, overflow: bool, fault: bool = False, samples: int = 0) -> None:
        """Record one step over `samples` samples. `overflow`: it was skipped because gradients overflowed, so the scale
        may be too large. `fault`: it was skipped for another reason, such as a loss that is not finite."""
        if overflow or fault:
            self.skip(samples)
            self.faults_in_a_row += fault
            self.overflows_in_a_row += overflow and self.scale <= self._min
        else:
            self.faults_in_a_row = self.overflows_in_a_row = 0
        if not self.dynamic or fault:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2.0, self._min)
            return
        self._good_steps += 1
        if self._good_steps == self._window:
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= 2.0

    def skip(self, samples: int) -> None:
        """Let learning rate and weight decay pass over a step of `samples` samples."""
        self.skipped_steps += 1
        self.skipped_samples += samples

    def state(self) -> dict[str, float]:
        skipped: dict[str, float] = {name: count for name in _SKIPPED if (count := getattr(self, name))}
        if not self.dynamic:
            return skipped
        return skipped | {"scale": self.scale, "good_steps": self._good_steps, "overflows_left": self._overflows_left}

    def load_state(self, state: dict[str, float]) -> None:
        """Load a saved state; a fixed scale stays fixed, and without a saved scale the initial one is used."""
        for name in _SKIPPED:
            setattr(self, name, int(state.get(name, 0)))
        if self.dynamic and "scale" in state:
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
            self._overflows_left = int(state["overflows_left"])


@dataclass(frozen=True)
class Progress:
    """A position in the run: after `step` steps and `samples` samples."""

    step: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Decay:
    """A position after the warm-up; all lengths are in samples."""

    at: int
    warmup: float
    length: int
    """Length of warm-up and decay; afterwards every schedule except `constant` returns `least`."""
    final: int  # length of WSD's final decay
    peak: float
    least: float
    config: OptimizerConfig

    @property
    def ratio(self) -> float:
        """The completed share of the decay."""
        return (self.at - self.warmup) / (self.length - self.warmup)

    def between(self, remaining: float) -> float:
        """Return `least` plus the share `remaining` of the distance to `peak`."""
        return self.least + (self.peak - self.least) * remaining


def constant(decay: Decay) -> float:
    return decay.peak


def linear(decay: Decay) -> float:
    return decay.between(1.0 - decay.ratio)


def cosine(decay: Decay) -> float:
    return decay.between(0.5 * (math.cos(math.pi * decay.ratio) + 1.0))


def inverse_square_root(decay: Decay) -> float:
    return max(decay.least, decay.peak * max(decay.warmup, 1) ** 0.5 / max(decay.at, 1) ** 0.5)


def warmup_stable_decay(decay: Decay) -> float:
    """arXiv 2404.06395; the four decays are Megatron-LM's."""
    start = decay.length - decay.final
    if decay.at <= start:
        return decay.peak
    ratio = (decay.at - start) / decay.final
    return decay.between(
        {
            "linear": 1.0 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
            "exponential": 2.0 * 0.5**ratio - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }[decay.config.lr_wsd_decay_style]
    )


class Schedules:
    """lr(progress) and weight_decay(progress) of one run."""

    def __init__(self, config: RunConfig) -> None:
        c = config.optimizer
        self._config, self._style = c, LR_SCHEDULES.get(c.lr_decay_style)
        run = config.training.train_samples
        self._by_samples = run is not None
        if run is not None:
            length, self._unit = c.lr_decay_samples or run, 1
            warmup, final = c.lr_warmup_samples, c.lr_wsd_decay_samples
        else:
            run, self._unit = total_steps(config), batch_sizes(config)[-1]
            length = c.lr_decay_iters or run
            warmup, final = c.lr_warmup_iters, c.lr_wsd_decay_iters
        self._run, self._length = run * self._unit, length * self._unit
        self._wsd_decay = (final or 0) * self._unit
        self._warmup: float = (warmup or 0) * self._unit
        if c.lr_warmup_fraction is not None:
            self._warmup = c.lr_warmup_fraction * self._length
        assert self._warmup < self._length, "the warm-up ends before the decay does"

    def read_at(self, before: Progress, after: Progress) -> Progress:
        """Return the position at which the schedules are evaluated for the step between two positions."""
        return before if self._config.lr_schedule_offset == "megatron" else after

    def _position(self, progress: Progress) -> int:
        return progress.samples if self._by_samples else progress.step * self._unit

    @property
    def warmup(self) -> int:
        """Length of the learning rate's warm-up in the unit of the run's length (steps or samples), rounded down."""
        return int(self._warmup / self._unit)

    def lr(self, progress: Progress) -> float:
        return self._lr(progress, self._config.lr, self._config.min_lr)

    def decoupled_lr(self, progress: Progress) -> float | None:
        """Return the learning rate of word embedding and head, or None if it is not separate."""
        c = self._config
        if c.decoupled_lr is None:
            return None
        return self._lr(progress, c.decoupled_lr, c.min_lr if c.decoupled_min_lr is None else c.decoupled_min_lr)

    def _lr(self, progress: Progress, peak: float, least: float) -> float:
        c, x = self._config, self._position(progress)
        if self._warmup and x <= self._warmup:
            return c.lr_warmup_init + (peak - c.lr_warmup_init) * x / self._warmup
        if x > self._length and c.lr_decay_style != "constant":
            return least
        rate: float = self._style(
            Decay(
                at=x, warmup=self._warmup, length=self._length, final=self._wsd_decay, peak=peak, least=least, config=c
            )
        )
        if not isinstance(rate, Real) or not math.isfinite(rate):
            raise ConfigError(f"lr_decay_style {c.lr_decay_style} returned {rate!r}; it must return a finite number")
        return rate

    def weight_decay(self, progress: Progress) -> float:
        """Return the weight decay at a position of `read_at`; it changes over the length of the run."""
        c = self._config
        if c.weight_decay_incr_style == "constant":
            return c.weight_decay
        assert c.start_weight_decay is not None and c.end_weight_decay is not None
        if self._position(progress) > self._run:
            return c.end_weight_decay
        ratio = self._position(progress) / self._run
        if c.weight_decay_incr_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return c.start_weight_decay + (c.end_weight_decay - c.start_weight_decay) * ratio

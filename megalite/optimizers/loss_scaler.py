"""Loss scaling for fp16."""

from megalite.config.training import TrainingConfig


class LossScaler:
    """The factor that keeps fp16 gradients in range (arXiv 1710.03740).

    Constant 1 without fp16 and constant where `loss_scale` is given; else it halves after `hysteresis` steps in a row
    (of those that overflow; good ones in between do not reset the count before a whole window) and doubles after
    `loss_scale_window` good ones, as in Megatron-LM. Every rank sees the same overflows, so every rank has the same
    scale without asking.

    Learning rate and weight decay wait for a step that overflowed, as in Megatron-LM, and for one that was skipped for a
    loss or gradient that is not finite in whatever precision: `skipped_steps` and `skipped_samples` say how far they are
    behind the run.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.dynamic = config.precision == "fp16" and config.loss_scale is None
        self.scale = 1.0
        if config.precision == "fp16":
            self.scale = config.loss_scale or config.initial_loss_scale
        self._min = config.min_loss_scale
        self._window = config.loss_scale_window
        self._hysteresis = config.hysteresis
        self._good_steps = 0
        self._overflows_left = config.hysteresis
        self.skipped_steps = self.skipped_samples = 0

    def update(self, *, overflow: bool, samples: int = 0) -> None:
        """Take note of one step, over so many samples, and whether it was skipped."""
        if overflow:
            self.skipped_steps += 1
            self.skipped_samples += samples
        if not self.dynamic:
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

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: nothing of a scale that does not move."""
        skipped: dict[str, float] = {}
        if self.skipped_steps:
            skipped = {"skipped_steps": self.skipped_steps, "skipped_samples": self.skipped_samples}
        if not self.dynamic:
            return skipped
        return skipped | {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state(self, state: dict[str, float]) -> None:
        """Take up a saved state; a scale that this run fixes stays fixed.

        After a run without a dynamic scale (fp32, say) there is nothing to take up: the initial scale stands.
        """
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.skipped_samples = int(state.get("skipped_samples", 0))
        if self.dynamic and "scale" in state:
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
            self._overflows_left = int(state["overflows_left"])

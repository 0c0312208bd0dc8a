"""Loss scaling for fp16."""

from megalite.config.training import TrainingConfig


class LossScaler:
    """The factor that keeps fp16 gradients in range (arXiv 1710.03740).

    Constant 1 without fp16 and constant where `loss_scale` is given; else it halves after `hysteresis` steps in a row
    (of those that overflow; good ones in between do not reset the count before a whole window) and doubles after
    `loss_scale_window` good ones, as in Megatron-LM. Every rank sees the same overflows, so every rank has the same
    scale without asking.
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

    def update(self, *, overflow: bool) -> None:
        """Take note of one step."""
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
        if not self.dynamic:
            return {}
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state(self, state: dict[str, float]) -> None:
        """Take up a saved state; a scale that this run fixes stays fixed.

        After a run without a dynamic scale (fp32, say) there is nothing to take up: the initial scale stands.
        """
        if self.dynamic and state:
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
            self._overflows_left = int(state["overflows_left"])

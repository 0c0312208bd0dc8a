"""An alarm for losses that jump."""

import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from megalite.config.run import RunConfig
from megalite.training.sinks import last_losses

_LEAST = 16
"""Losses that say something of how they scatter."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_FLOOR = 0.002
"""Share of the median loss that counts as scatter at least: else a loss that hardly moves would alarm at a breath."""


class LossSpikes:
    """Scores each loss by those of the steps before it: z = (loss - median) / (1.4826 · median absolute deviation).

    Neither moves by single outliers, nor does a loss that falls slowly, as they do, score high. The alarm is raised once:
    it is armed again when a score is below half the threshold. A loss that stays high is the usual one after half a window.

    Args:
        window: steps that a loss is compared with.
        threshold: score from which on a loss is a spike; 0: none ever is.
    """

    def __init__(self, *, window: int, threshold: float) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._least = min(window, _LEAST)
        self._threshold = threshold
        self._armed = True

    @classmethod
    def of(cls, config: RunConfig, before: Iterable[float] = ()) -> "LossSpikes":
        """That of a run.

        Args:
            before: losses of the steps before this start, the oldest first: the alarm goes on as if it had not stopped.
        """
        made = cls(window=config.logging.loss_spike_window, threshold=config.logging.loss_spike_threshold)
        for loss in before:
            made.score(loss)
        return made

    @classmethod
    def resumed(cls, config: RunConfig, *, reads: bool) -> "LossSpikes":
        """That of a run that may go on from an earlier start, whose losses are in its metrics.jsonl. Called once that is open
        for writing: steps that will be made again are no longer in it.

        Args:
            reads: this rank looks there; the others, which tell nothing, begin anew.
        """
        logging, before = config.logging, list[float]()
        if reads and logging.run_dir is not None:
            before = last_losses(Path(logging.run_dir) / "metrics.jsonl", 2 * logging.loss_spike_window)
        return cls.of(config, before)

    def score(self, loss: float) -> tuple[float | None, bool]:
        """The loss's score (None while too few are known) and whether the alarm goes off. NaN has a fate of its own
        (`on_non_finite`) and is passed over."""
        if self._threshold <= 0.0 or loss - loss != 0.0:
            return None, False
        score = None
        if len(self._losses) >= self._least:
            median = statistics.median(self._losses)
            scatter = _NORMAL * statistics.median(abs(other - median) for other in self._losses)
            score = (loss - median) / max(scatter, _FLOOR * abs(median), 1e-12)
        self._losses.append(loss)
        if score is None:
            return None, False
        alarm = self._armed and score >= self._threshold
        self._armed = (self._armed and not alarm) or score < self._threshold / 2
        return score, alarm

    def words(self, loss: float, score: float) -> str:
        """For the log."""
        return (
            f"loss {loss:.4f} is a spike: {score:.1f} times the usual scatter above the median of the last "
            f"{len(self._losses)} steps (loss_spike_threshold {self._threshold:g}); if it stays, go on from a checkpoint "
            "before it with a lower --lr or other data"
        )

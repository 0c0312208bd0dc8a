"""When the second moment of a 1-bit optimizer stops moving."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megalite.config.batch import batch_size
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Schedules
from megalite.topology.group import Group


def warmup_steps(config: RunConfig) -> int:
    """Steps in which the learning rate rises.

    Raises:
        ConfigError: as `Schedules`.
    """
    length = Schedules(config).warmup
    if config.training.train_samples is None:
        return length
    steps = samples = 0
    while samples < length:
        samples += batch_size(config, samples)
        steps += 1
    return steps


class FreezePoint:
    """The last step of the warm-up, F: whether a step is frozen depends on its number, on F and, with fp16, on the steps
    that were skipped.

    F is `freeze_step`. Without it, it is the first multiple t of Δ = 1/(1-β₂) after the warm-up of the learning rate at
    which ‖v̂‖₁, over all parameters, has been stable for Δ steps (arXiv 2102.02888, section 4, which asks this of
    shrinking alone: with a moment that still grows every step after it would be too long):

        freeze_threshold ≤ ‖v̂_t‖₁/‖v̂_{t-Δ}‖₁ ≤ 1/freeze_threshold

    Args:
        world: all ranks, which together count each element of the moment once.

    Raises:
        ConfigError: freeze_step below 1; without it, as `warmup_steps`.
    """

    def __init__(self, config: RunConfig, *, world: Group) -> None:
        c = config.optimizer
        if c.freeze_step is not None and c.freeze_step < 1:
            raise ConfigError(
                f"freeze_step is {c.freeze_step}, but {c.optimizer} needs at least one step with whole gradients for its "
                "second moment; take 15 to 25 % of the run, or leave it out to have it found while training"
            )
        self.step = c.freeze_step
        """F, once it is known."""
        self.updates: int | None = None
        """Updates that the frozen second moment has had, once a frozen step has been made."""
        self._given = c.freeze_step
        self._threshold, self._world = c.freeze_threshold, world
        self._warmup = warmup_steps(config) if c.freeze_step is None else 0
        self._every = max(round(1.0 / (1.0 - c.adam_beta2)), 1)
        self._last: tuple[int, float] | None = None

    def at(self, step: int) -> "FreezePoint":
        """Another one, of a warm-up that ends after `step` whatever happens."""
        other = copy.copy(self)
        other.step = other._given = step
        other.updates = other._last = None
        return other

    def frozen(self, step: int, updates: int) -> bool:
        """The step, from 1, is after the warm-up, in which there were `updates` updates if it ended just before.

        Steps that fp16 skipped are no part of the warm-up: a moment of none would be frozen for ever.
        """
        if self.step is None or step <= self.step:
            return False
        return self.updates is not None or self._given is None or updates >= self._given

    def observe(self, step: int, norm: Callable[[], torch.Tensor]) -> str | None:
        """Look at the second moment after an update of the warm-up; a line for the log if the warm-up ends with it.

        Args:
            norm: this rank's part of ‖v̂‖₁, fp64; called on few steps.

        Collectives: on every Δ-th step, unless freeze_step is given, one all-reduce of a number over the world.
        """
        if self.step is not None or step % self._every:
            return None
        total = norm().view(1).clone()
        self._world.all_reduce(total)
        before, self._last = self._last, (step, float(total.item()))
        if step <= self._warmup or before is None or before[0] != step - self._every or before[1] <= 0.0:
            return None
        ratio = self._last[1] / before[1]
        if not self._threshold <= ratio <= 1.0 / self._threshold:
            return None
        self.step = step
        return (
            f"step {step}: the second moment is stable (its norm is {ratio:.4f} of that {self._every} steps ago, "
            f"freeze_threshold is {self._threshold:g}): from step {step + 1} on signs are exchanged instead of gradients"
        )

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps: F, if it was found or has been passed, and the last norm that was looked at."""
        passed = self._given is None or self.updates is not None
        return {
            "freeze_step": self.step if passed else None,
            "frozen_updates": self.updates,
            "second_moment_norm": None if self._last is None else list(self._last),
        }

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Take up saved `counters`; those of another optimizer are passed over.

        Raises:
            ConfigError: freeze_step is given and is not where the warm-up has ended already.
        """
        if "frozen_updates" not in counters:
            return
        step, updates, last = (
            counters["freeze_step"],
            counters["frozen_updates"],
            counters["second_moment_norm"],
        )
        if step is not None and self._given is not None and int(step) != self._given:
            raise ConfigError(
                f"freeze_step is {self._given}, but the checkpoint's warm-up ended after step {step} already; give "
                f"--freeze-step {step}, or leave it out"
            )
        if step is not None:
            self.step = int(step)
        self.updates = None if updates is None else int(updates)
        self._last = None if last is None else (int(last[0]), float(last[1]))

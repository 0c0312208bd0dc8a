"""Implement 0/1 Adam: ever rarer updates of the second moment, then local steps between exchanges of signs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config.optimizer import OptimizerConfig, state_formats
from megalite.kernels.optimizer_ops import Direction
from megalite.optimizers.base import Exchange, FlatParameter, Update
from megalite.optimizers.onebit import OneBitOptimizer, ranges, zero_without_moment


def updates_variance(step: int, scaler: int) -> bool:
    """Return whether a step of the warm-up updates the second moment: the first `scaler` updates are 1 step apart, the
    next 2, then 4, ..."""
    interval = 1
    while step > scaler * interval:
        step -= scaler * interval
        interval *= 2
    return step % interval == 0


def exchanges(local: int, *, scaler: int, clipper: int) -> bool:
    """Return whether step `local` after the warm-up, from 1, ends with an exchange: every step at first, half as often
    after every `scaler` steps, but at least every `clipper` steps."""
    doublings = min((local - 1) // scaler, clipper.bit_length())
    return local % min(1 << doublings, clipper) == 0


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (arXiv 2202.06009), with decoupled weight decay and bias correction. In the warm-up, the steps of
    `updates_variance` update both moments by whole gradients; the other steps update the first moment by the mean of
    gradients by signs. Then v is frozen, d = √v̂ + ε, and each rank steps alone between exchanges. With the parameters a
    after the last exchange, the decay D since then, and S = Σ lr̂ over the steps since then:

        m_i = β₁m_i + (1-β₁)g_i;   u_i ← (1 - lr·λ)u_i + lr̂·m_i, lr̂ = lr/(1-β₁ᵗ);   x_i = D·a - u_i/d

    An exchange computes m̄, the mean of u_i/S by signs; all ranks continue from x = a = D·a - S·m̄/d, m = (1-β₁ᵗ)m̄.

    u_i/S has the unit of gradients, so errors of the sign compression stay valid when the warm-up ends. x is recomputed
    from values that are equal on all ranks: subtracting a rank's local steps would leave replicas apart by rounding.
    Between exchanges replicas differ in x_i, m_i and u_i; checkpoints contain those of each replica.
    """

    from_zeros = frozenset(("local_update", "synced_param"))  # both are initialized when the warm-up ends

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig, *args: Any, **common: Any) -> None:
        super().__init__(parameters, config, *args, states=tuple(state_formats(config)), **common)
        self._variance_updates = 0
        self._decay, self._rate = 1.0, 0.0
        """D and S."""

    def reduces_gradients(self, step: int) -> bool:
        frozen = self.freeze.frozen(step, self.updates)
        return not frozen and updates_variance(step, self.config.variance_update_scaler)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        frozen = self.freeze.frozen(update.step, self.updates)
        self.updates += 1
        if exchange is None:
            assert not frozen, "gradients are not reduced"
            self._variance_updates += 1
        else:
            self._bound(max(self._variance_updates, 1))
        if frozen and exchange is not None:
            self._local_step(update, exchange)
            return
        for flat in self.parameters:
            self._warmup_step(flat, update, exchange)
        self._observe(update.step, self._variance_correction)

    @property
    def _variance_correction(self) -> float:
        return 1.0 - self.config.adam_beta2 ** max(self._variance_updates, 1)

    @property
    def _momentum_correction(self) -> float:
        return 1.0 - self.config.adam_beta1**self.updates

    def _step_along(self, flat: FlatParameter, momentum: torch.Tensor, factor: float) -> None:
        below = math.sqrt(self._variance_correction)
        direction = Direction(scale=below, eps=self.config.adam_eps * below)
        moment = self._states[flat.param]["exp_avg_sq"]
        for part in ranges(flat.param):
            direction.add_to(flat.param.data[part], momentum[part], moment[part], factor=factor)

    def _warmup_step(self, flat: FlatParameter, update: Update, exchange: Exchange | None) -> None:
        c, grad, states = self.config, flat.grad, self._states[flat.param]
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        if exchange is None:
            exp_avg_sq.mul_(c.adam_beta2).addcmul_(grad, grad, value=1.0 - c.adam_beta2)
        else:
            exchange(flat, grad)
        zero_without_moment(exp_avg.lerp_(grad, 1.0 - c.adam_beta1), exp_avg_sq)
        if flat.decay:
            flat.param.data.mul_(update.decay_factor)
        self._step_along(flat, exp_avg, -update.lr / self._momentum_correction)

    def _local_step(self, update: Update, exchange: Exchange) -> None:
        c = self.config
        if self.freeze.updates is None:
            self.freeze.updates = self.updates
            for flat in self.parameters:
                self._states[flat.param]["synced_param"].copy_(flat.param.data)
        assert self.freeze.step is not None
        local = update.step - self.freeze.step
        due = exchanges(local, scaler=c.local_step_scaler, clipper=c.local_step_clipper)
        rate = update.lr / self._momentum_correction
        self._decay *= update.decay_factor
        self._rate += rate
        # If no parameter has moved (the learning rate is 0), there is no mean step either.
        due = due and self._rate > 0.0
        for flat in self.parameters:
            param, states = flat.param, self._states[flat.param]
            exp_avg, own = states["exp_avg"], states["local_update"]
            zero_without_moment(exp_avg.lerp_(flat.grad, 1.0 - c.adam_beta1), states["exp_avg_sq"])
            if flat.decay:
                own.mul_(update.decay_factor)
            own.add_(exp_avg, alpha=rate)
            torch.mul(states["synced_param"], self._decay if flat.decay else 1.0, out=param.data)
            if due:
                self._exchange_steps(flat, exchange)
            else:
                self._step_along(flat, own, -1.0)
        if due:
            self._decay, self._rate = 1.0, 0.0

    def _exchange_steps(self, flat: FlatParameter, exchange: Exchange) -> None:
        param, states = flat.param, self._states[flat.param]
        mean = states["local_update"].div_(self._rate)
        exchange(flat, mean)
        self._step_along(flat, zero_without_moment(mean, states["exp_avg_sq"]), -self._rate)
        torch.mul(mean, self._momentum_correction, out=states["exp_avg"])
        states["synced_param"].copy_(param.data)
        mean.zero_()

    def counters(self) -> dict[str, Any]:
        return super().counters() | {
            "variance_updates": self._variance_updates,
            "local_decay": self._decay,
            "local_rate": self._rate,
        }

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        super().load_counters(counters)
        self._variance_updates = int(counters.get("variance_updates", self.updates))
        self._decay = float(counters.get("local_decay", 1.0))
        self._rate = float(counters.get("local_rate", 0.0))

"""Implement 1-bit Adam and 0/1 Adam, the freeze point of 1-bit optimizers, and the base class for steps with exchanged signs."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.batch import steps_until
from megalite.config.errors import ConfigError
from megalite.config.optimizer import OptimizerConfig, state_formats
from megalite.config.run import RunConfig
from megalite.kernels.optimizer_ops import Direction
from megalite.kernels.registry import Kernels
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import Context, Exchange, FlatParameter, Optimizer, Update
from megalite.optimizers.lamb import TensorSums, block_size
from megalite.optimizers.schedules import Schedules
from megalite.topology.group import Group


def warmup_steps(config: RunConfig) -> int:
    length = Schedules(config).warmup
    return length if config.training.train_samples is None else steps_until(config, length)


class FreezePoint:
    """Determines the last step F of the warm-up. Whether a step is frozen depends on its number, on F and, with fp16, on
    the skipped steps.

    F is `freeze_step`, if set. Otherwise it is the first multiple t of Δ = 1/(1-β₂) after the learning rate's warm-up at
    which ‖v̂‖₁, over all parameters, has been stable for Δ steps:

        freeze_threshold ≤ ‖v̂_t‖₁/‖v̂_{t-Δ}‖₁ ≤ 1/freeze_threshold

    Source: arXiv 2102.02888, section 4, which has only the lower limit. But if a moment that still grows were frozen, all
    later steps would be too long.

    `world`: all ranks, which together count each element of the moment once."""

    def __init__(self, config: RunConfig, *, world: Group) -> None:
        c = config.optimizer
        self.step = c.freeze_step  # F, once it is known
        self.updates: int | None = None
        """Number of updates of the frozen second moment; None before the first frozen step."""
        self.bounded: int | None = None
        """Number of updates of the second moment when it was last bounded (`onebit.bound_moments`)."""
        self._configured = c.freeze_step
        self._threshold, self._world = c.freeze_threshold, world
        self._warmup = warmup_steps(config) if c.freeze_step is None else 0
        self._every = max(round(1.0 / (1.0 - c.adam_beta2)), 1)
        self._last: tuple[int, float] | None = None

    def at(self, step: int) -> "FreezePoint":
        """Return a freeze point of a warm-up that ends after `step`."""
        other = copy.copy(self)
        other.step = other._configured = step
        other.updates = other.bounded = other._last = None
        return other

    def frozen(self, step: int, updates: int) -> bool:
        """Return whether the step, from 1, is after the warm-up. `updates`: number of updates before the step.

        Steps that fp16 skips do not count for the warm-up; otherwise a moment without updates could be frozen."""
        if self.step is None or step <= self.step:
            return False
        return self.updates is not None or self._configured is None or updates >= self._configured

    def observe(self, step: int, norm: Callable[[], torch.Tensor]) -> str | None:
        """Check the second moment after an update of the warm-up; return a line for the log if the warm-up ends.
        `norm`: computes this rank's part of ‖v̂‖₁, fp64; called on few steps.

        Collectives: on every Δ-th step, unless freeze_step is set, one all-reduce of a number over the world."""
        if self.step is not None or step % self._every:
            return None
        total = norm().view(1).clone()
        self._world.all_reduce(total)
        with self._world.heartbeat.synchronise():
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
        passed = self._configured is None or self.updates is not None
        return {
            "freeze_step": self.step if passed else None,
            "frozen_updates": self.updates,
            "bounded_updates": self.bounded,
            "second_moment_norm": None if self._last is None else list(self._last),
        }

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load saved `counters`; those of another optimizer are ignored. Raises ConfigError: the warm-up has ended, at
        another step than freeze_step."""
        if "frozen_updates" not in counters:
            return
        step, last = counters["freeze_step"], counters["second_moment_norm"]
        if step is not None and self._configured not in (None, step):
            raise ConfigError(
                f"freeze_step is {self._configured}, but the checkpoint's warm-up ended after step {step} already; use "
                f"--freeze-step {step}, or omit it"
            )
        self.step = self.step if step is None else step
        self.updates = counters["frozen_updates"]
        self.bounded = counters.get("bounded_updates")  # older checkpoints lack it
        self._last = None if last is None else (last[0], last[1])


NOISE_SHARE = 0.01
"""Share of a mean square (of a tensor's second moment, or ε²) below which a second moment is not used as it is."""


def bound_moments(
    optimizer: Optimizer, sums: TensorSums, freeze: FreezePoint, *, updates: int, by_bucket: bool
) -> None:
    """Raise or clear small second moments, in place and once for each v that divides signs, so that steps are bounded.

    A decoded sign has the size of its whole tensor. Divided by the √v̂ of an element far below the tensor's mean, it could
    be a step of any length: the gradients of key biases, for example, are rounding noise, as softmax is invariant to them.
    With V the tensor's mean of v̂,

        v̂ ≤ 0.01·V and v̂ ≤ 0.01·ε²:  v = 0; Adam would hardly move the element, and `zero_without_moment` does not move it
        v̂ ≤ 0.01·V only:              v̂ = 0.01·V; it steps at most 10 times as far as an element of mean size

    Errors of the sign compression do not change. Checkpoints contain the new v.

    `sums`: over the optimizer's parameters; V is of whole tensors in any layout. `updates`: number of updates of v.
    `by_bucket`: signs have the size of all tensors of a bucket, so V is the mean over them.

    Collectives: one all-reduce of two fp64 numbers per tensor, or none if v is bounded already."""
    if freeze.bounded == updates:
        return
    freeze.bounded = updates
    moments = [(flat, optimizer.state(flat.param)["exp_avg_sq"]) for flat in optimizer.parameters]
    totals, counts = sums.read(sums.totals(moments, lambda values: values.sum(dtype=torch.float64)))
    quiet = NOISE_SHARE * optimizer.config.adam_eps**2 * (1.0 - optimizer.config.adam_beta2**updates)
    for flat, moment in moments:
        columns = [sums.column(each) for each in flat.segments]
        for each, column in zip(flat.segments, columns, strict=True):
            averaged = columns if by_bucket else [column]
            lowest = NOISE_SHARE * sum(totals[one] for one in averaged) / sum(counts[one] for one in averaged)
            part = moment[each.start : each.stop]
            part.copy_(torch.where(part <= min(lowest, quiet), 0.0, part.clamp(min=lowest)))


def zero_without_moment(values: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the values with a second moment v of 0. Elements without a gradient in the warm-up (see
    `bound_moments`) have no scale for a step, so they do not move."""
    # v is not negative. On a CPU a product is several times as fast as a mask.
    return values.mul_(moment.sign())


def ranges(parameter: torch.Tensor) -> Iterator[slice]:
    """Yield slices of all elements, with LAMB's block size."""
    size = block_size(parameter)
    for start in range(0, parameter.numel(), size):
        yield slice(start, min(start + size, parameter.numel()))


UNCORRECTED = 1 << 30
"""Number of updates with a bias correction of 1, for DeepSpeed's rule, which has no correction."""


class OneBitOptimizer(Optimizer):
    """An optimizer that averages its state by signs once its second moment is frozen. `freeze`: the freeze point.
    `group`: all ranks of the step."""

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        config: OptimizerConfig,
        freeze: FreezePoint,
        *,
        group: Group,
        kernels: Kernels | None = None,
        states: Sequence[str] = (),
    ) -> None:
        super().__init__(parameters, config, states)
        self.freeze, self._group, self._kernels = freeze, group, kernels
        self._sums = TensorSums(parameters, group=group, device=parameters[0].param.device)
        self._by_bucket, self._published = config.onebit_scale == "bucket", config.deepspeed_onebit

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        world = context.topology.world
        freeze = FreezePoint(config, world=world)
        return cls(parameters, config.optimizer, freeze, group=world, kernels=context.kernels)

    def for_measurement(self, parameters: Sequence[FlatParameter], *, freeze_step: int) -> Optimizer:
        freeze, group = self.freeze.at(freeze_step), Group.solo("alone")
        return type(self)(parameters, self.config, freeze, group=group, kernels=self._kernels)

    def _bound(self, updates: int) -> None:
        if not self._published:
            bound_moments(self, self._sums, self.freeze, updates=updates, by_bucket=self._by_bucket)

    def _observe(self, step: int, correction: float) -> None:
        """Check whether the warm-up ends with this step. `correction`: bias correction 1 - β₂ᵏ of v̂."""

        def norm() -> torch.Tensor:
            total = torch.zeros((), dtype=torch.float64, device=self._sums.device)
            for flat in self.parameters:
                if flat.segments and flat.segments[0].counts:
                    total += self.state(flat.param)["exp_avg_sq"].sum(dtype=torch.float64)
            return total / correction

        note = self.freeze.observe(step, norm)
        if note:
            self.notes.append(note)

    def counters(self) -> dict[str, Any]:
        return self.freeze.counters()

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self.freeze.load_counters(counters)


class FrozenMoments(OneBitOptimizer):
    """Steps by a base optimizer in the warm-up. Then v is frozen, and ranks average their momenta:

        m_i = β₁m + (1-β₁)g_i;   m = mean over ranks of m_i, by signs;   a step along m̂/(√v̂ + ε)

    v̂ = v/(1-β₂ᵏ), with k updates of v before the freeze: without the correction every step after a short warm-up would be
    1/√(1-β₂ᵏ) times too long. DeepSpeed's rule has neither v̂ nor m̂ and does not bound v. Elements without a gradient in
    the warm-up never move afterwards, as with the masks that users of DeepSpeed write by hand."""

    _base: Optimizer  # the warm-up's optimizer; its states `exp_avg` and `exp_avg_sq` are the moments

    def reduces_gradients(self, step: int) -> bool:
        return not self.freeze.frozen(step, self.updates)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        if self.reduces_gradients(update.step):
            self._base.updates = UNCORRECTED if self._published else self.updates
            self._base.step(update)
            self.updates += 1
            self._warmed()
            self._observe(update.step, 1.0 - self.config.adam_beta2**self.updates)
            return
        assert exchange is not None, "gradients are not reduced"
        begins = self.freeze.updates is None
        if begins:
            self.freeze.updates = max(self.updates, 1)
        assert self.freeze.updates is not None
        self._bound(self.freeze.updates)
        if begins:
            self._freeze()
        self.updates += 1
        self._frozen_step(update, exchange)

    def _warmed(self) -> None:
        """Update further states after a step of the warm-up."""

    def _freeze(self) -> None:
        """Initialize further states before the first frozen step."""

    @abstractmethod
    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        """Step along the exchanged momentum; `updates` already includes this step."""

    @property
    def _variance_correction(self) -> float:
        assert self.freeze.updates is not None
        return 1.0 if self._published else 1.0 - self.config.adam_beta2**self.freeze.updates

    @property
    def _direction(self) -> Direction:
        c = self.config
        if self._published:
            return Direction(scale=1.0, eps=c.adam_eps)
        return Direction.at(
            self.updates, beta1=c.adam_beta1, beta2=c.adam_beta2, eps=c.adam_eps, frozen=self.freeze.updates
        )

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return self._base.state(parameter)


class OneBitAdam(FrozenMoments):
    """1-bit Adam (arXiv 2102.02888), with decoupled weight decay, bias correction as in AdamW, and a size of signs for
    each tensor. In bucket scale all signs of a bucket have one size, as in the paper."""

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig, *args: Any, **common: Any) -> None:
        super().__init__(parameters, config, *args, **common)
        self._base = AdamW(parameters, config)

    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        direction = self._direction
        for flat in self.parameters:
            exp_avg, exp_avg_sq = self.state(flat.param).values()
            exp_avg.lerp_(flat.grad, 1.0 - self.config.adam_beta1)
            exchange(flat, exp_avg)
            for part in ranges(flat.param):
                values, momentum, moment = flat.param.data[part], exp_avg[part], exp_avg_sq[part]
                zero_without_moment(momentum, moment)
                if flat.decay:
                    values.mul_(update.decay_factor)
                direction.add_to(values, momentum, moment, factor=-update.lr)


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
    from values that are equal on all ranks: subtracting each rank's local steps would leave replicas apart by rounding.
    Between exchanges replicas differ in x_i, m_i and u_i; checkpoints contain those of each replica."""

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

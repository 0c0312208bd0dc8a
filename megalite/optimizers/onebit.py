"""1-bit optimizers: when their second moment stops moving, and what they have in common once ranks exchange signs."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.batch import steps_until
from megalite.config.errors import ConfigError
from megalite.config.optimizer import OptimizerConfig
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
    """The last step of the warm-up, F: whether a step is frozen depends on its number, on F and, with fp16, on the steps
    that were skipped.

    F is `freeze_step`. Without it, it is the first multiple t of Δ = 1/(1-β₂) after the warm-up of the learning rate at
    which ‖v̂‖₁, over all parameters, has been stable for Δ steps (arXiv 2102.02888, section 4, which asks this of
    shrinking alone: with a moment that still grows every step after it would be too long):

        freeze_threshold ≤ ‖v̂_t‖₁/‖v̂_{t-Δ}‖₁ ≤ 1/freeze_threshold

    `world`: all ranks, which together count each element of the moment once."""

    def __init__(self, config: RunConfig, *, world: Group) -> None:
        c = config.optimizer
        self.step = c.freeze_step  # F, once it is known
        self.updates: int | None = None
        """Updates that the frozen second moment has had, once a frozen step has been made."""
        self.bounded: int | None = None
        """Updates that the second moment had had when it was last bounded (`onebit.bound_moments`)."""
        self._given = c.freeze_step
        self._threshold, self._world = c.freeze_threshold, world
        self._warmup = warmup_steps(config) if c.freeze_step is None else 0
        self._every = max(round(1.0 / (1.0 - c.adam_beta2)), 1)
        self._last: tuple[int, float] | None = None

    def at(self, step: int) -> "FreezePoint":
        """Another one, of a warm-up that ends after `step` whatever happens."""
        other = copy.copy(self)
        other.step = other._given = step
        other.updates = other.bounded = other._last = None
        return other

    def frozen(self, step: int, updates: int) -> bool:
        """The step, from 1, is after the warm-up, in which there were `updates` updates if it ended just before.

        Steps that fp16 skipped are no part of the warm-up: a moment of none would be frozen forever.
        """
        if self.step is None or step <= self.step:
            return False
        return self.updates is not None or self._given is None or updates >= self._given

    def observe(self, step: int, norm: Callable[[], torch.Tensor]) -> str | None:
        """Look at the second moment after an update of the warm-up; a line for the log if the warm-up ends with it.
        `norm`: this rank's part of ‖v̂‖₁, fp64; called on few steps.

        Collectives: on every Δ-th step, unless freeze_step is given, one all-reduce of a number over the world."""
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
        passed = self._given is None or self.updates is not None
        return {
            "freeze_step": self.step if passed else None,
            "frozen_updates": self.updates,
            "bounded_updates": self.bounded,
            "second_moment_norm": None if self._last is None else list(self._last),
        }

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load saved `counters`; those of another optimizer are ignored. Raises ConfigError: freeze_step is given and
        is not where the warm-up has ended already."""
        if "frozen_updates" not in counters:
            return
        step, last = counters["freeze_step"], counters["second_moment_norm"]
        if step is not None and self._given not in (None, step):
            raise ConfigError(
                f"freeze_step is {self._given}, but the checkpoint's warm-up ended after step {step} already; give "
                f"--freeze-step {step}, or leave it out"
            )
        self.step = self.step if step is None else step
        self.updates = counters["frozen_updates"]
        self.bounded = counters.get("bounded_updates")  # checkpoints of before moments were bounded have none
        self._last = None if last is None else (last[0], last[1])


NOISE_SHARE = 0.01
"""Of a mean square (of a tensor's second moment, of ε): what is below is not stepped by its own size."""


def bound_moments(
    optimizer: Optimizer, sums: TensorSums, freeze: FreezePoint, *, updates: int, by_bucket: bool
) -> None:
    """In place, once for each second moment v that signs are divided by: make it one that bounds their steps.

    A sign stands for the size of its whole tensor. Over the √v̂ of an element far below the tensor's that is a step of any
    length: key biases have rounding noise for gradients, as softmax does not see them. With V the tensor's mean of v̂,

        v̂ ≤ 0.01·V and v̂ ≤ 0.01·ε²:  v = 0; Adam would hardly move the element, and `zero_without_moment` leaves it where it is
        v̂ ≤ 0.01·V alone:             v̂ = 0.01·V; it steps no more than 10 times as far as one of mean size

    What signs leave out stays owed as it is. The new v is what checkpoints have.

    `sums`: over the optimizer's parameters; V is of whole tensors, however they are split. `updates`: that v has had.
    `by_bucket`: signs stand for the size of all tensors of a bucket, so V is the mean over those.

    Collectives: one all-reduce of two fp64 numbers per tensor, or nothing where v is bounded already."""
    if freeze.bounded == updates:
        return
    freeze.bounded = updates
    table = sums.zeros(2)
    moments = [optimizer.state(flat.param)["exp_avg_sq"] for flat in optimizer.parameters]
    for flat, moment in zip(optimizer.parameters, moments, strict=True):
        for each in flat.segments:
            if each.counts:
                table[0, sums.column(each)] += moment[each.start : each.stop].sum(dtype=torch.float64)
                table[1, sums.column(each)] += each.stop - each.start
    sums.all_reduce(table)
    totals, counts = sums.read(table)
    quiet = NOISE_SHARE * optimizer.config.adam_eps**2 * (1.0 - optimizer.config.adam_beta2**updates)
    for flat, moment in zip(optimizer.parameters, moments, strict=True):
        columns = [sums.column(each) for each in flat.segments]
        for each, column in zip(flat.segments, columns, strict=True):
            those = columns if by_bucket else [column]
            lowest = NOISE_SHARE * sum(totals[one] for one in those) / sum(counts[one] for one in those)
            part = moment[each.start : each.stop]
            part.copy_(torch.where(part <= min(lowest, quiet), 0.0, part.clamp(min=lowest)))


def zero_without_moment(values: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """In place: 0 where the second moment v is. What got no gradient in the warm-up (see `bound_moments`) has no scale to
    step by, so it stays as it is."""
    # v is not negative. A product is several times as fast as a mask, on a CPU.
    return values.mul_(moment.sign())


def ranges(parameter: torch.Tensor) -> Iterator[slice]:
    """All elements, as many at a time as LAMB takes."""
    size = block_size(parameter)
    for start in range(0, parameter.numel(), size):
        yield slice(start, min(start + size, parameter.numel()))


UNCORRECTED = 1 << 30
"""Updates after which a bias correction is 1: those of DeepSpeed's rule, which has none."""


class OneBitOptimizer(Optimizer):
    """An optimizer that averages its own state by signs once its second moment is frozen. `freeze`: when that is.
    `group`: all ranks that make the step."""

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
        self._by_bucket, self._published = config.onebit_scale == "bucket", config.published_onebit

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        world = context.topology.world
        freeze = FreezePoint(config, world=world)
        return cls(parameters, config.optimizer, freeze, group=world, kernels=context.kernels)

    def alone(self, parameters: Sequence[FlatParameter], *, freeze_step: int) -> Optimizer:
        freeze, group = self.freeze.at(freeze_step), Group.solo("alone")
        return type(self)(parameters, self.config, freeze, group=group, kernels=self._kernels)

    def _bound(self, updates: int) -> None:
        if not self._published:
            bound_moments(self, self._sums, self.freeze, updates=updates, by_bucket=self._by_bucket)

    def _observe(self, step: int, correction: float) -> None:
        """Look whether the warm-up ends with this step; 1 - β₂ᵏ is the `correction` of v̂."""

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
    """A base optimizer in the warm-up; then v stays, and each rank's momentum follows its own gradient and is averaged:

        m_i = β₁m + (1-β₁)g_i;   m = mean over ranks of m_i, by signs;   a step along m̂/(√v̂ + ε)

    v̂ = v/(1-β₂ᵏ) with the k updates that v has had when it is frozen: without that a short warm-up would leave every
    later step 1/√(1-β₂ᵏ) times too long. DeepSpeed's rule has neither that nor m̂, and v is as it is; but what had no
    gradient in the warm-up stays where it is, as with the masks that users of DeepSpeed make by hand.
    """

    _base: Optimizer  # of the warm-up; its states `exp_avg` and `exp_avg_sq` are the moments

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
        assert exchange is not None, "gradients are this rank's own"
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
        """A step of the warm-up has been made."""

    def _freeze(self) -> None:
        """The first frozen step comes."""

    @abstractmethod
    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        """One step along the exchanged momentum; `updates` counts it already."""

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
    """arXiv 2102.02888, with decoupled weight decay, bias correction as in AdamW and sizes of signs tensor by tensor.

    In bucket scale all signs of a bucket stand for one size, as in the paper.
    """

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
                    values.mul_(update.kept)
                direction.add_to(values, momentum, moment, factor=-update.lr)

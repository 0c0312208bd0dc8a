"""1-bit LAMB: LAMB until its second moment is stable, then momentum by signs and trust ratios that follow from it."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.base import Exchange
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.freeze import FreezePoint
from megalite.optimizers.lamb import LAMB
from megalite.optimizers.onebit import FrozenMoments, frozen_denominator
from megalite.optimizers.tensor_sums import Pieces, TensorSums
from megalite.topology.group import Group

RATIO_SMOOTHING = 0.9
"""β₃, of the trust ratios in the warm-up."""
FACTOR_RANGE = (0.5, 4.0)
"""Of r."""
FACTOR_CHANGE = 0.1
"""By how much of itself r may change in a step."""


class OneBitLAMB(FrozenMoments):
    """arXiv 2104.06069. In the warm-up LAMB, whose trust ratios c are smoothed: c̄ ← β₃c̄ + (1-β₃)c, from the first c on
    and whatever c is. Then, for each tensor of the model, with d = √v̂ + ε of the frozen moment,

        m_i = β₁m₋ + (1-β₁)g_i;   m = mean of m_i by signs;   ĝ = (m - β₁m₋)/(1-β₁)
        v' ← β₂v' + (1-β₂)ĝ², from v' = v̂;   r = max over elements of d/(√v' + ε)
        r ← rρ + 1 - ρ with ρ = min(1, ‖m̂/d‖/‖u‖), u = m̂/d + λx;   r within [0.5, 4] and 10 % of the last r
        x -= lr·c̄·r·u

    so that c̄r stands for the trust ratio that a moving v would have given. Maxima and norms are of the whole tensor,
    however it is split. Tensors that do not decay take 1-bit Adam's step, as LAMB gives them Adam's.

    In bucket scale momenta are multiplied with σ before they are exchanged, and divided by it after, which gives all
    tensors of the run the same root mean square when the moment is frozen: one size of sign then fits them all.

    Args:
        group: all ranks that make the step.

    Collectives: those of LAMB; when frozen those of `exchange`, and two all-reduces of up to two fp64 numbers a tensor.
    """

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        config: OptimizerConfig,
        freeze: FreezePoint,
        *,
        group: Group,
    ) -> None:
        self._lamb = LAMB(parameters, config, group=group)
        super().__init__(parameters, self._lamb, config, freeze)
        device = parameters[0].param.device
        self._sums = TensorSums(parameters, group=group, device=device)
        self._all_pieces, self._pieces = (
            Pieces(
                [self._sums.column(each) for flat in flats for each in flat.segments if each.counts],
                self._sums,
            )
            for flats in (parameters, [flat for flat in parameters if flat.decay])
        )
        self._fresh = {flat.param: torch.zeros_like(flat.param.data) for flat in parameters}
        """v'."""
        self._ratio, self._factor, self._sigma = self._sums.zeros(3)
        self._factor += 1.0
        self._sigma += 1.0

    def _warmed(self) -> None:
        ratios = self._lamb.trust_ratios
        found = self._ratio.new_tensor([ratios.get(name, 1.0) for name in self._sums.names])
        # 0 is no ratio: there has been none yet.
        smooth = RATIO_SMOOTHING * self._ratio + (1.0 - RATIO_SMOOTHING) * found
        self._ratio.copy_(torch.where(self._ratio == 0.0, found, smooth))

    def _freeze(self) -> None:
        for flat in self.parameters:
            moment = self.state(flat.param)["exp_avg_sq"]
            torch.div(moment, self._variance_correction, out=self._fresh[flat.param])
        # Without a warm-up of its own (a checkpoint of another optimizer) there is no ratio to go by but 1.
        self._ratio.masked_fill_(self._ratio == 0.0, 1.0)
        if self._config.onebit_scale == "bucket":
            self._find_sigma()

    def _find_sigma(self) -> None:
        table, sizes = self._sums.zeros(2), []
        norms = []
        for flat in self.parameters:
            momentum = self.state(flat.param)["exp_avg"]
            for segment in flat.segments:
                if segment.counts:
                    norms.append(torch.linalg.vector_norm(momentum[segment.start : segment.stop]))
                    sizes.append((self._sums.column(segment), segment.stop - segment.start))
        table[0] = self._all_pieces.add_up(norms)
        for column, size in sizes:
            table[1, column] += size
        self._sums.all_reduce(table)
        rms = (table[0] / table[1]).sqrt()
        # A tensor without momentum says nothing of its size.
        self._sigma.copy_(torch.where(rms > 0.0, rms[rms > 0.0].mean() / rms, 1.0))

    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        largest, norms = self._sums.zeros(1)[0], list[torch.Tensor]()
        for flat in self.parameters:
            self._exchange_momentum(flat, exchange)
            if flat.decay:
                norms += self._look_at(flat, update.weight_decay, largest)
        factors = self._factors(largest, norms)
        for flat in self.parameters:
            momentum, below, values = self.state(flat.param)["exp_avg"], self._below(flat), flat.param.data
            for segment in flat.segments:
                rate, part = update.lr, slice(segment.start, segment.stop)
                if flat.decay:
                    rate *= factors[self._sums.column(segment)]
                    values[part].mul_(1.0 - rate * update.weight_decay)
                values[part].addcdiv_(momentum[part], below[part], value=-rate / self._momentum_correction)

    def _exchange_momentum(self, flat: FlatParameter, exchange: Exchange) -> None:
        """m, and v' by the mean gradient that it tells."""
        c, moments = self._config, self.state(flat.param)
        momentum = moments["exp_avg"]
        assert flat.param.grad is not None
        before = momentum.clone()
        momentum.lerp_(flat.param.grad, 1.0 - c.adam_beta1)
        if c.onebit_scale == "bucket":
            sigma = self._sigma.tolist()
            for segment in flat.segments:
                momentum[segment.start : segment.stop].mul_(sigma[self._sums.column(segment)])
            exchange(flat, momentum)
            for segment in flat.segments:
                momentum[segment.start : segment.stop].div_(sigma[self._sums.column(segment)])
        else:
            exchange(flat, momentum)
        momentum.masked_fill_(moments["exp_avg_sq"] == 0.0, 0.0)
        mean_gradient = before.mul_(-c.adam_beta1).add_(momentum).div_(1.0 - c.adam_beta1)
        self._fresh[flat.param].mul_(c.adam_beta2).addcmul_(
            mean_gradient, mean_gradient, value=1.0 - c.adam_beta2
        )

    def _below(self, flat: FlatParameter) -> torch.Tensor:
        moment = self.state(flat.param)["exp_avg_sq"]
        return frozen_denominator(moment, correction=self._variance_correction, eps=self._config.adam_eps)

    def _look_at(
        self, flat: FlatParameter, weight_decay: float, largest: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """‖m̂/d‖ and ‖u‖ of each piece that this rank counts; `largest` [tensors] becomes at least its d/(√v' + ε)."""
        below = self._below(flat)
        direction = (self.state(flat.param)["exp_avg"] / below).div_(self._momentum_correction)
        growth = below / self._fresh[flat.param].sqrt().add_(self._config.adam_eps)
        growth.masked_fill_(below == math.inf, 0.0)
        u = torch.add(direction, flat.param.data, alpha=weight_decay)
        for segment in flat.segments:
            part, column = slice(segment.start, segment.stop), self._sums.column(segment)
            largest[column] = torch.maximum(largest[column], growth[part].max())
            if segment.counts:
                yield torch.linalg.vector_norm(direction[part])
                yield torch.linalg.vector_norm(u[part])

    def _factors(self, largest: torch.Tensor, norms: Sequence[torch.Tensor]) -> list[float]:
        """c̄r of all tensors; 1 for those of which nothing is known."""
        self._sums.all_reduce(largest, op="max")
        squares = torch.stack([self._pieces.add_up(norms[::2]), self._pieces.add_up(norms[1::2])])
        self._sums.all_reduce(squares)
        share = torch.where(squares[1] > 0.0, squares[0] / squares[1], 1.0).sqrt_().clamp_(max=1.0)
        factor = (largest * share + 1.0 - share).clamp_(*FACTOR_RANGE)
        lowest, highest = self._factor * (1.0 - FACTOR_CHANGE), self._factor * (1.0 + FACTOR_CHANGE)
        factor = torch.minimum(torch.maximum(factor, lowest), highest)
        self._factor.copy_(torch.where(largest > 0.0, factor, 1.0))
        return (self._ratio * self._factor).tolist()

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments, and the second one as it would have gone on."""
        return self._lamb.state(parameter) | {"exp_avg_sq_fresh": self._fresh[parameter]}

    def tensor_state(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """c̄ and r, and σ in bucket scale, of each tensor that this rank holds a part of."""
        found = {"trust_ratio": self._ratio, "trust_factor": self._factor}
        if self._config.onebit_scale == "bucket":
            found["momentum_scale"] = self._sigma
        held = {each.name: self._sums.column(each) for flat in self.parameters for each in flat.segments}
        return {
            (state, name): values[column] for state, values in found.items() for name, column in held.items()
        }

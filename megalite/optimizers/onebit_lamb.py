"""Implement 1-bit LAMB: LAMB until its second moment is stable, then momentum by signs with derived trust ratios."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.kernels.optimizer_ops import norm
from megalite.optimizers.base import Exchange, FlatParameter, Update
from megalite.optimizers.lamb import LAMB, Block, PieceSums, make_blocks
from megalite.optimizers.onebit import FrozenMoments

RATIO_SMOOTHING = 0.9  # β₃, for the average of trust ratios in the warm-up
FACTOR_RANGE = (0.5, 4.0)  # limits of r
FACTOR_CHANGE = 0.1  # greatest relative change of r in a step


class OneBitLAMB(FrozenMoments):
    """1-bit LAMB (arXiv 2104.06069). The warm-up is LAMB, with an average of trust ratios c: c̄ ← β₃c̄ + (1-β₃)c, starting
    at the first c. Then, for each tensor of the model, with d = √v̂ + ε of the frozen moment,

        m_i = β₁m₋ + (1-β₁)g_i;   m = mean of m_i by signs;   ĝ = (m - β₁m₋)/(1-β₁)
        v' ← β₂v' + (1-β₂)ĝ², from v' = v̂;   r = max over elements of d/(√v' + ε)
        r ← rρ + 1 - ρ with ρ = min(1, ‖m̂/d‖/‖u‖), u = m̂/d + λx;   r within [0.5, 4] and 10 % of the last r
        x -= lr·c̄·r·u

    so that c̄r approximates the trust ratio of an unfrozen v. Maxima and norms are of the whole tensor in any layout.
    Tensors without weight decay take 1-bit Adam's step, as they take Adam's in LAMB.

    In bucket scale momenta are multiplied with a factor σ per tensor before they are exchanged, and divided by it after.
    At the freeze, σ gives all tensors of the run the same root mean square, so that one size of signs fits all.

    DeepSpeed's rule (`onebit_rule`) has trust ratios for all tensors, σ, no bias correction, and a c̄ that starts at 0 and
    ignores every c of 1: a tensor without another c is never stepped once frozen.

    Collectives: those of LAMB; when frozen those of `exchange`, and two all-reduces of up to two fp64 numbers per tensor.
    """

    from_zeros = frozenset(("exp_avg_sq_fresh",))  # v' is initialized when the warm-up ends

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig, *args: Any, **common: Any) -> None:
        super().__init__(parameters, config, *args, **common)
        published = self._published
        self._base = self._lamb = LAMB(parameters, config, group=self._group, kernels=self._kernels, every=published)
        device = parameters[0].param.device
        self._by_bucket = False  # even in bucket scale, σ gives signs the size of each tensor
        self._has_sigma = published or config.onebit_scale == "bucket"
        self._blocks = make_blocks(parameters, self._sums, every=published)
        in_tensors = [(block.column, block.counts) for block in self._blocks if block.column is not None]
        self._columns = torch.tensor([column for column, _ in in_tensors], dtype=torch.int64, device=device)
        self._piece_sums = PieceSums([column for column, counts in in_tensors if counts], self._sums)
        self._fresh = {flat.param: torch.zeros_like(flat.param.data) for flat in parameters}  # v'
        self._ratio, self._factor, self._sigma = self._sums.zeros(3)
        self._knows_ratios = True
        self._unknown = -1.0 if published else 0.0
        """Initial value of an average ratio that has not been computed yet; by DeepSpeed's rule 0 is a valid ratio."""
        self._ratio += self._unknown
        self._factor += 1.0
        self._sigma += 1.0

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        super().load_counters(counters)
        self._knows_ratios = False

    def _warmed(self) -> None:
        ratios = self._lamb.trust_ratios
        found = self._ratio.new_tensor([ratios.get(name, 1.0) for name in self._sums.names])
        before, first = self._ratio, self._ratio == self._unknown
        if self._published:
            before = before.masked_fill(first, 0.0)
        smooth = RATIO_SMOOTHING * before + (1.0 - RATIO_SMOOTHING) * found
        kept = torch.where(found == 1.0, before, smooth) if self._published else torch.where(first, found, smooth)
        self._ratio.copy_(kept)

    def _freeze(self) -> None:
        for flat in self.parameters:
            moment = self.state(flat.param)["exp_avg_sq"]
            torch.div(moment, self._variance_correction, out=self._fresh[flat.param])
        # Without a warm-up by this optimizer (a checkpoint of another one) the ratio is 1.
        if self._lacks_ratios():
            self._ratio.masked_fill_(self._ratio == self._unknown, 1.0)
        if self._has_sigma:
            self._find_sigma()

    def _lacks_ratios(self) -> bool:
        """Return whether some tensor, on any rank, has no trust ratio."""
        ratios = self._ratio.clone()
        self._sums.all_reduce(ratios, op="max")
        return not all(self._sums.read(ratios > self._unknown))

    def _find_sigma(self) -> None:
        momenta = [(flat, self.state(flat.param)["exp_avg"]) for flat in self.parameters]
        table = self._sums.totals(momenta, lambda values: norm(values).square())
        rms = (table[0] / table[1]).sqrt()
        # The size of a tensor without momentum is unknown.
        self._sigma.copy_(torch.where(rms > 0.0, rms[rms > 0.0].mean() / rms, 1.0))

    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        if not self._knows_ratios:
            # The warm-up was by a 1-bit optimizer without trust ratios: freeze again, with ratios of 1.
            self._knows_ratios = True
            if self._lacks_ratios():
                self._freeze()
        direction = self._direction
        for flat in self.parameters:
            self._exchange_momentum(flat, exchange)
        largest: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []
        for block in self._blocks:
            below, mean = self._take_mean(block, direction.eps)
            if block.column is None:
                continue
            # Maximum of (√v + eps)/(√v' + ε).
            fresh = block.of(self._fresh[block.param])
            largest.append(below.div_(fresh.sqrt().add_(self.config.adam_eps)).amax())
            if block.counts:
                norms.append(norm(mean))
                decay = update.weight_decay * block.flat.decay / direction.scale
                norms.append(norm(torch.add(mean, block.of(block.param.data), alpha=decay)))
        factors = self._factors(largest, norms)
        for block in self._blocks:
            rate, values = update.lr, block.of(block.param.data)
            if block.column is not None:
                rate *= factors[block.column]
                values.mul_(1.0 - rate * update.weight_decay * block.flat.decay)
            values.add_(block.of(block.flat.grad), alpha=-rate * direction.scale)

    def _exchange_momentum(self, flat: FlatParameter, exchange: Exchange) -> None:
        momentum, grad = self.state(flat.param)["exp_avg"], flat.grad
        torch.lerp(momentum, grad, 1.0 - self.config.adam_beta1, out=grad)
        if not self._has_sigma:
            exchange(flat, grad)
            return
        sigma = self._sums.read(self._sigma)
        sizes = [sigma[self._sums.column(segment)] for segment in flat.segments]
        parts = [grad[segment.start : segment.stop] for segment in flat.segments]
        torch._foreach_mul_(parts, sizes)
        exchange(flat, grad)
        torch._foreach_div_(parts, sizes)

    def _take_mean(self, block: Block, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Update m and v' by the mean of m_i. Return √v + eps (0 if v is 0) and m/(√v + eps), in the gradient's memory.

        All operations run on one block while it is in the cache."""
        c = self.config
        mean, momentum, moment = map(block.of, (block.flat.grad, *self._lamb.state(block.param).values()))
        known = moment.sign()
        mean.mul_(known)  # see `zero_without_moment`
        estimate = torch.sub(mean, momentum, alpha=c.adam_beta1)
        share = (1.0 - c.adam_beta2) / (1.0 - c.adam_beta1) ** 2
        block.of(self._fresh[block.param]).mul_(c.adam_beta2).addcmul_(estimate, estimate, value=share)
        momentum.copy_(mean)
        below = torch.sqrt(moment, out=estimate).add_(eps)
        mean.div_(below)
        return below.mul_(known), mean

    def _factors(self, largest: Sequence[torch.Tensor], norms: Sequence[torch.Tensor]) -> list[float]:
        """Return c̄r of all tensors; r is 1 for tensors without a second moment. `largest`: maxima of (√v + eps)/(√v' + ε)
        of blocks with a trust ratio. `norms`: the two norms of ρ, of counted blocks."""
        growth = self._sums.zeros(1)[0]
        if largest:
            found = torch.stack(list(largest)).double() / math.sqrt(self._variance_correction)
            growth.scatter_reduce_(0, self._columns, found, "amax")
        self._sums.all_reduce(growth, op="max")
        squares = self._piece_sums.of_pairs(norms)
        share = torch.where(squares[1] > 0.0, squares[0] / squares[1], 1.0).sqrt_().clamp_(max=1.0)
        factor = (growth * share + 1.0 - share).clamp_(*FACTOR_RANGE)
        lowest, highest = self._factor * (1.0 - FACTOR_CHANGE), self._factor * (1.0 + FACTOR_CHANGE)
        factor = torch.minimum(torch.maximum(factor, lowest), highest)
        self._factor.copy_(torch.where(growth > 0.0, factor, 1.0))
        return (self._ratio * self._factor).tolist()

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return self._lamb.state(parameter) | {"exp_avg_sq_fresh": self._fresh[parameter]}

    def tensor_state(self) -> Mapping[tuple[str, str], torch.Tensor]:
        found = {"trust_ratio": self._ratio, "trust_factor": self._factor}
        if self._has_sigma:
            found["momentum_scale"] = self._sigma
        columns = {each.name: self._sums.column(each) for flat in self.parameters for each in flat.segments}
        return {(state, name): values[column] for state, values in found.items() for name, column in columns.items()}

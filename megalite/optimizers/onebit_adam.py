"""1-bit Adam: AdamW until its second moment is stable, then momentum by signs."""

from collections.abc import Sequence

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import Exchange
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.freeze import FreezePoint
from megalite.optimizers.onebit import FrozenMoments, frozen_denominator


class OneBitAdam(FrozenMoments):
    """arXiv 2102.02888, with decoupled weight decay, bias correction as in AdamW and sizes of signs tensor by tensor.

    In bucket scale all signs of a bucket stand for one size, as in the paper.
    """

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, freeze: FreezePoint
    ) -> None:
        super().__init__(parameters, AdamW(parameters, config), config, freeze)

    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        rate = -update.lr / self._momentum_correction
        for flat in self.parameters:
            param, moments = flat.param, self.state(flat.param)
            exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
            assert param.grad is not None
            exp_avg.lerp_(param.grad, 1.0 - self._config.adam_beta1)
            exchange(flat, exp_avg)
            exp_avg.masked_fill_(exp_avg_sq == 0.0, 0.0)
            if flat.decay:
                param.data.mul_(1.0 - update.lr * update.weight_decay)
            below = frozen_denominator(
                exp_avg_sq, correction=self._variance_correction, eps=self._config.adam_eps
            )
            param.data.addcdiv_(exp_avg, below, value=rate)

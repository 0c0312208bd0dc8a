"""1-bit Adam: AdamW until its second moment is stable, then momentum by signs."""

from collections.abc import Sequence

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import Exchange
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.freeze import FreezePoint
from megalite.optimizers.onebit import FrozenMoments, ranges, silence


class OneBitAdam(FrozenMoments):
    """arXiv 2102.02888, with decoupled weight decay, bias correction as in AdamW and sizes of signs tensor by tensor.

    In bucket scale all signs of a bucket stand for one size, as in the paper.
    """

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, freeze: FreezePoint
    ) -> None:
        super().__init__(parameters, AdamW(parameters, config), config, freeze)

    def alone(self, parameters: Sequence[FlatParameter], *, freeze_step: int) -> "OneBitAdam":
        """Another one that no other rank takes part in."""
        return OneBitAdam(parameters, self._config, self.freeze.at(freeze_step))

    def _frozen_step(self, update: Update, exchange: Exchange) -> None:
        direction = self._direction
        for flat in self.parameters:
            param, moments = flat.param, self.state(flat.param)
            exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
            assert param.grad is not None
            exp_avg.lerp_(param.grad, 1.0 - self._config.adam_beta1)
            exchange(flat, exp_avg)
            for part in ranges(param):
                values, momentum, moment = param.data[part], exp_avg[part], exp_avg_sq[part]
                silence(momentum, moment)
                if flat.decay:
                    values.mul_(1.0 - update.lr * update.weight_decay)
                direction.add_to(values, momentum, moment, factor=-update.lr)

"""SGD with momentum over flat shards: torch's fused kernel, one tensor per bucket."""

from collections.abc import Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.base import Exchange, FlatParameter, Optimizer, Update


class SGD(Optimizer):
    """b = μb + g,  x = (1 - lr·λ)x - lr·b; Nesterov's form steps by g + μb instead of b.

    Weight decay is decoupled, as in AdamW here, and norms and biases are left out of it. torch's SGD adds λx to the
    gradient instead, where momentum accumulates it to λ/(1-μ); decoupled, `--weight-decay` means the same with every
    optimizer. The buffer starts at 0 and gradients enter it whole (no dampening), as in torch.
    """

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig) -> None:
        super().__init__(parameters, config)
        params = [{"params": [flat.param]} for flat in parameters]
        momentum, nesterov = config.sgd_momentum, config.sgd_nesterov
        self._sgd = torch.optim.SGD(params, lr=config.lr, momentum=momentum, nesterov=nesterov, fused=True)
        if momentum:
            self._sgd.state.update(self._states.items())

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "SGD steps by reduced gradients"
        for flat, group in zip(self.parameters, self._sgd.param_groups, strict=True):
            group["lr"] = update.rate(flat)
            if flat.decay and update.weight_decay != 0.0:
                flat.param.data.mul_(update.kept_of(flat))
        self._sgd.step()
        self.updates += 1

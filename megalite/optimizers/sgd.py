"""Implement SGD with momentum over flat shards by torch's fused kernel, one tensor per bucket."""

import torch
from torch.optim.sgd import sgd

from megalite.optimizers.base import Exchange, Optimizer, Update, whole_parts


class SGD(Optimizer):
    """Steps by b = μb + g,  x = (1 - lr·λ)x - lr·b; Nesterov's form steps by g + μb instead of b.

    Weight decay is decoupled, as in AdamW here, and does not apply to norms and biases. torch's SGD adds λx to the
    gradient instead, which momentum accumulates to λ/(1-μ); decoupled, `--weight-decay` means the same with every
    optimizer. The buffer starts at 0, and there is no dampening, as in torch.
    """

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "SGD steps by reduced gradients"
        for piece in self.pieces(whole_parts(self.parameters), update):
            if piece.flat.decay and update.weight_decay != 0.0:
                piece.param.mul_(update.decay_factor_of(piece.flat))
            momentum: list[torch.Tensor | None] = [*piece.states]
            sgd(
                *([piece.param], [piece.grad], momentum),
                fused=True,
                lr=update.rate(piece.flat),
                momentum=self.config.sgd_momentum,
                nesterov=self.config.sgd_nesterov,
                weight_decay=0.0,
                dampening=0.0,
                maximize=False,
            )
        self.updates += 1

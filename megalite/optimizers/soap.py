"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (arXiv 2409.11321)."""

from collections.abc import Sequence

import torch

from megalite.config.run import RunConfig
from megalite.optimizers.base import Context, FlatParameter, Optimizer, Piece, Update
from megalite.optimizers.matrices import Matrix, MatrixOptimizer, group_of

STATES = ("exp_avg", "exp_avg_sq", "gram", "eigenbasis")
SHIFT = 1e-3
"""Of the mean eigenvalue, added to all before a power iteration. Directions without gradients stay then as they are; else
rounding would choose among them, and another layout would choose otherwise."""


class SOAP(MatrixOptimizer):
    """For hidden matrices [r, c], here with r <= c and gradient g:

        m = β1·m + (1-β1)·g,   v = β2·v + (1-β2)·(Qᵀg)²,   x = (1 - lr·λ)x - lr·Q·(Qᵀm̂/(√v̂ + ε))
        S = β2·S + (1-β2)·g·gᵀ,   every soap_frequency updates Q = QR((S + shift)·Q)

    with bias corrections m̂ and v̂ as Adam's. This is the one-sided form of the paper's section 7: the basis is of the
    smaller dimension alone (of columns where c < r, by gᵀg), and so S and Q, of min(r, c)² numbers, fit into r·c. They are
    kept as states like any other, in the first elements of a matrix, so that memory, checkpoints and sharding are those of
    two more moments. Q starts from the identity, so that the first updates are Adam's. Each expert's matrix, gate and up
    projection are separate matrices; queries, keys and values of a layer are one.
    """

    sends, returns, keeps = 5, 4, True

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        matrices = [flat for flat in parameters if flat.orthogonal]
        others = [flat for flat in parameters if not flat.orthogonal]
        return cls(matrices, others, config.optimizer, STATES, group=group_of(context))

    def _before(self, piece: Piece) -> Sequence[torch.Tensor]:
        mean, square, gram, basis = piece.states
        mean.lerp_(piece.grad, 1.0 - self.config.adam_beta1)
        return piece.grad, square, gram, basis, mean

    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        grad, square, *kept, mean = wholes
        config, size, count = self.config, min(matrix.rows, matrix.columns), self.updates + 1
        gram, basis = (each.view(-1)[: size * size].view(size, size) for each in kept)
        if matrix.rows > matrix.columns:  # the transposed problem
            grad, square, mean = grad.mT, square.mT, mean.mT
        if self.updates == 0:
            basis.fill_diagonal_(1.0)
        square.lerp_((basis.mT @ grad).square_(), 1.0 - config.adam_beta2)
        gram.lerp_(grad @ grad.mT, 1.0 - config.adam_beta2)
        scale = (square / (1.0 - config.adam_beta2**count)).sqrt_().add_(config.adam_eps)
        # The gradient's place is that of the change.
        grad.copy_(basis @ (basis.mT @ mean).div_(scale).div_(1.0 - config.adam_beta1**count))
        if count % config.soap_frequency == 0:
            shift = SHIFT * gram.diagonal().mean()
            turned, triangle = torch.linalg.qr(torch.addmm(basis * shift, gram, basis))
            # Of the two signs of a column the one that it had.
            basis.copy_(turned * torch.where(triangle.diagonal() < 0.0, -1.0, 1.0))

    def _after(self, piece: Piece, made: Sequence[torch.Tensor], update: Update) -> None:
        change, *states = made
        for own, new in zip(piece.states[1:], states, strict=True):
            own.copy_(new)
        if piece.flat.decay:
            piece.param.mul_(update.kept_of(piece.flat))
        piece.param.sub_(change, alpha=update.rate(piece.flat))

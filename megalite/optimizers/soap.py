"""Implement SOAP, Adam in the eigenbases of Shampoo's preconditioners (arXiv 2409.11321)."""

from collections.abc import Mapping, Sequence

import torch

from megalite.config.optimizer import MOMENTS, SQUARES, MatrixKey, OptimizerConfig, matrix_sides
from megalite.config.run import RunConfig
from megalite.optimizers.base import Context, FlatParameter, FlatPart, MatrixState, Optimizer, Update
from megalite.optimizers.matrices import Matrix, MatrixOptimizer, group_of
from megalite.topology.group import Group
from megalite.topology.host_memory import pinned
from megalite.topology.layout import ShardSpec

SHIFT = 1e-3
"""Share of the mean eigenvalue that is added to all eigenvalues before a power iteration. Directions without gradients then
do not change; otherwise rounding, and so the layout, would determine them."""

Sides = Mapping[str, Sequence[torch.Tensor]]
"""left, right -> its Gram matrix and eigenbasis, [n, n]."""


class SOAP(MatrixOptimizer):
    """Steps hidden matrices [r, c] with gradient g (algorithm 3 of the paper):

        m = β1·m + (1-β1)·g,   v = β2·v + (1-β2)·(Qₗᵀ·g·Qᵣ)²,   x = (1 - lr·λ)x - lr·Qₗ·(Qₗᵀ·m̂·Qᵣ/(√v̂ + ε))·Qᵣᵀ
        L = β2·L + (1-β2)·g·gᵀ,   R = β2·R + (1-β2)·gᵀ·g
        every soap_frequency updates Qₗ = QR((L + shift)·Qₗ),   Qᵣ = QR((R + shift)·Qᵣ)

    with bias corrections m̂ and v̂ as in Adam. `one-sided-soap` is the variant of the paper's section 7: only L and Qₗ, or R
    and Qᵣ if c < r. Only the owner of x stores these matrices, 2·(r² + c²) numbers, and never sends them. Q starts from
    the identity, so that the first updates equal Adam's. Each expert's matrix, gate and up projection are separate
    matrices; queries, keys and values of a layer are one.
    """

    needs_states_after = True

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig, *, group: Group) -> None:
        super().__init__(parameters, config, MOMENTS, group=group)
        self._owned = [matrix for wave in self._waves for matrix in wave.owned]
        self._sides: dict[MatrixKey, Sides] = {
            matrix.key: {
                side: (self._square(size).zero_(), self._square(size).zero_().fill_diagonal_(1.0))
                for side, size in matrix_sides(config, matrix.rows, matrix.columns).items()
            }
            for matrix in self._owned
        }

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        return cls(parameters, config.optimizer, group=group_of(context))

    def _square(self, size: int) -> torch.Tensor:
        like = self._empty(0)
        memory = pinned if self.config.optimizer_cpu_offload else torch.empty
        return memory(torch.Size((size, size)), dtype=like.dtype, device=like.device)

    def matrix_states(self) -> list[MatrixState]:
        found = []
        for matrix in self._owned:
            name, number = matrix.key
            for side, squares in self._sides[matrix.key].items():
                for state, values in zip(SQUARES, squares, strict=True):
                    shape = (matrix.count, *values.shape)
                    bounds = ((number, number + 1), *((0, size) for size in values.shape))
                    spec = ShardSpec(name=name, global_shape=shape, slice=bounds)
                    found.append(MatrixState(f"{state}_{side}", spec, values[None]))
        return found

    def _before(self, piece: FlatPart) -> Sequence[torch.Tensor]:
        mean, square = piece.states
        mean.lerp_(piece.grad, 1.0 - self.config.adam_beta1)
        return piece.grad, square, mean

    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        grad, square, mean = wholes
        config, count, kept = self.config, self.updates + 1, self._sides[matrix.key]
        sides = {side: [each.to(grad.device) for each in squares] for side, squares in kept.items()}
        square.lerp_(_turned(grad, sides).square_(), 1.0 - config.adam_beta2)
        scale = (square / (1.0 - config.adam_beta2**count)).sqrt_().add_(config.adam_eps)
        change = _turned(mean, sides).div_(scale).div_(1.0 - config.adam_beta1**count)
        change = _turned(change, sides, back=True)
        for side, (gram, basis) in sides.items():
            rows = grad if side == "left" else grad.mT
            gram.lerp_(rows @ rows.mT, 1.0 - config.adam_beta2)
            if count % config.soap_frequency == 0:
                shift = SHIFT * gram.diagonal().mean()
                # The sign of a column changes nothing.
                basis.copy_(torch.linalg.qr(torch.addmm(basis * shift, gram, basis)).Q)
            for own, new in zip(kept[side], (gram, basis), strict=True):
                if own is not new:  # offloaded
                    own.copy_(new)
        grad.copy_(change)  # the first result replaces the gradient

    def _after(self, piece: FlatPart, results: Sequence[torch.Tensor], update: Update) -> None:
        change, square = results
        piece.states[1].copy_(square)
        if piece.flat.decay:
            piece.param.mul_(update.decay_factor_of(piece.flat))
        piece.param.sub_(change, alpha=update.rate(piece.flat))


def _turned(x: torch.Tensor, sides: Sides, *, back: bool = False) -> torch.Tensor:
    """Return Qₗᵀ·x·Qᵣ, or Qₗ·x·Qᵣᵀ with `back`."""
    for side, (_, basis) in sides.items():
        turn = basis if back else basis.mT
        x = turn @ x if side == "left" else x @ turn.mT
    return x

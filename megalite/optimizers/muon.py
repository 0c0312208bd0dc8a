"""Implement Muon: the update of a matrix is its orthogonalised momentum."""

import math
from collections.abc import Callable, Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.config.run import RunConfig
from megalite.optimizers.base import Context, FlatParameter, FlatPart, Optimizer, Update
from megalite.optimizers.matrices import Matrix, MatrixOptimizer, group_of
from megalite.topology.group import Group

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients: the steepest slope at 0, with singular values between 0.7 and 1.2 instead of 1."""
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
"""Factors of `muon_scale_mode`, by arXiv 2502.16982, Keller Jordan and Jeremy Bernstein."""
FUSED = ".attention.qkv.weight"  # queries, keys and values in one tensor, group by group
EPS = 1e-7  # least divisor when a matrix is normalized


def orthogonalise(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return approximately the nearest orthogonal matrix U·Vᵀ of U·S·Vᵀ [r, c], by `steps` Newton-Schulz iterations

        X <- aX + bAX + cA²X,  A = X·Xᵀ,

    which drive every singular value in (0, 1] towards 1. They use the matrix's precision, also on CUDA, where other
    implementations use bf16: distributed over ranks the products take little time, and results depend less on hardware.
    """
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(MatrixOptimizer):
    """Steps hidden matrices [r, c] (Jordan 2024; scaled as in arXiv 2502.16982, with decoupled decay):

        b = μb + (1-μ)g,   x = (1 - lr·λ)x - lr·muon_scale·s(r, c)·orthogonalise((1-μ)g + μb)

    With s = √max(r, c), the mode `spectral`, the root mean square of a full-rank update is muon_scale, about that of AdamW,
    so AdamW's learning rate and weight decay fit. Without Nesterov, b is orthogonalised. AdamW steps embeddings, head,
    norms and biases. Queries, keys and values of a layer are separate matrices unless `muon_split_qkv` is off; gate and up
    projection, and the matrices of each expert, are always separate.

    `fused`: rows of queries, key and value per group in a fused matrix; None: it is stepped as one matrix.
    """

    needs_states_after = False

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        config: OptimizerConfig,
        *,
        group: Group,
        fused: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(parameters, config, ["momentum_buffer"], group=group)
        self._fused = fused

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        model, fused = config.model, None
        if config.optimizer.muon_split_qkv:
            fused = model.num_attention_heads // model.query_groups * model.head_size, model.head_size, model.head_size
        return cls(parameters, config.optimizer, group=group_of(context), fused=fused)

    def _before(self, piece: FlatPart) -> Sequence[torch.Tensor]:
        (buffer,), momentum = piece.states, self.config.muon_momentum
        buffer.lerp_(piece.grad, 1.0 - momentum)
        return [torch.lerp(piece.grad, buffer, momentum) if self.config.muon_nesterov else buffer]

    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        (whole,) = wholes
        parts: Sequence[torch.Tensor] = [whole]
        if self._fused is not None and matrix.key[0].endswith(FUSED):
            parts = whole.view(-1, sum(self._fused), matrix.columns).split(self._fused, dim=1)
        for part in parts:
            rows = part.reshape(-1, matrix.columns)
            scale = self.config.muon_scale * SCALES[self.config.muon_scale_mode](*rows.shape)
            part.copy_(orthogonalise(rows, self.config.muon_steps).mul_(scale).view(part.shape))

    def _after(self, piece: FlatPart, results: Sequence[torch.Tensor], update: Update) -> None:
        if piece.flat.decay:
            piece.param.mul_(update.decay_factor_of(piece.flat))
        piece.param.sub_(results[0], alpha=update.rate(piece.flat))

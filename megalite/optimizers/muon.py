"""Muon: the update of a matrix is its momentum, made orthogonal."""

import math
from collections.abc import Callable, Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.matrix_plan import Box, Holding, Key, Matrix, Traffic, Wave, plan
from megalite.topology.group import Group

BUFFER = "momentum_buffer"
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients: steepest at 0, at the price of singular values between 0.7 and 1.2 instead of 1."""
EPS = 1e-7
"""Least norm that a matrix is divided by."""


def orthogonalise(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest orthogonal matrix U·Vᵀ of U·S·Vᵀ [r, c], roughly: `steps` Newton-Schulz iterations

        X <- aX + bAX + cA²X,  A = X·Xᵀ,

    which drive every singular value from (0, 1] towards 1. In the matrix's own precision, also on CUDA, where others use
    bf16: shared out over ranks the products take little time, and results hang less on the hardware.
    """
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """For hidden matrices [r, c] (Jordan 2024; scaled as in arXiv 2502.16982, with decoupled decay):

        b = μb + (1-μ)g,   x = (1 - lr·λ)x - lr·muon_scale·√max(r, c)·orthogonalise((1-μ)g + μb)

    so that the root mean square of a full-rank update is muon_scale, about that of AdamW: learning rate and weight decay
    can be AdamW's. Embeddings, head, norms and biases are AdamW's. Queries, keys and values of a layer are one matrix, as
    they lie in one tensor; gate and up projection, and every expert's, are matrices of their own.

    Matrices are whole when they are orthogonalised, however ranks share them. Each is dealt to one rank; the others send
    what it lacks of the momentum and get back their parts of the update (`matrix_plan`). So ranks share the work, also
    those that hold the same matrices, and the numbers do not depend on the layout but for the rounding of gradients.

    Args:
        matrices: parameters of nothing but hidden matrices.
        others: all other ones.
        group: ranks that hold all matrices of their own among them; of what several hold, all have the same.

    Collectives: where matrices are split, an exchange of the momentum over `group`, and where several ranks hold parts of
    one, an exchange of the update. Each rank sends and receives about as many elements as it holds, at most.
    """

    def __init__(
        self,
        matrices: Sequence[FlatParameter],
        others: Sequence[FlatParameter],
        config: OptimizerConfig,
        *,
        group: Group,
    ) -> None:
        self.parameters, self.notes = [*matrices, *others], []
        self._matrices, self._config, self._group = matrices, config, group
        self._adam = AdamW(others, config)
        self._buffers = {flat.param: torch.zeros_like(flat.param, requires_grad=False) for flat in matrices}
        self._waves = plan(matrices, group, others[0].param.device)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Momentum, then wave by wave: gather, orthogonalise, hand back, apply; and AdamW's step."""
        assert exchange is None, "Muon goes by reduced gradients"
        for flat in self._matrices:
            assert flat.param.grad is not None
            self._buffers[flat.param].lerp_(flat.param.grad, 1.0 - self._config.muon_momentum)
            if flat.decay:
                flat.param.data.mul_(1.0 - update.lr * update.weight_decay)
        for wave in self._waves:
            self._step(wave, update.lr)
        self._adam.step(update)

    def _step(self, wave: Wave, lr: float) -> None:
        boxes = {
            (matrix.key, box): self._empty((box[1] - box[0]) * (box[3] - box[2]))
            for matrix in wave.owned
            for box in matrix.boxes
        }

        def in_box(matrix: Matrix, holding: Holding) -> torch.Tensor:
            return boxes[matrix.key, holding.span.box][holding.span.start : holding.span.stop]

        def fill(matrix: Matrix, holding: Holding, values: torch.Tensor) -> None:
            in_box(matrix, holding).copy_(values)

        def momentum(_: Matrix, holding: Holding) -> torch.Tensor:
            param = self._matrices[holding.flat].param
            assert param.grad is not None
            part = slice(holding.start, holding.stop)
            return param.grad[part].lerp(self._buffers[param][part], self._config.muon_momentum)

        def apply(_: Matrix, holding: Holding, values: torch.Tensor) -> None:
            self._matrices[holding.flat].param.data[holding.start : holding.stop].sub_(values, alpha=lr)

        self._exchange(wave.gather, momentum, fill)
        for matrix in wave.owned:
            self._orthogonalise(matrix, boxes)
        self._exchange(wave.give_back, in_box, apply)

    def _orthogonalise(self, matrix: Matrix, boxes: dict[tuple[Key, Box], torch.Tensor]) -> None:
        """From the momentum in the boxes to the update in them."""
        whole = self._empty(matrix.rows * matrix.columns).view(matrix.rows, matrix.columns)
        views = {box: whole[box[0] : box[1], box[2] : box[3]] for box in matrix.boxes}
        for box, view in views.items():
            view.copy_(boxes[matrix.key, box].view(view.shape))
        scale = self._config.muon_scale * math.sqrt(max(matrix.rows, matrix.columns))
        whole.copy_(orthogonalise(whole, self._config.muon_steps)).mul_(scale)
        for box, view in views.items():
            boxes[matrix.key, box].view(view.shape).copy_(view)

    def _exchange(
        self,
        traffic: Traffic,
        read: Callable[[Matrix, Holding], torch.Tensor],
        write: Callable[[Matrix, Holding, torch.Tensor], object],
    ) -> None:
        """Each span from where it is read to where it is written."""
        for place in traffic.kept:
            write(*place, read(*place))
        if not traffic.moves:
            return
        sent = [read(*place) for part in traffic.sent for place in part]
        splits = [
            [sum(holding.stop - holding.start for _, holding in part) for part in parts]
            for parts in (traffic.received, traffic.sent)
        ]
        received = self._empty(sum(splits[0]))
        self._group.all_to_all(received, torch.cat([self._empty(0), *sent]), *splits)
        place_of = [place for part in traffic.received for place in part]
        sizes = [holding.stop - holding.start for _, holding in place_of]
        for place, values in zip(place_of, received.split(sizes), strict=True):
            write(*place, values)

    def _empty(self, size: int) -> torch.Tensor:
        return self._matrices[0].param.data.new_empty(size)

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Of matrices the momentum, of the rest AdamW's moments."""
        if parameter in self._buffers:
            return {BUFFER: self._buffers[parameter]}
        return self._adam.state(parameter)

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._adam.updates

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""
        self._adam.set_updates(updates)

"""Implement Muon and SOAP, which step whole matrices, and their base class, which gathers and returns the parts of matrices."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from megalite.config.optimizer import MOMENTS, OPTIMIZERS, SQUARES, MatrixKey, OptimizerConfig, matrix_sides
from megalite.config.run import RunConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import (
    Context,
    Exchange,
    FlatParameter,
    FlatPart,
    MatrixState,
    Optimizer,
    Update,
    cut_part,
)
from megalite.optimizers.matrices import Box, Matrix, MatrixPart, Traffic, Wave, plan
from megalite.topology.group import Group
from megalite.topology.host_memory import Event, pinned, shared_stream
from megalite.topology.layout import ShardSpec


class MatrixOptimizer(Optimizer):
    """Steps hidden matrices [r, c] as a whole; AdamW steps embeddings, head, norms and biases.

    Each matrix has one owner. The other ranks send the owner the parts that it lacks, and receive their parts of the
    result (`plan`). So ranks share the work, also ranks with the same matrices, and results do not depend on the layout
    except through the rounding of gradients.

    `group`: the ranks that together have all hidden matrices complete.
    Collectives: exchanges over `group`, of `sends` numbers per element if ranks split matrices, and of `returns` numbers
    if other ranks than the owner have parts. Each rank sends and receives at most about as many elements as it has."""

    needs_states_after: bool  # `_after` needs the states

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, states: Sequence[str], *, group: Group
    ) -> None:
        matrices = [flat for flat in parameters if flat.orthogonal]
        others = [flat for flat in parameters if not flat.orthogonal]
        super().__init__(matrices, config, states)
        self.parameters = [*matrices, *others]
        self._matrices, self._group = matrices, group
        # Numbers per element that `_before` returns, and that `_work` changes (the first ones).
        self.sends, self.returns = OPTIMIZERS.facts(config.optimizer).exchanged
        self._adam = AdamW(others, config)
        self._states |= self._adam._states
        self._averages |= self._adam._averages
        self._waves = plan(matrices, config, group)

    @abstractmethod
    def _before(self, piece: FlatPart) -> Sequence[torch.Tensor]:
        """Step the states of a piece, before matrices are gathered, and return the tensors that `_work` needs."""

    @abstractmethod
    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        """Process a whole matrix: `wholes` are the tensors of `_before`, each [r, c]; change the first `returns`."""

    @abstractmethod
    def _after(self, piece: FlatPart, results: Sequence[torch.Tensor], update: Update) -> None:
        """Update a piece by its part of the tensors that `_work` changed."""

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "matrices are stepped by reduced gradients"
        for wave in self._waves:
            self._step(wave, update)
        self._adam.updates = self.updates
        self._adam.step(update)
        self.updates += 1

    def _step(self, wave: Wave, update: Update) -> None:
        gather, scatter = wave.gather, wave.scatter
        visits = [
            (part, owned, slice(part[1] - owned.at, part[2] - owned.at))
            for _, owned in (*scatter.local, *scatter.incoming)
            for part in cut_part(self._matrices[owned.flat], owned.at, owned.at + owned.size)
        ]
        parts = [part for part, _, _ in visits]
        buffers = [_WaveValues(wave, self._empty) for _ in range(self.sends)]
        for (_, owned, within), piece in zip(visits, self.pieces(parts, values=False), strict=True):
            for buffer, values in zip(buffers, self._before(piece), strict=True):
                if owned in buffer.inputs:
                    buffer.inputs[owned][within] = values
        for buffer in buffers:
            received = self._exchange(gather, buffer.outgoing)
            for matrix_part, values in zip(gather.incoming, received, strict=True):
                buffer.at(matrix_part).copy_(values)
        for matrix in wave.owned:
            wholes = [buffer.whole(matrix, self._empty) for buffer in buffers]
            self._work(matrix, wholes)
            for buffer, whole in zip(buffers, wholes[: self.returns]):
                buffer.cut(matrix, whole)
        results = []
        for buffer in buffers[: self.returns]:
            own = {owned: buffer.at((matrix, owned)) for matrix, owned in scatter.local}
            outgoing = torch.cat([self._empty(0), *map(buffer.at, scatter.outgoing)])
            own |= zip((owned for _, owned in scatter.incoming), self._exchange(scatter, outgoing), strict=True)
            results.append(own)
        pieces = self.pieces(parts, update, states=self.needs_states_after)
        for (_, owned, within), piece in zip(visits, pieces, strict=True):
            self._after(piece, [own[owned][within] for own in results], update)

    def _exchange(self, traffic: Traffic, outgoing: torch.Tensor) -> Sequence[torch.Tensor]:
        """Send `outgoing`, in the order of `traffic.outgoing`; return the parts of `traffic.incoming`."""
        if not traffic.moves:
            return []
        ranks = range(self._group.size)
        splits = [
            [sum(owned.size for _, owned in by_rank[rank]) for rank in ranks]
            for by_rank in (traffic.received, traffic.sent)
        ]
        received = self._empty(sum(splits[0]))
        self._group.all_to_all(received, outgoing, *splits)
        return received.split([owned.size for _, owned in traffic.incoming])

    def _empty(self, size: int) -> torch.Tensor:
        return self._matrices[0].param.data.new_empty(size)


class _WaveValues:
    """Buffers for one number per element of a wave's matrices: boxes of owned matrices, and parts to send to owners."""

    def __init__(self, wave: Wave, empty: Callable[[int], torch.Tensor]) -> None:
        self._boxes = {
            (matrix.key, box): empty((box[1] - box[0]) * (box[3] - box[2]))
            for matrix in wave.owned
            for box in matrix.boxes
        }
        sizes = [owned.size for _, owned in wave.gather.outgoing]
        self.outgoing = empty(sum(sizes))
        self.inputs = {part[1]: self.at(part) for part in wave.gather.local}
        """Range of this rank -> its elements in a box or in `outgoing`."""
        self.inputs |= zip((owned for _, owned in wave.gather.outgoing), self.outgoing.split(sizes), strict=True)

    def at(self, part: MatrixPart) -> torch.Tensor:
        """Return the elements of a part in its box; on the owner."""
        matrix, owned = part
        return self._boxes[matrix.key, owned.box][owned.start : owned.stop]

    def whole(self, matrix: Matrix, empty: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the matrix [r, c], assembled from its boxes."""
        found = empty(matrix.rows * matrix.columns).view(matrix.rows, matrix.columns)
        for box, part in self._parts(matrix, found):
            part.copy_(self._boxes[matrix.key, box].view(part.shape))
        return found

    def cut(self, matrix: Matrix, whole: torch.Tensor) -> None:
        """Copy the matrix back into its boxes."""
        for box, part in self._parts(matrix, whole):
            self._boxes[matrix.key, box].view(part.shape).copy_(part)

    def _parts(self, matrix: Matrix, whole: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        return ((box, whole[box[0] : box[1], box[2] : box[3]]) for box in matrix.boxes)


def group_of(context: Context) -> Group:
    """Return the ranks that share the work on matrices: those of one pipeline rank, or only the tp ranks of one replica
    if replicas have different weights."""
    return context.topology.tp_dp_cp if context.replicas_agree else context.topology.tp


QUINTIC = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients: the steepest slope at 0, with singular values between 0.7 and 1.2 instead of 1."""
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
"""Factors of `muon_scale_mode`, by arXiv 2502.16982, Keller Jordan and Jeremy Bernstein."""
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
    norms and biases. Queries, keys, values and their gates are separate matrices unless `muon_split_qkv` is off; gate and
    up projection, and the matrices of each expert, are always separate.

    `fused`: end of a tensor's name -> rows of the matrices in it per group; other tensors are one matrix."""

    needs_states_after = False

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        config: OptimizerConfig,
        *,
        group: Group,
        fused: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        super().__init__(parameters, config, ["momentum_buffer"], group=group)
        self._fused = fused

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        fused = config.model.fused_rows if config.optimizer.muon_split_qkv else {}
        return cls(parameters, config.optimizer, group=group_of(context), fused=fused)

    def _before(self, piece: FlatPart) -> Sequence[torch.Tensor]:
        (buffer,), momentum = piece.states, self.config.muon_momentum
        buffer.lerp_(piece.grad, 1.0 - momentum)
        return [torch.lerp(piece.grad, buffer, momentum) if self.config.muon_nesterov else buffer]

    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        (whole,) = wholes
        parts: Sequence[torch.Tensor] = [whole]
        for end, rows in self._fused.items():
            if matrix.key[0].endswith(end):
                parts = whole.view(-1, sum(rows), matrix.columns).split(rows, dim=1)
        for part in parts:
            one = part.reshape(-1, matrix.columns)
            scale = self.config.muon_scale * SCALES[self.config.muon_scale_mode](*one.shape)
            part.copy_(orthogonalise(one, self.config.muon_steps).mul_(scale).view(part.shape))

    def _after(self, piece: FlatPart, results: Sequence[torch.Tensor], update: Update) -> None:
        if piece.flat.decay:
            piece.param.mul_(update.decay_factor_of(piece.flat))
        piece.param.sub_(results[0], alpha=update.rate(piece.flat))


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
    matrices; queries, keys and values of a layer are one."""

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
        self._copied: Event = None  # end of the last copy of them to host memory

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        return cls(parameters, config.optimizer, group=group_of(context))

    def _square(self, size: int) -> torch.Tensor:
        like = self._empty(0)
        memory = pinned if self.config.optimizer_cpu_offload else torch.empty
        return memory(torch.Size((size, size)), dtype=like.dtype, device=like.device)

    def matrix_states(self) -> list[MatrixState]:
        if self._copied is not None:
            self._copied.synchronize()
        found = []
        for matrix in self._owned:
            name, number = matrix.key
            for side, squares in self._sides[matrix.key].items():
                for state, values in zip(SQUARES, squares, strict=True):
                    spec = ShardSpec.whole(name, tuple(values.shape)).stacked(number, matrix.count)
                    found.append(MatrixState(f"{state}_{side}", spec, values[None]))
        return found

    def _before(self, piece: FlatPart) -> Sequence[torch.Tensor]:
        mean, square = piece.states
        mean.lerp_(piece.grad, 1.0 - self.config.adam_beta1)
        return piece.grad, square, mean

    def _work(self, matrix: Matrix, wholes: Sequence[torch.Tensor]) -> None:
        grad, square, mean = wholes
        config, count, kept = self.config, self.updates + 1, self._sides[matrix.key]
        sides = {side: [each.to(grad.device, non_blocking=True) for each in squares] for side, squares in kept.items()}
        square.lerp_(_rotated(grad, sides).square_(), 1.0 - config.adam_beta2)
        scale = (square / (1.0 - config.adam_beta2**count)).sqrt_().add_(config.adam_eps)
        change = _rotated(mean, sides).div_(scale).div_(1.0 - config.adam_beta1**count)
        change = _rotated(change, sides, back=True)
        for side, (gram, basis) in sides.items():
            rows = grad if side == "left" else grad.mT
            gram.lerp_(rows @ rows.mT, 1.0 - config.adam_beta2)
            if count % config.soap_frequency == 0:
                shift = SHIFT * gram.diagonal().mean()
                # The sign of a column changes nothing.
                basis.copy_(torch.linalg.qr(torch.addmm(basis * shift, gram, basis)).Q)
            for own, new in zip(kept[side], (gram, basis), strict=True):
                if own is not new:  # offloaded
                    own.copy_(new, non_blocking=True)
                    self._copied = shared_stream(grad.device).now()
        grad.copy_(change)  # the first result replaces the gradient

    def _after(self, piece: FlatPart, results: Sequence[torch.Tensor], update: Update) -> None:
        change, square = results
        piece.states[1].copy_(square)
        if piece.flat.decay:
            piece.param.mul_(update.decay_factor_of(piece.flat))
        piece.param.sub_(change, alpha=update.rate(piece.flat))


def _rotated(x: torch.Tensor, sides: Sides, *, back: bool = False) -> torch.Tensor:
    """Return Qₗᵀ·x·Qᵣ, or Qₗ·x·Qᵣᵀ with `back`."""
    for side, (_, basis) in sides.items():
        turn = basis if back else basis.mT
        x = turn @ x if side == "left" else x @ turn.mT
    return x

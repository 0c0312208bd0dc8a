"""Implement AdamW over flat shards, one tensor per bucket: plain, with bf16 moments and stochastic rounding, schedule-free."""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from megalite.config.optimizer import MOMENTS, OptimizerConfig
from megalite.config.run import RunConfig
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Context, Exchange, FlatParameter, FlatPart, Optimizer, Segment, Update, whole_parts


class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101), of the parameters that decay.

    Its kernel also clips, and rounds the new parameters to the model's precision."""

    applies_factor = True
    writes_copies = True

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, kernels: Kernels | None = None
    ) -> None:
        super().__init__(parameters, config, MOMENTS)
        kernels = kernels or Kernels()
        self._kernels = {
            flat.param: kernels.get("adam", device=flat.param.device, dtype=flat.param.dtype, size=flat.param.numel())
            for flat in parameters
        }

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> Optimizer:
        if "bf16" in (config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype):
            return RoundedAdamW(parameters, config.optimizer, seed=config.training.seed)
        return cls(parameters, config.optimizer, context.kernels)

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        self.updates += 1
        for piece in self.pieces(whole_parts(self.parameters), update):
            flat, param = piece.flat, piece.flat.param
            self._kernels[param](
                piece.param,
                piece.grad,
                *piece.states,
                lr=update.rate(flat),
                beta1=self.config.adam_beta1,
                beta2=self.config.adam_beta2,
                eps=self.config.adam_eps,
                weight_decay=update.weight_decay if flat.decay else 0.0,
                step=self.updates,
                factor=None if update.factor == 1.0 else param.new_full((), update.factor),
                copy=piece.copy,
            )


CPU_PIECE, DEVICE_PIECE = 1 << 18, 1 << 23
"""Elements that are processed at a time: enough to fill a cache, or to keep a device busy."""


class RoundedAdamW(AdamW):
    """AdamW with bf16 moments: 2 bytes each instead of 4. The arithmetic is that of `AdamW`, torch's fused kernel in fp32;
    a bf16 moment is rounded once per update, piece by piece.

    With rounding to nearest, a second moment with beta2 above 1 - 2^-8 does not change: an update is less than half of its
    last bit. Stochastic rounding preserves the expectation (arXiv 2010.06192).

    `seed`: of the random bits."""

    applies_factor = writes_copies = False

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig, *, seed: int) -> None:
        Optimizer.__init__(self, parameters, config)
        self._seed = seed

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        for piece in self.pieces(whole_parts(self.parameters), update):
            size = CPU_PIECE if piece.param.device.type == "cpu" else DEVICE_PIECE
            for start in range(0, piece.param.numel(), size):
                self._step_piece(piece, start, min(start + size, piece.param.numel()), update)
        self.updates += 1

    def _step_piece(self, piece: FlatPart, start: int, stop: int, update: Update) -> None:
        config, flat, grad = self.config, piece.flat, piece.grad
        kept = [values[start:stop] for values in piece.states]
        moments = [values.float() if values.dtype == torch.bfloat16 else values for values in kept]
        adamw(
            *([piece.param[start:stop]], [grad[start:stop]], [moments[0]], [moments[1]], []),
            [torch.full((), float(self.updates), device=grad.device)],
            fused=True,
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=update.rate(flat),
            weight_decay=update.weight_decay if flat.decay else 0.0,
            eps=config.adam_eps,
            maximize=False,
        )
        bits = None
        if config.stochastic_rounding:
            first = piece.start
            bits = random_bits(flat, first + start, first + stop, seed=self._seed, step=update.step)
        # One half of the bits for each moment.
        for target, values, shift in zip(kept, moments, (0, 16), strict=True):
            if target.dtype == values.dtype:
                continue
            if bits is None:
                target.copy_(values)
            else:
                round_to(target, values, bits.bitwise_right_shift(shift))


# Stochastic rounding to bf16: an element between two bf16 numbers is rounded up with a probability equal to its relative
# distance from the lower one. The random bits are a hash of the seed, the step, the tensor's name and the element's index
# in the whole tensor. So they do not depend on the layout, and no generator state needs to be saved.

_SPREAD, _FIRST, _SECOND, _CARRY = (
    number - (1 << 32) if number >> 31 else number
    # Odd, so that multiplication is a bijection of 32 bits. The first spreads consecutive indices; with the next two, found
    # by search, each bit of the index affects each bit of the hash (github.com/skeeto/hash-prospector).
    for number in (0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xC2B2AE3D)
)


def global_indices(segment: Segment, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return the indices, int64, of elements [start, stop) of a flat parameter, all in `segment`, in the whole tensor.

    The indices are consecutive, except for a gap at each end of a row of a split dimension."""
    first = start - segment.start + segment.offset
    index = torch.arange(first, first + stop - start, device=device)
    shift, local, stride = 0, 1, 1
    for dim in reversed(range(len(segment.global_shape))):
        size, (low, high) = segment.global_shape[dim], segment.slice[dim]
        shift += low * stride
        local *= high - low
        if dim > 0 and high - low != size:
            _leave_gaps(index, first, every=local, gap=(size - high + low) * stride)
        stride *= size
    return index.add_(shift)


def _leave_gaps(index: torch.Tensor, first: int, *, every: int, gap: int) -> None:
    """Add `gap` to an index for each `every` elements before it; `index` is of elements first, first + 1, ..."""
    head = min(-first % every, index.numel())
    index[:head] += first // every * gap
    row, rows = (first + head) // every, (index.numel() - head) // every
    end = head + rows * every
    # Add per row: a division for each element would take longer than everything else.
    whole = index[head:end].view(rows, every)
    whole += gap * torch.arange(row, row + rows, device=index.device).view(rows, 1)
    index[end:] += (row + rows) * gap


def random_bits(flat: FlatParameter, start: int, stop: int, *, seed: int, step: int) -> torch.Tensor:
    """Return 32 random bits for each element of a range of a flat parameter, int32; padding gets 0."""
    out = torch.zeros(stop - start, dtype=torch.int32, device=flat.param.device)
    for segment in flat.segments:
        low, high = max(segment.start, start), min(segment.stop, stop)
        if low < high:
            digest = hashlib.blake2b(f"{seed}:{step}:{segment.name}".encode(), digest_size=8).digest()
            index = global_indices(segment, low, high, out.device)
            wide = math.prod(segment.global_shape) > 1 << 32
            _hash(index, struct.unpack("<ii", digest), out[low - start : high - start], wide=wide)
    return out


def _hash(index: torch.Tensor, key: tuple[int, ...], out: torch.Tensor, *, wide: bool) -> None:
    """Write a hash of each index with two 32-bit keys to `out`; `wide`: some indices have more than 32 bits. Arithmetic
    wraps around."""
    out.copy_(index)
    out.mul_(_SPREAD).add_(key[0])
    if wide:
        out.add_(index.bitwise_right_shift_(32).to(torch.int32).mul_(_CARRY))
    shifted = torch.empty_like(out)
    for shift, factor in ((16, _FIRST), (15, _SECOND), (16, 1)):
        torch.bitwise_right_shift(out, shift, out=shifted)
        # Clear the copies of the sign bit that the arithmetic shift added.
        out.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            # Without the second key all steps would draw from one sequence.
            out.mul_(factor).bitwise_xor_(key[1])


def round_to(target: torch.Tensor, values: torch.Tensor, bits: torch.Tensor) -> None:
    """Write fp32 `values`, rounded by the lower 16 of each element's `bits`, to bf16 `target`. Overwrites `bits`.

    NaN and infinities are preserved."""
    # The bits as an integer grow with the magnitude, so the sum carries into the bf16 part with the right probability.
    rounded = bits.bitwise_and_(0xFFFF).add_(values.view(torch.int32))
    # A NaN may have carried into its sign. This term is NaN if the value is, else a signed 0; a comparison is slower.
    rounded.bitwise_or_(values.clamp(-1.0, 1.0).mul_(0.0).view(torch.int32))
    target.copy_(rounded.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16))


class ScheduleFreeAdamW(Optimizer):
    """Steps as in arXiv 2405.15682 and its authors' package `schedulefree` (bias correction of v, w = largest lr so far):

        y = (1-β₁)z + β₁x                            the trained parameters, at which gradients g are taken
        v = β₂v + (1-β₂)g²,   u = g/(√(v/(1-β₂ᵗ)) + ε) + λy
        z ← z - lr·u,   x ← (1-c)x + c·z,   c = w²/Σw²

    The parameters are y, and z is a state; x = (y - (1-β₁)z)/β₁ is evaluated, saved and exported. Checkpoints contain x as
    the weights, and y as the state `train_param`: a run resumes bit for bit, and other readers of weights get x."""

    from_parameters = Optimizer.from_parameters | {"z", "train_param"}

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig) -> None:
        super().__init__(parameters, config)
        for flat in parameters:
            self._states[flat.param]["z"].copy_(flat.param.data)
        self._largest_lr = self._squares = 0.0  # w and Σw²

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "schedule-free AdamW needs reduced gradients"
        c = self.config
        self.updates += 1
        self._largest_lr = max(self._largest_lr, update.lr)
        self._squares += self._largest_lr**2
        share = self._largest_lr**2 / self._squares if self._squares else 0.0
        for flat in self.parameters:
            piece = CPU_PIECE if flat.param.device.type == "cpu" else DEVICE_PIECE
            states, lr = self._states[flat.param], update.rate(flat)
            flats = (flat.param.data, flat.grad, states["z"], states["exp_avg_sq"])
            for y, grad, z, v in zip(*(values.split(piece) for values in flats), strict=True):
                v.mul_(c.adam_beta2).addcmul_(grad, grad, value=1.0 - c.adam_beta2)
                step = torch.div(v, 1.0 - c.adam_beta2**self.updates).sqrt_().add_(c.adam_eps).reciprocal_().mul_(grad)
                if flat.decay and update.weight_decay:
                    step.add_(y, alpha=update.weight_decay)
                y.lerp_(z, share).add_(step, alpha=lr * (c.adam_beta1 * (1.0 - share) - 1.0))
                z.sub_(step, alpha=lr)

    def evaluated(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.data.lerp(self._states[parameter]["z"], 1.0 - 1.0 / self.config.adam_beta1)

    def counters(self) -> dict[str, Any]:
        return {"largest_lr": self._largest_lr, "squares_of_lr": self._squares}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self._largest_lr = float(counters.get("largest_lr", 0.0))
        self._squares = float(counters.get("squares_of_lr", 0.0))

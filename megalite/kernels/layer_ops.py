"""torch kernels between the matrix products of a layer: norms, dropout with residual sums, activations, RoPE.

Frequencies of YaRN (arXiv 2309.00071) use transformers' operations in the same order, which gives the same bits."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.bases import Function


class _MaskedDropout(Function):
    """x·keep·scale for a boolean mask of x's shape; plain autograd would save the mask in x's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


def masked_dropout(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """Zero the dropped elements and scale the others by 1/(1-p); saves one byte per element. `keep` None: return x."""
    return x if keep is None else _MaskedDropout.apply(x, keep, 1.0 / (1.0 - p))


def add_dropped(
    residual: Tensor, branch: Tensor, bias: Tensor | None, keep: Tensor | None, p: float, factor: float = 1.0
) -> Tensor:
    """Return residual + factor·dropout(branch + bias), all [..., n]; None: no bias, no dropout."""
    branch = branch if bias is None else branch + bias
    if keep is not None:
        return residual + _MaskedDropout.apply(branch, keep, factor / (1.0 - p))
    return torch.add(residual, branch, alpha=factor)


class _RMSNorm(Function):
    """RMSNorm in fp32 for half types (fp64 for fp64) that saves x in its own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        normed, inverse = _normalized(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse  # in fp32 at least, as `inverse` is
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * _factor(weight, inverse.dtype, ctx.offset)
        mean = (grad_normed * normed).mean(dim=-1, keepdim=True)
        grad_x = grad_normed.sub_(normed.mul_(mean)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


def _normalized(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    exact = x.float() if x.dtype in HALF_TYPES else x
    inverse = (torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_() / x.shape[-1]).add_(eps)
    inverse.rsqrt_()
    return (exact * inverse).mul_(_factor(weight, exact.dtype, offset)).to(x.dtype), inverse


def _factor(weight: Tensor, dtype: torch.dtype, offset: float) -> Tensor:
    return weight.to(dtype) + offset if offset else weight.to(dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) · weight + bias; torch computes the statistics in fp32 for half types.

    zero_centered: the factor is 1 + weight, never rounded to a half type."""
    if not zero_centered and (x.dtype == weight.dtype or x.is_cpu):
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
    offset = float(zero_centered)
    if x.dtype not in HALF_TYPES:
        return F.layer_norm(x, weight.shape, weight + offset, bias, eps)
    # CUDA's kernel requires one type for all inputs; only the result is rounded.
    return F.layer_norm(x.float(), weight.shape, weight.float() + offset, bias.float(), eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, with 1 + weight if `zero_centered`."""
    if x.is_cuda and x.dtype == weight.dtype and not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)  # one fused kernel, which saves the same tensors
    # On CPU torch's version saves two fp32 copies of x; and 1 + weight must not be rounded to bf16.
    offset = 1.0 if zero_centered else 0.0
    if not torch.is_grad_enabled():  # autograd's overhead exceeds a norm of few rows
        return _normalized(x, weight, eps, offset)[0]
    return _RMSNorm.apply(x, weight, eps, offset)


def add_norm(
    branch: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    p: float,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (norm(x), x) for x = residual + factor·dropout(branch + bias).

    Args:
        branch, residual: [..., n].
        bias: [n], the bias of the linear layer that computed `branch`, if that layer did not add it.
        keep: boolean [..., n], the elements of the branch that dropout keeps and scales by 1/(1-p); None: no dropout.
        weight, norm_bias: [n], parameters of LayerNorm, or of RMSNorm if `norm_bias` is None."""
    x = add_dropped(residual, branch, bias, keep, p, factor)
    if norm_bias is None:
        return rms_norm(x, weight, eps, zero_centered=zero_centered), x
    return layer_norm(x, weight, norm_bias, eps, zero_centered=zero_centered), x


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, tanh: bool = False) -> Tensor:
    """Return z·Φ(z) for z = x + bias, exactly or by the tanh approximation that GPT-2 was trained with."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh" if tanh else "none")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)² (arXiv 2109.08668)."""
    return F.relu(x).square()


class _Gated(Function):
    """f(gate)·up; the backward recomputes f(gate) instead of saving a third tensor of this size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, limit: float | None = None, offset: float = 0.0) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.limit, ctx.offset = kind, limit, offset
        gate, up = gate_and_up(x, limit, offset)
        return activate(gate, kind).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gate, up = gate_and_up(x, ctx.limit, ctx.offset)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(activate(gate, ctx.kind), grad, out=grad_up)
        if ctx.kind in ("silu", "quick"):
            inner = gate if ctx.kind == "silu" else gate * QUICK
            torch.ops.aten.silu_backward.grad_input(grad * up, inner, grad_input=grad_gate)
        else:
            torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate=ctx.kind, grad_input=grad_gate)
        if ctx.limit is not None:
            raw_gate, raw_up = x.chunk(2, dim=-1)
            grad_gate.masked_fill_(raw_gate > ctx.limit, 0.0)
            grad_up.masked_fill_(raw_up.abs() > ctx.limit, 0.0)
        return grad_x, None, None, None


QUICK = 1.702
"""x·sigmoid(1.702·x) is close to GELU (arXiv 1606.08415)."""


def gate_and_up(x: Tensor, limit: float | None, offset: float) -> tuple[Tensor, Tensor]:
    """Return min(gate, limit) and clamp(up, -limit, limit) + offset for the halves of x [..., 2·f]."""
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate, up + offset if offset else up


def activate(gate: Tensor, kind: str) -> Tensor:
    """Return f(gate); see `gated`."""
    if kind == "quick":
        return F.silu(gate * QUICK).div_(QUICK)
    return F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=kind)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate)·up for x [..., 2·f] with the gate in the first half -> [..., f] (arXiv 2002.05202)."""
    return _Gated.apply(x, "silu")


def geglu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """Return gelu(gate)·up for x [..., 2·f] with the gate in the first half -> [..., f] (arXiv 2002.05202)."""
    return _Gated.apply(x, "tanh" if tanh else "none")


def gated(x: Tensor, *, kind: str, limit: float | None, offset: float) -> Tensor:
    """Return f(min(gate, limit))·(clamp(up, -limit, limit) + offset) [..., f] for x [..., 2·f], the gate first.

    `kind`: f is silu, quick (gate·sigmoid(1.702·gate)), or GELU with torch's `approximate` tanh or none."""
    return _Gated.apply(x, kind, limit, offset)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}) of queries or keys x [s, b, heads, d] by their angles.

    cos and sin are [s, 1, 1, d/2], or [s, b, 1, d/2] if each sequence of a microbatch has its own positions."""
    first, second = x.chunk(2, dim=-1)
    if cos.dtype != x.dtype:
        first, second = first.to(cos.dtype), second.to(cos.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


DROPOUT_COLUMNS = 8
"""Elements per generator call: four 64-bit words of two elements each, the low half first."""


class DropoutMask(Protocol):
    """A kernel of the operation `dropout_mask`."""

    def __call__(
        self, keep: Tensor, rows: Tensor, *, key: int, samples: Sequence[int], first_head: int, p: float
    ) -> None:
        """See `dropout_mask`."""


def drop_threshold(p: float) -> int:
    """Return the integer in [0, 2^32) below which a random number drops its element."""
    return min(round(p * (1 << 32)), (1 << 32) - 1)


def dropout_mask(keep: Tensor, rows: Tensor, *, key: int, samples: Sequence[int], first_head: int, p: float) -> None:
    """Fill `keep` [samples, heads, rows, n]: true with probability 1 - p, the same bits on any device and layout.

    Elements 8·j to 8·j + 7 of row r are Philox4x64-10 (Salmon et al., SC 2011) of the key (key, sample) and the counter
    (r·ceil(n/8) + j + 1, 0, head, 0). This kernel draws them with numpy's generator on the host.

    Args:
        keep: boolean, contiguous in its last dimension.
        rows: int64, the global indices of this rank's rows.
        key: 63 bits that identify the mask's use.
        samples: global sample indices.
        first_head: global index of the first head."""
    if keep.is_meta:
        keep.fill_(True)
    elif keep.device.type != "cpu":
        host = torch.empty(keep.shape, dtype=torch.bool, pin_memory=True)
        dropout_mask(host, rows.cpu(), key=key, samples=samples, first_head=first_head, p=p)
        keep.copy_(host, non_blocking=True)
    else:
        _, heads, count, width = keep.shape
        blocks, below = -(-width // DROPOUT_COLUMNS), np.uint32(drop_threshold(p))
        places, out = rows.numpy(), keep.numpy()
        runs = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), count]
        for index, sample in enumerate(samples):
            for head in range(heads):
                for start, stop in pairwise(runs):
                    counter = int(places[start]) * blocks | (first_head + head) << 128  # numpy increments before a draw
                    generator = np.random.Philox(key=key | sample << 64, counter=counter)
                    words = generator.random_raw((stop - start) * blocks * 4).view(np.uint32).reshape(stop - start, -1)
                    np.greater_equal(words[:, :width], below, out=out[index, head, start:stop])


def rope_frequencies(config: ModelConfig, *, length: int = 0, local: bool = False) -> Tensor:
    """Return θ_i = base^(-2i/d) [d/2] in fp64 for the d rotated channels of a head, with the configured scaling.

    Scaling `linear`: every θ / factor (arXiv 2306.15595). `llama3` (Llama 3.1, arXiv 2407.21783) depends on the
    rotations of a pair within the original positions. Fewer than low_freq_factor: θ / factor; more than
    high_freq_factor: θ; in between, linear interpolation in the number of rotations. `yarn`: see `yarn_frequencies`.
    `dynamic` (NTK-aware): the base grows with the run's sequence `length` by (factor·length/original - factor +
    1)^(d/(d-2)). `local`: use rotary_base_local without scaling."""
    size, factor, low = config.rotary_size, config.rope_scaling_factor, config.rope_low_freq_factor
    base = (config.rotary_base_local if local else None) or config.rotary_base
    if config.rope_scaling == "dynamic" and not local:
        original = config.rope_original_max_positions
        base *= (factor * max(length, original) / original - (factor - 1)) ** (size / (size - 2))
    theta = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if config.rope_scaling in ("none", "dynamic") or local:
        return theta
    if config.rope_scaling == "linear":
        return theta / factor
    if config.rope_scaling == "yarn":
        return yarn_frequencies(config)
    assert config.rope_scaling == "llama3", config.rope_scaling
    rotations = config.rope_original_max_positions * theta / (2 * math.pi)
    kept = ((rotations - low) / (config.rope_high_freq_factor - low)).clamp(0.0, 1.0)
    return theta * (kept + (1.0 - kept) / factor)


def rope_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., d/2] of position · θ_i for positions [...], times `factor`, computed in fp64."""
    angles = positions.double().unsqueeze(-1) * frequencies.to(positions.device)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Return YaRN's frequencies [d/2] in fp64. Pairs with more than `rope_beta_fast` rotations within the original
    positions keep their frequency, pairs below `rope_beta_slow` divide it by the factor; in between, linear
    interpolation in the pair's index."""
    size, base = config.rotary_size, config.rotary_base

    def index(rotations: float) -> float:
        """Return the (fractional) index of the pair with this number of rotations."""
        return size * math.log(config.rope_original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = index(config.rope_beta_fast), index(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    powers = base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    ramp = (torch.arange(size // 2, dtype=torch.float64) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.rope_scaling_factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_factor(config: ModelConfig) -> float:
    """Return the factor on queries and on keys; scores are multiplied by its square."""
    if config.rope_scaling != "yarn":
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    if config.rope_mscale is not None and config.rope_mscale_all_dim is not None:
        return _mscale(config, config.rope_mscale) / _mscale(config, config.rope_mscale_all_dim)
    return _mscale(config, 1)


def latent_score_factor(config: ModelConfig) -> float:
    """Return the factor on scores of multi-latent attention besides 1 / sqrt(d), in all channels."""
    if config.rope_scaling != "yarn" or config.rope_mscale_all_dim is None:
        return 1.0
    return _mscale(config, config.rope_mscale_all_dim) ** 2


def _mscale(config: ModelConfig, scale: float) -> float:
    return 0.1 * scale * math.log(config.rope_scaling_factor) + 1.0

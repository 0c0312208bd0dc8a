"""Which kernel computes causal attention: one of torch's, pinned by name or found out where torch chooses, or ours.

A pinned kernel is torch's operator itself, so that nothing is decided a call.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from megalite.config.errors import ConfigError
from megalite.kernels.attention import causal_attention
from megalite.kernels.blocked_attention import blocked_attention, why_not_blocked
from megalite.kernels.probes import cpu_kinds

_HALF = (torch.bfloat16, torch.float16)
BLOCKED_BECAUSE = "quicker than torch's flash in bf16 on processors like this one"
_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Of torch's SDPBackend."""


@dataclass(frozen=True)
class AttentionShape:
    """What one rank's attention looks like."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    """Query heads."""
    groups: int
    """Key and value heads."""
    head_size: int

    def tensors(self, seq: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of one sample, of zeros."""
        shapes = [(1, heads, seq, self.head_size) for heads in (self.heads, self.groups, self.groups)]
        q, k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@dataclass(frozen=True)
class AttentionChoice:
    """What computes causal attention."""

    kernel: Callable[..., torch.Tensor]
    """Takes what `causal_attention` takes."""
    backend: str
    """flash, cudnn, efficient, blocked or math."""
    why: str
    """Asked for, or torch's choice, or what was measured."""


def choose_attention(backend: str, shape: AttentionShape, *, seq: int) -> AttentionChoice:
    """The kernel for causal attention.

    Args:
        backend: flash, cudnn, efficient, blocked or math. auto: `blocked_attention` where that was measured to be quicker,
            else `causal_attention`, and which of them torch takes for it.
        seq: length of a sequence, by which torch may choose.

    Raises:
        ConfigError: what was asked for is not there, or does not take this shape; with the reason.
    """
    if shape.device.type == "meta":  # shapes alone: nothing will be computed
        return AttentionChoice(causal_attention, backend, "not on a device")
    if backend == "auto":
        if "amd-avx512" in cpu_kinds() and why_not_blocked(shape.device, shape.dtype) is None:
            return AttentionChoice(blocked_attention, "blocked", BLOCKED_BECAUSE)
        return AttentionChoice(causal_attention, _torchs_choice(shape, seq), "torch's choice")
    reason = _why_not(backend, shape)
    if reason is None:
        kernel = partial(_KERNELS[backend, shape.device.type], grouped=_takes_groups(backend, shape))
        reason = _failure(kernel, shape)
        if reason is None:
            return AttentionChoice(kernel, backend, "asked for")
    raise ConfigError(f"attention_backend {backend} cannot be had: {reason}; use attention_backend auto")


def _torchs_choice(shape: AttentionShape, seq: int) -> str:
    q, k, v = shape.tensors(seq)
    grouped = shape.heads > shape.groups and q.is_cuda and q.dtype in _HALF
    if not grouped:
        k, v = _for_every_head(q, k, v)
    return _NAMES[torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)]


def _why_not(backend: str, shape: AttentionShape) -> str | None:
    """Why the shape cannot be given to the backend, or None: what needs no device first, then what torch says."""
    device = shape.device.type
    if (backend, device) not in _KERNELS:
        there = ", ".join(name for name, of in _KERNELS if of == device)
        return f"there is none on {device}, which has {there}"
    if backend == "blocked":
        return why_not_blocked(shape.device, shape.dtype)
    if device == "cuda" and backend in ("flash", "cudnn"):
        if shape.dtype not in _HALF:
            return f"it takes bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}"
        if shape.head_size % 8:
            return f"it takes head sizes that are multiples of 8, not {shape.head_size}"
    if device == "cuda" and backend != "math":
        return _why_not_on_cuda(backend, shape, grouped=False)
    return None


def _why_not_on_cuda(backend: str, shape: AttentionShape, *, grouped: bool) -> str | None:
    """What torch itself says; `grouped`: of keys with fewer heads than the queries."""
    q, k, v = shape.tensors(128)
    if not grouped:
        k, v = _for_every_head(q, k, v)
    takes = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
    }[backend]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if takes(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped), True):
            return None
    return " ".join(str(one.message).partition(" (Triggered")[0] for one in said) or "torch does not say why"


def _takes_groups(backend: str, shape: AttentionShape) -> bool:
    """Keys with fewer heads than the queries can be given to the kernel as they are."""
    if shape.heads == shape.groups or shape.device.type != "cuda" or backend == "efficient":
        return False
    return backend == "math" or _why_not_on_cuda(backend, shape, grouped=True) is None


def _failure(kernel: Callable[..., torch.Tensor], shape: AttentionShape) -> str | None:
    """How a small forward and backward fails, or None."""
    try:
        q, k, v = shape.tensors(16)
        kernel(q, k, v).sum().backward()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def _for_every_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    repeats = q.shape[1] // k.shape[1]
    if repeats == 1:
        return k, v
    return k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)


def _flash_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, grouped: bool
) -> torch.Tensor:
    k, v = _for_every_head(q, k, v)
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)[0]


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, grouped: bool
) -> torch.Tensor:
    if not grouped:
        k, v = _for_every_head(q, k, v)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, grouped: bool
) -> torch.Tensor:
    k, v = _for_every_head(q, k, v)
    keeps = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, keeps, 0.0, causal)[0]


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, grouped: bool
) -> torch.Tensor:
    if not grouped:
        k, v = _for_every_head(q, k, v)
    keeps = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, keeps, 0.0, causal)[0]


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, grouped: bool
) -> torch.Tensor:
    if not grouped:
        k, v = _for_every_head(q, k, v)
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, causal, enable_gqa=grouped)[
        0
    ]


_KERNELS: Mapping[tuple[str, str], Callable[..., torch.Tensor]] = MappingProxyType(
    {
        ("flash", "cpu"): _flash_on_cpu,
        ("blocked", "cpu"): blocked_attention,
        ("math", "cpu"): _math,
        ("flash", "cuda"): _flash,
        ("cudnn", "cuda"): _cudnn,
        ("efficient", "cuda"): _efficient,
        ("math", "cuda"): _math,
    }
)
"""Backend and device -> the kernel."""

"""Choose the kernel for causal attention: a torch kernel, pinned by name or chosen by torch, or `blocked_attention`.

A pinned kernel calls torch's operator directly, without torch's choice on each call. `blocked` computes scores in fp32
and the other products in bf16, for CPUs on which torch's flash kernel is slower."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.config.megatron import VALUES
from megalite.config.registry import imported
from megalite.kernels.attention import HALF_TYPES, causal_attention, readable, repeat_kv_heads
from megalite.kernels.bases import Function
from megalite.kernels.probes import LIMITS, Inputs, cpu_kinds, relative, through

SCORES = 1 << 20  # elements of scores per block, which sets the heads per block: a few MB, small enough for CPU caches


def why_not_blocked(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why `blocked_attention` cannot be used, or None."""
    if device.type != "cpu":
        return f"it does not exist on {device.type}"
    if dtype != torch.bfloat16:
        return f"it requires bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return "oneDNN has no bf16 matrix products in this torch build or on this processor"
    return None


class _Blocked(Function):
    """Causal attention of [n, s, d], where n counts the heads of all samples."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for heads, rows, keys, p in _probabilities(q, k):
            out[heads, rows] = torch.bmm(p.to(q.dtype), v[heads, keys])
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        half, scale = q.dtype, 1.0 / math.sqrt(q.shape[2])
        grad_out = grad_out.contiguous()
        grad_q = torch.empty(q.shape, dtype=half)
        # Contributions of the query blocks are summed in fp32.
        grad_k, grad_v = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
        for heads, rows, keys, p in _probabilities(q, k):
            grad = grad_out[heads, rows]
            grad_p = torch.bmm(grad, v[heads, keys].mT).float()
            grad_s = torch._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(scale).to(half)
            grad_q[heads, rows] = torch.bmm(grad_s, k[heads, keys])
            grad_k[heads, keys] += torch.bmm(grad_s.mT, q[heads, rows])
            grad_v[heads, keys] += torch.bmm(p.to(half).mT, grad)
        return grad_q, grad_k.to(half), grad_v.to(half)


def _probabilities(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield (heads, queries, visible keys, probabilities [heads, queries, keys] in fp32) for each block."""
    count, seq, size = q.shape
    queries = 128 if seq <= 1024 else 256  # small blocks skip more masked scores, large ones read the keys less often
    together = max(1, SCORES // (queries * seq))
    hidden = torch.full((queries, queries), -math.inf).triu_(1)
    for head in range(0, count, together):
        heads = slice(head, head + together)
        scaled, exact = q[heads].float().mul_(1.0 / math.sqrt(size)), k[heads].float()
        for start in range(0, seq, queries):
            stop = min(seq, start + queries)
            scores = torch.bmm(scaled[:, start:stop], exact[:, :stop].mT)
            scores[:, :, start:].add_(hidden[: stop - start, : stop - start])
            yield heads, slice(start, stop), slice(0, stop), scores.softmax(dim=-1)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """`causal_attention` for bf16 on a CPU; without a mask it calls `causal_attention`."""
    if not causal:
        return causal_attention(q, k, v, causal=False)
    b, heads, seq, size = q.shape
    k, v = repeat_kv_heads(k, heads), repeat_kv_heads(v, heads)
    return _Blocked.apply(*(each.reshape(b * heads, seq, size) for each in (q, k, v))).view(b, heads, seq, size)


BLOCKED_BECAUSE = "faster than torch's flash in bf16 on processors like this one"
_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # values of torch's SDPBackend


@dataclass(frozen=True)
class AttentionShape:
    """Device, type and sizes of one rank's attention: query heads, and groups of key and value heads."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    head_size: int

    def tensors(self, seq: int, *, grouped: bool = True) -> list[Tensor]:
        """Return queries, keys and values of one sample, all 0; without `grouped`, keys and values have all heads."""
        groups = self.groups if grouped else self.heads
        shapes = [(1, heads, seq, self.head_size) for heads in (self.heads, groups, groups)]
        return [torch.zeros(each, dtype=self.dtype, device=self.device, requires_grad=True) for each in shapes]


class AttentionChoice(NamedTuple):
    """The chosen kernel for causal attention."""

    kernel: Callable[..., Tensor]  # same arguments as `causal_attention`
    backend: str  # flash, cudnn, efficient, blocked or math
    why: str  # the reason, for the log


def choose_attention(backend: str, shape: AttentionShape, *, seq: int) -> AttentionChoice:
    """Return the kernel for causal attention.

    Args:
        backend: flash, cudnn, efficient, blocked or math. auto: `blocked_attention` on the processors on which it was
            measured to be faster, else `causal_attention` with the backend that torch chooses.
        seq: sequence length, on which torch's choice may depend.

    Raises ConfigError: the backend does not exist on this device or does not support this shape."""
    if shape.device.type == "meta":  # shapes alone: no kernel will run
        return AttentionChoice(_KERNELS["flash", "cuda"], backend, "not on a device")
    if backend == "auto":
        if "amd-avx512" in cpu_kinds() and why_not_blocked(shape.device, shape.dtype) is None:
            return AttentionChoice(blocked_attention, "blocked", BLOCKED_BECAUSE)
        return AttentionChoice(causal_attention, _torchs_choice(shape, seq), "torch's choice")
    reason = _why_not(backend, shape)
    if reason is None:
        kernel = _KERNELS[backend, shape.device.type]
        kernel = kernel if _takes_groups(backend, shape) else _with_repeated_keys(kernel)
        try:
            kernel(*shape.tensors(16)).sum().backward()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        else:
            return AttentionChoice(kernel, backend, "requested")
    spellings = " or ".join([backend, *(word for word, ours in VALUES["attention_backend"].items() if ours == backend)])
    raise ConfigError(f"attention_backend {spellings} cannot be used: {reason}; use attention_backend auto")


def _torchs_choice(shape: AttentionShape, seq: int) -> str:
    grouped = shape.heads > shape.groups and shape.device.type == "cuda" and shape.dtype in HALF_TYPES
    q, k, v = shape.tensors(seq, grouped=grouped)
    return _NAMES[torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)]


def _why_not(backend: str, shape: AttentionShape) -> str | None:
    """Return why the backend does not support the shape, or None; checks that need no device come before torch's."""
    device = shape.device.type
    if (backend, device) not in _KERNELS:
        available = ", ".join(name for name, of in _KERNELS if of == device)
        return f"it does not exist on {device}, which has {available}"
    if backend == "blocked":
        return why_not_blocked(shape.device, shape.dtype)
    if device == "cuda" and backend in ("flash", "cudnn"):
        if shape.dtype not in HALF_TYPES:
            return f"it supports bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}"
        if shape.head_size % 8:
            return f"it supports head sizes that are multiples of 8, not {shape.head_size}"
    if device == "cuda" and backend != "math" and not _takes(backend, shape, grouped=False):
        return "see torch's warning on stderr"
    return None


def _takes(backend: str, shape: AttentionShape, *, grouped: bool) -> bool:
    """Return torch's verdict, with its reason on stderr; `grouped`: for fewer key heads than query heads, silently."""
    q, k, v = shape.tensors(128, grouped=grouped)
    takes = getattr(torch.backends.cuda, f"can_use_{backend}_attention")
    return bool(takes(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped), not grouped))


def _takes_groups(backend: str, shape: AttentionShape) -> bool:
    """Return whether the kernel supports keys with fewer heads than the queries."""
    if shape.heads == shape.groups or shape.device.type != "cuda" or backend == "efficient":
        return False
    return backend == "math" or _takes(backend, shape, grouped=True)


def _with_repeated_keys(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a kernel that needs as many heads of keys and values as of queries."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
        return kernel(q, repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1]), causal=causal)

    return attention


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, document_starts: tuple[tuple[int, ...], ...] | None
) -> Tensor:
    """Causal attention of whole sequences within documents and a window, by one flash kernel on CUDA.

    Args:
        q: [b, heads, s, d]; k, v: [b, groups, s, d].
        window: number of visible keys per query, including its own position; None: all keys up to it.
        document_starts: per sample the ascending first positions of its documents; None: each sample is one document.
    """
    kernel = imported("torch.nn.attention.varlen:varlen_attn")  # imported late because it takes seconds
    b, heads, s, d = q.shape
    bounds, longest = _bounds(document_starts or ((0,),) * b, s, q.device)
    q, k, v = (tensor.permute(0, 2, 1, 3).reshape(b * s, -1, d) for tensor in (q, k, v))
    # torch 2.11 supports grouped keys without the argument.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}
    bounds_of_window = (-1 if window is None else window - 1, 0)
    out = kernel(q, k, v, bounds, bounds, longest, longest, window_size=bounds_of_window, **grouped)
    assert isinstance(out, Tensor)
    return out.view(b, s, heads, d).permute(0, 2, 1, 3)


@lru_cache(maxsize=8)
def _bounds(document_starts: tuple[tuple[int, ...], ...], s: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the cumulative document boundaries over the concatenated samples, and the longest document's length."""
    places = [sample * s + start for sample, starts in enumerate(document_starts) for start in starts]
    places.append(len(document_starts) * s)
    with torch.inference_mode(False):  # the cache outlives the caller's mode
        bounds = torch.tensor(places, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return bounds, max(stop - start for start, stop in pairwise(places))


@cache
def why_not_varlen(shape: AttentionShape) -> str | None:
    """Return why `varlen_attention` must not be used, or None: an unsupported shape, or wrong numbers on a few rows."""
    if shape.device.type != "cuda":
        return f"it does not exist on {shape.device.type}"
    if shape.dtype not in HALF_TYPES or shape.head_size % 8 or shape.head_size > 256:
        return f"it supports bfloat16 and float16 and head sizes up to 256, multiples of 8, not {shape.head_size}"
    return varlen_fault(shape)


def varlen_fault(shape: AttentionShape) -> str | None:
    """Return the first error of `varlen_attention` on a few rows with documents and a window, or None."""
    b, s, window, starts = 2, 64, 9, ((0, 3, 40), (0,))
    inputs, sizes = Inputs(shape.dtype, str(shape.device)), (shape.heads, shape.groups, shape.groups)
    drawn = [inputs.normal(b, heads, s, shape.head_size) for heads in sizes]
    places = torch.arange(s)
    document = torch.stack([torch.bucketize(places, torch.tensor(each), right=True) for each in starts])
    distance = places.unsqueeze(1) - places
    seen = (distance >= 0) & (distance < window) & (document.unsqueeze(2) == document.unsqueeze(1))
    mask = seen.unsqueeze(1).to(shape.device)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_kv_heads(k, shape.heads), repeat_kv_heads(v, shape.heads)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    try:
        found = through(partial(varlen_attention, window=window, document_starts=starts), drawn)
    except (ImportError, RuntimeError, TypeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    right, limit = through(masked, [tensor.float() for tensor in drawn]), LIMITS[shape.dtype]
    for name, wanted in right.items():
        if not (off := relative(found[name], wanted)) <= limit:  # NaN too
            return f"{name} has a relative error of {off:.1e}, more than {limit:.0e}"
    return None


_aten = torch.ops.aten


def _math(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return _aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, causal, enable_gqa=grouped)[0]


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    return torch._scaled_dot_product_flash_attention_for_cpu(readable(q), readable(k), readable(v), 0.0, causal)[0]


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    return _aten._scaled_dot_product_cudnn_attention(q, k, v, None, torch.is_grad_enabled(), 0.0, causal)[0]


def _efficient(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    return _aten._scaled_dot_product_efficient_attention(q, k, v, None, torch.is_grad_enabled(), 0.0, causal)[0]


_KERNELS: Mapping[tuple[str, str], Callable[..., Tensor]] = MappingProxyType(
    {
        ("flash", "cpu"): _flash_on_cpu,
        ("blocked", "cpu"): blocked_attention,
        ("math", "cpu"): _math,
        ("flash", "cuda"): _flash,
        ("cudnn", "cuda"): _cudnn,
        ("efficient", "cuda"): _efficient,
        ("math", "cuda"): _math,
    }
)  # (backend, device) -> kernel

"""How a rank computes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalite.config.errors import ConfigError, nearest
from megalite.config.option import option
from megalite.config.registry import Registry

BACKENDS = ("apex", "triton", "onednn", "torch")
"""Where kernels come from: NVIDIA's apex, our Triton ones, the oneDNN inside torch where torch does not take it itself, torch."""

OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "rmsnorm": "RMSNorm",
        "layernorm": "LayerNorm",
        "add_norm": "bias, dropout, residual sum and the norm behind it",
        "bias_gelu": "bias and GELU",
        "swiglu": "silu(gate) · up",
        "geglu": "gelu(gate) · up",
        "rope": "rotary position embedding",
        "softmax": "softmax of attention scores in memory, where attention has dropout",
        "dropout_mask": "which elements dropout keeps",
        "cross_entropy": "cross-entropy over this rank's part of the vocabulary",
        "fp8": "scaling and rounding to fp8",
        "matmul": "output and input gradient of linear layers",
        "weight_grad": "weight gradients added to the main gradient",
        "adam": "AdamW",
        "lamb": "LAMB",
        "l2norm": "gradient norm",
    }
)
"""Operations that can have more than one kernel, and what they are."""


ATTENTION_BACKENDS = ("auto", "flash", "cudnn", "efficient", "blocked", "math")


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Kernels and how layers compute."""

    kernels: list[str] = option([])
    """Kernels by hand, as apex,adam=torch: a BACKEND goes first for all operations, OPERATION=BACKEND must serve that
    one."""
    attention_backend: str = option("auto", choices=ATTENTION_BACKENDS)
    """Attention by torch's flash, cudnn, efficient or math kernel, or ours for bf16 on a CPU, blocked."""
    tp_comm_overlap: bool = option(False)
    """With sequence parallelism: gathers and scatters overlap with products, in tp pieces."""
    tp_comm_overlap_backend: str = option("auto", choices=("auto", "ring", "symmetric"))
    """How pieces of tp_comm_overlap travel: round a ring, or by symmetric memory over NVLink. auto: symmetric where a
    trial gives the ring's numbers."""
    fp8: bool = option(False)
    """Linear layers multiply in fp8, except the first and last layer, experts and head. Needs bf16 and compute
    capability 8.9."""
    fp8_recipe: str = option("tensorwise", choices=("tensorwise", "rowwise", "blockwise"))
    """What has a scale in fp8: each tensor, each row of the first and column of the second factor, or 128 elements of these
    and 128 x 128 of a weight."""
    fp8_wgrad: bool = option(True)
    """With fp8: weight gradients are products in fp8 too; else in bf16."""
    tf32: bool = option(False)
    """Products of fp32 matrices on CUDA round their factors to TF32: errors near 5e-4. Needs compute capability 8.0."""
    deterministic: bool = option(False, flags=("--deterministic-mode",))
    """The same bits in every run of one layout, also on CUDA; an operation without a repeatable form ends the run."""
    compile: bool = option(False)
    """torch.compile for what is between matrix products, attention and communication. Takes a minute at start."""
    keep_cpu_memory: bool = option(True)
    """On a CPU with glibc, reuse freed memory instead of returning it."""


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """Of a user's kernel; it has the signature of torch's for the operation."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    devices: tuple[str, ...] = ("cpu", "cuda")


KERNELS: Registry[Any] = Registry("kernels", facts=KernelFacts)
"""What users add, as OPERATION=BACKEND: a function, or a tuple of them where torch's are several. It serves where that is
asked for, once it has given torch's numbers on a few rows. Our own are rows in `kernels.registry`."""


ALL_OPERATIONS = ""
"""Stands for every operation that is not asked for by name."""


def kernel_requests(given: list[str]) -> dict[str, str]:
    """Operation -> backend, of the setting `kernels`; a backend alone is that of `ALL_OPERATIONS`.
    Raises ConfigError: neither OPERATION=BACKEND nor BACKEND, an operation twice."""
    requests: dict[str, str] = {}
    for text in (part.strip() for entry in given for part in entry.split(",")):
        operation, equals, backend = (part.strip() for part in text.partition("="))
        if operation in BACKENDS and not equals:
            operation, backend = ALL_OPERATIONS, operation
        elif not (operation and equals and backend):
            raise ConfigError(
                f"kernels: {text!r} is neither OPERATION=BACKEND, such as rmsnorm=triton, nor one of {', '.join(BACKENDS)}"
            )
        if requests.get(operation, backend) != backend:
            raise ConfigError(
                f"kernels: {operation or 'the backend of all operations'} is given twice, as {requests[operation]} and "
                f"{backend}; keep one of them"
            )
        requests[operation] = backend
    return requests


def unknown_kernels(requests: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with `kernel_requests`: no such operation or backend."""
    for operation, backend in requests.items():
        if operation in OPERATIONS and f"{operation}={backend}" in KERNELS:
            continue
        operations = [*OPERATIONS] if operation != ALL_OPERATIONS else [ALL_OPERATIONS]
        for kind, name, known in (("operation", operation, operations), ("backend", backend, [*BACKENDS])):
            if name not in known:
                yield f"kernels {operation}={backend}: no {kind} {name}{nearest(name, known)} (one of {', '.join(known)})"


def kernels_in_words(chosen: Mapping[str, str]) -> str:
    """`torch; triton for adam, rmsnorm`: the backend that serves most operations, and which ones others serve.

    Args:
        chosen: operation -> backend.
    """
    serves: dict[str, list[str]] = {}
    for operation, backend in chosen.items():
        serves.setdefault(backend, []).append(operation)
    most = max(serves, key=lambda backend: len(serves[backend]))
    others = [f"{backend} for {', '.join(serves[backend])}" for backend in serves if backend != most]
    return "; ".join([most, *others])

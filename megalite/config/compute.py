"""Settings of kernels and computation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.errors import ConfigError, nearest
from megalite.config.registry import Registry, option

BACKENDS = ("apex", "triton", "onednn", "torch")
"""Kernel backends: NVIDIA's apex, megalite's Triton kernels, the oneDNN inside torch where torch itself does not use
it, torch."""

OPERATIONS: Mapping[str, str] = {
    "rmsnorm": "RMSNorm",
    "layernorm": "LayerNorm",
    "add_norm": "bias, dropout, residual sum and the norm behind it",
    "bias_gelu": "bias and GELU",
    "swiglu": "silu(gate) · up",
    "geglu": "gelu(gate) · up",
    "rope": "rotary position embedding",
    "softmax": "softmax of attention scores in memory, where attention has dropout",
    "delta_scan": "state of linear attention from chunk to chunk",
    "dropout_mask": "which elements dropout keeps",
    "cross_entropy": "cross-entropy over this rank's part of the vocabulary",
    "fp8": "scaling and rounding to fp8",
    "matmul": "output and input gradient of linear layers",
    "weight_grad": "weight gradients added to the main gradient",
    "adam": "AdamW",
    "lamb": "LAMB",
    "l2norm": "gradient norm",
}
"""Operations that can have more than one kernel -> description."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Kernels and computation."""

    kernels: list[str] = option([])
    """Kernel choice, e.g. apex,adam=torch: a BACKEND is preferred for all operations, OPERATION=BACKEND is required."""
    attention_backend: str = option("auto", choices=("auto", "flash", "cudnn", "efficient", "blocked", "math"))
    """Attention kernel: torch's flash, cudnn, efficient or math, or megalite's blocked for bf16 on a CPU."""
    tp_comm_overlap: bool = option(False)
    """With sequence_parallel: overlap gathers and scatters with matrix products, in tp pieces."""
    tp_comm_overlap_backend: str = option("auto", choices=("auto", "ring", "symmetric"))
    """Transport of tp_comm_overlap: a ring, or symmetric memory over NVLink; auto: symmetric if a trial reproduces the
    ring's numbers."""
    fp8: bool = option(False)
    """Compute linear layers in fp8, except first and last layer, experts and head. Needs bf16 and compute capability
    8.9."""
    fp8_recipe: str = option("tensorwise", choices=("tensorwise", "rowwise", "blockwise"))
    """fp8 scaling: one scale per tensor; per row of the first and column of the second factor; or per 128 elements, for
    weights per 128 x 128."""
    fp8_wgrad: bool = option(True)
    """fp8: compute weight gradients in fp8 too, instead of bf16."""
    tf32: bool = option(False)
    """Round factors of fp32 matrix products to TF32 on CUDA: errors near 5e-4. Needs compute capability 8.0."""
    deterministic: bool = option(False, flags=("--deterministic-mode",))
    """Reproduce a run bit for bit on one layout, also on CUDA; an operation that cannot do this ends the run."""
    compile: bool = option(False)
    """Use torch.compile between matrix products, attention and communication. Adds about a minute at start."""
    keep_cpu_memory: bool = option(True)
    """On a CPU with glibc: reuse freed memory instead of returning it to the system."""


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """Facts about a user's kernel, which has the signature of torch's kernel for the operation."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    devices: tuple[str, ...] = ("cpu", "cuda")

    def __post_init__(self) -> None:
        known = ("float64", "float32", "bfloat16", "float16")
        if not set(self.dtypes) <= set(known):
            raise TypeError(f"dtypes is {self.dtypes!r}; name some of {', '.join(known)}")


KERNELS: Registry[Any] = Registry("kernels", facts=KernelFacts)
"""Kernels that users add, named OPERATION=BACKEND: a function, or a tuple if torch's kernel is a tuple. A requested
kernel is used if it reproduces torch's numbers on a few rows. megalite's kernels are in `kernels.registry`."""


ALL_OPERATIONS = ""
"""Key for all operations that are not requested by name."""


def kernel_requests(entries: list[str]) -> dict[str, str]:
    """Parse the setting `kernels` into operation -> backend; a backend alone has the key `ALL_OPERATIONS`. Raises
    ConfigError: an entry is neither OPERATION=BACKEND nor BACKEND, or an operation has two backends."""
    requests: dict[str, str] = {}
    for text in (part.strip() for entry in entries for part in entry.split(",")):
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
    """Yield the errors of `kernel_requests`: unknown operations and backends."""
    for operation, backend in requests.items():
        if operation in OPERATIONS and f"{operation}={backend}" in KERNELS:
            continue
        operations = [*OPERATIONS] if operation != ALL_OPERATIONS else [ALL_OPERATIONS]
        for kind, name, known in (("operation", operation, operations), ("backend", backend, [*BACKENDS])):
            if name not in known:
                yield f"kernels {operation}={backend}: no {kind} {name}{nearest(name, known)} (one of {', '.join(known)})"


def kernels_in_words(chosen: Mapping[str, str]) -> str:
    """Return `torch; triton for adam, rmsnorm`: the backend of most operations, then the exceptions. `chosen`:
    operation -> backend."""
    serves: dict[str, list[str]] = {}
    for operation, backend in chosen.items():
        serves.setdefault(backend, []).append(operation)
    most = max(serves, key=lambda backend: len(serves[backend]))
    others = [f"{backend} for {', '.join(serves[backend])}" for backend in serves if backend != most]
    return "; ".join([most, *others])

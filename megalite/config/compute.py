"""How a rank computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megalite.config.errors import ConfigError
from megalite.config.option import option

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
        "cross_entropy": "cross-entropy over this rank's part of the vocabulary",
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
    """Kernels by hand, OPERATION=BACKEND with commas or spaces between: rmsnorm=triton,adam=apex. The others are chosen
    by a table of measured speeds; `megalite kernels` lists operations, backends and what is there."""
    attention_backend: str = option("auto", choices=ATTENTION_BACKENDS)
    """Which of torch's kernels computes causal attention: flash or cudnn or efficient (half types on CUDA; efficient also
    fp32), flash (on a CPU any type), or math, which keeps the scores in memory; or our own for bf16 on a CPU, blocked.
    auto: what torch prefers for the device, or blocked where that was measured to be quicker; the log says which it is.
    One that is not there is an error."""
    tp_comm_overlap: bool = option(False)
    """With sequence parallelism: gather and multiply, and multiply and scatter, in tp pieces, so that each piece travels
    while another is multiplied. Same numbers to rounding."""
    fp8: bool = option(False)
    """Linear layers multiply in fp8 (e4m3 forward, e5m2 gradients, one scale a tensor), except in the first and the last
    layer, in experts and in the head. Weights, weight gradients and optimizer are as without. Needs precision bf16 and a
    GPU of compute capability 8.9 or more."""
    deterministic_mode: bool = option(False)
    """Only kernels that give the same bits in every run, on CUDA too; an operation without one is an error. Slower."""
    compile: bool = option(False)
    """torch.compile for what is between the matrix products, attention and communication: norms, activations, rotary
    embedding, dropout with residual sum, as far as torch's kernels serve them. Takes a minute at start."""
    keep_cpu_memory: bool = option(True)
    """On a CPU with glibc, reuse what is freed instead of giving it back to the system: large tensors otherwise come as
    zeroed pages each time. --no-keep-cpu-memory for processes that share a machine short of memory."""


def kernel_requests(given: list[str]) -> dict[str, str]:
    """Operation -> backend, of the setting `kernels`.

    Raises:
        ConfigError: not OPERATION=BACKEND, an operation twice.
    """
    requests: dict[str, str] = {}
    for text in (part.strip() for entry in given for part in entry.split(",")):
        operation, equals, backend = (part.strip() for part in text.partition("="))
        if not (operation and equals and backend):
            raise ConfigError(f"kernels: {text!r} is not OPERATION=BACKEND, such as rmsnorm=triton")
        if requests.get(operation, backend) != backend:
            raise ConfigError(
                f"kernels: {operation} is given twice, as {requests[operation]} and {backend}; keep one of them"
            )
        requests[operation] = backend
    return requests


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

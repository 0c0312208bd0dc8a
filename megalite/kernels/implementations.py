"""Every kernel there is: operation -> backend -> where it is and what it takes."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megalite.kernels.apex.detect import why_not_extension
from megalite.kernels.apex.limits import softmax_limit
from megalite.kernels.self_check import why_wrong

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
ALL = (torch.float64, *FLOATS)


@dataclass(frozen=True)
class Use:
    """What a module asks a kernel for, as far as it knows when it is built."""

    device: str
    """Type of the device: cpu, cuda."""
    dtype: torch.dtype
    """Of activations, or of a flat tensor."""
    size: int
    """Of the last dimension; for an optimizer's operation the number of elements."""


@dataclass(frozen=True)
class Implementation:
    """One kernel of one backend."""

    module: str
    """Below megalite.kernels; imported when it is chosen."""
    names: tuple[str, ...]
    """Its functions there, one for most operations."""
    dtypes: tuple[torch.dtype, ...] = ALL
    extension: str | None = None
    """Of apex."""
    limit: Callable[[Use], str | None] | None = None
    """Why it does not take a use of a type that it takes, or None."""
    tried: tuple[str, str] | None = None
    """(backend, operation), where it must give torch's numbers on a few rows before it may serve."""

    def load(self) -> Any:
        """The function; the functions in a tuple where there are several."""
        module = importlib.import_module(f"megalite.kernels.{self.module}")
        found = tuple(getattr(module, name) for name in self.names)
        return found[0] if len(found) == 1 else found

    def why_not_here(self) -> str | None:
        """Why it cannot be used in this installation, or None."""
        return None if self.extension is None else why_not_extension(self.extension)

    def why_not(self, use: Use) -> str | None:
        """Why it cannot serve a use here, or None."""
        if use.dtype not in self.dtypes:
            takes = ", ".join(_name(dtype) for dtype in self.dtypes)
            return f"it takes {takes}, not {_name(use.dtype)}"
        reason = self.why_not_here() or (None if self.limit is None else self.limit(use))
        if reason is not None or self.tried is None:
            return reason
        return why_wrong(*self.tried, self.load(), use.dtype, use.device, use.size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CROSS_ENTROPY = ("cross_entropy_forward", "cross_entropy_backward")
_LAMB = ("lamb_moments", "lamb_step")
_SOFTMAX = ("causal_softmax_forward", "causal_softmax_backward")


def _softmax_limit(use: Use) -> str | None:
    return softmax_limit(use.size)


def _apex() -> Mapping[str, Implementation]:
    """Not FastLayerNorm, which has a list of sizes that differs between versions, nor FusedLAMB, which knows no bounds of
    the trust ratio and no tensor that is split: of LAMB the pieces that it is made of."""
    norms, multi, products = "fused_layer_norm_cuda", "amp_C", "fused_weight_gradient_mlp_cuda"
    rope, softmax = "fused_rotary_positional_embedding", "scaled_upper_triang_masked_softmax_cuda"
    rows: dict[str, tuple[str, tuple[str, ...], tuple[torch.dtype, ...], str]] = {
        "rmsnorm": ("norms", ("rmsnorm",), FLOATS, norms),
        "layernorm": ("norms", ("layernorm",), FLOATS, norms),
        "rope": ("rope", ("rope",), FLOATS, rope),
        "softmax": ("softmax", _SOFTMAX, HALVES, softmax),
        # Of bf16 logits it rounds the log-sum-exp to bf16: probabilities off by up to 3 %.
        "cross_entropy": ("cross_entropy", _CROSS_ENTROPY, (torch.float32, torch.float16), "xentropy_cuda"),
        "weight_grad": ("weight_grad", ("accumulate_weight_grad",), FLOATS, products),
        # Its moments are fp32 whatever the parameter is, and bf16 parameters would have no fp32 copy.
        "adam": ("adam", ("adam",), (torch.float32,), multi),
        "lamb": ("lamb", _LAMB, (torch.float32,), multi),
        "l2norm": ("l2norm", ("l2norm",), FLOATS, multi),
    }
    return {
        operation: Implementation(
            f"apex.{module}",
            names,
            dtypes,
            extension,
            _softmax_limit if operation == "softmax" else None,
            tried=("apex", operation),
        )
        for operation, (module, names, dtypes, extension) in rows.items()
    }


def _onednn(operation: str, name: str) -> Implementation:
    """Of half types torch's products are oneDNN's already."""
    return Implementation("onednn", (name,), (torch.float32,), tried=("onednn", operation))


def _table() -> Mapping[str, Mapping[str, Implementation]]:
    apex = _apex()
    return MappingProxyType(
        {
            "rmsnorm": {
                "torch": Implementation("norms", ("rms_norm",)),
                "triton": Implementation("triton.norms", ("rmsnorm",), FLOATS),
                "apex": apex["rmsnorm"],
            },
            "layernorm": {
                "torch": Implementation("norms", ("layer_norm",)),
                "triton": Implementation("triton.norms", ("layernorm",), FLOATS),
                "apex": apex["layernorm"],
            },
            "add_norm": {
                "torch": Implementation("add_norm", ("add_norm",)),
                "triton": Implementation("triton.add_norm", ("add_norm",), FLOATS),
            },
            "bias_gelu": {
                "torch": Implementation("activations", ("bias_gelu",)),
                "triton": Implementation("triton.activations", ("bias_gelu",), FLOATS),
            },
            "swiglu": {
                "torch": Implementation("activations", ("swiglu",)),
                "triton": Implementation("triton.activations", ("swiglu",), FLOATS),
            },
            "geglu": {
                "torch": Implementation("activations", ("geglu",)),
                "triton": Implementation("triton.activations", ("geglu",), FLOATS),
            },
            "rope": {
                "torch": Implementation("rope", ("apply_rope",)),
                "triton": Implementation("triton.rope", ("rope",), FLOATS),
                "apex": apex["rope"],
            },
            "cross_entropy": {
                "torch": Implementation("cross_entropy", _CROSS_ENTROPY),
                "triton": Implementation("triton.cross_entropy", _CROSS_ENTROPY, FLOATS),
                "apex": apex["cross_entropy"],
            },
            "softmax": {"torch": Implementation("softmax", _SOFTMAX), "apex": apex["softmax"]},
            "matmul": {
                "torch": Implementation("matmul", ("matmul",)),
                "onednn": _onednn("matmul", "matmul"),
            },
            "weight_grad": {
                "torch": Implementation("weight_grad", ("accumulate_weight_grad",)),
                "onednn": _onednn("weight_grad", "accumulate_weight_grad"),
                "apex": apex["weight_grad"],
            },
            "adam": {
                "torch": Implementation("adam", ("adam",)),
                "triton": Implementation("triton.adam", ("adam",), (torch.float32,)),
                "apex": apex["adam"],
            },
            "lamb": {
                "torch": Implementation("lamb", _LAMB),
                "triton": Implementation("triton.lamb", _LAMB, (torch.float32,)),
                "apex": apex["lamb"],
            },
            "l2norm": {
                "torch": Implementation("l2norm", ("l2norm",)),
                "triton": Implementation("triton.l2norm", ("l2norm",), FLOATS),
                "apex": apex["l2norm"],
            },
        }
    )


IMPLEMENTATIONS = _table()

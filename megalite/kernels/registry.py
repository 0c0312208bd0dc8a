"""Choose the kernel of each operation: all implementations, their limits, and the choice among them.

A module requests its kernel in its constructor and stores the function, so a call has no dispatch cost."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
import yaml

from megalite.config.compute import ALL_OPERATIONS, BACKENDS, KERNELS, OPERATIONS, KernelFacts
from megalite.config.errors import ConfigError
from megalite.config.reading import OR_ZERO, build
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.probes import (
    cpu_kinds,
    softmax_limit,
    why_not_apex,
    why_not_extension,
    why_not_onednn,
    why_not_triton,
    why_wrong,
)

FLOATS = (torch.float32, *HALF_TYPES)
ALL = (torch.float64, *FLOATS)


@dataclass(frozen=True)
class KernelUse:
    """Device, type and size for which a module requests a kernel."""

    device: str
    dtype: torch.dtype  # type of activations, or of a flat tensor
    size: int  # size of the last dimension; for an optimizer's operation the number of elements


@dataclass(frozen=True)
class Implementation:
    """One kernel of one backend for one operation."""

    operation: str
    backend: str
    place: str  # `module:name` below megalite.kernels, or `module:name,name` for several functions
    dtypes: tuple[torch.dtype, ...] = ALL
    extension: str | None = None  # required extension of apex
    limit: Callable[[int], str | None] | None = None  # returns why a size is not supported, or None
    function: Any = None  # a user's function, instead of `place`
    devices: tuple[str, ...] | None = None  # None: all devices of its backend

    def load(self) -> Any:
        """Import the module and return the function, or the tuple of functions."""
        if self.function is not None:
            return self.function
        module, _, names = self.place.partition(":")
        return attrgetter(*names.split(","))(importlib.import_module(f"megalite.kernels.{module}"))

    def why_not_here(self) -> str | None:
        """Return why it cannot be used in this installation, or None."""
        return None if self.extension is None else why_not_extension(self.extension)

    def why_not(self, use: KernelUse) -> str | None:
        """Return why it cannot be used here, or None. Third-party kernels must first match torch on a few rows."""
        if self.devices is not None and use.device not in self.devices:
            return f"it runs on {', '.join(self.devices)}, not on {use.device}"
        if use.dtype not in self.dtypes:
            supported = ", ".join(_name(dtype) for dtype in self.dtypes)
            return f"it supports {supported}, not {_name(use.dtype)}"
        reason = self.why_not_here() or (None if self.limit is None else self.limit(use.size))
        if reason is not None or self.backend in ("torch", "triton"):
            return reason
        kernels = self.load(), IMPLEMENTATIONS[self.operation]["torch"].load()
        return why_wrong(self.backend, self.operation, *kernels, use.dtype, use.device, use.size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CROSS_ENTROPY = "cross_entropy_forward,cross_entropy_backward"
_LAMB = "lamb_moments,lamb_step"
_SOFTMAX = "causal_softmax_forward,causal_softmax_backward"
_NORMS, _LOWER = "fused_layer_norm_cuda", (torch.float32, torch.float16)
_ROPE, _PRODUCTS = "fused_rotary_positional_embedding", "fused_weight_gradient_mlp_cuda"
_CAUSAL = "scaled_upper_triang_masked_softmax_cuda"
_FP32 = (torch.float32,)

# Not used from apex: FastLayerNorm, because its supported sizes differ between versions; FusedLAMB, because it supports
# neither bounds on the trust ratio nor sharded tensors (the kernels inside it are used); cross-entropy of bf16 logits,
# because it rounds the log-sum-exp to bf16 (errors of up to 3 % in probabilities); Adam of bf16 parameters, because
# they would have no fp32 copy. For half types torch already uses oneDNN's products.
_ROWS = (
    Implementation("rmsnorm", "torch", "layer_ops:rms_norm"),
    Implementation("rmsnorm", "triton", "triton.norms:rmsnorm", FLOATS),
    Implementation("rmsnorm", "apex", "apex:rmsnorm", FLOATS, _NORMS),
    Implementation("layernorm", "torch", "layer_ops:layer_norm"),
    Implementation("layernorm", "triton", "triton.norms:layernorm", FLOATS),
    Implementation("layernorm", "apex", "apex:layernorm", FLOATS, _NORMS),
    Implementation("add_norm", "torch", "layer_ops:add_norm"),
    Implementation("add_norm", "triton", "triton.norms:add_norm", FLOATS),
    Implementation("bias_gelu", "torch", "layer_ops:bias_gelu"),
    Implementation("bias_gelu", "triton", "triton.elementwise:bias_gelu", FLOATS),
    Implementation("swiglu", "torch", "layer_ops:swiglu"),
    Implementation("swiglu", "triton", "triton.elementwise:swiglu", FLOATS),
    Implementation("geglu", "torch", "layer_ops:geglu"),
    Implementation("geglu", "triton", "triton.elementwise:geglu", FLOATS),
    Implementation("rope", "torch", "layer_ops:apply_rope"),
    Implementation("rope", "triton", "triton.elementwise:rope", FLOATS),
    Implementation("rope", "apex", "apex:rope", FLOATS, _ROPE),
    Implementation("cross_entropy", "torch", f"cross_entropy:{_CROSS_ENTROPY}"),
    Implementation("cross_entropy", "triton", f"triton.cross_entropy:{_CROSS_ENTROPY}", FLOATS),
    Implementation("cross_entropy", "apex", f"apex:{_CROSS_ENTROPY}", _LOWER, "xentropy_cuda"),
    Implementation("softmax", "torch", f"attention:{_SOFTMAX}"),
    Implementation("softmax", "apex", f"apex:{_SOFTMAX}", HALF_TYPES, _CAUSAL, softmax_limit),
    Implementation("delta_scan", "torch", "linear_attention:delta_scan"),
    Implementation("delta_scan", "triton", "triton.delta_scan:delta_scan", _FP32),
    Implementation("dropout_mask", "torch", "layer_ops:dropout_mask"),
    Implementation("dropout_mask", "triton", "triton.elementwise:dropout_mask", FLOATS),
    Implementation("fp8", "torch", "quantization:largest,cast,cast_rows"),
    Implementation("fp8", "triton", "triton.fp8:largest,cast,cast_rows", (torch.float32, torch.bfloat16)),
    Implementation("matmul", "torch", "matmul:matmul"),
    Implementation("matmul", "onednn", "matmul:onednn_matmul", _FP32),
    Implementation("weight_grad", "torch", "matmul:accumulate_weight_grad"),
    Implementation("weight_grad", "onednn", "matmul:onednn_accumulate_weight_grad", _FP32),
    Implementation("weight_grad", "apex", "apex:accumulate_weight_grad", FLOATS, _PRODUCTS),
    Implementation("adam", "torch", "optimizer_ops:adam"),
    Implementation("adam", "triton", "triton.optimizer_ops:adam", _FP32),
    Implementation("adam", "apex", "apex:adam", _FP32, "amp_C"),
    Implementation("lamb", "torch", f"optimizer_ops:{_LAMB}"),
    Implementation("lamb", "triton", f"triton.optimizer_ops:{_LAMB}", _FP32),
    Implementation("lamb", "apex", f"apex:{_LAMB}", _FP32, "amp_C"),
    Implementation("l2norm", "torch", "optimizer_ops:l2norm"),
    Implementation("l2norm", "triton", "triton.optimizer_ops:l2norm", FLOATS),
)
IMPLEMENTATIONS: Mapping[str, Mapping[str, Implementation]] = MappingProxyType(
    {operation: {row.backend: row for row in _ROWS if row.operation == operation} for operation in OPERATIONS}
)  # operation -> backend -> implementation


@dataclass(frozen=True)
class Rule:
    """Preferred backends of one operation on one kind of device."""

    operation: str
    device: str
    """`cpu`, `cuda`, or a narrower kind, which has precedence: `amd-avx512`, a compute capability such as `sm_90`."""
    order: tuple[str, ...]
    because: str  # the measurement or the assumption behind the rule
    dtypes: tuple[str, ...] = ()  # empty: any type
    from_size: int = field(default=0, metadata=OR_ZERO)
    """Smallest size of the last dimension; of several matching rules the one with the largest applies."""


@dataclass(frozen=True)
class Preferences:
    """The rules that order the backends of an operation."""

    rules: tuple[Rule, ...]

    def order(self, operation: str, use: KernelUse, device: torch.device) -> tuple[tuple[str, ...], str]:
        """Return the backends, best first, and the reason; torch alone if no rule matches."""
        kinds = _kinds(device)
        fitting = [
            rule
            for rule in self.rules
            if rule.operation == operation
            and rule.device in kinds
            and (not rule.dtypes or _name(use.dtype) in rule.dtypes)
            and rule.from_size <= use.size
        ]
        best = min(fitting, key=lambda rule: (kinds.index(rule.device), -rule.from_size), default=None)
        return (("torch",), "no rule: torch") if best is None else (best.order, best.because)


def _kinds(device: torch.device) -> list[str]:
    """Return the names of a device that rules may use, the most specific first."""
    if device.type == "cpu":
        return [*cpu_kinds(), "cpu"]
    if device.type != "cuda":
        return [device.type]
    major, minor = torch.cuda.get_device_capability(device)
    return [f"sm_{major}{minor}", "cuda"]


def read_preferences(text: str, source: str) -> Preferences:
    """Parse a YAML list of rules.

    Raises ConfigError: a rule is invalid; the error names `source`, the rule and the fault."""
    rows = yaml.safe_load(text)
    if not isinstance(rows, list):
        raise ConfigError(f"{source}: expected a list of rules, got {type(rows).__name__}")
    return Preferences(tuple(build(Rule, row, f"{source}, rule {n}") for n, row in enumerate(rows, start=1)))


@cache
def shipped_preferences() -> Preferences:
    """Return the preferences that are part of megalite."""
    file = resources.files("megalite.kernels").joinpath("preferences.yaml")
    return read_preferences(file.read_text(encoding="utf-8"), "megalite/kernels/preferences.yaml")


@dataclass(frozen=True)
class Choice:
    """The backend chosen for one use."""

    operation: str
    use: KernelUse
    backend: str
    why: str  # "requested", or the reason of the matching rule
    why_not_requested: str | None = None  # why the backend requested for all operations is not used


class Kernels:
    """Chooses the kernels of one run and records the choices.

    Args:
        requests: operation -> backend for all its uses. The backend of `ALL_OPERATIONS` is preferred for each use that
            it supports.
        preferences: the order of backends without a request."""

    def __init__(self, requests: Mapping[str, str] | None = None, *, preferences: Preferences | None = None) -> None:
        self._requests = dict(requests or {})
        self._first = self._requests.pop(ALL_OPERATIONS, None)
        self._preferences = preferences or shipped_preferences()
        self._chosen: dict[tuple[str, KernelUse], tuple[Choice, Any]] = {}

    def check(self, device: torch.device) -> None:
        """Raise ConfigError if a requested backend cannot run on `device`, or has no such operation."""
        if self._first is not None and (reason := why_not_backend(self._first, device.type)) is not None:
            raise ConfigError(f"kernels: {self._first} cannot be used: {reason}; remove it")
        for operation, backend in self._requests.items():
            implementation = kernel_of(operation, backend)
            _refuse(operation, backend, why_not_backend(backend, device.type) or implementation.why_not_here())

    def get(self, operation: str, *, device: torch.device, dtype: torch.dtype, size: int) -> Any:
        """Return the kernel for a use: a function or a tuple of functions; arguments as in `KernelUse`.

        Raises ConfigError: the requested backend does not support this use."""
        return self._chosen_for(operation, device, KernelUse(device.type, dtype, size))[1]

    def fuses(self, operation: str, *, device: torch.device, dtype: torch.dtype, size: int) -> bool:
        """Return whether the kernel is fused, so that work is better left to it than to a matrix product."""
        return self._chosen_for(operation, device, KernelUse(device.type, dtype, size))[0].backend != "torch"

    @property
    def chosen(self) -> Sequence[Choice]:
        """The choices so far, in the order of the requests."""
        return [choice for choice, _ in self._chosen.values()]

    def fallback_summary(self) -> str | None:
        """Return a log line with the uses that the backend of all operations does not support, and why; None: none."""
        groups: dict[tuple[str, str], list[str]] = {}
        for choice in self.chosen:
            if choice.why_not_requested is not None:
                operations = groups.setdefault((choice.backend, choice.why_not_requested), [])
                operations += [choice.operation] if choice.operation not in operations else []
        parts = [f"{backend} for {', '.join(of)} ({reason})" for (backend, reason), of in groups.items()]
        return f"kernels: not {self._first} but {'; '.join(parts)}" if parts else None

    def summary(self) -> dict[str, str]:
        """Return operation -> backend; several backends are joined with a plus sign."""
        pairs = sorted({(choice.operation, choice.backend) for choice in self.chosen})
        return {name: "+".join(backend for of, backend in pairs if of == name) for name, _ in pairs}

    def _chosen_for(self, operation: str, device: torch.device, use: KernelUse) -> tuple[Choice, Any]:
        if (operation, use) not in self._chosen:
            choice = self._choose(operation, use, device)
            self._chosen[operation, use] = choice, kernel_of(operation, choice.backend).load()
        return self._chosen[operation, use]

    def _choose(self, operation: str, use: KernelUse, device: torch.device) -> Choice:
        requested, first, unusable = self._requests.get(operation), self._first, None
        if requested is not None:
            _refuse(operation, requested, why_not(operation, requested, use))
            return Choice(operation, use, requested, "requested")
        if first is not None:
            none = None if first in IMPLEMENTATIONS[operation] else "it has none"
            unusable = none or why_not(operation, first, use)
            if unusable is None:
                return Choice(operation, use, first, "requested for all operations")
        order, why = self._preferences.order(operation, use, device)
        for backend in order:
            if backend in IMPLEMENTATIONS[operation] and why_not(operation, backend, use) is None:
                return Choice(operation, use, backend, why, unusable)
        return Choice(operation, use, "torch", "no other backend supports it", unusable)


def why_not_backend(backend: str, device: str) -> str | None:
    """Return why no kernel of a backend can run on this device type here, or None. Probed once per process."""
    if backend == "torch" or backend not in BACKENDS:
        return None
    return {"onednn": why_not_onednn, "triton": why_not_triton, "apex": why_not_apex}[backend](device)


def why_not(operation: str, backend: str, use: KernelUse) -> str | None:
    """Return why a backend cannot be used here, or None."""
    return why_not_backend(backend, use.device) or kernel_of(operation, backend).why_not(use)


def backends_of(operation: str) -> list[str]:
    """Return the backends with a kernel for the operation, in the order of BACKENDS; registered ones of users last."""
    names = (name.partition("=") for name in KERNELS)
    registered = [backend for of, _, backend in names if of == operation]
    return [*(backend for backend in BACKENDS if backend in IMPLEMENTATIONS[operation]), *registered]


def kernel_of(operation: str, backend: str) -> Implementation:
    implementation = IMPLEMENTATIONS[operation].get(backend)
    if implementation is None and (name := f"{operation}={backend}") in KERNELS:
        facts: KernelFacts = KERNELS.facts(name)
        dtypes = tuple(getattr(torch, dtype) for dtype in facts.dtypes)
        return Implementation(operation, backend, name, dtypes, function=KERNELS.get(name), devices=facts.devices)
    if implementation is None:
        available = ", ".join(backends_of(operation))
        raise ConfigError(f"kernels: {backend} has no {operation} ({OPERATIONS[operation]}); use {available}")
    return implementation


def _refuse(operation: str, backend: str, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(f"kernels: {operation}={backend} cannot be used: {reason}; use {operation}=torch")

"""Which kernel serves an operation: all implementations, what each takes, and the choice among them.

A module asks when it is built and keeps the function that it gets, so a call costs no more than the call.
"""

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
from megalite.kernels.probes import (
    cpu_kinds,
    softmax_limit,
    why_not_apex,
    why_not_extension,
    why_not_onednn,
    why_not_triton,
)
from megalite.kernels.self_check import why_wrong

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
ALL = (torch.float64, *FLOATS)


@dataclass(frozen=True)
class KernelUse:
    """What a module asks a kernel for, as far as it knows when it is built."""

    device: str
    dtype: torch.dtype  # of activations, or of a flat tensor
    size: int  # of the last dimension; for an optimizer's operation the number of elements


@dataclass(frozen=True)
class Implementation:
    """One kernel of one backend for one operation."""

    operation: str
    backend: str
    place: str  # its function, or its functions with commas between, in a module below megalite.kernels: `module:name`
    dtypes: tuple[torch.dtype, ...] = ALL
    extension: str | None = None  # of apex
    limit: Callable[[int], str | None] | None = None  # why it does not take a size of a type that it takes, or None
    function: Any = None  # of a user, instead of a place
    devices: tuple[str, ...] | None = None  # None: those that its backend runs on

    def load(self) -> Any:
        """The function, or the tuple of functions. Imports the module."""
        if self.function is not None:
            return self.function
        module, _, names = self.place.partition(":")
        return attrgetter(*names.split(","))(importlib.import_module(f"megalite.kernels.{module}"))

    def why_not_here(self) -> str | None:
        """Why it cannot be used in this installation, or None."""
        return None if self.extension is None else why_not_extension(self.extension)

    def why_not(self, use: KernelUse) -> str | None:
        """Why it cannot serve a use here, or None. Kernels of others must give torch's numbers on a few rows first."""
        if self.devices is not None and use.device not in self.devices:
            return f"it runs on {', '.join(self.devices)}, not on {use.device}"
        if use.dtype not in self.dtypes:
            takes = ", ".join(_name(dtype) for dtype in self.dtypes)
            return f"it takes {takes}, not {_name(use.dtype)}"
        reason = self.why_not_here() or (None if self.limit is None else self.limit(use.size))
        if reason is not None or self.backend in ("torch", "triton"):
            return reason
        return why_wrong(self.backend, self.operation, self.load(), use.dtype, use.device, use.size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CROSS_ENTROPY = "cross_entropy_forward,cross_entropy_backward"
_LAMB = "lamb_moments,lamb_step"
_SOFTMAX = "causal_softmax_forward,causal_softmax_backward"
_NORMS, _LOWER = "fused_layer_norm_cuda", (torch.float32, torch.float16)
_ROPE, _PRODUCTS = "fused_rotary_positional_embedding", "fused_weight_gradient_mlp_cuda"
_CAUSAL = "scaled_upper_triang_masked_softmax_cuda"
_FP32 = (torch.float32,)

# Of apex not FastLayerNorm, of which the list of sizes differs between versions, nor FusedLAMB, which knows no bounds of
# the trust ratio and no tensor that is split: of LAMB the pieces that it is made of. Its cross-entropy rounds the
# log-sum-exp of bf16 logits to bf16: probabilities off by up to 3 %. The moments of its Adam are fp32 whatever the
# parameter is, and bf16 parameters would have no fp32 copy. oneDNN's products in half types are torch's already.
_ROWS = (
    Implementation("rmsnorm", "torch", "layer_ops:rms_norm"),
    Implementation("rmsnorm", "triton", "triton.norms:rmsnorm", FLOATS),
    Implementation("rmsnorm", "apex", "apex.layers:rmsnorm", FLOATS, _NORMS),
    Implementation("layernorm", "torch", "layer_ops:layer_norm"),
    Implementation("layernorm", "triton", "triton.norms:layernorm", FLOATS),
    Implementation("layernorm", "apex", "apex.layers:layernorm", FLOATS, _NORMS),
    Implementation("add_norm", "torch", "layer_ops:add_norm"),
    Implementation("add_norm", "triton", "triton.norms:add_norm", FLOATS),
    Implementation("bias_gelu", "torch", "layer_ops:bias_gelu"),
    Implementation("bias_gelu", "triton", "triton.activations:bias_gelu", FLOATS),
    Implementation("swiglu", "torch", "layer_ops:swiglu"),
    Implementation("swiglu", "triton", "triton.activations:swiglu", FLOATS),
    Implementation("geglu", "torch", "layer_ops:geglu"),
    Implementation("geglu", "triton", "triton.activations:geglu", FLOATS),
    Implementation("rope", "torch", "layer_ops:apply_rope"),
    Implementation("rope", "triton", "triton.rope:rope", FLOATS),
    Implementation("rope", "apex", "apex.layers:rope", FLOATS, _ROPE),
    Implementation("cross_entropy", "torch", f"cross_entropy:{_CROSS_ENTROPY}"),
    Implementation("cross_entropy", "triton", f"triton.cross_entropy:{_CROSS_ENTROPY}", FLOATS),
    Implementation("cross_entropy", "apex", f"apex.layers:{_CROSS_ENTROPY}", _LOWER, "xentropy_cuda"),
    Implementation("softmax", "torch", f"unfused_attention:{_SOFTMAX}"),
    Implementation("softmax", "apex", f"apex.layers:{_SOFTMAX}", HALVES, _CAUSAL, softmax_limit),
    Implementation("dropout_mask", "torch", "dropout:dropout_mask"),
    Implementation("dropout_mask", "triton", "triton.dropout:dropout_mask", FLOATS),
    Implementation("fp8", "torch", "fp8:largest,cast,cast_rows"),
    Implementation("fp8", "triton", "triton.fp8:largest,cast,cast_rows", (torch.float32, torch.bfloat16)),
    Implementation("matmul", "torch", "matmul:matmul"),
    Implementation("matmul", "onednn", "matmul:onednn_matmul", _FP32),
    Implementation("weight_grad", "torch", "matmul:accumulate_weight_grad"),
    Implementation("weight_grad", "onednn", "matmul:onednn_accumulate_weight_grad", _FP32),
    Implementation("weight_grad", "apex", "apex.layers:accumulate_weight_grad", FLOATS, _PRODUCTS),
    Implementation("adam", "torch", "optimizer_ops:adam"),
    Implementation("adam", "triton", "triton.optimizer_ops:adam", _FP32),
    Implementation("adam", "apex", "apex.multi_tensor:adam", _FP32, "amp_C"),
    Implementation("lamb", "torch", f"optimizer_ops:{_LAMB}"),
    Implementation("lamb", "triton", f"triton.optimizer_ops:{_LAMB}", _FP32),
    Implementation("lamb", "apex", f"apex.multi_tensor:{_LAMB}", _FP32, "amp_C"),
    Implementation("l2norm", "torch", "optimizer_ops:l2norm"),
    Implementation("l2norm", "triton", "triton.optimizer_ops:l2norm", FLOATS),
)
IMPLEMENTATIONS: Mapping[str, Mapping[str, Implementation]] = MappingProxyType(
    {operation: {row.backend: row for row in _ROWS if row.operation == operation} for operation in OPERATIONS}
)  # operation -> backend -> its kernel


@dataclass(frozen=True)
class Rule:
    """Of an operation on one kind of device."""

    operation: str
    device: str
    """`cpu`, `cuda`, or a narrower kind, which goes before them: `amd-avx512`, a compute capability such as `sm_90`."""
    order: tuple[str, ...]
    because: str  # measured where, with what; or assumed, and from what
    dtypes: tuple[str, ...] = ()  # empty: any
    from_size: int = field(default=0, metadata=OR_ZERO)
    """It holds for this size of the last dimension and up; the largest that fits wins."""


@dataclass(frozen=True)
class Preferences:
    """The rules, and the order that follows for a use."""

    rules: tuple[Rule, ...]

    def order(self, operation: str, use: KernelUse, device: torch.device) -> tuple[tuple[str, ...], str]:
        """(backends, best first; why). torch alone where no rule fits."""
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
    """What rules may call a device, the most special first."""
    if device.type == "cpu":
        return [*cpu_kinds(), "cpu"]
    if device.type != "cuda":
        return [device.type]
    major, minor = torch.cuda.get_device_capability(device)
    return [f"sm_{major}{minor}", "cuda"]


def read_preferences(text: str, source: str) -> Preferences:
    """From YAML: a list of rules.

    Raises:
        ConfigError: naming `source`, the rule and what is wrong with it.
    """
    rows = yaml.safe_load(text)
    if not isinstance(rows, list):
        raise ConfigError(f"{source}: a list of rules is wanted, got {type(rows).__name__}")
    return Preferences(tuple(build(Rule, row, f"{source}, rule {n}") for n, row in enumerate(rows, start=1)))


@cache
def shipped_preferences() -> Preferences:
    """Those that come with megalite."""
    file = resources.files("megalite.kernels").joinpath("preferences.yaml")
    return read_preferences(file.read_text(encoding="utf-8"), "megalite/kernels/preferences.yaml")


@dataclass(frozen=True)
class Choice:
    """What serves one use."""

    operation: str
    use: KernelUse
    backend: str
    why: str  # asked for, or which rule of the table of preferences
    instead: str | None = None  # why the backend that goes first for all operations does not serve it


class Kernels:
    """Chooses the kernels of one run and remembers what it chose.

    Args:
        requests: operation -> backend, which then serves every use of the operation; of `ALL_OPERATIONS` the one that goes
            first for each use that it takes.
        preferences: the order among backends where nothing is asked for.
    """

    def __init__(self, requests: Mapping[str, str] | None = None, *, preferences: Preferences | None = None) -> None:
        self._requests = dict(requests or {})
        self._first = self._requests.pop(ALL_OPERATIONS, None)
        self._preferences = preferences or shipped_preferences()
        self._chosen: dict[tuple[str, KernelUse], tuple[Choice, Any]] = {}

    def check(self, device: torch.device) -> None:
        """Raise ConfigError if a backend that was asked for cannot run on `device`, or has no such operation."""
        if self._first is not None and (reason := why_not_backend(self._first, device.type)) is not None:
            raise ConfigError(f"kernels: {self._first} cannot be had: {reason}; remove it")
        for operation, backend in self._requests.items():
            found = kernel_of(operation, backend)
            _refuse(operation, backend, why_not_backend(backend, device.type) or found.why_not_here())

    def get(self, operation: str, *, device: torch.device, dtype: torch.dtype, size: int) -> Any:
        """The function that serves a use, or the tuple of its functions; arguments as in `KernelUse`.

        Raises:
            ConfigError: what was asked for does not take this use.
        """
        return self._serving(operation, device, KernelUse(device.type, dtype, size))[1]

    def fuses(self, operation: str, *, device: torch.device, dtype: torch.dtype, size: int) -> bool:
        """One kernel serves the use, so that it pays to leave it work that a matrix product could take along."""
        return self._serving(operation, device, KernelUse(device.type, dtype, size))[0].backend != "torch"

    @property
    def chosen(self) -> Sequence[Choice]:
        """So far, in the order in which modules asked."""
        return [choice for choice, _ in self._chosen.values()]

    def not_first(self) -> str | None:
        """What serves the operations that the backend of all operations does not, and why it does not; None: it serves all."""
        groups: dict[tuple[str, str], list[str]] = {}
        for choice in self.chosen:
            if choice.instead is not None:
                operations = groups.setdefault((choice.backend, choice.instead), [])
                operations += [choice.operation] if choice.operation not in operations else []
        parts = [f"{backend} for {', '.join(of)} ({reason})" for (backend, reason), of in groups.items()]
        return f"kernels: not {self._first} but {'; '.join(parts)}" if parts else None

    def summary(self) -> dict[str, str]:
        """Operation -> backend; several with a plus sign between them."""
        pairs = sorted({(choice.operation, choice.backend) for choice in self.chosen})
        return {name: "+".join(backend for of, backend in pairs if of == name) for name, _ in pairs}

    def _serving(self, operation: str, device: torch.device, use: KernelUse) -> tuple[Choice, Any]:
        if (operation, use) not in self._chosen:
            choice = self._choose(operation, use, device)
            self._chosen[operation, use] = choice, kernel_of(operation, choice.backend).load()
        return self._chosen[operation, use]

    def _choose(self, operation: str, use: KernelUse, device: torch.device) -> Choice:
        asked, first, instead = self._requests.get(operation), self._first, None
        if asked is not None:
            _refuse(operation, asked, why_not(operation, asked, use))
            return Choice(operation, use, asked, "asked for")
        if first is not None:
            none = None if first in IMPLEMENTATIONS[operation] else "it has none"
            instead = none or why_not(operation, first, use)
            if instead is None:
                return Choice(operation, use, first, "asked for, for all operations")
        order, why = self._preferences.order(operation, use, device)
        for backend in order:
            if backend in IMPLEMENTATIONS[operation] and why_not(operation, backend, use) is None:
                return Choice(operation, use, backend, why, instead)
        return Choice(operation, use, "torch", "nothing else takes it", instead)


def why_not_backend(backend: str, device: str) -> str | None:
    """Why no kernel of a backend can run on a device of that type here, or None. Probed once per process."""
    if backend == "torch" or backend not in BACKENDS:
        return None
    return {"onednn": why_not_onednn, "triton": why_not_triton, "apex": why_not_apex}[backend](device)


def why_not(operation: str, backend: str, use: KernelUse) -> str | None:
    """Why a backend cannot serve a use here, or None."""
    return why_not_backend(backend, use.device) or kernel_of(operation, backend).why_not(use)


def backends_of(operation: str) -> list[str]:
    """Those that have a kernel for it, in the order of BACKENDS; then users'."""
    names = (name.partition("=") for name in KERNELS)
    theirs = [backend for of, _, backend in names if of == operation]
    return [*(backend for backend in BACKENDS if backend in IMPLEMENTATIONS[operation]), *theirs]


def kernel_of(operation: str, backend: str) -> Implementation:
    found = IMPLEMENTATIONS[operation].get(backend)
    if found is None and (name := f"{operation}={backend}") in KERNELS:
        facts: KernelFacts = KERNELS.facts(name)
        dtypes = tuple(getattr(torch, dtype) for dtype in facts.dtypes)
        return Implementation(operation, backend, name, dtypes, function=KERNELS.get(name), devices=facts.devices)
    if found is None:
        has = ", ".join(backends_of(operation))
        raise ConfigError(f"kernels: {backend} has no {operation} ({OPERATIONS[operation]}); there is {has}")
    return found


def _refuse(operation: str, backend: str, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(f"kernels: {operation}={backend} cannot be had: {reason}; use {operation}=torch")

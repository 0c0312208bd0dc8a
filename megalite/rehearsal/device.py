"""A device without computation: torch's meta tensors, observed while the real training step runs on them.

Tensors on the device have shape and dtype but no data. The dispatch mode below sees each operator: it counts kernels, the
memory of live storages, and the places where the host would wait for the device."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megalite.topology.sanitizer import calling_line

DEVICE = torch.device("meta")
_aten = torch.ops.aten
# Value of torch's SDPBackend; otherwise torch would use the kernel that stores all scores for meta tensors.
_FLASH = 1
_NO_KERNEL = frozenset(
    {
        _aten.detach.default,
        _aten.alias.default,
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.lift_fresh.default,
        _aten._reshape_alias.default,
        _aten._unsafe_view.default,
    }
)
# Rounding units of CUDA's caching allocator, below and from 1 MiB.
_BLOCK, _LARGE, _LARGE_BLOCK = 512, 1 << 20, 2 << 20


def allocated(nbytes: int) -> int:
    """Return the bytes that CUDA's caching allocator uses for a tensor."""
    unit = _BLOCK if nbytes < _LARGE else _LARGE_BLOCK
    return -(-nbytes // unit) * unit


@dataclass
class Memory:
    """Bytes of live storages."""

    live: int = 0
    peak: int = 0
    peak_place: str = ""  # action or phase at the peak
    # Storage address -> (weak reference with a callback, bytes).
    _seen: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def add(self, tensor: Tensor, where: str) -> None:
        """Count the tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = allocated(storage.nbytes())
        self._seen[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self._grow(size, where)

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is counted here."""
        return tensor.untyped_storage()._cdata in self._seen

    def resized(self, storage: torch.UntypedStorage, where: str) -> None:
        """Update the size of a resized storage."""
        reference, before = self._seen.get(storage._cdata, (None, 0))
        if reference is not None:
            size = allocated(storage.nbytes())
            self._seen[storage._cdata] = (reference, size)
            self._grow(size - before, where)

    def _grow(self, size: int, where: str) -> None:
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_place = self.live, where

    def _forget(self, key: int) -> None:
        self.live -= self._seen.pop(key)[1]


_known: dict[Any, Any] = {}
"""(operator, argument properties) -> shapes, strides and dtypes of the results; None: the first argument is returned."""


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, with a cache by argument shapes: torch's own shape inference in Python is slower."""
    returns = _result_kind(func)
    if returns == "other":
        return func(*args, **kwargs)
    try:
        key = (func, *map(_facts, args), *((name, _facts(value)) for name, value in kwargs.items()))
        known = _known.get(key, ())
    except TypeError:  # an argument is not hashable
        return func(*args, **kwargs)
    if known == ():
        found = func(*args, **kwargs)
        tensors = found if isinstance(found, tuple) else (found,)
        if all(isinstance(one, Tensor) and one.device.type == "meta" for one in tensors):
            made = tuple((one.shape, one.stride(), one.dtype) for one in tensors)
            _known[key] = (isinstance(found, tuple), None if returns == "first" else made)
        return found
    is_tuple, made = known
    if made is None:
        return args[0]
    results = tuple(torch.empty_strided(shape, stride, dtype=dtype, device=DEVICE) for shape, stride, dtype in made)
    return results if is_tuple else results[0]


@cache
def _result_kind(func: Any) -> str:
    """Return `new` (tensors), `first` (its first argument) or `other`."""
    returns = func._schema.returns
    if func.is_view or not returns or func in _ANSWERS:
        return "other"
    if all(one.alias_info is None and str(one.type) == "Tensor" for one in returns):
        return "other" if func._schema.is_mutable else "new"
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    mutated = sum(argument.alias_info is not None for argument in func._schema.arguments)
    is_first = len(returns) == 1 and mutated == 1 and first is not None and first.is_write
    return "first" if is_first and func._schema.name.endswith("_") else "other"


def _facts(value: Any) -> Any:
    """Return the properties of an argument that result shapes can depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(map(_facts, value))
    return type(value), value


class Device(TorchDispatchMode):
    """Dispatch mode in which `meta` tensors act as a device: operators are counted, and reads by the host get values.

    Values read by the host are made up: results are 0 and finite, and each expert has the same number of tokens. Further
    operators on these token counts also run on the CPU (`values_of`)."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.host = Memory(), Memory()  # device memory, and pinned host memory
        self.kernels: Counter[str] = Counter()  # kernels by pipeline action or phase of the step
        self.synchronisations: Counter[tuple[str, str]] = Counter()  # (place, reason) of each wait of the host
        self.late_reads: dict[str, tuple[int, int]] = {}
        """Place where the host reads a copy from an earlier action -> (count, least number of kernels since then)."""
        self.launched = 0  # kernels so far
        self.running = "build"
        self._shadows: dict[int, tuple[Any, Tensor]] = {}

    def values_of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a device tensor, if they are known."""
        found = self._shadows.get(id(tensor))
        return None if found is None else found[1]

    def set_values(self, tensor: Tensor, values: Tensor) -> None:
        """Set the values of `tensor`, and of its base if it is a view of the whole base."""
        base = tensor._base
        for target in (tensor, *([base] if base is not None and base.numel() == tensor.numel() else [])):
            key = id(target)
            self._shadows[key] = (weakref.ref(target, self._dropping(key)), values.view(target.shape))

    def _dropping(self, key: int) -> Callable[[Any], Any]:
        return lambda _: self._shadows.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERS:
            answer = _ANSWERS[func](self, args, kwargs)
            if answer is not None:
                return answer[0]
        found = _run(func, args, kwargs)
        on_device = False
        for leaf in tree_leaves(found) if isinstance(found, (tuple, list)) else (found,):
            if isinstance(leaf, Tensor) and leaf.device.type == "meta":
                on_device = True
                pinned = kwargs.get("pin_memory") or self.host.has(leaf)
                (self.host if pinned else self.memory).add(leaf, self.running)
        if on_device and not func.is_view and func not in _NO_KERNEL:
            self.kernels[self.running] += 1
            self.launched += 1
        if self._shadows:
            self._follow(func, args, kwargs, found)
        return found

    @contextmanager
    def entered(self) -> Iterator["Device"]:
        """Enter the mode, and also count storages that are freed and allocated again by resizing."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.memory.resized(storage, self.running)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore

    def synchronise(self, why: str) -> None:
        """Record that the host waits here."""
        self.synchronisations[calling_line(), why] += 1

    def read_later(self, kernels: int) -> None:
        """Record that the host reads a copy here that was started `kernels` kernels ago."""
        place = calling_line()
        count, least = self.late_reads.get(place, (0, kernels))
        self.late_reads[place] = count + 1, min(least, kernels)

    def _follow(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Run an operator on known values on the CPU too."""
        leaves = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.device.type == "meta"
        ]
        if not leaves:
            return
        known = [self.values_of(leaf) for leaf in leaves]
        if all(values is None for values in known):
            return
        if any(values is None for values in known):
            if isinstance(found, Tensor):  # overwritten with unknown values
                self._shadows.pop(id(found), None)
            return

        def on_cpu(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value if value.device.type != "meta" else self.values_of(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        values = func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
        for tensor, value in zip(tree_leaves(found), tree_leaves(values), strict=True):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self.set_values(tensor, value)


def _scalar(device: Device, args: Any, _: Any) -> tuple[Any] | None:
    (tensor,) = args
    if tensor.device.type != "meta":
        return None
    device.synchronise("reads a value")
    values = device.values_of(tensor)
    zero = False if tensor.dtype is torch.bool else 0.0 if tensor.is_floating_point() else 0
    return (zero if values is None else values.item(),)


def _copy(device: Device, args: Any, kwargs: Any) -> tuple[Any] | None:
    target = kwargs.get("device")
    if target is None or torch.device(target).type == args[0].device.type:
        return None
    if torch.device(target).type == "cpu":
        device.synchronise("copies to the host")
        values = device.values_of(args[0])
        dtype = kwargs.get("dtype") or args[0].dtype
        return (torch.zeros(args[0].shape, dtype=dtype) if values is None else values.to(dtype, copy=True),)
    if not kwargs.get("non_blocking"):
        device.synchronise("copies from pageable memory")
    return None


def _even_bounds(device: Device, args: Any, kwargs: Any) -> tuple[Any] | None:
    """`searchsorted` of experts in sorted choices: each expert is chosen equally often."""
    chosen, experts = args[:2]
    if chosen.device.type != "meta" or kwargs:  # with `right` it looks up documents of positions
        return None
    parts = experts.numel() - 1
    found = torch.empty(experts.shape, dtype=torch.int64, device=DEVICE)
    device.set_values(found, torch.arange(parts + 1) * chosen.numel() // parts)
    return (found,)


def _all_are(device: Device, args: Any, kwargs: Any) -> tuple[Any] | None:
    """`all`: results on the device are assumed to be finite."""
    if args[0].device.type != "meta":
        return None
    found = torch.empty((), dtype=torch.bool, device=DEVICE)
    device.set_values(found, torch.ones((), dtype=torch.bool))
    return (found,)


_ANSWERS: dict[Any, Callable[[Device, Any, Any], tuple[Any] | None]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten._to_copy.default: _copy,
    _aten.searchsorted.Tensor: _even_bounds,
    _aten.all.default: _all_are,
    _aten._fused_sdp_choice.default: lambda device, args, kwargs: (_FLASH,),
}
"""Operators that need data -> (result,), or None if torch runs them."""

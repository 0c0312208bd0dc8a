"""Memory that a forward keeps for its backward, by two methods, and that a replica keeps between steps.

`SavedBytes` uses autograd's hooks: they see every tensor that an operation saves, and its release. Hooks inside
(of a checkpoint, or of code that omits tensors) hide their tensors from it.
`LiveBytes` counts every storage created by an operation and not yet freed. It also includes memory that autograd does
not know, but cannot distinguish saved tensors."""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.training.replica import Replica


class _Tally:
    """Bytes of the current storages, and their maximum."""

    def __init__(self, around: AbstractContextManager[Any]) -> None:
        self.now = self.peak = 0
        self._around = around  # makes it see tensors

    def __enter__(self) -> Self:
        self._around.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class _Held:
    """A saved tensor; it counts until this object is freed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBytes(_Tally):
    """Bytes of the distinct storages that autograd holds, except parameters and other tensors `besides`."""

    def __init__(self, besides: Iterable[Tensor]) -> None:
        super().__init__(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor))
        self._besides = {tensor.untyped_storage().data_ptr() for tensor in besides}
        self._holds: dict[int, int] = {}

    def _pack(self, tensor: Tensor) -> _Held:
        # Detached, as an operation that saves its own output would otherwise keep itself alive.
        held = _Held(tensor if tensor.is_leaf else tensor.detach())
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._besides:
            self._holds[address] = self._holds.get(address, 0) + 1
            if self._holds[address] == 1:
                self.add(size)
            weakref.finalize(held, self._release, address, size)
        return held

    def _release(self, address: int, size: int) -> None:
        self._holds[address] -= 1
        if self._holds[address] == 0:
            del self._holds[address]
            self.add(-size)


class LiveBytes(_Tally):
    """Bytes of storages created inside the `with` block and still alive."""

    def __init__(self) -> None:
        super().__init__(_EachOperation(self))
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, tensor: Tensor) -> None:
        """Count the tensor's storage unless it is already counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or storage.nbytes() == 0:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            del self._known[key]
            self.add(-size)

        self._known[key] = weakref.ref(storage, freed)
        self.add(size)


class _EachOperation(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs that were not created inside are old: a view of them is no new memory.
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in before:
                self._live.see(leaf)
        return result


def state_bytes(replica: Replica) -> int:
    """Bytes of the storages of weights, gradients and states of optimizer and strategy between two steps."""
    strategy = replica.strategy
    tensors = [state.values for state in strategy.states()]
    for shard in strategy.shards:
        main = shard.main_param
        tensors += [strategy.weights(shard).values, shard.bucket.data, shard.bucket.grad, main.data]
        tensors += [*replica.optimizer.state(main).values(), *([] if main.grad is None else [main.grad])]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())

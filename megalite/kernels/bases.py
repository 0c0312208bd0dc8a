"""The bases of the autograd functions and modules of layers: torch's, without what takes the host's time for nothing."""

from typing import Any

import torch
from torch.autograd.function import FunctionMeta


class _Direct(FunctionMeta):
    def __init__(cls, *definition: Any) -> None:
        super().__init__(*definition)
        made: Any = cls
        made._backward_cls.apply = made.backward


class Function(torch.autograd.Function, metaclass=_Direct):
    """Without what `apply` does for functorch alone; the engine calls `backward` itself, and looks for no other rule."""

    apply = torch._C._FunctionBase.__dict__["apply"]


class Module(torch.nn.Module):
    """Finds its parameters and children as it finds plain attributes; is never compiled as a whole."""

    __call__ = torch.nn.Module._call_impl

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def _apply(self, fn: Any, recurse: bool = True) -> "Module":
        super()._apply(fn, recurse)
        self.__dict__.update(self._parameters, **self._buffers)  # a move between devices may have made new ones
        return self

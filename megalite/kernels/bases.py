"""Base classes for autograd functions and modules of layers: torch's, without host overhead that is never needed."""

from typing import Any

import torch
from torch.autograd.function import FunctionMeta


class _Direct(FunctionMeta):
    def __init__(cls, *definition: Any) -> None:
        super().__init__(*definition)
        made: Any = cls
        name, backward, differentiates = cls.__qualname__, made.backward, torch.is_grad_enabled

        def apply(ctx: Any, *grads: Any) -> Any:
            if differentiates():  # saved tensors carry no graph here, so a second derivative would be wrong
                raise RuntimeError(f"{name} has no second derivative: call backward without create_graph=True")
            return backward(ctx, *grads)

        made._backward_cls.apply = apply


class Function(torch.autograd.Function, metaclass=_Direct):
    """An autograd function without the functorch part of `apply`; the engine calls `backward` directly."""

    apply = torch._C._FunctionBase.__dict__["apply"]


class Module(torch.nn.Module):
    """A module that calls `forward` and hooks without torch's wrapper for compiled modules, which are never used here.
    A parameter that replaces another (`load_state_dict(assign=True)`) passes through the old one's `replaced_by`."""

    __call__ = torch.nn.Module._call_impl

    def compile(self, *args: Any, **settings: Any) -> None:
        """Raise TypeError: a megalite model cannot be compiled as a whole."""
        raise TypeError(
            "torch.compile cannot compile a whole megalite model: its layers define their own backward; use "
            "compile=True of configure (--compile), which compiles the operations between matrix products"
        )

    @property
    def _initialize_hook(self) -> None:
        """Raise TypeError when `torch.compile(module)` reads this attribute."""
        self.compile()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # called by to_empty() and to()
        former = dict(self._parameters)
        super()._apply(fn, recurse)
        for name, param in self._parameters.items():
            self._parameters[name] = _in_place_of(former[name], param)
        return self

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, _in_place_of(self._parameters.get(name), param))


def _in_place_of(former: Any, param: torch.nn.Parameter | None) -> Any:
    return former.replaced_by(param) if param is not None and hasattr(former, "replaced_by") else param

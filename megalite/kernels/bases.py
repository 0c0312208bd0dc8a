"""The bases of the autograd functions and modules of layers: torch's, without what takes the host's time for nothing."""

from typing import Any

import torch
from torch.autograd.function import FunctionMeta


class _Direct(FunctionMeta):
    def __init__(cls, *definition: Any) -> None:
        super().__init__(*definition)
        made: Any = cls
        name, backward, differentiates = cls.__qualname__, made.backward, torch.is_grad_enabled

        def apply(ctx: Any, *grads: Any) -> Any:
            if differentiates():  # how what a forward saves was made is not known here
                raise RuntimeError(f"{name} has no second derivative: call backward without create_graph=True")
            return backward(ctx, *grads)

        made._backward_cls.apply = apply


class Function(torch.autograd.Function, metaclass=_Direct):
    """Without what `apply` does for functorch alone; the engine calls `backward` itself, and looks for no other rule."""

    apply = torch._C._FunctionBase.__dict__["apply"]


class Module(torch.nn.Module):
    """Calls `forward` and hooks without torch's frame for modules that are compiled as a whole: these never are. A parameter
    in the place of another, as `load_state_dict(assign=True)` puts it there, is as that one has it (`replaced_by`)."""

    __call__ = torch.nn.Module._call_impl

    def compile(self, *args: Any, **settings: Any) -> None:
        """Raises TypeError: it cannot be, as a whole."""
        raise TypeError(
            "torch.compile cannot take a model of megalite as a whole: its layers write their backward themselves; use "
            "compile=True of configure (--compile), which compiles what is between matrix products"
        )

    @property
    def _initialize_hook(self) -> None:
        """What torch.compile(module) asks for when it is called."""
        self.compile()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # what to_empty() and to() call
        former = dict(self._parameters)
        super()._apply(fn, recurse)
        for name, param in self._parameters.items():
            self._parameters[name] = _in_place_of(former[name], param)
        return self

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, _in_place_of(self._parameters.get(name), param))


def _in_place_of(former: Any, param: torch.nn.Parameter | None) -> Any:
    return former.replaced_by(param) if param is not None and hasattr(former, "replaced_by") else param

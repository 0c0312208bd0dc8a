"""The bases of the autograd functions and modules of layers: torch's, without what takes the host's time for nothing."""

import weakref
from collections.abc import MutableMapping
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


class _Shown(dict[str, Any]):
    """What torch keeps of a module by name, parameters or buffers or children. Each is a plain attribute of it too."""

    def __init__(self, module: "Module", kept: dict[str, Any]) -> None:
        self._module = weakref.ref(module)
        self.update(kept)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        vars(self._module())[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        vars(self._module()).pop(name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())  # copies of the module show them again


for _name in ("pop", "popitem", "clear", "update", "setdefault"):  # of a dict they would not ask the two above
    setattr(_Shown, _name, getattr(MutableMapping, _name))


class Module(torch.nn.Module):
    """Finds its parameters and children as it finds plain attributes; is never compiled as a whole."""

    __call__ = torch.nn.Module._call_impl

    def __init__(self) -> None:
        super().__init__()
        self._show()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show()

    def _show(self) -> None:
        for kept in ("_parameters", "_buffers", "_modules"):
            vars(self)[kept] = _Shown(self, vars(self)[kept])

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
    """Calls `forward` and hooks without torch's frame for modules that are compiled as a whole: these never are."""

    __call__ = torch.nn.Module._call_impl

"""The base of the autograd functions that every layer calls."""

from typing import Any

import torch


class Function(torch.autograd.Function):
    """torch's, but for what its `apply` does for functorch alone, which nothing here runs under: on the host that takes as
    long as a small kernel."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

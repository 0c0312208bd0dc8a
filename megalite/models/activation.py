"""The nonlinearity of an MLP, by the name that the config has for it."""

from collections.abc import Callable
from functools import partial

import torch

from megalite.tensor_parallel.parameter import ParameterFactory


def activation_of(name: str, size: int, *, make: ParameterFactory) -> Callable[..., torch.Tensor]:
    """x [..., size] -> [..., size], or x [..., 2·size] where there is a gate, in the first half.

    Without a gate it takes a bias too: `f(x, bias)`.

    Args:
        name: `ModelConfig.activation`.
        size: features on this rank.
    """
    tanh = name.endswith("_tanh")
    if name == "swiglu":
        return make.kernel("swiglu", size)
    if name.startswith("geglu"):
        return partial(make.kernel("geglu", size), tanh=tanh)
    assert name.startswith("gelu"), name
    return partial(make.kernel("bias_gelu", size), tanh=tanh)

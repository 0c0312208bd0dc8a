"""Modules find parameters, buffers and children as plain attributes: they must be those that torch knows."""

import torch

from megalite.kernels.bases import Module


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("mask", torch.ones(2, device="meta"))
        self.child: torch.nn.Module | None = None


def test_attributes_are_those_that_torch_knows() -> None:
    layer = Layer()
    layer.child = Layer()
    for moved in (layer.to_empty(device="cpu"), layer.double()):  # the first makes new parameters
        for each in (moved, layer.child):
            assert each.weight is each._parameters["weight"] and each.mask is each._buffers["mask"]
    assert (layer.weight.device.type, layer.weight.dtype, layer.child.mask.dtype) == (
        "cpu",
        torch.float64,
        torch.float64,
    )
    layer.load_state_dict({name: torch.zeros_like(value) for name, value in layer.state_dict().items()}, assign=True)
    assert layer.weight is dict(layer.named_parameters())["weight"] and not layer.weight.any()
    del layer.weight
    assert not hasattr(layer, "weight") and list(dict(layer.named_parameters())) == ["child.weight"]

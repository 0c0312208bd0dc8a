"""Modules find parameters, buffers and children as plain attributes: they must be those that torch knows. Functions have
one derivative, and say so."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels.bases import Module
from megalite.kernels.layer_ops import rms_norm
from megalite.topology.group import conjugate
from tests.models.stages import LLAMA, build
from tests.models.test_gpt import batch, gradients
from tests.support.layers import read_modules
from tests.support.measures import ROOT


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("mask", torch.ones(2, device="meta"))
        self.child: torch.nn.Module | None = None

    def forward(self) -> Tensor:
        return self.weight * 2


def same(layer: Module) -> None:
    """What torch knows and what an attribute is are one."""
    for kept in (layer._parameters, layer._buffers, layer._modules):
        assert all(getattr(layer, name) is value is vars(layer)[name] for name, value in kept.items())


def test_attributes_are_those_that_torch_knows() -> None:
    layer = Layer()
    layer.child = Layer()
    for moved in (layer.to_empty(device="cpu"), layer.double()):  # the first makes new parameters
        same(moved)
        same(layer.child)
    assert (layer.weight.device.type, layer.weight.dtype, layer.child.mask.dtype) == (
        "cpu",
        torch.float64,
        torch.float64,
    )
    layer.load_state_dict({name: torch.zeros_like(value) for name, value in layer.state_dict().items()}, assign=True)
    assert not layer.weight.any()
    layer.register_parameter("weight", torch.nn.Parameter(torch.ones(3)))
    layer._buffers.update(mask=torch.zeros(1))
    same(layer)
    given = torch.func.functional_call(layer, {"weight": torch.full((3,), 5.0)}, ())
    assert given.tolist() == [10.0] * 3 and layer.weight.tolist() == [1.0] * 3
    del layer.weight
    layer._modules.pop("child")
    assert not hasattr(layer, "weight") and not hasattr(layer, "child") and not dict(layer.named_parameters())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_has_attributes_of_its_own(copied: Callable[[Layer], Layer]) -> None:
    layer = Layer().to_empty(device="cpu")
    other = copied(layer)
    same(other)
    before, other.weight = layer.weight, torch.nn.Parameter(torch.zeros(3))
    same(other)
    assert layer.weight is layer._parameters["weight"] is before


def test_a_copied_model_gives_the_same_bits_by_itself() -> None:
    stage = build(LLAMA)
    other = copy.deepcopy(stage)
    loss, grads = gradients(stage)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    again, others = gradients(other)
    assert torch.equal(again, loss) and all(torch.equal(others[name], grad) for name, grad in grads.items())


def test_a_second_derivative_is_refused() -> None:
    """torch would give one that leaves out how what a function keeps was made."""
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    for y in (rms_norm(x, torch.ones(3, dtype=torch.float64), 1e-5), conjugate(x, torch.clone, torch.clone)):
        with pytest.raises(RuntimeError, match="has no second derivative: call backward without create_graph=True"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    bare = {each.name for each in read_modules(ROOT) if "(torch.autograd.Function" in each.text}
    assert bare == {"megalite.kernels.bases", "megalite.topology.group"}


def test_what_is_kept_and_overwritten_is_not_taken_for_what_it_was() -> None:
    """By a kernel, which puts the gradient in the place of the logits, or by a user."""
    stage, inputs = build(LLAMA), list[Tensor]()
    stage.layers["1"].attention.out.register_forward_hook(lambda module, given, output: inputs.append(given[0]))
    tokens, labels, _ = batch()
    losses = stage(tokens, stage.context((4, 5)), labels=labels)
    again = stage(tokens, stage.context((4, 5)), labels=labels)
    losses.sum().backward(retain_graph=True)
    inputs[1].detach().mul_(2.0)
    for each in (losses, again):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.sum().backward()

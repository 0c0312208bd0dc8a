"""Modules do what torch's do. Functions have one derivative, and say so."""

import copy

import pytest
import torch
from torch import Tensor

from megalite.kernels.layer_ops import rms_norm
from megalite.topology.group import conjugate
from tests.models.stages import LLAMA, build
from tests.models.test_gpt import batch, gradients
from tests.support.layers import read_modules
from tests.support.measures import ROOT


def test_a_model_called_with_other_weights_uses_these() -> None:
    stage, (tokens, labels, _) = build(LLAMA), batch()
    other = copy.deepcopy(stage)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    inputs = (tokens, stage.context((4, 5)))
    given = torch.func.functional_call(stage, dict(other.named_parameters()), inputs, {"labels": labels})
    assert torch.equal(given, other(*inputs, labels=labels)) and not torch.equal(given, stage(*inputs, labels=labels))


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

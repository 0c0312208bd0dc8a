"""Modules behave like torch's. Functions have a first derivative only, and a second one raises an error."""

import copy
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize, prune

from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.data_parallel.buckets import make_buckets, parameters_of
from megalite.kernels.layer_ops import rms_norm
from megalite.models.gpt import GPTStage
from megalite.models.shapes import StageLayers
from megalite.topology.group import conjugate
from tests.models.stages import GPT, LLAMA, build, named, varied
from tests.models.test_gpt import batch, gradients
from tests.support.layers import read_modules
from tests.support.measures import ROOT

MOE = varied(LLAMA, num_experts=4)


def put_in_buckets(stage: GPTStage) -> None:
    """Put the stage into buckets, like a run."""
    make_buckets(parameters_of(stage), bucket_size=10**6, replicas=lambda kind: 1, grad_dtype=torch.float64)


def assert_same_gradients(one: GPTStage, other: GPTStage) -> None:
    one.zero_grad()
    other.zero_grad()
    (loss, grads), (again, others) = gradients(one), gradients(other)
    assert torch.equal(loss, again) and all(torch.equal(grad, others[name]) for name, grad in grads.items())


def test_functional_call_uses_the_given_weights() -> None:
    stage, (tokens, labels, _) = build(LLAMA), batch()
    other = copy.deepcopy(stage)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    inputs = (tokens, stage.context((4, 5)))
    given = torch.func.functional_call(stage, dict(other.named_parameters()), inputs, {"labels": labels})
    assert torch.equal(given, other(*inputs, labels=labels)) and not torch.equal(given, stage(*inputs, labels=labels))


def test_deep_copy_is_independent_and_bitwise_equal() -> None:
    stage = build(LLAMA)
    other = copy.deepcopy(stage)
    loss, grads = gradients(stage)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    again, others = gradients(other)
    assert torch.equal(again, loss) and all(torch.equal(others[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("model", [GPT, LLAMA, MOE], ids=["gpt", "llama", "experts"])
def test_functional_call_accepts_plain_tensors(model: ModelConfig) -> None:
    stage, (tokens, labels, weights) = build(model), batch()
    loss, grads = gradients(stage)
    plain = {name: parameter.detach().requires_grad_() for name, parameter in stage.named_parameters()}
    inputs = (tokens, stage.context((4, 5)))
    again = torch.func.functional_call(stage, plain, inputs, {"labels": labels})
    (again * weights).sum().backward()
    assert torch.equal(again, loss)
    for name, tensor in plain.items():
        found = stage.get_parameter(name).info.spec.name
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, grads[found])


def test_model_moved_through_the_meta_device_keeps_tied_weights() -> None:
    stage, other = build(GPT), build(GPT, seed=6)
    other.to("meta").to_empty(device="cpu").load_state_dict(stage.state_dict())
    assert other.head.weight is other.embedding.word.weight
    assert_same_gradients(stage, other)


def test_autocast_transforms_and_wrong_lengths_are_errors() -> None:
    stage, (tokens, labels, _) = build(LLAMA), batch()
    loss = partial(stage, tokens, stage.context((4, 5)), labels=labels)
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match=r"supports neither autocast nor torch\.func"):
        loss()
    with pytest.raises(RuntimeError, match=r"supports neither autocast nor torch\.func transforms"):
        torch.func.grad(lambda scale: (loss() * scale).sum())(torch.ones(()))
    with pytest.raises(ValueError, match=r"10 tokens with a context of 5; use context\(seq_length=10\)"):
        stage(tokens, stage.context((4, 5), seq_length=5), labels=labels)


def test_second_derivatives_are_errors() -> None:
    """torch would return a second derivative that ignores how saved tensors were computed."""
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    for y in (rms_norm(x, torch.ones(3, dtype=torch.float64), 1e-5), conjugate(x, torch.clone, torch.clone)):
        with pytest.raises(RuntimeError, match="has no second derivative: call backward without create_graph=True"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    bare = {each.name for each in read_modules(ROOT) if "(torch.autograd.Function" in each.text}
    assert bare == {"megalite.kernels.bases", "megalite.topology.group"}


def test_overwritten_saved_tensors_are_errors() -> None:
    """A kernel that overwrites logits with their gradient, or user code, may change a saved tensor."""
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


def test_model_can_be_pickled_outside_a_run(tmp_path: Path) -> None:
    """In a run, parameters are views of a bucket, and pickling is an error."""
    stage = build(GPT)
    torch.save(stage, tmp_path / "model.pt")
    for other in (pickle.loads(pickle.dumps(stage)), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert other.head.weight is other.embedding.word.weight
        assert [parameter.info for parameter in other.parameters()] == [each.info for each in stage.parameters()]
        assert_same_gradients(stage, other)
    put_in_buckets(stage)
    with pytest.raises(TypeError, match=r"embedding\.\w+\.weight is in a bucket .* save model\.state_dict\(\)"):
        pickle.dumps(stage)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["tied", "untied"])
def test_load_state_dict_can_assign_weights(model: ModelConfig) -> None:
    stage, other = build(model, seed=6), build(model)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    stage.load_state_dict(state, assign=True)
    assert stage.layers["1"].mlp.up.weight.data_ptr() == state["layers.1.mlp.up.weight"].data_ptr()
    assert (stage.head.weight is stage.embedding.word.weight) is model.tie_embeddings
    assert {name: each.info for name, each in named(stage).items()} == {
        name: each.info for name, each in named(other).items()
    }
    assert_same_gradients(other, stage)
    put_in_buckets(stage)
    with pytest.raises(RuntimeError, match=r"embedding\.word\.weight is in a bucket .* without assign=True"):
        stage.load_state_dict(other.state_dict(), assign=True)
    assert all(parameter.main_grad is not None for parameter in stage.parameters())


def test_parametrized_and_pruned_weights_have_gradients() -> None:
    """The layer uses the computed weight, and the gradient reaches the original weight."""

    class Twice(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    stage, plain = build(LLAMA), build(LLAMA)
    layers = [stage.layers["0"].mlp.up, stage.layers["1"].attention.out]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Twice())
    with torch.no_grad():
        for weight in (plain.layers["0"].mlp.up.weight, plain.layers["1"].attention.out.weight):
            weight.mul_(2.0)
    (ours, grads), (theirs, expected) = gradients(stage), gradients(plain)
    assert torch.equal(ours, theirs)
    for name, grad in expected.items():
        doubled = name in [layer.parametrizations.weight.original.info.spec.name for layer in layers]
        torch.testing.assert_close(grads[name], grad * (1 + doubled))
    stage.zero_grad()
    prune.l1_unstructured(stage.layers["2"].mlp.down, "weight", amount=0.5)
    gradients(stage)
    pruned = stage.layers["2"].mlp.down
    assert not pruned.weight_orig.grad[pruned.weight_mask == 0].any()


def test_weight_changes_between_forward_and_backward_are_errors() -> None:
    """Every dense and expert layer checks its weight in the backward."""
    for model, kinds in ((LLAMA, ("qkv", "out", "up", "down")), (MOE, ("router", "up", "down"))):
        stage, (tokens, labels, _) = build(model), batch()
        seen = set()
        for name, weight in named(stage).items():
            if not (name.startswith("layers.1.") and weight.dim() > 1):
                continue
            losses = stage(tokens, stage.context((4, 5)), labels=labels)
            with torch.no_grad():
                weight.add_(1.0)
            with pytest.raises(RuntimeError, match=rf"modified by an inplace operation: {re.escape(name)} \["):
                losses.sum().backward()
            seen.add(name.split(".")[-2])
        assert seen >= set(kinds), seen


def test_compiling_a_whole_model_is_an_error() -> None:
    """The error for a whole model or layer names the setting that works."""
    stage = build(LLAMA)
    for ask in (lambda: torch.compile(stage), lambda: torch.compile(stage.layers["0"].mlp.up), stage.compile):
        with pytest.raises(TypeError, match="use compile=True of configure"):
            ask()
    with pytest.raises(ConfigError, match="pass validate"):
        GPTStage(
            ModelConfig(vocab_size=64),
            StageLayers(first_layer=0, last_layer=1, has_embedding=True, has_head=True),
            factory=stage.factory,
            seq_length=8,
        )
    assert copy.deepcopy(stage).layers.keys() == stage.layers.keys()

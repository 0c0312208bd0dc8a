"""Recompute changes memory and no bit of the gradients; tests of the saved tensors too."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.live_bytes import LiveBytes
from megalite.config.model import ModelConfig
from megalite.config.rules.compute import MODULES
from megalite.models.block import Block
from megalite.models.context import AuxiliaryLosses
from megalite.models.recompute import Recompute, SavedTensors
from tests.models.stages import GPT, LLAMA, B, S, build, named, varied

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
MODELS = {
    "gpt": varied(GPT, **DROPOUT),
    "llama": varied(LLAMA, **DROPOUT),
    "llama-fused": varied(LLAMA, hidden_dropout=0.2, qk_norm=True),
    "gemma": varied(LLAMA, activation="geglu_tanh", norm_zero_centered=True),
    "experts": varied(
        LLAMA,
        num_experts=4,
        moe_layer_freq=2,
        moe_shared_expert_intermediate_size=12,
        moe_aux_loss_coeff=0.1,
        moe_expert_capacity_factor=0.75,
        hidden_dropout=0.2,
    ),
}


def selective(*modules: str) -> Recompute:
    return Recompute(granularity="selective", modules=frozenset(modules))


def full(method: str, num_layers: int) -> Recompute:
    return Recompute(granularity="full", method=method, num_layers=num_layers)


PLANS = [
    *(selective(module) for module in MODULES),
    selective("core_attn", "mlp_act", "layernorm"),
    selective("core_attn", "mlp", "moe", "layernorm"),
    full("uniform", 1),
    full("uniform", 2),
    full("block", 2),
]


def name_of(plan: Recompute) -> str:
    if plan.granularity == "selective":
        return "+".join(sorted(plan.modules))
    return f"{plan.granularity}-{plan.method}-{plan.num_layers}"


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


def step(model: ModelConfig, plan: Recompute, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return losses, gradients and the number of matrix products in the backward."""
    stage = build(model, dtype=dtype, recompute=plan).train()
    tokens, labels = torch.randint(0, 37, (2, B, S), generator=torch.Generator().manual_seed(1))
    auxiliary = AuxiliaryLosses(1 / B, 1 / (B * S), 1.0, torch.device("cpu"))
    losses = stage(tokens, stage.context((3, 8), auxiliary=auxiliary), labels=labels)
    with Products() as products:
        losses.sum().backward()
    gradients = {}
    for name, parameter in named(stage).items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    return losses.detach(), gradients, products.count


@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_bitwise_equal(family: str) -> None:
    losses, gradients, products = step(MODELS[family], Recompute(), torch.float32)
    for plan in PLANS:
        again, same, more = step(MODELS[family], plan, torch.float32)
        assert torch.equal(again, losses), name_of(plan)
        assert same.keys() == gradients.keys()
        different = [name for name in gradients if not torch.equal(same[name], gradients[name])]
        assert different == [], name_of(plan)
        if plan.granularity == "selective" and plan.modules <= {"mlp_act", "layernorm"}:
            assert more == products, "norms and activations are recomputed without a matrix product"


@pytest.mark.parametrize(
    ("plan", "runs"),
    [
        (Recompute(), {0: 1, 1: 1, 2: 1}),
        (full("uniform", 2), {0: 2, 1: 2, 2: 2}),
        (full("block", 2), {0: 2, 1: 2, 2: 1}),
        (full("block", 1), {0: 2, 1: 1, 2: 1}),
    ],
)
def test_layers_that_run_twice(plan: Recompute, runs: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[int] = Counter()
    forward = Block.forward

    def counting(block: Block, *arguments: Any) -> Tensor:
        seen[int(block.name.split(".")[1])] += 1
        return forward(block, *arguments)

    monkeypatch.setattr(Block, "forward", counting)
    step(MODELS["gpt"], plan, torch.float64)
    assert seen == runs


def remade(x: Tensor, made: list[str]) -> Tensor:
    made.append("again" if not torch.is_grad_enabled() else "forward")
    return x.exp()


@pytest.mark.parametrize("holders", [1, 3])
def test_tensor_is_recomputed_once_for_all_its_uses(holders: int) -> None:
    x, made = torch.randn(6, 4, dtype=torch.float64).requires_grad_(), []
    weight = torch.randn(4, 4, dtype=torch.float64).requires_grad_()
    y = remade(x, made).detach().requires_grad_()
    with SavedTensors().recomputing(y, lambda x: remade(x, made), x):
        out = sum(y.view(3, 8).view(6, 4) @ weight for _ in range(holders))
    assert made == ["forward"]
    for times in (1, 2):
        weight.grad = None
        out.sum().backward(retain_graph=True)
        assert made == ["forward"] + ["again"] * times
        torch.testing.assert_close(weight.grad, holders * y.detach().sum(0)[:, None].expand(4, 4))


def test_recomputed_tensor_is_freed_after_the_backward() -> None:
    x = torch.randn(100, 8).requires_grad_()
    weight = torch.randn(8, 8).requires_grad_()
    with LiveBytes() as live:
        y = x * 1.0
        with SavedTensors().recomputing(y, lambda x: x * 1.0, x):
            out = y @ weight
        del y
        assert live.now == out.untyped_storage().nbytes()
        out.sum().backward()
        del out
    assert live.now == x.grad.untyped_storage().nbytes() + weight.grad.untyped_storage().nbytes()


def test_other_tensors_are_saved_and_freed_with_the_graph() -> None:
    x, weight = torch.randn(100, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
    with LiveBytes() as live:
        y = x.tanh()
        with SavedTensors().recomputing(y, torch.tanh, x):
            out = (y @ weight).softmax(-1)  # softmax saves its output
        expected = torch.autograd.grad((x.tanh() @ weight).softmax(-1).square().sum(), weight)
        (found,) = torch.autograd.grad(out.square().sum(), weight, retain_graph=True)
        assert torch.equal(found, expected[0])
        del y, out, found, expected
        assert live.now == 0

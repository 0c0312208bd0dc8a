"""A split backward has the bits of the whole one, and runs each matrix product and each recompute once."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.models.block import Block
from megalite.models.context import AuxiliaryLosses
from megalite.models.gpt import GPTStage
from megalite.models.recompute import Recompute
from megalite.tensor_parallel.parameter import DeferredWeightGradients, attach_deferred
from tests.models.stages import LLAMA, B, S, build, named, varied
from tests.models.test_recompute import MODELS, PLANS, Products, full, name_of, selective

MICROBATCHES = 3
WHOLE = ("B0", "B1", "B2")
HALVES = ("I0", "I1", "W0", "I2", "W1", "W2")

EXPERTS = varied(
    LLAMA,
    num_experts=4,
    moe_first_dense_layers=1,
    moe_shared_expert_intermediate_size=12,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.01,
)
FEW_PLANS = [Recompute(), selective("mlp_act", "layernorm", "core_attn"), full("uniform", 2)]


def stage_of(model: ModelConfig, plan: Recompute, dtype: torch.dtype, *, main_grad: bool = True) -> GPTStage:
    stage = build(model, dtype=dtype, recompute=plan).train()
    if main_grad:
        kind = torch.float32 if dtype == torch.bfloat16 else dtype
        for parameter in named(stage).values():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=kind)
    return stage


def play(stage: GPTStage, order: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, int], list[float]]:
    """Return gradients, matrix products by kind of action, and the auxiliary losses."""
    deferred = DeferredWeightGradients()
    attach_deferred(stage, deferred)
    draws = torch.Generator().manual_seed(1)
    auxiliary = AuxiliaryLosses(1 / B, 1 / (B * S), 1.0, torch.device("cpu"))
    losses = []
    for microbatch in range(MICROBATCHES):
        tokens, labels = torch.randint(0, 37, (2, B, S), generator=draws)
        context = stage.context((2 * microbatch, 2 * microbatch + 1), auxiliary=auxiliary)
        losses.append(stage(tokens, context, labels=labels).sum())
    products = dict.fromkeys("BIW", 0)
    for kind, microbatch in ((action[0], int(action[1:])) for action in order):
        with Products() as counted:
            if kind == "B":
                losses[microbatch].backward()
            elif kind == "I":
                with deferred.deferring(microbatch):
                    losses[microbatch].backward()
            else:
                deferred.run(microbatch)
        products[kind] += counted.count
    assert deferred.pending == 0
    grads = {}
    for name, parameter in named(stage).items():
        # Norms and biases come from autograd; matrices and the word embedding go to main_grad if there is one.
        for kind, grad in (("grad", parameter.grad), ("main", parameter.main_grad)):
            if grad is not None:
                grads[f"{name} {kind}"] = grad
    return grads, products, [total.item() for total in auxiliary.totals.values()]


def compare(model: ModelConfig, plan: Recompute, dtype: torch.dtype, *, main_grad: bool = True) -> None:
    whole, whole_products, whole_terms = play(stage_of(model, plan, dtype, main_grad=main_grad), WHOLE)
    halves, products, terms = play(stage_of(model, plan, dtype, main_grad=main_grad), HALVES)
    what = f"{name_of(plan)} {dtype} main_grad={main_grad}"
    assert halves.keys() == whole.keys(), what
    assert [name for name in whole if not torch.equal(whole[name], halves[name])] == [], what
    assert terms == whole_terms
    assert products["I"] + products["W"] == whole_products["B"], what
    assert products["W"] > 0


@pytest.mark.parametrize(
    ("family", "plans"),
    [("gpt", PLANS[::2]), ("llama-fused", PLANS[1::2]), ("experts", PLANS)],
    ids=["gpt", "llama", "moe"],
)
def test_halves_are_bitwise_equal_to_the_whole_backward(family: str, plans: list[Recompute]) -> None:
    for plan in [Recompute(), *plans]:
        compare(MODELS[family], plan, torch.float32)
    compare(MODELS[family], Recompute(), torch.float32, main_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["gpt", "experts"])
def test_halves_in_other_precisions(family: str, dtype: torch.dtype) -> None:
    for plan in FEW_PLANS:
        compare(MODELS[family], plan, dtype)


@pytest.mark.parametrize(
    ("plan", "in_weights"), [(Recompute(), 13), (full("uniform", 1), 13), (selective("mlp"), 13)], ids=str
)
def test_second_half_has_one_product_per_matrix(
    plan: Recompute, in_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three dense layers of four matrices, and the head."""
    runs = 0
    forward = Block.feed_forward

    def counting(block: Block, *arguments: Any) -> Tensor:
        nonlocal runs
        runs += 1
        return forward(block, *arguments)

    monkeypatch.setattr(Block, "feed_forward", counting)
    stage = stage_of(MODELS["gpt"], plan, torch.float32)
    deferred = DeferredWeightGradients()
    attach_deferred(stage, deferred)
    tokens, labels = torch.randint(0, 37, (2, B, S), generator=torch.Generator().manual_seed(1))
    loss = stage(tokens, stage.context((0, 1)), labels=labels).sum()
    assert runs == 3
    with deferred.deferring(0):
        loss.backward()
    assert runs == (6 if plan.granularity == "full" else 3)
    with Products() as products:
        deferred.run(0)
    assert products.count == in_weights
    assert runs == (6 if plan.granularity == "full" else 3)


@pytest.mark.parametrize("family", MODELS)
def test_only_matrix_gradients_are_deferred(family: str) -> None:
    """The first half computes gradients of norms, biases, the position table, and an untied word table."""
    stage = stage_of(MODELS[family], Recompute(), torch.float32)
    deferred = DeferredWeightGradients()
    attach_deferred(stage, deferred)
    tokens, labels = torch.randint(0, 37, (2, B, S), generator=torch.Generator().manual_seed(1))
    loss = stage(tokens, stage.context((0, 1)), labels=labels).sum()
    with deferred.deferring(0):
        loss.backward()
    gradient = Counter(parameter.info.spec.name for parameter in deferred.parameters(0))  # type: ignore[attr-defined]
    tables = {"embedding.word.weight", "embedding.position.weight"}
    matrices = {name for name, parameter in named(stage).items() if name.endswith(".weight") and parameter.dim() > 1}
    tied = {"embedding.word.weight": 2} if family == "gpt" else {}
    assert gradient == {**dict.fromkeys(matrices - tables, 1), **tied}
    deferred.run(0)


def test_auxiliary_losses_count_once_with_recompute_ahead() -> None:
    """A forward without a graph, a forward with one, then the backward: the first changes nothing."""
    tokens, labels = torch.randint(0, 37, (2, B, S), generator=torch.Generator().manual_seed(1))
    found = []
    for ahead in (False, True):
        stage = stage_of(EXPERTS, Recompute(), torch.float64)
        auxiliary = AuxiliaryLosses(1 / B, 1 / (B * S), 1.0, torch.device("cpu"))
        context = stage.context((0, 1), auxiliary=auxiliary)
        if ahead:
            with torch.no_grad():
                stage(tokens, context, labels=labels)
        stage(tokens, context, labels=labels).sum().backward()
        found.append([total.item() for total in list(auxiliary.totals.values())[:2]])
    assert found[0] == found[1]
    assert all(total > 0 for total in found[0])

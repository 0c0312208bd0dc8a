"""Measured bytes that a split backward keeps for its weight gradients, against the planner's bytes."""

from typing import Any

import pytest
import torch

from benchmarks.live_bytes import LiveBytes
from megalite.models.context import AuxiliaryLosses
from megalite.partition.activations import deferred_bytes
from megalite.tensor_parallel.parameter import DeferredWeightGradients, attach_deferred
from tests.models.test_activation_bytes import GPT, LATENT, SPARSE, S, layers_alone, settled
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, tiny_config, words

EXPERTS: dict[str, Any] = words(
    "num_experts=4 moe_router_topk=4 add_bias_linear=false moe_ffn_hidden_size=192 "
    "moe_shared_expert_intermediate_size=128"
)  # all experts for each token, so that their numbers of rows are known


def kept(context: RankContext, world_size: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes alive after an I, without its results, and the planned bytes."""
    alone = world_size == 1
    config = tiny_config(world_size, **{**GPT, "hidden_dropout": 0.0, "attention_dropout": 0.0, **settings})
    stage, plan = layers_alone(context, config)
    deferred = DeferredWeightGradients()
    attach_deferred(stage, deferred)
    for parameter in stage.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    samples = config.training.micro_batch_size
    losses = AuxiliaryLosses(1.0 / samples, 1.0 / (samples * S), 1.0, torch.device("cpu"))
    forward_context = stage.context(tuple(range(samples)), auxiliary=losses)
    with LiveBytes() as live:
        x = torch.randn(stage.activation_shape(samples), dtype=torch.bfloat16).requires_grad_()
        y = stage(x, forward_context)
        with deferred.deferring(0):
            y.backward(torch.ones_like(y))
        results = [x.grad, *(parameter.grad for parameter in stage.parameters())]
        found = sum(grad.untyped_storage().nbytes() for grad in results if grad is not None)
        del x, y, forward_context
        alive = settled(lambda: live.now - found, alone=alone)
        deferred.run(0)
        assert settled(lambda: live.now - found, alone=alone) < alive / 20
    return alive, deferred_bytes(config, plan)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"num_layers": 2}),
        (1, {**LLAMA, "ffn_hidden_size": 320}),
        (1, {**LLAMA, **EXPERTS}),
        (1, LATENT),
        (2, {**LATENT, "q_lora_rank": None, "tp": 2, "sequence_parallel": True}),
        (1, SPARSE),
        (2, {**SPARSE, "tp": 2, "sequence_parallel": True}),
        (2, {"tp": 2}),
        (2, {"tp": 2, "sequence_parallel": True, "num_layers": 2}),
        (2, {"cp": 2}),
        (1, {"num_layers": 2, "recompute_granularity": "full"}),
    ],
    ids=str,
)
def test_deferred_bytes_equal_the_plan(world_size: int, settings: dict[str, Any]) -> None:
    ranks = (
        [kept(RankContext(0, {}), 1, settings)]
        if world_size == 1
        else run_ranks(world_size, kept, world_size, settings)
    )
    for alive, planned in ranks:
        assert alive == pytest.approx(planned, rel=0.03)

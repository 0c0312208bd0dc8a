"""Sizes, FLOPs and stages of models in which some layers have experts."""

import pytest

from megalite.config.flags import parse_arguments
from megalite.config.model import ModelConfig
from megalite.config.validate import validate
from megalite.models.shapes import (
    flops_per_token,
    head_forward_flops,
    layer_forward_flops,
    layer_shapes,
    parameter_count,
)
from megalite.partition.pipeline import plan_stages
from megalite.partition.stages import stage_forward_flops

MODEL = ModelConfig(
    num_layers=6,
    hidden_size=8,
    num_attention_heads=2,
    activation="swiglu",
    ffn_hidden_size=40,
    num_experts=16,
    moe_router_topk=3,
    moe_ffn_hidden_size=10,
    moe_shared_expert_intermediate_size=20,
    moe_first_dense_layers=1,
    moe_layer_freq=2,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    tie_embeddings=False,
    vocab_size=128,
)
MOE_LAYERS = [1, 3, 5]


def feed_forward(layer: int) -> dict[str, tuple[int, ...]]:
    rows = layer_shapes(MODEL, layer)
    prefix = f"layers.{layer}."
    short = {row.name.removeprefix(prefix): row.shape for row in rows}
    return {name: shape for name, shape in short.items() if name.startswith(("mlp.", "moe."))}


@pytest.mark.parametrize("layer", range(6))
def test_each_layer_has_its_own_kind(layer: int) -> None:
    if layer in MOE_LAYERS:
        assert feed_forward(layer) == {
            "moe.router.weight": (16, 8),
            "moe.experts.up.weight": (16, 2, 10, 8),
            "moe.experts.down.weight": (16, 8, 10),
            "moe.shared.up.weight": (2, 20, 8),
            "moe.shared.down.weight": (8, 20),
        }
    else:
        assert feed_forward(layer) == {"mlp.up.weight": (2, 40, 8), "mlp.down.weight": (8, 40)}


def test_shared_experts_are_not_split_over_ep() -> None:
    assert {row.name.split(".moe.")[1]: row.expert for row in layer_shapes(MODEL, 1) if ".moe." in row.name} == {
        "router.weight": False,
        "experts.up.weight": True,
        "experts.down.weight": True,
        "shared.up.weight": False,
        "shared.down.weight": False,
    }


def test_count_by_hand() -> None:
    attention, norms = 4 * 8 * 8, 2 * 8
    dense, moe = 3 * 40 * 8, 16 * 8 + 16 * 3 * 10 * 8 + 3 * 20 * 8
    ends = 2 * 128 * 8 + 8
    assert parameter_count(MODEL) == 6 * (attention + norms) + 3 * dense + 3 * moe + ends


def test_flops_by_hand() -> None:
    s = 10
    attention = 2 * 4 * 8 * 8 + 4 * s * 8
    dense, moe = 2 * 3 * 40 * 8, 2 * (16 * 8 + 3 * 3 * 10 * 8 + 3 * 20 * 8)
    for layer in range(6):
        found = layer_forward_flops(MODEL, layer, s)
        assert found == attention + (moe if layer in MOE_LAYERS else dense)
    assert flops_per_token(MODEL, s) == 3 * (6 * attention + 3 * dense + 3 * moe + head_forward_flops(MODEL))


def test_stages_weigh_their_own_layers() -> None:
    flags = (
        "--num-layers 8 --hidden-size 64 --seq-length 32 --vocab-size 128 --num-experts 4 --moe-router-topk 4 "
        "--moe-first-dense-layers 4 --pp 2"
    )
    config = validate(parse_arguments(flags.split()).config, 2)
    first, last = plan_stages(config)
    assert first.num_layers > last.num_layers, "layers with four experts a token are heavier"
    costs = [layer_forward_flops(config.model, layer, 32) for layer in range(8)]
    head = head_forward_flops(config.model)
    assert stage_forward_flops(config, first) == sum(costs[: first.num_layers])
    assert stage_forward_flops(config, last) == sum(costs[first.num_layers :]) + head
    best = min(max(sum(costs[:cut]), sum(costs[cut:]) + head) for cut in range(1, 8))
    assert max(stage_forward_flops(config, plan) for plan in (first, last)) == best

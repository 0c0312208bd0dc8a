"""The table of parameters: names, shapes, shards, counts and FLOPs."""

import dataclasses

import pytest

from megalite.config.model import ModelConfig
from megalite.models.shapes import (
    ParameterShape,
    embedding_shapes,
    flops_per_token,
    head_forward_flops,
    head_shapes,
    layer_forward_flops,
    layer_shapes,
    map_layers,
    parameter_count,
    stage_shapes,
)
from tests.models import stages
from tests.support.tiny import words

GPT = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=100, max_position_embeddings=16)
LLAMA = dataclasses.replace(stages.LLAMA, hidden_size=8, vocab_size=100, make_vocab_size_divisible_by=64)

Row = tuple[str, tuple[int, ...], int | None, bool, str]


def rows(shapes: list[ParameterShape]) -> list[Row]:
    return [(shape.name, shape.shape, shape.shard_dim, shape.decay, shape.init) for shape in shapes]


def test_shapes_of_a_gpt_layer() -> None:
    assert rows(layer_shapes(GPT, 1)) == [
        ("layers.1.attention_norm.weight", (8,), None, False, "ones"),
        ("layers.1.attention_norm.bias", (8,), None, False, "zeros"),
        ("layers.1.attention.qkv.weight", (24, 8), 0, True, "normal"),
        ("layers.1.attention.qkv.bias", (24,), 0, False, "zeros"),
        ("layers.1.attention.out.weight", (8, 8), 1, True, "residual"),
        ("layers.1.attention.out.bias", (8,), None, False, "zeros"),
        ("layers.1.mlp_norm.weight", (8,), None, False, "ones"),
        ("layers.1.mlp_norm.bias", (8,), None, False, "zeros"),
        ("layers.1.mlp.up.weight", (32, 8), 0, True, "normal"),
        ("layers.1.mlp.up.bias", (32,), 0, False, "zeros"),
        ("layers.1.mlp.down.weight", (8, 32), 1, True, "residual"),
        ("layers.1.mlp.down.bias", (8,), None, False, "zeros"),
    ]


def test_weight_decay_of_query_and_key_norms() -> None:
    plain = dataclasses.replace(GPT, qk_norm=True)
    decayed = dataclasses.replace(plain, apply_wd_to_qk_layernorm=True)
    before, after = (rows(layer_shapes(model, 1)) for model in (plain, decayed))
    names = [f"layers.1.attention.{one}_norm.{part}" for one in "qk" for part in ("weight", "bias")]
    assert [row[0] for row, old in zip(after, before, strict=True) if row != old] == names
    assert all(row[3] for row in after if row[0] in names)
    assert layer_forward_flops(decayed, 1, 16) == layer_forward_flops(plain, 1, 16)


def test_layers_with_a_window_have_fewer_flops() -> None:
    s, model = 100, ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, sliding_window=10)
    mixed = dataclasses.replace(model, window_attn_skip_freq=[2])
    assert [mixed.has_window(index) for index in range(4)] == [True, False, True, False]
    assert dataclasses.replace(model, window_attn_skip_freq=[0, 1, 1, 0]).has_window(3) is False
    costs = [layer_forward_flops(mixed, index, s) for index in range(4)]
    assert costs[1] - costs[0] == 4 * (s - 10) * 16 and costs[:2] == costs[2:]
    turned = dataclasses.replace(model, position_embedding_type="rope", no_rope_freq=[3])
    assert [turned.has_rope(index) for index in range(4)] == [True, True, False, True]
    experts = dataclasses.replace(model, num_experts=2, moe_layer_freq=3)
    for kind in (mixed.has_window, turned.has_rope, experts.is_moe_layer):  # computed once per kind of layer
        assert map_layers(kind.__self__, range(4), kind) == list(map(kind, range(4)))


def test_shapes_of_embedding_and_head() -> None:
    assert rows(embedding_shapes(GPT)) == [
        ("embedding.word.weight", (128, 8), 0, True, "normal"),
        ("embedding.position.weight", (16, 8), None, True, "normal"),
    ]
    assert rows(embedding_shapes(LLAMA)) == [("embedding.word.weight", (128, 8), 0, True, "normal")]
    assert [shape.name for shape in head_shapes(GPT)] == ["final_norm.weight", "final_norm.bias"]
    assert rows(head_shapes(LLAMA)) == [
        ("final_norm.weight", (8,), None, False, "ones"),
        ("head.weight", (128, 8), 0, True, "normal"),
    ]


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_stages_sum_to_the_model(model: ModelConfig) -> None:
    whole = {shape.name: shape for shape in stage_shapes(model, 0, 3, True, True)}
    assert sum(shape.size for shape in whole.values()) == parameter_count(model)
    first, last = stage_shapes(model, 0, 1, True, False), stage_shapes(model, 1, 3, False, True)
    assert {shape.name: shape for shape in first + last} == whole
    # The tied embedding is on both ends of the pipeline.
    shared = {shape.name for shape in first} & {shape.name for shape in last}
    assert shared == ({"embedding.word.weight"} if model.tie_embeddings else set())
    assert all(name.split(".")[1] in "12" for name in {s.name for s in last} if name.startswith("layers"))


def test_parameter_count_equals_the_formula() -> None:
    h, layers, vocab, positions = 8, 3, 128, 16
    assert parameter_count(GPT) == layers * (12 * h * h + 13 * h) + (vocab + positions) * h + 2 * h


def test_unresolved_sizes_are_an_error() -> None:
    with pytest.raises(ValueError, match="vocab_size is not set"):
        parameter_count(ModelConfig())
    with pytest.raises(ValueError, match="max_position_embeddings is not set"):
        parameter_count(ModelConfig(vocab_size=8))


@pytest.mark.parametrize(("layers", "h", "s", "vocab"), [(96, 12288, 2048, 51200), (24, 2304, 2048, 51200)])
def test_flops_equal_the_published_formula(layers: int, h: int, s: int, vocab: int) -> None:
    model = ModelConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=h // 96, vocab_size=vocab, max_position_embeddings=s
    )
    # Narayanan et al. 2021: 72·B·L·s·h²(1 + s/6h + V/12hL) without recomputation; here for B·s = 1.
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert flops_per_token(model, s) == pytest.approx(formula, rel=1e-12)
    assert flops_per_token(model, s) - flops_per_token(model, s, "megatron") == 6 * layers * s * h


def test_flops_of_single_products() -> None:
    s = 10
    # qkv 48·8, out 8·24, up and gate 2·20·8, down 8·20 weights; two products of s keys with 4 heads of 6.
    assert layer_forward_flops(LLAMA, 0, s) == 2 * (48 * 8 + 8 * 24 + 2 * 20 * 8 + 8 * 20) + 4 * s * 24
    assert head_forward_flops(LLAMA) == 2 * 128 * 8
    assert flops_per_token(LLAMA, s) == 3 * (3 * layer_forward_flops(LLAMA, 0, s) + head_forward_flops(LLAMA))


def test_flops_with_a_sliding_window() -> None:
    h, s, window = 8, 10, 4
    wide, narrow = (ModelConfig(hidden_size=h, num_attention_heads=2, sliding_window=w) for w in (None, window))
    assert layer_forward_flops(wide, 0, s) - layer_forward_flops(narrow, 0, s) == 4 * (s - window) * h
    seen = [min(position + 1, window) for position in range(s)]
    # The convention omits the diagonal's half: s/2 keys on average instead of (s + 1)/2.
    causal = 4 * h * (sum(seen) - window / 2) / s
    assert layer_forward_flops(narrow, 0, s, "megatron") == 2 * 12 * h * h + int(causal)
    assert layer_forward_flops(
        ModelConfig(hidden_size=h, num_attention_heads=2, sliding_window=s), 0, s, "megatron"
    ) == layer_forward_flops(wide, 0, s, "megatron")


MIXED = ModelConfig(
    **words(
        "num_layers=6 hidden_size=8 num_attention_heads=2 activation=swiglu ffn_hidden_size=40 num_experts=16 "
        "moe_router_topk=3 moe_ffn_hidden_size=10 moe_shared_expert_intermediate_size=20 moe_first_dense_layers=1 "
        "moe_layer_freq=2 normalization=RMSNorm position_embedding_type=rope add_bias_linear=false "
        "tie_embeddings=false vocab_size=128"
    )
)
MOE_LAYERS = [1, 3, 5]


def test_flops_of_mixed_layers() -> None:
    s = 10
    attention = 2 * 4 * 8 * 8 + 4 * s * 8
    dense, moe = 2 * 3 * 40 * 8, 2 * (16 * 8 + 3 * 3 * 10 * 8 + 3 * 20 * 8)
    for layer in range(6):
        found = layer_forward_flops(MIXED, layer, s)
        assert found == attention + (moe if layer in MOE_LAYERS else dense)
    assert flops_per_token(MIXED, s) == 3 * (6 * attention + 3 * dense + 3 * moe + head_forward_flops(MIXED))

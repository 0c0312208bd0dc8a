"""The table of parameters: names, shapes, shards, counts and FLOPs."""

import dataclasses
import subprocess
import sys

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
    parameter_count,
    stage_shapes,
)

GPT = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=100, max_position_embeddings=16)
LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    ffn_hidden_size=20,
    vocab_size=100,
    make_vocab_size_divisible_by=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    tie_embeddings=False,
)

Row = tuple[str, tuple[int, ...], int | None, bool, str]


def rows(shapes: list[ParameterShape]) -> list[Row]:
    return [(shape.name, shape.shape, shape.shard_dim, shape.decay, shape.init) for shape in shapes]


def test_gpt_layer() -> None:
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


def test_llama_layer() -> None:
    assert rows(layer_shapes(LLAMA, 0)) == [
        ("layers.0.attention_norm.weight", (8,), None, False, "ones"),
        ("layers.0.attention.qkv.weight", (2 * (2 + 2) * 6, 8), 0, True, "normal"),
        ("layers.0.attention.out.weight", (8, 24), 1, True, "residual"),
        ("layers.0.mlp_norm.weight", (8,), None, False, "ones"),
        ("layers.0.mlp.up.weight", (2, 20, 8), 1, True, "normal"),
        ("layers.0.mlp.down.weight", (8, 20), 1, True, "residual"),
    ]


def test_swiglu_bias_is_stacked_like_its_weight() -> None:
    model = ModelConfig(hidden_size=24, activation="swiglu", ffn_hidden_size=64)
    bias = next(shape for shape in layer_shapes(model, 0) if shape.name == "layers.0.mlp.up.bias")
    assert (bias.shape, bias.shard_dim, bias.decay) == ((2, 64), 1, False)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
def test_every_gate_is_stacked_on_its_up_projection(activation: str) -> None:
    model = ModelConfig(hidden_size=24, activation=activation, ffn_hidden_size=64)
    up = next(shape for shape in layer_shapes(model, 0) if shape.name == "layers.0.mlp.up.weight")
    assert (up.shape, up.shard_dim) == ((2, 64, 24), 1)


def test_bias_of_query_key_and_value_alone() -> None:
    model = dataclasses.replace(LLAMA, add_qkv_bias=True)
    biases = [row for row in rows(layer_shapes(model, 0)) if row[0].endswith("bias")]
    assert biases == [("layers.0.attention.qkv.bias", (48,), 0, False, "zeros")]
    assert parameter_count(model) == parameter_count(LLAMA) + 3 * 48


@pytest.mark.parametrize(("normalization", "kinds"), [("RMSNorm", ["weight"]), ("LayerNorm", ["weight", "bias"])])
def test_norms_of_queries_and_keys(normalization: str, kinds: list[str]) -> None:
    """Of the size of one head, whole on every tensor-parallel rank."""
    model = dataclasses.replace(LLAMA, qk_norm=True, normalization=normalization)
    names = [row[0] for row in rows(layer_shapes(model, 0))]
    own = [row for row in rows(layer_shapes(model, 0)) if "q_norm" in row[0] or "k_norm" in row[0]]
    assert own == [
        (f"layers.0.attention.{norm}.{kind}", (6,), None, False, "ones" if kind == "weight" else "zeros")
        for norm in ("q_norm", "k_norm")
        for kind in kinds
    ]
    first = names.index(own[0][0])
    assert names[first - 1] == "layers.0.attention.qkv.weight"
    assert names[first + len(own)] == "layers.0.attention.out.weight"
    # Vectors are no matrices: they change no FLOPs.
    assert flops_per_token(model, 10) == flops_per_token(LLAMA, 10)


def test_zero_centered_norms_start_at_zero() -> None:
    model = dataclasses.replace(LLAMA, norm_zero_centered=True, qk_norm=True)
    norms = [row for row in rows(stage_shapes(model, 0, 1, True, True)) if "norm" in row[0]]
    assert len(norms) == 5 and {row[-1] for row in norms} == {"zeros"}


@pytest.mark.parametrize(("activation", "up", "shard_dim"), [("gelu", (4, 32, 8), 1), ("swiglu", (4, 2, 64, 8), 2)])
def test_moe_layer(activation: str, up: tuple[int, ...], shard_dim: int) -> None:
    ffn = {"gelu": None, "swiglu": 64}[activation]
    model = ModelConfig(hidden_size=8, num_attention_heads=2, num_experts=4, activation=activation, ffn_hidden_size=ffn)
    router, ups, downs = layer_shapes(model, 2)[-3:]
    assert rows([router]) == [("layers.2.moe.router.weight", (4, 8), None, True, "normal")]
    assert rows([ups]) == [("layers.2.moe.experts.up.weight", up, shard_dim, True, "normal")]
    assert rows([downs]) == [("layers.2.moe.experts.down.weight", (4, 8, up[-2]), 2, True, "residual")]
    assert (router.expert, ups.expert, downs.expert) == (False, True, True)


def test_ends() -> None:
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
def test_stages_add_up_to_the_model(model: ModelConfig) -> None:
    whole = {shape.name: shape for shape in stage_shapes(model, 0, 3, True, True)}
    assert sum(shape.size for shape in whole.values()) == parameter_count(model)
    first, last = stage_shapes(model, 0, 1, True, False), stage_shapes(model, 1, 3, False, True)
    assert {shape.name: shape for shape in first + last} == whole
    # The tied embedding is on both ends of the pipeline.
    shared = {shape.name for shape in first} & {shape.name for shape in last}
    assert shared == ({"embedding.word.weight"} if model.tie_embeddings else set())
    assert all(name.split(".")[1] in "12" for name in {s.name for s in last} if name.startswith("layers"))


def test_count_of_a_gpt_by_its_formula() -> None:
    h, layers, vocab, positions = 8, 3, 128, 16
    assert parameter_count(GPT) == layers * (12 * h * h + 13 * h) + (vocab + positions) * h + 2 * h


def test_unresolved_sizes() -> None:
    with pytest.raises(ValueError, match="vocab_size is not set"):
        parameter_count(ModelConfig())
    with pytest.raises(ValueError, match="max_position_embeddings is not set"):
        parameter_count(ModelConfig(vocab_size=8))


@pytest.mark.parametrize(("layers", "h", "s", "vocab"), [(96, 12288, 2048, 51200), (24, 2304, 2048, 51200)])
def test_flops_of_the_published_formula(layers: int, h: int, s: int, vocab: int) -> None:
    model = ModelConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=h // 96, vocab_size=vocab, max_position_embeddings=s
    )
    # Narayanan et al. 2021: 72·B·L·s·h²(1 + s/6h + V/12hL) without recomputation; here for B·s = 1.
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert flops_per_token(model, s) == pytest.approx(formula, rel=1e-12)
    assert flops_per_token(model, s) - flops_per_token(model, s, "megatron") == 6 * layers * s * h


def test_flops_of_parts() -> None:
    s = 10
    # qkv 48·8, out 8·24, up and gate 2·20·8, down 8·20 weights; two products of s keys with 4 heads of 6.
    assert layer_forward_flops(LLAMA, 0, s) == 2 * (48 * 8 + 8 * 24 + 2 * 20 * 8 + 8 * 20) + 4 * s * 24
    assert head_forward_flops(LLAMA) == 2 * 128 * 8
    assert flops_per_token(LLAMA, s) == 3 * (3 * layer_forward_flops(LLAMA, 0, s) + head_forward_flops(LLAMA))


def test_a_sliding_window_leaves_fewer_products() -> None:
    h, s, window = 8, 10, 4
    wide, narrow = (ModelConfig(hidden_size=h, num_attention_heads=2, sliding_window=w) for w in (None, window))
    assert layer_forward_flops(wide, 0, s) - layer_forward_flops(narrow, 0, s) == 4 * (s - window) * h
    seen = [min(position + 1, window) for position in range(s)]
    # The convention leaves out the diagonal's half: s/2 keys on average rather than (s + 1)/2.
    causal = 4 * h * (sum(seen) - window / 2) / s
    assert layer_forward_flops(narrow, 0, s, "megatron") == 2 * 12 * h * h + int(causal)
    assert layer_forward_flops(
        ModelConfig(hidden_size=h, num_attention_heads=2, sliding_window=s), 0, s, "megatron"
    ) == layer_forward_flops(wide, 0, s, "megatron")


def test_a_token_pays_for_its_experts_alone() -> None:
    def flops(experts: int, topk: int) -> int:
        model = ModelConfig(hidden_size=8, num_attention_heads=2, num_experts=experts, moe_router_topk=topk)
        return layer_forward_flops(model, 0, 4)

    router, expert = 2 * 8, 2 * 2 * 8 * 32
    assert flops(8, 2) - flops(4, 2) == 4 * router
    assert flops(8, 3) - flops(8, 2) == expert


def test_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import megalite.models.shapes"
    subprocess.run([sys.executable, "-c", code], check=True)

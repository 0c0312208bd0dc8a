"""Parameters of built stages compared with the table in models/shapes.py."""

import math

import pytest
import torch

from megalite.config.files import preset_names
from megalite.config.flags import parse_arguments
from megalite.config.model import ModelConfig
from megalite.models.shapes import ParameterShape, buffer_shapes, stage_shapes
from megalite.topology.group import Group
from tests.models.stages import GPT, S, build, named, varied


def tiny_preset(name: str) -> ModelConfig:
    """Return the preset's family as a small model."""
    config = parse_arguments(["--preset", name]).config
    model, groups = config.model, config.model.num_query_groups
    return varied(
        model,
        num_layers=3,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=8 if groups is None or groups == model.num_attention_heads else 4,
        kv_channels=None,
        ffn_hidden_size=None if model.ffn_hidden_size is None else 48,
        vocab_size=500,
        max_position_embeddings=16,
        moe_first_dense_layers=min(1, model.moe_first_dense_layers),
        moe_ffn_hidden_size=None if model.moe_ffn_hidden_size is None else 24,
        moe_shared_expert_intermediate_size=None if model.moe_shared_expert_intermediate_size is None else 40,
    )


PRESETS = list({repr(tiny_preset(name)): name for name in preset_names()}.values())
"""Presets without duplicates of the same small model."""


MODELS = {name: tiny_preset(name) for name in PRESETS}
MODELS["decayed norms"] = varied(GPT, qk_norm=True, apply_wd_to_qk_layernorm=True)
MODELS["linear attention, LayerNorm, decayed norms"] = varied(
    MODELS["qwen3-next-80b-a3b"], normalization="LayerNorm", apply_wd_to_qk_layernorm=True
)
MODELS["decayed norms, all heads"] = varied(MODELS["olmo3-7b"], apply_wd_to_qk_layernorm=True)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_the_table(name: str) -> None:
    model, tp, group = MODELS[name], 2, Group("tp", (0, 1), 1)
    for cut in ((0, 3), (0, 1), (1, 2), (2, 3)):
        table = stage_shapes(model, *cut, cut[0] == 0, cut[1] == 3) + buffer_shapes(model, *cut)
        parameters = named(build(model, cut=cut, tp=group))
        assert sorted(parameters) == sorted(row.name for row in table)
        for row in table:
            info = parameters[row.name].info
            assert info.spec.global_shape == row.shape, row.name
            assert (info.shard_dim, info.decay) == (row.shard_dim, row.decay), row.name
            local = list(row.shape)
            if row.shard_dim is not None:
                local[row.shard_dim] //= tp
            assert list(parameters[row.name].shape) == local, row.name


@pytest.mark.parametrize("preset", PRESETS)
def test_initial_values_equal_the_table(preset: str) -> None:
    model = varied(tiny_preset(preset), hidden_size=64, ffn_hidden_size=128)
    parameters = named(build(model))
    for row in stage_shapes(model, 0, 3, True, True):
        check_initial(row, parameters[row.name].detach(), model)


def check_initial(row: ParameterShape, values: torch.Tensor, model: ModelConfig) -> None:
    if row.init in ("zeros", "ones"):
        assert torch.equal(values, torch.full_like(values, float(row.init == "ones"))), row.name
        return
    if row.init == "other":  # tested with its layer
        return
    branches = model.num_layers + sum(map(model.has_mlp, range(model.num_layers)))
    std = model.init_method_std / (math.sqrt(branches) if row.init == "residual" else 1.0)
    assert values.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * values.numel())), row.name
    assert abs(values.mean().item()) < 5 * std / math.sqrt(values.numel()), row.name


def test_partial_gradients_with_sequence_parallelism() -> None:
    """Norms and biases after the sum have partial gradients on each rank; the other parameters have full ones."""
    group = Group("tp", (0, 1), 0)
    for sequence_parallel in (False, True):
        stage = build(GPT, tp=group, sequence_parallel=sequence_parallel)
        partial = {name for name, parameter in named(stage).items() if parameter.info.partial_over_tp}
        expected = {name for name in named(stage) if "norm" in name or name.endswith(("out.bias", "down.bias"))}
        assert partial == (expected if sequence_parallel else set())
        shape = (S // 2 if sequence_parallel else S, 3, 16)
        assert stage.activation_shape(3) == shape


def test_tied_copies_are_marked() -> None:
    both, first, last = build(GPT), build(GPT, cut=(0, 1)), build(GPT, cut=(2, 3))
    assert both.head.weight is both.embedding.word.weight
    word = "embedding.word.weight"
    assert (named(both)[word].info.tied, named(both)[word].info.uses) == (False, 2)
    for stage in (first, last):
        assert (named(stage)[word].info.tied, named(stage)[word].info.uses) == (True, 1)
    assert torch.equal(named(first)[word], named(last)[word])
    untied = build(varied(GPT, tie_embeddings=False), cut=(0, 1))
    assert not named(untied)[word].info.tied

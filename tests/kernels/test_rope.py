"""YaRN's frequencies and attention factor are bitwise equal to those of transformers in float64."""

from typing import Any

import pytest
import torch

from megalite.config.model import ModelConfig
from megalite.kernels.layer_ops import attention_factor, rope_frequencies, rope_tables
from tests.models.test_families import all_float64

QWEN = {"rotary_base": 1e6, "rope_scaling_factor": 4.0, "rope_original_max_positions": 32768}
DEEPSEEK = {"rope_scaling_factor": 40.0, "rope_original_max_positions": 4096}
SHORT = {"rope_original_max_positions": 12, "rope_scaling_factor": 3.0}


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize(
    "settings",
    [
        QWEN,
        {**QWEN, "rope_truncate": False},
        {**QWEN, "rotary_percent": 0.5},
        {**QWEN, "rope_beta_fast": 20.0, "rope_beta_slow": 2.0, "rope_attention_factor": 1.3},
        {**DEEPSEEK, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0},
        {**DEEPSEEK, "rope_mscale": 0.707, "rope_mscale_all_dim": 1.3},
        SHORT,
        {**SHORT, "rope_truncate": False, "rope_beta_fast": 1.4, "rope_beta_slow": 0.2},
    ],
    ids=str,
)
def test_yarn_is_bitwise_equal_to_transformers(settings: dict[str, Any], head_size: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    model = ModelConfig(kv_channels=head_size, rope_scaling="yarn", **settings)
    names = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
    parameters = {name: getattr(model, f"rope_{name}") for name in names}
    parameters |= {"rope_type": "yarn", "factor": model.rope_scaling_factor, "rope_theta": model.rotary_base}
    parameters["original_max_position_embeddings"] = model.rope_original_max_positions
    parameters["partial_rotary_factor"] = model.rotary_percent
    config = LlamaConfig(
        head_dim=head_size,
        max_position_embeddings=int(model.rope_scaling_factor * model.rope_original_max_positions),
        rope_parameters=parameters,
    )
    with all_float64():
        theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert theirs.dtype == torch.float64
    assert torch.equal(rope_frequencies(model), theirs)
    assert attention_factor(model) == factor


def test_tables_are_scaled_before_they_are_rounded() -> None:
    theta = rope_frequencies(ModelConfig(kv_channels=8, rope_scaling="yarn", **QWEN))
    positions = torch.arange(50)
    exact = [table * 1.37 for table in rope_tables(positions, theta, torch.float64)]
    for ours, expected in zip(rope_tables(positions, theta, torch.float32, 1.37), exact, strict=True):
        assert torch.equal(ours, expected.float())


def test_attention_factor_of_other_scalings_is_one() -> None:
    assert {attention_factor(ModelConfig(rope_scaling=kind)) for kind in ("none", "linear", "llama3", "dynamic")} == {
        1.0
    }


@pytest.mark.parametrize("length", [1, 4096, 4097, 8192, 100_000])
def test_dynamic_scaling_equals_transformers(length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    scaled = {"rope_scaling": "dynamic", "rope_scaling_factor": 2.5, "rope_original_max_positions": 4096}
    model = ModelConfig(kv_channels=64, rotary_base=1e4, **scaled)
    parameters = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4}
    config = LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=parameters)
    with all_float64():
        theirs, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    assert factor == 1.0
    torch.testing.assert_close(rope_frequencies(model, length=length), theirs, rtol=1e-14, atol=0.0)

"""Presets have the parameter counts of the published models."""

from pathlib import Path

import pytest

import megalite.config.files as presets
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.models.shapes import parameter_count

# Exact parameter counts of the released weights; rounded for models known only from a paper.
EXACT = {
    "gpt2-124m": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "phi-3-mini": 3_821_079_552,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "gemma-7b": 8_537_680_896,
    "gemma2-9b": 9_241_705_984,
    "gemma3-27b": 27_009_346_304,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "ministral-3-8b": 8_489_553_920,
    "mistral-small-4-119b": 118_972_826_624,
    "granite-3.1-8b": 8_170_848_256,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,  # without the routers' biases, which are not parameters
    "deepseek-v3.2": 671_877_929_216,
    "moonlight-16b-a3b": 15_960_108_544,
    "kimi-k2": 1_026_408_209_408,
}
ROUNDED = {
    "gpt3-350m": 355e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.65e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13e9,
    "gpt3-175b": 175e9,
    "gpt-1.7b": 1.65e9,
    "gpt-3.6b": 3.56e9,
    "gpt-7.5b": 7.5e9,
    "gpt-18.4b": 18.4e9,
    "gpt-39.1b": 39.1e9,
    "gpt-76.1b": 76.1e9,
    "gpt-145.6b": 145.6e9,
    "gpt-310.1b": 310.1e9,
    "gpt-529.6b": 529.6e9,
    "gpt-1t": 1008e9,
}


@pytest.mark.parametrize("name", presets.preset_names())
def test_parameter_count_equals_the_published_model(name: str) -> None:
    flags = ["--preset", name, "--make-vocab-size-divisible-by", "1"]
    model = validate(parse_arguments(flags).config, 1).model
    if name in EXACT:
        assert parameter_count(model) == EXACT[name]
    else:
        assert parameter_count(model) == pytest.approx(ROUNDED[name], rel=0.015)


@pytest.mark.parametrize("name", presets.preset_names())
def test_presets_name_their_source(name: str) -> None:
    text = (Path(presets.__file__).parent / "presets" / f"{name}.yaml").read_text()
    assert text.startswith("# ") and "# Optimizer: " in text
    config = parse_arguments(["--preset", name]).config
    assert config.training.seq_length == (config.model.max_position_embeddings or config.training.seq_length)
    assert config.optimizer.min_lr < config.optimizer.lr < 1e-3

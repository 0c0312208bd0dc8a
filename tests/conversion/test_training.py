"""Training from a Hugging Face folder on any layout gives the weights and steps of a converted checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.manifest import weight_key
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.conversion import weights as blockwise
from megalite.conversion.huggingface.weights import HuggingFaceSource, HuggingFaceWeights, Shards
from megalite.conversion.native import write_native
from megalite.conversion.weights import parameter_shapes
from megalite.training.resume import choose_checkpoint, resume
from megalite.training.saving import save
from tests.conversion.huggingface.models import saved, saved_in_four_bits
from tests.models.test_families import FAMILIES, Family, their_model
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import silent
from tests.support.tiny import Runner, assemble, build, local_parts, tiny_config

FOUR_LAYERS = {"num_hidden_layers": 4, "max_position_embeddings": 16}
KINDS = {
    "llama": Family("", {}, "Llama", {**FAMILIES["llama3"].theirs, **FOUR_LAYERS}),
    "mixtral": Family("", {}, "Mixtral", {**FAMILIES["mixtral"].theirs, **FOUR_LAYERS, "num_local_experts": 4}),
}


def folder_of(kind: str, folder: Path, dtype: torch.dtype = torch.float64) -> tuple[Path, dict[str, Any]]:
    """A folder, and the settings of a run of its model."""
    their_model(KINDS[kind]).to(dtype).save_pretrained(folder)
    model = HuggingFaceWeights(folder).model
    return folder, {**asdict(model), "make_vocab_size_divisible_by": 8, "seq_length": 16, "load": f"hf:{folder}"}


SLICED = ("gpt2", "llama2", "qwen2-moe", "gpt-oss", "phi3-window", "glm4-moe-groups", "deepseek-v3")
"""Every kind of view through which a family's tensors are read."""


@pytest.mark.parametrize("name", SLICED)
def test_slices_equal_the_whole_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor, sliced along each dimension, with blocks of a few elements."""
    saved(name, tmp_path)
    monkeypatch.setattr(blockwise, "BLOCK", 64)
    weights = HuggingFaceWeights(tmp_path, divisible_by=16)
    assert weights.model.padded_vocab_size == 48
    for key, shape in parameter_shapes(weights.model).items():
        expected = weights.read(key)
        for dim, size in enumerate(shape.shape):
            for first, last in ((0, size // 2), (size // 2, size), (size // 3, size // 3 + 1)):
                part = tuple((first, last) if at == dim else (0, n) for at, n in enumerate(shape.shape))
                index = tuple(slice(*bounds) for bounds in part)
                assert torch.equal(weights.read(key, part), expected[index]), (key, part)


def test_slice_reads_only_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the rows are half the bytes: eight ranks of a host do not read the model eight times."""
    folder, settings = folder_of("llama", tmp_path / "llama")
    model = replace(RunConfig(), **{k: v for k, v in settings.items() if k not in ("load", "seq_length")}).model
    source, count = HuggingFaceSource(folder, model), [0]
    read = Shards.read_elements

    def counted(shards: Shards, name: str, start: int, number: int, room: torch.Tensor | None) -> torch.Tensor:
        count[0] += number
        return read(shards, name, start, number, room)

    monkeypatch.setattr(Shards, "read_elements", counted)
    monkeypatch.setattr(blockwise, "BLOCK", 128)  # a row of 16 in float64
    key = weight_key("layers.0.attention.qkv.weight")
    rows, columns = source.entry(key).global_shape
    for first, last in ((0, rows // 2), (rows // 2, rows)):
        count[0] = 0
        source.read_into(torch.empty(rows // 2, columns, dtype=torch.float64), key, ((first, last), (0, columns)))
        assert count[0] == rows // 2 * columns


def started(
    context: RankContext, world: int, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """This rank's weights and main parameters, and the losses of two steps."""
    config = tiny_config(world, **settings)
    replica = build(context, config)
    progress = resume(replica, tokenizer=None, log=silent)
    assert (progress.step, progress.samples) == (0, 0)
    held = local_parts(replica, "weight"), local_parts(replica, "main_param")
    runner = Runner(replica, progress)
    return *held, [runner.step().loss for _ in range(2)]


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp 2 x vpp 2": ("llama", 2, {"pp": 2, "vpp": 2}),
    "ZeRO-1, bf16": ("llama", 4, {"tp": 2, "dp_strategy": "distributed-optimizer", "precision": "bf16"}),
    "fully sharded": ("llama", 2, {"dp_strategy": "fully-sharded"}),
    "local SGD": ("llama", 2, {"dp_strategy": "diloco"}),
    "ep 2 x tp 2, bf16": ("mixtral", 4, {"tp": 2, "ep": 2, "precision": "bf16"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_weights(layout: str, tmp_path: Path) -> None:
    """Bit-equal weights, rounded in bf16 runs; the first steps equal those from a converted checkpoint."""
    kind, world, axes = LAYOUTS[layout]
    folder, settings = folder_of(kind, tmp_path / kind, torch.float32)
    ranks = run_ranks(world, started, world, {**settings, **axes})
    weights = HuggingFaceWeights(folder, divisible_by=8)
    low = axes.get("precision") == "bf16"
    held, main = assemble([rank[0] for rank in ranks]), assemble([rank[1] for rank in ranks])
    assert sorted(held) == sorted(parameter_shapes(weights.model))
    for key, values in held.items():
        expected = weights.read(key)
        rounded = expected.bfloat16().float() if low else expected
        assert np.array_equal(np.asarray(values, dtype=np.float64), rounded.double().numpy()), key
        assert np.array_equal(np.asarray(main[key], dtype=np.float64), expected.double().numpy()), key
    native = write_native(weights, tmp_path / "native")
    converted = run_ranks(world, started, world, {**settings, **axes, "load": str(native), "finetune": True})
    assert [rank[2] for rank in ranks] == [rank[2] for rank in converted]


def other(context: RankContext, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        resume(build(context, tiny_config(1, **settings)), tokenizer=None, log=silent)
    return str(error.value)


def test_different_model_is_refused(tmp_path: Path) -> None:
    """Also with a manually written config; --finetune allows extending the context, as for checkpoints."""
    folder, settings = folder_of("llama", tmp_path / "llama")
    context = RankContext(0, {})
    said = other(context, {**settings, "norm_epsilon": 1e-4, "rotary_base": 7.0})
    assert (
        f"{folder} is of another model: rotary_base 500000.0 there, 7.0 here; norm_epsilon 1e-05 there, 0.0001" in said
    )
    assert "norm_epsilon" in (
        said := other(context, {**settings, "norm_epsilon": 1e-4, "rotary_base": 7.0, "finetune": True})
    )
    assert "rotary_base" not in said
    more = {**settings, "mtp_num_layers": 1, "finetune": True}
    assert f"{folder} is of another model: mtp_num_layers 0 there, 1 here. Use" in other(context, more)
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in other(context, settings)


def test_own_checkpoints_take_precedence(tmp_path: Path) -> None:
    """From the first one; without any, or without saving, the run starts from the weights."""
    _, settings = folder_of("llama", tmp_path / "llama")
    context, said = RankContext(0, {}), list[str]()
    own = tmp_path / "own"
    config = tiny_config(1, **settings, save=str(own), save_interval=2, finetune=True)
    topology = context.topology_of(config)
    how: dict[str, Any] = {"world": topology.world, "log": said.append}
    assert choose_checkpoint(config, **how) == config
    own.mkdir()
    (own / ".tmp-step-2").mkdir()
    assert choose_checkpoint(config, **how) == config and said == []
    replica = build(context, config)
    runner = Runner(replica, resume(replica, tokenizer=None, log=silent))
    runner.step()
    save(replica, own, runner.progress, tokenizer=None)
    now = choose_checkpoint(config, **how)
    assert said == [
        f"{own} holds checkpoints: the run resumes from the newest of them, not from {config.checkpoint.load}"
    ]
    assert (now.checkpoint.load, now.checkpoint.finetune) == (str(own), False)
    assert resume(build(context, now), tokenizer=None, log=silent).step == 1
    without = tiny_config(1, **settings)
    assert choose_checkpoint(without, **how) == without


def said(context: RankContext, settings: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    resume(build(context, tiny_config(1, **settings)), tokenizer=None, log=lines.append)
    return lines


def test_conversion_of_quantized_weights_is_logged(tmp_path: Path) -> None:
    saved_in_four_bits(tmp_path)
    model = {**asdict(HuggingFaceWeights(tmp_path).model), "make_vocab_size_divisible_by": 8}
    (lines,) = run_ranks(1, said, {**model, "seq_length": 12, "load": f"hf:{tmp_path}"})
    assert lines == [
        f"loaded the weights of {tmp_path}, of which those in MXFP4 are read as bf16; training begins at step 0"
    ]

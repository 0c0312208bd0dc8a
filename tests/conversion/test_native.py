"""megalite's checkpoints, read from any layout and written as weights only, which training and generation load."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from megalite.checkpoint import files
from megalite.checkpoint.load import find_checkpoint
from megalite.checkpoint.manifest import Manifest, seal
from megalite.config.errors import CheckpointError
from megalite.config.flags import parse_arguments
from megalite.config.model import ModelConfig
from megalite.config.validate import validate
from megalite.conversion.native import NativeWeights, write_native
from megalite.conversion.output import workplace_of
from megalite.conversion.weights import ConversionError, parameter_shapes
from megalite.optimizers.schedules import Progress
from megalite.topology.group import Group
from megalite.training.resume import load
from tests.conversion.samples import EXPERTS, GPT, LLAMA, MadeUp, byte_tokenizer, contents, train
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import assemble, build, local_parts, tiny_config

CPU = torch.device("cpu")
WIDE = {"tp": 2, "pp": 2}


write = write_native


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A Llama in bf16 on tp 2 x pp 2 with a tokenizer, and its tensors."""
    home = tmp_path_factory.mktemp("trained")
    vocab, merges = byte_tokenizer(home / "data")
    tokenizer = {"vocab_file": str(vocab), "merge_file": str(merges)}
    settings = {**LLAMA, **WIDE, **tokenizer, "precision": "bf16", "sequence_parallel": True}
    return home / "checkpoints", train(home / "checkpoints", 4, settings)


class TestReading:
    def test_weights_are_main_parameters_of_any_layout(self, trained: tuple[Path, Any]) -> None:
        folder, tensors = trained
        weights = NativeWeights(folder)
        assert list(parameter_shapes(weights.model)) and set(tensors["main_param"]) == set(
            parameter_shapes(weights.model)
        )
        for name, values in tensors["main_param"].items():
            found = weights.read(name)
            assert found.dtype == weights.dtype(name) == torch.float32
            np.testing.assert_array_equal(found.double().numpy(), values, err_msg=name)
        name = "layers.0.mlp.up.weight"
        assert np.any(tensors["weight"][name] != tensors["main_param"][name]), "main parameters have more digits"
        assert (weights.model.num_query_groups, weights.seq_length) == (2, 24)
        assert [path.name for path in weights.tokenizer_files] == ["vocab.json", "merges.txt"]
        assert weights.layout["tp"] == weights.layout["pp"] == 2

    def test_checkpoint_or_folder_of_checkpoints_is_read(self, trained: tuple[Path, Any]) -> None:
        folder, _ = trained
        step = folder / "step-0000003"
        for weights in (NativeWeights(folder), NativeWeights(folder, step=3), NativeWeights(step)):
            assert weights.path == step
        with pytest.raises(CheckpointError, match="no checkpoint of step 7; it has steps 3"):
            NativeWeights(folder, step=7)
        with pytest.raises(ConversionError, match=r"checkpoint of step 3, and --step is 7"):
            NativeWeights(step, step=7)

    def test_damaged_checkpoint_is_not_replaced_by_an_older_one(self, tmp_path: Path) -> None:
        write(MadeUp(tmp_path, GPT), tmp_path / "a")
        newer = tmp_path / "a" / "step-0000005"
        shutil.copytree(tmp_path / "a" / "step-0000000", newer)
        body = json.loads((newer / "manifest.json").read_text())
        del body["sha256"]
        (newer / "manifest.json").write_text(seal({**body, "step": 5}))
        assert NativeWeights(tmp_path / "a").path == newer
        weights = newer / "weights-00000.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        with pytest.raises(CheckpointError, match=r"weights-00000.*sha256.*--step 0 takes the previous one"):
            NativeWeights(tmp_path / "a")
        assert NativeWeights(tmp_path / "a", step=0).model.num_layers == 2

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"num_layers": 3}, "there is no weight:layers.2"),
            ({"num_layers": 1}, "contains layers.1.* does not have"),
            ({"hidden_size": 64}, r"has shape \[304, 32\]; a model of its settings has \[304, 64\]"),
            ({"hidden_size": "wide"}, "hidden_size takes a whole number"),
            ({"num_attention_heads": 0}, "num_attention_heads is 0"),
            ({"normalization": "Norm"}, "normalization cannot be 'Norm'"),
            ({"magic": 1}, "magic"),
        ],
    )
    def test_settings_and_tensors_must_match(self, tmp_path: Path, change: dict[str, Any], says: str) -> None:
        write(MadeUp(tmp_path, GPT), tmp_path / "a")
        manifest = tmp_path / "a" / "step-0000000" / "manifest.json"
        body = json.loads(manifest.read_text())
        del body["sha256"]
        body["config"]["model"] |= change
        manifest.write_text(seal(body))
        with pytest.raises((ConversionError, CheckpointError, ValueError), match=says):
            NativeWeights(tmp_path / "a")

    def test_tokenizer_may_move_but_not_change(self, tmp_path: Path) -> None:
        first = byte_tokenizer(tmp_path / "data")
        write(MadeUp(tmp_path, GPT, tokenizer_files=first), tmp_path / "a")
        moved = tmp_path / "b"
        (tmp_path / "a").rename(moved)
        assert [path.parent for path in NativeWeights(moved).tokenizer_files] == [moved / "tokenizer"] * 2
        (moved / "tokenizer" / "merges.txt").write_text("#version: 0.2\na b\n")
        vocab = moved / "tokenizer" / "vocab.json"
        vocab.write_text(json.dumps({**json.loads(vocab.read_text()), "ab": 257}))
        with pytest.raises(ConversionError, match=r"merges.txt: not the tokenizer that .* was trained with"):
            _ = NativeWeights(moved).tokenizer_files
        shutil.rmtree(moved / "tokenizer")
        assert NativeWeights(moved).tokenizer_files == []


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Read as tools without knowledge of megalite do."""
    found = {}
    for path in sorted((folder / "step-0000000").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return found


class TestWriting:
    @pytest.mark.parametrize("settings, dtype", [(GPT, None), (EXPERTS, torch.bfloat16)], ids=["gpt", "experts"])
    def test_written_checkpoint_verifies(
        self, tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype | None
    ) -> None:
        weights = MadeUp(tmp_path, settings)
        limit = 20_000
        assert write(weights, tmp_path / "a", dtype=dtype, max_file_bytes=limit) == tmp_path / "a"
        assert (tmp_path / "a" / "latest").read_text() == "step-0000000\n"
        found = find_checkpoint(tmp_path / "a", step=None, world=Group.solo("world"), log=pytest.fail)
        assert found.manifest.config["training"]["precision"] == ("bf16" if dtype else "fp32")
        tensors = tensors_in(tmp_path / "a")
        assert set(tensors) == set(parameter_shapes(weights.model))
        for name, tensor in tensors.items():
            assert torch.equal(tensor, weights.read(name).to(dtype or torch.float32)), name
        sizes = {name: entry.length for name, entry in found.manifest.files.items()}
        assert len(sizes) > 3
        for name, size in sizes.items():
            in_file = [entry for entry in found.manifest.tensors.values() if entry.parts[0].file == name]
            assert size <= limit or len(in_file) == 1
        again = NativeWeights(tmp_path / "a")
        assert (again.model, again.seq_length) == (weights.model, weights.seq_length)

    def test_untrainable_model_is_refused(self, tmp_path: Path) -> None:
        weights = MadeUp(tmp_path, {**GPT, "vocab_size": 200})
        weights.tokenizer_files = byte_tokenizer(tmp_path / "data")
        with pytest.raises(ConversionError, match=r"has 257 ids, the model 200"):
            write(weights, tmp_path / "a")
        with pytest.raises(ConversionError, match=r"int64; give --dtype, one of fp32, bf16"):
            write(MadeUp(tmp_path, GPT, dtype=torch.int64), tmp_path / "a")
        assert not (tmp_path / "a").exists()


def finetuned(context: RankContext, folder: str, world: int) -> dict[str, Any]:
    """Load weights only in a run with the same settings, on another layout."""
    given = [*("--config", f"{folder}/config.yaml", "--load", folder, "--finetune", "--micro-batch-size", "1")]
    given += ["--tp", "2", "--mock-data", "--train-iters", "2", "--device", "cpu"]
    config = validate(parse_arguments(given).config, world)
    replica = build(context, config)
    progress = load(replica, Path(folder), tokenizer=None, log=lambda line: None)
    assert progress == Progress(0, 0)
    return local_parts(replica, "weight")


def test_training_starts_from_the_weights(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, tensors = trained
    write(NativeWeights(folder), tmp_path / "a")
    loaded = assemble(run_ranks(2, finetuned, str(tmp_path / "a"), 2))
    assert loaded.keys() == tensors["main_param"].keys()
    for name, values in tensors["main_param"].items():
        np.testing.assert_array_equal(loaded[name], values, err_msg=name)


def resumed(context: RankContext, folder: str, settings: dict[str, Any]) -> str:
    replica = build(context, tiny_config(1, **settings, precision="fp32"))
    try:
        load(replica, Path(folder), tokenizer=None, log=lambda line: None)
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def test_weights_only_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    write(MadeUp(tmp_path, GPT), tmp_path / "a")
    (said,) = run_ranks(1, resumed, str(tmp_path / "a"), GPT)
    assert "there is no optimizer.exp_avg:" in said or "--finetune" in said


def test_written_settings_are_those_of_the_model(tmp_path: Path) -> None:
    files = byte_tokenizer(tmp_path / "data")
    for name, settings in {"gpt": GPT, "llama": LLAMA, "experts": EXPERTS}.items():
        weights = MadeUp(tmp_path, settings, tokenizer_files=files)
        folder = write(weights, tmp_path / name)
        config = validate(parse_arguments(["--config", str(folder / "config.yaml")]).config, 1)
        assert (config.model, config.training.seq_length) == (weights.model, 24)
        assert config.data.vocab_file == str(folder / "tokenizer" / "vocab.json")
        manifest = Manifest.from_json((folder / "step-0000000" / "manifest.json").read_text())
        assert ModelConfig(**manifest.config["model"]) == weights.model
        assert manifest.config["data"]["merge_file"] == str(folder / "tokenizer" / "merges.txt")


class Stopped(BaseException):
    """Simulates a killed process: nothing cleans up."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`stop_at(n)`: make the n-th call that changes the disk raise. `stop_at.calls` counts the calls."""

    class Stopper:
        calls = 0
        last = 0

        def __call__(self, last: int) -> None:
            self.calls, self.last = 0, last

        def count(self, name: str, owner: Any) -> None:
            real = getattr(owner, name)

            def counted(*arguments: Any, **named: Any) -> Any:
                self.calls += 1
                if self.calls == self.last:
                    if name == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    raise Stopped
                # No power loss is simulated: written data is there, synced or not.
                return None if name == "fsync" else real(*arguments, **named)

            monkeypatch.setattr(owner, name, counted)

    stopper = Stopper()
    for name in ("write", "fsync", "open", "mkdir", "rename", "replace", "unlink", "rmdir"):
        stopper.count(name, files.os)
    yield stopper


def test_conversion_interrupted_anywhere_is_completed_by_the_next(tmp_path: Path, stop_at: Any) -> None:
    weights = MadeUp(tmp_path / "source", {**GPT, "num_layers": 1})
    target = tmp_path / "model"

    def convert() -> None:
        weights.reads.clear()
        write(weights, target, max_file_bytes=40_000)

    stop_at(0)
    convert()
    expected, calls, reads = contents(target), stop_at.calls, sum(weights.reads.values())
    assert calls > 80 and len(expected) >= 5
    saved = 0
    for last in range(1, calls + 1, 2):
        shutil.rmtree(target, ignore_errors=True)
        stop_at(last)
        with pytest.raises(Stopped):
            convert()
        stop_at(0)
        if target.exists():  # the stop came after the rename: everything is complete
            with pytest.raises(ConversionError, match="not empty"):
                convert()
        else:
            convert()
            saved += reads - sum(weights.reads.values())
        assert contents(target) == expected, last
        assert not workplace_of(target).exists(), last
    assert saved > calls * reads // 8, "finished files are not read again"

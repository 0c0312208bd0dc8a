"""The commands of docs/conversion.md, run in order."""

import json
from pathlib import Path

import pytest
import torch

from megalite.cli.convert import DTYPES
from megalite.cli.main import main
from megalite.conversion.native import NativeWeights, write_native
from megalite.conversion.weights import FORMATS
from tests.conversion.samples import GPT, MadeUp, byte_tokenizer
from tests.e2e.commands import commands_in

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"


def test_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = MadeUp(tmp_path, {**GPT, "seq_length": 128}, tokenizer_files=byte_tokenizer(tmp_path / "data"))
    write_native(weights, Path("runs/1/checkpoints"))
    found = [command.words for command in commands_in(PAGE.read_text(), str(PAGE))]
    assert [words[1] for words in found] == ["convert"] * 4 + ["generate", "--nproc-per-node"]
    training = found.pop()
    for _, *words in found:
        more = ["--device", "cpu", "--temperature", "0"] if words[0] == "generate" else []
        assert main([*words, *more]) == 0, words
    assert rehearsed(training) == 0
    last = NativeWeights(Path("back"))
    for name in ("embedding.word.weight", "layers.1.mlp.up.bias"):
        assert torch.equal(last.read(name), weights.read(name))
    assert last.tokenizer_files
    assert json.loads(Path("model-hf/config.json").read_text())["model_type"] == "gpt2"


def rehearsed(words: list[str]) -> int:
    """Replace the training command by its dry run; the folder's model has 128 positions."""
    flags = ["128" if word == "2048" else word for word in words[4:]]
    return main(["train", *flags, "--dry-run", "--world-size", words[2]])


def test_page_names_every_format() -> None:
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in FORMATS)
    assert "|".join(DTYPES) in text

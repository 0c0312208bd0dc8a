"""examples/shakespeare: its character data and a few steps, by the commands of its README.md."""

import json
import runpy
from pathlib import Path

import pytest

from megalite.cli.model_commands import GENERATE
from megalite.config import files
from megalite.config.data import DataConfig
from megalite.data.indexed_dataset import IndexedDataset
from megalite.tokenizers.build import build_tokenizer
from tests.e2e.commands import commands_in
from tests.e2e.forked import train_forked
from tests.e2e.programs import REPOSITORY

HERE = REPOSITORY / "examples" / "shakespeare"


def test_few_steps_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    download, prepare, train, say = [
        command.words for command in commands_in((HERE / "README.md").read_text(encoding="utf-8"), "README.md")
    ]
    assert download[:3] == ["curl", "-LO", download[-1]] and Path(download[-1]).name == "input.txt"
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8") + "é𝄞\n"
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")

    assert prepare[:2] == ["python", "examples/shakespeare/prepare.py"]
    assert runpy.run_path(prepare[1])["main"](prepare[2:]) == 0
    config = files.load("examples/shakespeare/run.yaml")
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=config.data.tokenizer_model), None)
    assert tokenizer is not None and tokenizer.vocab_size == len(set(text)) + 1
    parts = []
    for paths in (config.data.train_data_path, config.data.valid_data_path):
        assert paths is not None
        ids = IndexedDataset(Path(paths[0]))[0].tolist()
        parts.append(tokenizer.decode(ids))
        assert len(ids) == len(parts[-1])  # an id is a character
    assert "".join(parts) == text and len(parts[0]) == len(text) * 9 // 10

    assert train[:2] == ["python", "pretrain_gpt.py"]
    few = "--train-iters 20 --lr-warmup-iters 2 --log-interval 10 --eval-interval 20 --eval-iters 1"
    train_forked(1, *train[2:], *few.split(), folder=tmp_path).require_success()
    lines = [json.loads(line) for line in Path("runs/shakespeare/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("kind") == "train"]
    assert losses[-1] < losses[0] - 0.3

    assert say[:2] == ["megalite", "generate"]
    capfd.readouterr()
    assert GENERATE([*say[2:], "--max-new-tokens", "8", "--device", "cpu"]) == 0
    assert capfd.readouterr().out

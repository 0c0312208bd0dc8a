"""docs/generation.md: the commands without torchrun, run in order."""

import json
from pathlib import Path

import pytest

from megalite.cli.main import main
from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.native import write_native
from tests.conversion.samples import LLAMA, MadeUp, byte_tokenizer
from tests.data.token_files import write_by_layout
from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "generation.md").read_text(encoding="utf-8")
COMMANDS = [command.words for command in commands_in(PAGE, "docs/generation.md")]


def test_commands_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = byte_tokenizer(tmp_path / "data")
    weights = MadeUp(tmp_path, {**LLAMA, "seq_length": 64, "vocab_size": 257}, tokenizer_files=files)
    write_native(weights, Path("runs/1/checkpoints"))
    write_huggingface(weights, Path("model-hf"))
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n')
    Path("valid.jsonl").write_text(json.dumps({"text": "def main():\n" * 9}) + "\n")
    write_by_layout(Path("valid_text_document"), [list(range(200))])
    ran = [words for words in COMMANDS if words[0] == "megalite"]
    assert [words[1] for words in ran] == ["generate"] * 3 + ["evaluate"] * 2
    for _, *words in ran:
        assert main([*words, "--device", "cpu"]) == 0, words
    records = [json.loads(line) for line in Path("texts.jsonl").read_text().splitlines()]
    assert [sorted(record) for record in records] == [["finish", "prompt", "text", "tokens"]] * 2
    said = capsys.readouterr().out
    assert said.startswith("def main(")
    assert json.loads(said[said.rindex("{") :])["stride"] == 32

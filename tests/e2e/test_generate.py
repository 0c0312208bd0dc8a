"""`megalite generate` on several ranks."""

import json
from pathlib import Path

import pytest

from megalite.cli.main import main
from megalite.conversion.huggingface.weights import write_huggingface
from tests.conversion.samples import LLAMA, MadeUp, byte_tokenizer
from tests.e2e.forked import train_forked

pytestmark = pytest.mark.e2e


def test_two_ranks_generate_the_same_text_as_one(tmp_path: Path) -> None:
    """From a Hugging Face folder: the same bytes, and only one rank prints."""
    files = byte_tokenizer(tmp_path / "vocabulary")
    weights = MadeUp(tmp_path, {**LLAMA, "vocab_size": 257}, tokenizer_files=files)
    write_huggingface(weights, tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main\n\nimport\nx\n")
    words = ["--load", str(tmp_path / "model"), "--prompts", str(prompts), "--device", "cpu"]
    words += ["--dtype", "fp64", "--max-new-tokens", "12"]
    layout = ("--tp", "2", "--output", tmp_path / "two.jsonl")
    two = train_forked(2, *words, *layout, command="megalite.cli.model_commands:GENERATE").require_success()
    assert main(["generate", *words, "--output", str(tmp_path / "one.jsonl")]) == 0
    made = (tmp_path / "two.jsonl").read_text()
    assert made == (tmp_path / "one.jsonl").read_text()
    assert [json.loads(line)["prompt"] for line in made.splitlines()] == ["def main", "import", "x"]
    assert two.out == "" and two.err.count("tokens/s") == 1

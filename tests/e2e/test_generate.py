"""`tools/generate_text.py` under torchrun, as a user starts it."""

import json
import sys
from pathlib import Path

import pytest

from megalite.conversion.huggingface.weights import write_huggingface
from tests.conversion.samples import LLAMA, MadeUp, byte_tokenizer
from tests.e2e.programs import TORCHRUN, run

pytestmark = pytest.mark.e2e


def test_four_ranks_write_what_one_does(tmp_path: Path) -> None:
    """tp 2 x pp 2, from a Hugging Face folder: the same bytes, and one rank alone tells."""
    files = byte_tokenizer(tmp_path / "vocabulary")
    weights = MadeUp(tmp_path, {**LLAMA, "vocab_size": 257}, tokenizer_files=files)
    write_huggingface(weights, tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main\n\nimport\nx\n")
    words = ("tools/generate_text.py", "--load", tmp_path / "model", "--prompts", prompts, "--device", "cpu")
    words += ("--dtype", "fp64", "--max-new-tokens", "12")
    layout = ("--tp", "2", "--pp", "2", "--output", tmp_path / "four.jsonl")
    four = run(*TORCHRUN, "--nproc-per-node", "4", *words, *layout).require_success()
    run(sys.executable, *words, "--output", tmp_path / "one.jsonl").require_success()
    made = (tmp_path / "four.jsonl").read_text()
    assert made == (tmp_path / "one.jsonl").read_text()
    assert [json.loads(line)["prompt"] for line in made.splitlines()] == ["def main", "import", "x"]
    assert four.out == "" and four.err.count("tokens/s") == 1

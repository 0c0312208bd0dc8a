import json
import runpy
import sys
from pathlib import Path

import pytest
import sentencepiece

from megalite.cli.model_commands import TRAIN_TOKENIZER as main
from megalite.config.data import DataConfig
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

BUILDER = Path(__file__).parents[2] / "examples" / "quickstart" / "build_corpus.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.6 MB of the quickstart's text."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["build_corpus", "--output", str(path), "--max-megabytes", "0.6"])
        runpy.run_path(str(BUILDER), run_name="__main__")
    assert not end.value.code
    return path


def opened(path: Path) -> Tokenizer:
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=str(path)), None)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "file"),
    [("sentencepiece-bpe", "own.model"), ("sentencepiece-unigram", "own.model"), ("byte-level-bpe", "own.json")],
)
def test_tokenizers_of_real_text(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, file: str
) -> None:
    prefix = tmp_path / "new" / "own"
    command = ["--input", str(corpus), "--output-prefix", str(prefix), "--vocab-size", "900", "--type", kind]
    assert main([*command, "--max-megabytes", "0.2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("read 200.0 KB of text in ") and "spread evenly over the inputs" in shown[0]
    assert 1.5 < float(shown[1].split(" bytes per token on ")[0]) < 4
    assert shown[2] == f"{prefix.parent / file}: 900 pieces; use it with --tokenizer-model {prefix.parent / file}"
    assert [path.name for path in prefix.parent.iterdir()] == [file]
    if file == "own.model":  # the scores of BPE are ranks, those of a unigram model logarithms
        model = sentencepiece.SentencePieceProcessor(model_file=str(prefix.parent / file))
        assert float(model.get_score(800)).is_integer() == (kind == "sentencepiece-bpe")
    tokenizer = opened(prefix.parent / file)
    for line in corpus.read_text(encoding="utf-8").splitlines()[:40]:
        text = json.loads(line)["text"]
        if "<|endoftext|>" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def test_bad_lines_and_few_documents_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"body": "one two three " * 2000}) + "\nno JSON\n{}\n")
    command = ["--input", str(path), "--output-prefix", str(tmp_path / "own"), "--json-keys", "body"]
    assert main([*command, "--vocab-size", "275"]) == 0
    shown = capsys.readouterr().out
    assert "read 28.0 KB of text in 1 documents, 2 bad lines left out\n" in shown
    assert "too few documents to hold some out" in shown

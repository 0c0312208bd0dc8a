"""What several tests share: a small corpus, prepared by the commands that a user would give."""

import sys
from pathlib import Path

import pytest

from tests.e2e.programs import Corpus, run

VOCABULARY = 384


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Half a megabyte of the text that Python carries, its tokenizer and its token files."""
    folder = tmp_path_factory.mktemp("corpus")
    text, tokenizer = folder / "corpus.jsonl", folder / "tokenizer.model"
    megalite = (sys.executable, "-m", "megalite.cli.main")
    build = ("examples/quickstart/build_corpus.py", "--output", text, "--max-megabytes", "0.5")
    run(sys.executable, *build).require_success()
    learn = ("--input", text, "--output-prefix", tokenizer.with_suffix(""), "--vocab-size", str(VOCABULARY))
    run(*megalite, "train-tokenizer", *learn).require_success()
    words = ("--input", text, "--output-prefix", folder / "corpus", "--tokenizer-model", tokenizer)
    run(sys.executable, "tools/preprocess_data.py", *words, "--append-eod").require_success()
    return Corpus(jsonl=text, tokenizer=tokenizer, prefix=folder / "corpus_text_document")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that are called in this process must not take it for a rank of something."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "run"

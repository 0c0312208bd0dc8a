"""Runs on text: `megalite preprocess` and a prefix give the same losses, and fine-tuning examples train on any layout."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.object_store import Store, serving
from tests.e2e.forked import train_forked
from tests.e2e.programs import MODEL, TRAINING, Corpus, losses

pytestmark = pytest.mark.e2e

PLAIN = [*MODEL, *TRAINING, "--precision", "fp64"]


def flags(run_dir: Path, *words: str | Path) -> list[str | Path]:
    saves = ("--save-interval", "1", "--load", run_dir / "checkpoints", "--fresh-if-missing")
    return [*PLAIN, "--run-dir", run_dir, *saves, *words]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums to learn; every ninth is longer than a sample."""
    path = tmp_path_factory.mktemp("examples") / "sums.jsonl"
    with path.open("w") as file:
        for i in range(120):
            prompt = f"{i} + {i}" + " + 0" * (12 if i % 9 == 0 else i % 4)
            file.write(json.dumps({"prompt": prompt, "response": f" = {2 * i}"}) + "\n")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with serving(tmp_path / "store") as server:
        yield server


def test_text_gives_the_losses_of_its_token_files(corpus: Corpus, tmp_path: Path) -> None:
    common = ("--split", "90,10,0", "--tokenizer-model", corpus.tokenizer, "--eval-interval", "4", "--eval-iters", "1")
    cache = ("--data-cache-path", tmp_path / "cache")
    length = ("--train-iters", "4")
    dry = train_forked(1, *PLAIN, *length, *common, "--data-path", corpus.jsonl, *cache, "--dry-run").require_success()
    assert re.search(
        r"corpus\.jsonl \(1 file, .*\) would be tokenized into .*/cache/corpus\.jsonl-\w+_text_document", dry.err
    )
    assert not (tmp_path / "cache").exists()
    prefix, text = tmp_path / "prefix", tmp_path / "text"
    train_forked(1, *flags(prefix, *length, *common, "--data-path", corpus.prefix)).require_success()
    words = [*common, "--data-path", corpus.jsonl, *cache]
    first = train_forked(2, *flags(text, *length, *words, "--dp", "2", "--exit-interval", "2")).require_success()
    assert "tokens, tokenized into" in first.out
    second = train_forked(1, *flags(text, *length, *words)).require_success()
    assert "tokenized before, in" in second.out and "from here on" not in second.out
    assert dict(losses(text)) == pytest.approx(dict(losses(prefix)), rel=1e-12)
    assert f"- {corpus.jsonl}" in (text / "config.yaml").read_text()
    (made,) = (tmp_path / "cache").glob("*.bin")
    assert made.read_bytes() == corpus.prefix.with_suffix(".bin").read_bytes()
    dry = train_forked(1, *PLAIN, *length, *words, "--dry-run").require_success()
    assert "corpus.jsonl is tokenized: " in dry.err


def test_fine_tuning_losses_are_equal_on_any_layout(examples: Path, tmp_path: Path) -> None:
    words = ("--sft", "--data-path", examples, "--tokenizer-type", "ByteLevelTokenizer", "--train-iters", "4")
    words = (*words, "--eval-interval", "4", "--eval-iters", "1", "--split", "80,20,0")
    whole = train_forked(1, *flags(tmp_path / "whole", *words)).require_success()
    assert re.search(r"96 examples are packed into \d+ samples per epoch; 11 are longer than seq_length 32", whole.out)
    run = tmp_path / "layouts"
    for layout in (("--cp", "2", "--exit-interval", "2"), ("--pp", "2")):
        train_forked(2, *flags(run, *words, *layout)).require_success()
    assert dict(losses(run)) == pytest.approx(dict(losses(tmp_path / "whole")), rel=1e-9)
    assert len(losses(run)) == 4


def test_run_from_a_server_equals_run_from_files(corpus: Corpus, tmp_path: Path, store: Store) -> None:
    """Token files, tokenizer and checkpoint come from a server. If it stops, two ranks report one error."""
    for path in (*(corpus.prefix.with_suffix(suffix) for suffix in (".bin", ".idx", ".json")), corpus.tokenizer):
        shutil.copy(path, store.folder)
    files = ("--split", "90,10,0", "--tokenizer-model", corpus.tokenizer, "--data-path", corpus.prefix)
    here = tmp_path / "here"
    train_forked(1, *flags(here, *files, "--train-iters", "4", "--exit-interval", "2")).require_success()
    shutil.copytree(here / "checkpoints", store.folder / "checkpoints")
    train_forked(1, *flags(here, *files, "--train-iters", "4")).require_success()
    named = ["--split", "90,10,0", "--data-path", store.address(corpus.prefix.name), "--train-iters", "4", "--dp", "2"]
    named += ["--tokenizer-model", store.address(corpus.tokenizer.name), "--load", store.address("checkpoints")]
    words = [*PLAIN, *named, "--run-dir", tmp_path / "there", "--data-cache-path", tmp_path / "cache"]
    out = train_forked(2, *words).require_success().out
    assert f"fetched {store.address('checkpoints')}/step-0000002/manifest.json" in out
    assert dict(losses(tmp_path / "there")) == pytest.approx({k: v for k, v in losses(here) if k > 2}, rel=1e-9)
    assert f"- {store.address(corpus.prefix.name)}" in (tmp_path / "there" / "config.yaml").read_text()
    store.close()
    gone = train_forked(2, *words)
    assert gone.status == 2 and len(gone.errors) == 1 and "cannot be read: " in gone.errors[0]

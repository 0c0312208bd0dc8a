"""Training of tokenizers, and the sampling of its text."""

import gzip
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.train_tokenizer import TrainingText, train_byte_level, train_sentencepiece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer
from tests.tokenizers.texts import AWKWARD, SOURCE, TEXTS

pytest.importorskip("tokenizers")
BOTH = pytest.mark.parametrize("train", [train_sentencepiece, train_byte_level])


def opened(path: Path) -> Tokenizer:
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=str(path)), None)
    assert tokenizer is not None
    return tokenizer


def refused(train: Callable[..., Path], folder: Path, message: str, texts: object = TEXTS, **settings: object) -> None:
    with pytest.raises(ConfigError, match=message):
        train(texts, **{"output_prefix": folder / "x", "vocab_size": 1000, **settings})
    assert not list(folder.glob("x*"))


def test_sentencepiece_bpe_is_deterministic(files: Path, tmp_path: Path) -> None:
    again = train_sentencepiece([*TEXTS, SOURCE], output_prefix=tmp_path / "again", vocab_size=1000)
    assert again.read_bytes() == (files / "sp.model").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.model"]


def test_sentencepiece_unigram(tmp_path: Path) -> None:
    settings = {"vocab_size": 450, "model_type": "unigram"}
    paths = [train_sentencepiece(TEXTS[:20], output_prefix=tmp_path / name, **settings) for name in "ab"]  # type: ignore[arg-type]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    tokenizer = opened(paths[0])
    assert tokenizer.vocab_size == 450 and len(tokenizer.encode(SOURCE)) < len(SOURCE) / 1.3
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in [*TEXTS, SOURCE, *AWKWARD])


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("size", [260, 2048, 100_000])
def test_suggested_size_works(tmp_path: Path, model_type: str, size: int) -> None:
    texts = ["one two three four five six " * 30]
    with pytest.raises(ConfigError, match="--vocab-size ") as raised:
        train_sentencepiece(texts, output_prefix=tmp_path / "x", vocab_size=size, model_type=model_type)
    assert f"vocab_size {size} cannot be trained on 840 characters: " in str(raised.value)
    assert ".cc" not in str(raised.value) and "INTERNAL" not in str(raised.value)
    offered = int(re.findall(r"--vocab-size (\d+)", str(raised.value))[0])
    train_sentencepiece(texts, output_prefix=tmp_path / "x", vocab_size=offered, model_type=model_type)
    assert opened(tmp_path / "x.model").vocab_size == offered


@pytest.mark.parametrize("words", ["gpt2", "gpt4"])
def test_byte_level(tmp_path: Path, words: str) -> None:
    path = train_byte_level(TEXTS, output_prefix=tmp_path / "own", vocab_size=1000, words=words)
    assert [file.name for file in tmp_path.iterdir()] == ["own.json"]
    tokenizer = opened(path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 0)
    for text in [*TEXTS, SOURCE, *(text for text in AWKWARD if "<|endoftext|>" not in text)]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(SOURCE)) < len(SOURCE) / 2
    again = train_byte_level(TEXTS, output_prefix=tmp_path / "b", vocab_size=1000, words=words)
    assert again.read_bytes() == path.read_bytes()
    # gpt4's words have at most three digits, gpt2's any number.
    size, count = (263, 1) if words == "gpt2" else (261, 3)
    digits = train_byte_level(["1234567 " * 100], output_prefix=tmp_path / "d", vocab_size=size, words=words)
    assert len(opened(digits).encode("1234567")) == count


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(train_byte_level, tmp_path, r"pip install 'megalite\[tokenizers\]'")


@BOTH
def test_untrainable_texts_are_errors(tmp_path: Path, train: Callable[..., Path]) -> None:
    """Libraries must not treat an exception of the texts as their end and train on the part before it."""

    def texts() -> Iterator[str]:
        yield from TEXTS
        raise ConfigError("input x.gz cannot be read")

    refused(train, tmp_path, r"^input x\.gz cannot be read$", texts())
    refused(train, tmp_path, "no text to train a tokenizer on", [])
    few = "vocab_size 1000 cannot be trained on|11 characters give at most"
    refused(train, tmp_path, few, ["hello world"])
    for size in (-1, 0, 256, 1 << 21, 10**12):
        refused(train, tmp_path, f"vocab_size {size} is not from 2.. .*; try 32000", vocab_size=size)
    for prefix in ("", "folder/", ".", "/"):
        refused(train, tmp_path, r"output_prefix .* has no name; use one such as", output_prefix=prefix)


@BOTH
def test_existing_file_is_kept(tmp_path: Path, train: Callable[..., Path]) -> None:
    """An existing file is an error before any text is read, and also if it appears during training."""
    paths = [tmp_path / "x.model", tmp_path / "x.json"]

    def texts(*, write: bool) -> Iterator[str]:
        assert write, "text was read"
        yield from TEXTS[:9]
        for path in paths:
            path.write_text("old")

    for write in (True, False):
        with pytest.raises(ConfigError, match=r"x\.(model|json) exists; use another --output-prefix or move"):
            train(texts(write=write), output_prefix=tmp_path / "x", vocab_size=400)
        assert [path.read_text() for path in paths] == ["old", "old"]


@BOTH
def test_unwritable_folder_is_an_error(tmp_path: Path, train: Callable[..., Path]) -> None:
    (tmp_path / "file").write_text("")

    def texts() -> Iterator[str]:
        pytest.fail("text was read")
        yield ""

    for folder in (tmp_path / "file", Path("/proc")):
        if folder.name != "proc" or os.path.ismount("/proc"):
            message = f"output_prefix {folder}/x: cannot write to {folder}: "
            refused(train, tmp_path, message, texts(), output_prefix=folder / "x")


def write(path: Path, documents: list[str]) -> Path:
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def numbered(count: int, size: int) -> list[str]:
    """Documents that start with their number, and compress about as well as text."""
    rng = random.Random(0)
    return [f"{i:06d}" + rng.randbytes(size).hex()[: size - 6] for i in range(count)]


def text_of(*paths: Path, most: int = 10_000_000, keys: tuple[str, ...] = ("text",)) -> TrainingText:
    return TrainingText(find_inputs(list(map(str, paths))), keys, most)


def test_small_corpus_is_read_completely(tmp_path: Path) -> None:
    documents = numbered(60, 100)
    path = write(tmp_path / "a.jsonl", documents)
    with path.open("a") as file:
        file.write("no JSON\n{}\n")
    counts: list[int] = []
    text = text_of(path)
    text.advance = counts.append
    assert list(text) == documents[:10] + documents[11:] and text.held_out == documents[10:11]
    assert (text.documents, text.num_bytes, text.bad, text.is_share) == (60, 6000, 2, False)
    assert sum(counts) == 6000


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_sample_is_spread_evenly(tmp_path: Path, suffix: str) -> None:
    """Two files of 1.5 MB, 1 MB requested: a third of each part."""
    half = numbered(1500, 1000)
    text = text_of(*(write(tmp_path / f"{name}{suffix}", half) for name in "ab"), most=1_000_000)
    taken = list(text)
    assert text.is_share and 700_000 < text.num_bytes <= 1_000_000
    numbers = [int(document[:6]) for document in taken if len(document) == 1000]
    # Where the other file begins.
    second = next(i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1])
    for part in (numbers[:second], numbers[second:]):
        thirds = [sum(low <= number < low + 500 for number in part) for low in (0, 500, 1000)]
        assert min(thirds) > 80, thirds  # of 500, a third is 167; an archive is unpacked a little ahead


def test_sample_with_long_documents_several_keys_and_damage(tmp_path: Path) -> None:
    text = text_of(write(tmp_path / "a.jsonl", ["é" * 100]), most=101)
    assert list(text) == ["é" * 50] and text.is_share and text.num_bytes == 101
    (tmp_path / "b.jsonl").write_text('{"title": "t", "text": "x"}\n{"title": "u", "text": "y"}\n')
    assert list(text_of(tmp_path / "b.jsonl", keys=("title", "text"))) == ["t", "x", "u", "y"]
    path = write(tmp_path / "c.jsonl.gz", numbered(1000, 1000))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ConfigError, match=r"c\.jsonl\.gz"):
        list(text_of(path))


def test_error_if_every_line_is_bad(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for path, content in zip(paths, ("\n\n", "\n" * 9000 + '{"body": "x"}\n' * 4000, "{\n"), strict=True):
        path.write_text(content)
    message = r"^no text to train a tokenizer on: 4001 lines left out, the first .*/b\.jsonl:9001: .*'text'"
    with pytest.raises(ConfigError, match=message):
        list(text_of(*paths))
    with pytest.raises(ConfigError, match=r": 1 line left out, the first .*/c\.jsonl:1: "):
        list(text_of(paths[2]))
    assert list(text_of(paths[0])) == []

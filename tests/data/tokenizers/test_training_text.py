import gzip
import json
import random
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.inputs.find import find_inputs
from megalite.data.tokenizers.training_text import TrainingText


def write(path: Path, documents: list[str]) -> Path:
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def numbered(count: int, size: int) -> list[str]:
    """Documents that begin with their number, and that compress no better than text does."""
    rng = random.Random(0)
    return [f"{i:06d}" + rng.randbytes(size).hex()[: size - 6] for i in range(count)]


def test_all_of_a_small_corpus(tmp_path: Path) -> None:
    documents = numbered(60, 100)
    path = write(tmp_path / "a.jsonl", documents)
    with path.open("a") as file:
        file.write("no JSON\n{}\n")
    counts: list[int] = []
    text = TrainingText(find_inputs([str(path)]), ["text"], 1_000_000, counts.append)
    held = documents[10:11]
    assert list(text) == [document for document in documents if document not in held]
    assert text.held_out == held
    assert (text.documents, text.num_bytes, text.bad, text.is_share) == (60, 6000, 2, False)
    assert sum(counts) == 6000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_share_is_spread_evenly(tmp_path: Path, name: str) -> None:
    """Two files of 1.5 MB, 1 MB asked for: a third of each part of them."""
    half = numbered(1500, 1000)
    write(tmp_path / name, half)
    write(tmp_path / f"b{name[1:]}", half)
    inputs = find_inputs([str(tmp_path / name), str(tmp_path / f"b{name[1:]}")])
    text = TrainingText(inputs, ["text"], 1_000_000)
    taken = list(text)
    assert text.is_share and text.num_bytes <= 1_000_000
    assert text.num_bytes > 700_000
    numbers = [int(document[:6]) for document in taken if len(document) == 1000]
    second = next(
        i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]
    )  # where the other file begins
    for part in (numbers[:second], numbers[second:]):
        thirds = [sum(low <= number < low + 500 for number in part) for low in (0, 500, 1000)]
        assert min(thirds) > 80, thirds  # of 500, a third is 167; an archive is unpacked a little ahead


def test_a_long_document_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["é" * 100])
    text = TrainingText(find_inputs([str(path)]), ["text"], 101)
    assert list(text) == ["é" * 50]
    assert text.is_share and text.num_bytes == 101


def test_several_keys(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "t", "text": "x"}\n{"title": "u", "text": "y"}\n')
    text = TrainingText(find_inputs([str(tmp_path / "a.jsonl")]), ["title", "text"], 100)
    assert list(text) == ["t", "x", "u", "y"]


def test_damaged_inputs_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", numbered(1000, 1000))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz"):
        list(TrainingText(find_inputs([str(path)]), ["text"], 10_000_000))


def test_no_text_because_every_line_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    (tmp_path / "b.jsonl").write_text("\n" * 9000 + '{"body": "x"}\n' * 4000)
    (tmp_path / "c.jsonl").write_text("{\n")
    inputs = find_inputs([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl")])
    with pytest.raises(
        ConfigError,
        match=r"^no text to train a tokenizer on: 4001 lines left out, the first .*/b\.jsonl:9001: .*'text'",
    ):
        list(TrainingText(inputs, ["text"], 1000))
    with pytest.raises(ConfigError, match=r": 1 line left out, the first .*/c\.jsonl:1: "):
        list(TrainingText(inputs[2:], ["text"], 1000))
    assert list(TrainingText(inputs[:1], ["text"], 1000)) == []

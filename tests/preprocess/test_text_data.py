"""Text in a data path: tokenized once, as by the preprocess command, despite kills and concurrent runs."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.config.data import DEFAULT_SPLIT, TEXT_SUFFIXES, DataConfig, names_text
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.preprocess.inputs import _kind_of
from megalite.preprocess.job import PreprocessJob, Progress
from megalite.preprocess.run import preprocess
from megalite.preprocess.text_data import Abandoned, documents_of, find_texts, tokenize_text
from tests.preprocess.jobs import write_jsonl

SUFFIXES = (".bin", ".idx", ".json")


def config(*paths: Path | str, **more: Any) -> RunConfig:
    given = {"tokenizer_type": "ByteLevelTokenizer"} | more
    return replace(RunConfig(), data_path=[str(path) for path in paths], **given)


def tokenized(run: RunConfig, **more: Any) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    return tokenize_text(run, None, say=said.append, **{"stopped": lambda: False, **more}), said


def content(prefix: str) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES]


def by_command(folder: Path, *inputs: Path) -> list[bytes]:
    """Return the output of `megalite preprocess --append-eod`."""
    job = PreprocessJob(
        inputs=tuple(map(str, inputs)),
        output_prefix=str(folder / "command"),
        tokenizer=DataConfig(tokenizer_type="ByteLevelTokenizer"),
        append_eod=True,
    )
    preprocess(job)
    return content(f"{folder}/command_text_document")


def large(path: Path) -> Path:
    """Four pieces of text."""
    return write_jsonl(path, [f"{i} " * 500 for i in range(500)])


def test_names_of_text() -> None:
    assert all(names_text(f"a{suffix}") and _kind_of(f"a{suffix}")[0] for suffix in TEXT_SUFFIXES)
    assert names_text("corpus/") and names_text("a/*.jsonl") and names_text("A.JSONL.GZ")
    assert not any(map(names_text, ("corpus", "a_text_document", "0.3", "a.parquet.gz", "a.bin")))


def test_text_is_tokenized_once_as_by_the_command(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    write_jsonl(tmp_path / "b.jsonl", ["three"])
    pattern = f"{tmp_path}/*.jsonl"
    run = config(pattern)
    (text,) = find_texts(run)
    assert (text.files, documents_of(text), text.is_done) == (2, None, False)
    made, said = tokenized(run)
    assert made == {pattern: text.prefix} and Path(text.prefix).parent == tmp_path / "cache"
    assert content(made[pattern]) == by_command(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert said == [f"{pattern}: 3 documents, 14 tokens, tokenized into {text.prefix}"]
    assert documents_of(text) == 3
    assert tokenized(run) == (made, [f"{pattern}: tokenized before, in {text.prefix}"])


def test_other_text_tokenizer_or_key_gives_another_file(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text(json.dumps({"text": "1 2", "title": "3"}) + "\n")
    numbers = {"tokenizer_type": "NullTokenizer"}
    runs = [config(text), config(text, text_field="title"), config(text, vocab_size=9, **numbers)]
    runs += [config(text, vocab_size=8, **numbers), config(text, data_cache_path=str(tmp_path / "elsewhere"))]
    before = {tokenized(run)[0][str(text)] for run in runs}
    assert len(before) == len(runs)
    os.utime(text, ns=(1, 1))
    assert tokenized(runs[0])[0][str(text)] not in before


def test_prefix_that_ends_like_text_is_a_prefix(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus.txt{suffix}").touch()
    assert find_texts(config(tmp_path / "corpus.txt")) == []


def test_settings_list_their_texts() -> None:
    data = DataConfig(data_path=["0.3", "a.jsonl", "0.7", "b"], valid_data_path=["a.jsonl", "c/"])
    assert data.texts == ["a.jsonl", "c/"]
    moved = data.with_paths({"a.jsonl": "x"})
    assert (moved.data_path, moved.valid_data_path, data.split or DEFAULT_SPLIT) == (
        ["0.3", "x", "0.7", "b"],
        ["x", "c/"],
        "969,30,1",
    )


def test_bad_lines_are_logged_and_bad_input_is_an_error(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "a"}\nnonsense\n')
    _, (said,) = tokenized(config(text))
    assert f"1 bad lines were left out, the first: {text}:2: invalid JSON" in said
    with pytest.raises(ConfigError, match="no document in"):
        tokenized(config(text, text_field="body"))
    with pytest.raises(ConfigError, match="does not exist"):
        tokenized(config(tmp_path / "b.jsonl"))
    with pytest.raises(ConfigError, match="no tokenizer: give --tokenizer-model"):
        tokenized(config(text, tokenizer_type=None))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set --data-cache-path to a writable folder"):
        tokenized(config(text, data_cache_path=str(tmp_path / "file")))


def test_stop_keeps_finished_work(tmp_path: Path) -> None:
    text = large(tmp_path / "a.jsonl")
    done: list[int] = []
    with pytest.raises(Abandoned):
        tokenized(config(text), stopped=lambda: done and done[-1] > 0, on_progress=lambda p: done.append(p.documents))
    made, (said,) = tokenized(config(text))
    assert f"resuming after {done[-1]:,} documents" in said and 0 < done[-1] < 500
    assert content(made[str(text)]) == by_command(tmp_path, text)


def test_second_run_waits_for_the_first(tmp_path: Path) -> None:
    text = large(tmp_path / "a.jsonl")
    is_working, may_go_on = threading.Event(), threading.Event()

    def slowly(progress: Progress) -> None:
        is_working.set()
        assert may_go_on.wait(60)

    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(tokenized(config(text), on_progress=slowly)))
    thread.start()
    assert is_working.wait(60)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        may_go_on.set()

    made = tokenize_text(config(text), None, say=say, stopped=lambda: False)
    thread.join(60)
    assert [made] == [found for found, _ in first]
    assert "another run is tokenizing it into" in said[0] and "tokenized by another run" in said[1]
    assert content(made[str(text)]) == by_command(tmp_path, text)


def test_another_node_writes_the_same_file(tmp_path: Path) -> None:
    texts = []
    for node in ("first", "second"):
        (tmp_path / node).mkdir()
        texts.append(write_jsonl(tmp_path / node / "a.jsonl", ["one", "two"]))
    made, _ = tokenized(config(texts[0]))
    stem = str(tmp_path / "second" / "named_text_document")
    never: Callable[[str], None] = pytest.fail
    assert tokenize_text(config(texts[1]), made, say=never, stopped=lambda: False) == made
    tokenize_text(config(texts[1]), {str(texts[1]): stem}, say=lambda line: None, stopped=lambda: False)
    assert content(stem) == content(made[str(texts[0])])

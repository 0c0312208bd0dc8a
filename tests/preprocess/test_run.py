"""Complete runs, and outputs that cannot be written."""

import gzip
import hashlib
import json
import os
import pydoc_data.topics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.token_files import read_side_file
from megalite.preprocess.job import PreprocessJob
from megalite.preprocess.run import plan, preprocess
from tests.data.token_files import write_by_layout
from tests.preprocess.jobs import (
    Stop,
    documents,
    number_job,
    output_bytes,
    run_numbers,
    stop_after,
    write_jsonl,
    write_numbers,
)

TOPICS = [text for _, text in sorted(pydoc_data.topics.topics.items())]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's documentation topics as jsonl, and a tokenizer trained on some of them."""
    folder = tmp_path_factory.mktemp("real")
    write_jsonl(folder / "topics.jsonl", TOPICS)
    with (folder / "tok.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TOPICS[:10]),
            model_writer=model,
            vocab_size=500,
            model_type="bpe",
            byte_fallback=True,
            max_sentence_length=1 << 30,
            minloglevel=2,
        )
    return folder


def test_ids_of_real_text_equal_the_library(real: Path) -> None:
    results = [
        preprocess(
            PreprocessJob(
                inputs=(str(real / "topics.jsonl"),),
                output_prefix=str(real / f"w{workers}"),
                tokenizer=DataConfig(tokenizer_model=str(real / "tok.model")),
                append_eod=True,
                workers=workers,
                piece_bytes=piece_bytes,
            )
        )
        for workers, piece_bytes in ((1, 1 << 20), (2, 1 << 14))
    ]
    bare = sentencepiece.SentencePieceProcessor(model_file=str(real / "tok.model"))
    write_by_layout(real / "theirs", [[*bare.encode(text), bare.eos_id()] for text in TOPICS])
    for suffix in (".bin", ".idx"):
        wanted = (real / f"theirs{suffix}").read_bytes()
        assert [(real / f"w{n}_text_document{suffix}").read_bytes() for n in (1, 2)] == [wanted, wanted]
    assert (real / "w1_text_document.json").read_bytes() == (real / "w2_text_document.json").read_bytes()
    tokens = IndexedDataset(real / "theirs").num_tokens
    size = (real / "topics.jsonl").stat().st_size
    for result in results:
        assert (result.documents, result.tokens, result.bad_lines) == (len(TOPICS), tokens, 0)
        assert result.input_bytes == result.disk_bytes == result.disk_total == size
    assert sorted(path.name for path in real.glob("w1*")) == [
        "w1_text_document.bin",
        "w1_text_document.idx",
        "w1_text_document.json",
    ]


def test_side_file_describes_the_dataset(real: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", TOPICS)
    path.write_bytes(path.read_bytes() + b"no JSON\n[]\n")
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", TOPICS[:1])
    preprocess(
        PreprocessJob(
            inputs=(str(tmp_path / "b.jsonl"), str(tmp_path / "in")),
            output_prefix=str(tmp_path / "out"),
            tokenizer=DataConfig(tokenizer_model=str(real / "tok.model")),
        )
    )
    facts = read_side_file(tmp_path / "out_text_document")
    assert facts is not None
    dataset = IndexedDataset(tmp_path / "out_text_document")
    ids = np.concatenate(list(dataset)).astype(int)
    lengths = [len(document) for document in dataset]
    buckets: dict[str, int] = {}
    for length in sorted(lengths):
        power = str(1 << (length.bit_length() - 1))
        buckets[power] = buckets.get(power, 0) + 1
    assert facts["document_lengths"] == {
        "min": min(lengths),
        "mean": round(sum(lengths) / len(lengths), 2),
        "max": max(lengths),
        "buckets": buckets,
    }
    files = {suffix: (tmp_path / f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")}
    assert facts["files"] == {
        suffix: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for suffix, content in files.items()
    }
    assert facts["tokenizer"] == {
        "kind": "SentencePieceTokenizer",
        "sha256": hashlib.sha256((real / "tok.model").read_bytes()).hexdigest(),
        "vocab_size": 500,
        "eod": 2,
    }
    assert (facts["documents"], facts["tokens"]) == (len(TOPICS) + 1, len(ids))
    assert facts["bad_lines"] == {"invalid JSON": 1, "no object": 1}
    assert (facts["dtype"], facts["append_eod"], facts["key"]) == ("uint16", False, "text")


def test_large_ids_are_int32(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["65499 65500 69998"])
    run_numbers(tmp_path, path, vocab_size=70000, append_eod=True)
    assert documents(tmp_path) == [[65499, 65500, 69998, 69999]]
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.dtype("<i4")


def test_outputs_of_several_keys_stay_aligned(tmp_path: Path) -> None:
    lines = [{"q": "1", "a": "2 3"}, {"q": "4"}, {"a": "5", "q": "6", "other": 7}, {"a": "x", "q": "1"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"a": " ", "q": "8"}, 9])))
    result = run_numbers(tmp_path, tmp_path / "a.jsonl", json_keys=("q", "a"))
    assert documents(tmp_path, "q") == [[1], [6]] and documents(tmp_path, "a") == [[2, 3], [5]]
    assert [fault.removeprefix(str(tmp_path / "a.jsonl")) for fault in result.faults] == [
        ":2: no key 'a' (there are 'q')",
        ":4: NullTokenizer: 'x' is not a number from 0 to 999",
        ":5: no tokens under 'a'",
        ":6: expected a JSON object, got a number",
    ]
    assert result.bad == {"missing key": 1, "not tokenized": 1, "no tokens": 1, "no object": 1}


def test_all_bad_lines_are_counted_and_the_first_recorded(tmp_path: Path) -> None:
    lines = ["x", *['{"text": "1"}', "y"] * 500]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for piece_bytes in (200, 1 << 18):
        result = run_numbers(tmp_path, tmp_path / "a.jsonl", piece_bytes=piece_bytes, restart=True)
        assert (result.documents, result.bad) == (500, {"invalid JSON": 501})
        places = [int(fault.split(":")[1]) for fault in result.faults]
        assert places == [1, *range(3, 21, 2)]


def test_invalid_inputs_and_settings_are_errors(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", ["1"])
    (tmp_path / "plain.txt").write_text("1")
    (tmp_path / "bad.jsonl").write_text("x\n")
    (tmp_path / "blank.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n' * 1000)[:-20])
    faults: list[tuple[list[Path], dict[str, object], str]] = [
        ([tmp_path / "no.jsonl"], {}, r"no\.jsonl does not exist"),
        ([tmp_path / "cut.jsonl.gz"], {}, r"cut\.jsonl\.gz cannot be read"),
        (
            [tmp_path / "bad.jsonl"],
            {},
            r"no document in .*bad\.jsonl; the first of 1 bad lines: .*bad\.jsonl:1: invalid",
        ),
        ([tmp_path / "blank.jsonl"], {}, r"no document in .*blank\.jsonl$"),
        ([tmp_path / "blank.jsonl", tmp_path / "bad.jsonl"], {}, r"in .*blank\.jsonl and 1 more; the first of 1"),
        ([good], {"workers": 0}, "workers 0 is not from 1 to 1024"),
        ([good], {"workers": 1025}, "workers 1025 is not from 1 to 1024"),
        ([good], {"json_keys": ()}, "must name one or more different keys"),
        ([good], {"json_keys": ("a/b",)}, "'a/b' cannot be part of a file's name"),
        ([good], {"max_document_bytes": 0}, "max_document_bytes 0 is below 1"),
        ([tmp_path / "plain.txt"], {"json_keys": ("a", "b")}, r"plain\.txt is plain text without keys"),
    ]
    before = sorted(tmp_path.iterdir())
    for inputs, settings, message in faults:
        with pytest.raises(ConfigError, match=message):
            run_numbers(tmp_path, *inputs, **settings)
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConfigError, match="no tokenizer: give --tokenizer-model"):
        preprocess(PreprocessJob(inputs=(str(good),), output_prefix=str(tmp_path / "out"), tokenizer=DataConfig()))


def test_ids_beyond_the_vocabulary_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megalite.tokenizers.base.NullTokenizer.encode_batch", lambda self, texts: [[5, 1000]] * len(texts)
    )
    with pytest.raises(ConfigError, match="NullTokenizer returns token id 1000, beyond its 1000 ids"):
        run_numbers(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["1"]))


def assert_refused(job: PreprocessJob, message: str) -> None:
    """Both the job and its plan are refused, and nothing is written."""
    top = Path(job.inputs[0]).parent
    before = sorted(top.rglob("*"))
    for work in (preprocess, plan):
        with pytest.raises(ConfigError, match=message):
            work(job)
    assert sorted(top.rglob("*")) == before


@pytest.fixture
def job(tmp_path: Path) -> PreprocessJob:
    return number_job(tmp_path, write_numbers(tmp_path / "a.jsonl", 30), piece_bytes=100)


def test_output_must_not_be_an_input(tmp_path: Path, job: PreprocessJob) -> None:
    path = write_numbers(tmp_path / "out_text_document.json", 3)
    (tmp_path / "link.jsonl").symlink_to(path)
    for source in (path, tmp_path / "link.jsonl"):
        for restart in (False, True):
            message = f"input {source} would be overwritten by the output; use another"
            assert_refused(replace(job, inputs=(str(source),), restart=restart), message)
    path.unlink()
    (tmp_path / "out.unfinished").mkdir()
    inside = write_numbers(tmp_path / "out.unfinished" / "0.jsonl", 3)
    assert_refused(replace(job, inputs=(*job.inputs, str(inside))), r"0\.jsonl is in .*out\.unfinished, the folder")


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_existing_output_is_replaced_only_with_restart(tmp_path: Path, job: PreprocessJob, suffix: str) -> None:
    preprocess(job)
    expected = output_bytes(tmp_path)
    assert_refused(job, r"out_text_document\.bin exists; use .* or --restart to replace")
    for other in {".bin", ".idx", ".json"} - {suffix}:
        (tmp_path / f"out_text_document{other}").unlink()
    assert_refused(job, rf"out_text_document\{suffix} exists.*; use")
    # --restart is not needed again to resume an interrupted run.
    with pytest.raises(Stop):
        preprocess(replace(job, restart=True), stop_after(10))
    assert plan(job).place
    assert preprocess(job).kept_documents >= 10
    assert output_bytes(tmp_path) == expected


def test_one_input_needs_no_tuple(job: PreprocessJob) -> None:
    assert replace(job, inputs="a.jsonl").inputs == ("a.jsonl",)


def test_unwritable_outputs_are_errors(tmp_path: Path, job: PreprocessJob, monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("", "data/", "data/\0"):
        assert_refused(
            replace(job, output_prefix=prefix), rf"output_prefix {prefix} has no name; use one such as .*corpus"
        )
    assert_refused(replace(job, output_prefix="s3://bucket/out"), "s3://bucket/out must be a path on this machine")
    under_file = replace(job, output_prefix=str(tmp_path / "a.jsonl" / "deep" / "out"))
    assert_refused(under_file, r"cannot be written at .*a\.jsonl: Not a directory; use another --output-prefix")
    (tmp_path / "out_text_document.idx").mkdir()
    assert_refused(replace(job, restart=True), r"document\.idx is a folder, but the output needs that name; use")
    (tmp_path / "out_text_document.idx").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.unfinished").symlink_to(tmp_path / "elsewhere")
    assert_refused(job, r"out\.unfinished is a link; remove it, or use another --output-prefix")
    (tmp_path / "out.unfinished").unlink()
    # The superuser may write anywhere, so the system's answer is patched.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    deep = replace(job, output_prefix=str(tmp_path / "new" / "out"))
    assert_refused(deep, f"cannot be written at {tmp_path}: Permission denied; use another --output-prefix")


def test_parquet_with_two_workers(tmp_path: Path) -> None:
    """Row groups are pieces, enough of them for workers; two keys, and a null is a bad row."""
    rows = [{"q": str(i), "a": f"{i} {i + 1}" if i != 70 else None} for i in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=10)
    result = run_numbers(tmp_path, tmp_path / "a.parquet", json_keys=("q", "a"), workers=2, piece_bytes=64)
    assert (result.documents, result.bad_lines) == (199, 1) and ":71: " in result.faults[0]
    assert documents(tmp_path, "a") == [[i, i + 1] for i in range(200) if i != 70]

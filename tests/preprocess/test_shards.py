"""Shards of the input processed separately: merged, they have the bytes of a run on one machine."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megalite.config.errors import ConfigError
from megalite.preprocess.job import job_inputs, parse_shard, shard_name
from megalite.preprocess.merge_split import merge
from megalite.preprocess.run import preprocess
from tests.preprocess.jobs import SUFFIXES, Stop, number_job, stop_after, write_numbers


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A long jsonl, a compressed one, a parquet file, one without a line end, and bad lines."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    text = write_numbers(folder / "a.jsonl", 200).read_text().splitlines(keepends=True)
    text[150] = "nonsense\n"
    (folder / "a.jsonl").write_text("".join(text))
    plain = write_numbers(tmp_path / "plain.jsonl", 90, first=200).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    rows = [json.loads(line)["text"] for line in plain.splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / "c.parquet")
    last = write_numbers(folder / "deep" / "d.jsonl", 40, first=300)
    last.write_bytes(last.read_bytes().rstrip(b"\n"))
    return folder


def output(folder: Path, prefix: str) -> list[bytes]:
    return [Path(f"{folder / prefix}_text_document{suffix}").read_bytes() for suffix in SUFFIXES]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_merged_parts_equal_one_run(corpus: Path, tmp_path: Path, count: int) -> None:
    whole = number_job(tmp_path, corpus)
    preprocess(whole)
    done = []
    for index in range(count):
        part = replace(whole, output_prefix=shard_name(whole.output_prefix, (index, count)), shard=(index, count))
        done += preprocess(part).outputs
    assert len(done) == min(count, len(done)) and len(done) > min(count, 8) - 1
    merge(sorted(done), str(tmp_path / "merged_text_document"))
    assert output(tmp_path, "merged") == output(tmp_path, "out")


def test_parts_have_similar_numbers_of_bytes(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a.jsonl", 500)
    size = (tmp_path / "a.jsonl").stat().st_size
    job = number_job(tmp_path, tmp_path / "a.jsonl")
    amounts = []
    for index in range(5):
        inputs, numbered = job_inputs(replace(job, shard=(index, 5)))
        assert numbered == [index, 5]
        amounts += [item.amount or 0 for item in inputs]
    assert sum(amounts) == size and max(amounts) - min(amounts) < 100


def test_empty_part_writes_nothing(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a.jsonl", 2)
    job = replace(number_job(tmp_path, tmp_path / "a.jsonl"), shard=(3, 9))
    assert preprocess(job).notice == "shard 3/9 is empty: the input is cut into 2 parts"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_stopped_part_resumes_and_names_bad_lines(tmp_path: Path) -> None:
    lines = write_numbers(tmp_path / "a.jsonl", 300).read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join([*lines[:250], "bad\n", *lines[250:]]))
    job = replace(number_job(tmp_path, tmp_path / "a.jsonl", piece_bytes=300), shard=(1, 2))
    straight = preprocess(replace(job, output_prefix=str(tmp_path / "straight")))
    with pytest.raises(Stop):
        preprocess(job, stop_after(60))
    resumed = preprocess(job)
    assert resumed.notice.startswith("resuming after") and resumed.faults == straight.faults
    (item,) = job_inputs(job)[0]
    before = (tmp_path / "a.jsonl").read_bytes()[: item.start].count(b"\n")
    assert resumed.faults[0].startswith(f"{tmp_path}/a.jsonl from byte {item.start}:{250 - before + 1}: invalid JSON")
    assert output(tmp_path, "out") == output(tmp_path, "straight")


def test_missing_part_is_an_error(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a.jsonl", 90)
    job = number_job(tmp_path, tmp_path / "a.jsonl")
    parts = [
        preprocess(replace(job, output_prefix=shard_name(job.output_prefix, (index, 3)), shard=(index, 3))).outputs[0]
        for index in range(3)
    ]
    for given, reason in (
        ([parts[0], parts[2]], "part 2 of 3, but part 1 of 3 comes here; give all parts, in order"),
        (parts[:2], "is part 1 of 3; give the parts after it too"),
        ([parts[1], parts[0], parts[2]], "is part 1 of 3, but part 0 of 3 comes here"),
    ):
        with pytest.raises(ConfigError, match=reason):
            merge(given, str(tmp_path / "merged"))
    for suffix in SUFFIXES:
        shutil.copy(f"{parts[0]}{suffix}", tmp_path / f"copy{suffix}")
    preprocess(replace(job, output_prefix=str(tmp_path / "whole")))
    with pytest.raises(ConfigError, match="whole_text_document is no part, but part 1 of 3 comes here"):
        merge([parts[0], str(tmp_path / "whole_text_document")], str(tmp_path / "merged"))


def test_names_of_parts() -> None:
    assert parse_shard("0/1") == (0, 1) and parse_shard("7/8") == (7, 8)
    for text in ("8/8", "1", "a/b", "-1/4", "1/0"):
        with pytest.raises(ConfigError, match=r"is not I/N with I from 0 to N - 1; the first of eight is 0/8"):
            parse_shard(text)


def test_standard_input_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--shard cannot cut standard input; give files"):
        job_inputs(replace(number_job(tmp_path, "-"), shard=(0, 2)))

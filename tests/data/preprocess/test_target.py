"""Outputs that cannot be where they are wanted: found before any work."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.preprocess.job import PreprocessJob
from megalite.data.preprocess.plan import plan
from megalite.data.preprocess.run import preprocess
from tests.data.preprocess.jobs import Stop, number_job, output_bytes, stop_after, write_numbers


def assert_refused(job: PreprocessJob, message: str) -> None:
    """By the job and by its plan, and nothing is made."""
    top = Path(job.inputs[0]).parent
    before = sorted(top.rglob("*"))
    for work in (preprocess, plan):
        with pytest.raises(ConfigError, match=message):
            work(job)
    assert sorted(top.rglob("*")) == before


@pytest.fixture
def job(tmp_path: Path) -> PreprocessJob:
    return number_job(tmp_path, write_numbers(tmp_path / "a.jsonl", 30), piece_bytes=100)


def test_the_output_may_not_be_an_input(tmp_path: Path, job: PreprocessJob) -> None:
    path = write_numbers(tmp_path / "out_text_document.json", 3)
    (tmp_path / "link.jsonl").symlink_to(path)
    for source in (path, tmp_path / "link.jsonl"):
        for restart in (False, True):
            message = f"input {source} is what the output would be written over; give another"
            assert_refused(replace(job, inputs=(str(source),), restart=restart), message)
    path.unlink()
    (tmp_path / "out.unfinished").mkdir()
    inside = write_numbers(tmp_path / "out.unfinished" / "0.jsonl", 3)
    assert_refused(
        replace(job, inputs=(*job.inputs, str(inside))), r"0\.jsonl lies in .*out\.unfinished, the fold"
    )


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_output_that_is_there_is_replaced_only_when_told(
    tmp_path: Path, job: PreprocessJob, suffix: str
) -> None:
    preprocess(job)
    expected = output_bytes(tmp_path)
    assert_refused(
        job, r"out_text_document\.bin is there already \(30 documents\); give .* or --restart to replace"
    )
    for other in {".bin", ".idx", ".json"} - {suffix}:
        (tmp_path / f"out_text_document{other}").unlink()
    assert_refused(job, rf"out_text_document\{suffix} is there already.*; give")
    # Told once, it need not be told again where a stopped run goes on.
    with pytest.raises(Stop):
        preprocess(replace(job, restart=True), stop_after(10))
    assert plan(job).first is not None
    assert preprocess(job).kept_documents >= 10
    assert output_bytes(tmp_path) == expected


@pytest.mark.parametrize("prefix", ["", "data/"])
def test_a_prefix_must_begin_a_name(job: PreprocessJob, prefix: str) -> None:
    assert_refused(
        replace(job, output_prefix=prefix), f"--output-prefix '{prefix}' must end in .*try data/corpus"
    )


def test_places_that_cannot_be_written(
    tmp_path: Path, job: PreprocessJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_file = replace(job, output_prefix=str(tmp_path / "a.jsonl" / "deep" / "out"))
    assert_refused(
        under_file, r"cannot be written at .*a\.jsonl: Not a directory; give another --output-prefix"
    )
    (tmp_path / "out_text_document.idx").mkdir()
    assert_refused(
        replace(job, restart=True), r"document\.idx is a folder, and the output would have that name; give"
    )
    (tmp_path / "out_text_document.idx").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.unfinished").symlink_to(tmp_path / "elsewhere")
    assert_refused(job, r"out\.unfinished is a link; remove it, or give another --output-prefix")
    (tmp_path / "out.unfinished").unlink()
    # The superuser may write anywhere: the system's answer is put in its mouth.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    deep = replace(job, output_prefix=str(tmp_path / "new" / "out"))
    assert_refused(deep, f"cannot be written at {tmp_path}: Permission denied; give another --output-prefix")


def test_names_that_are_too_long(tmp_path: Path, job: PreprocessJob) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - len("_text_document.json")
    for folder in (tmp_path, tmp_path / "new"):
        long = replace(job, output_prefix=str(folder / ("p" * (longest + 1))))
        assert_refused(
            long, rf"the name p+\.\.\. has {longest + 20} bytes, and a .* may have {longest + 19}; give"
        )
    assert_refused(
        replace(job, output_prefix=str(tmp_path / ("q/" * 2500) / "out")), "File name too long; give"
    )
    assert preprocess(replace(job, output_prefix=str(tmp_path / ("p" * longest)))).documents == 30

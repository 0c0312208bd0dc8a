import json
from functools import partial
from pathlib import Path

import pytest

from megalite.cli.model_commands import DATA_INDEX as main
from megalite.data.sources import build_datasets
from tests.data.token_files import write_by_layout


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a run of 100 samples of 8 tokens: an epoch has 20 of the first file, 40 of the second."""
    build = partial(build_datasets, small_bytes=0)
    monkeypatch.setattr("megalite.data.sources.build_datasets", build)
    write_by_layout(tmp_path / "a", [[1] * 17] * 10)
    write_by_layout(tmp_path / "b", [[2] * 17] * 20)
    blend = ["1", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    sizes = ["--seq-length", "8", "--train-iters", "50", "--global-batch-size", "2", "--vocab-size", "10"]
    return ["--data-path", *blend, "--split", "1", *sizes]


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_small_indices_are_not_cached(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "a: 10 documents, 170 tokens, 21 samples per epoch; the run reads 2.38 epochs" in out
    assert "its index has 120 bytes: the run builds it in memory" in out
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("order", ["megalite", "megatron"])
def test_large_indices_are_cached_once(
    order: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words += ["--data-order", order, "--data-cache-path", str(tmp_path / "kept")]
    first = answer(words, capsys)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")}
    # For 50 samples per dataset: 3 epochs of 21 and 2 of 42; or one index for all and one of the blend.
    assert [one["indices"] for one in first] == ([3, 2] if order == "megalite" else [1, 1, 1])
    assert [one["built"] for one in first] == [one["indices"] for one in first]
    assert all(one["folder"] == str(tmp_path / "kept") for one in first)
    again = answer(words, capsys)
    assert [one["built"] for one in again] == [0] * len(first)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")} == files
    assert main(words) == 0
    assert "0 built, " in capsys.readouterr().out


def test_unwritable_folder_is_an_error(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"error: cannot write to {tmp_path / 'cache'} (File exists)" in error
    assert "are built in the memory of each rank of a run" in error


@pytest.mark.parametrize("order", ["megalite", "megatron"])
def test_index_used_twice_is_built_once(
    order: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(tmp_path / "a")
    rest = [*words[words.index("--seq-length") :], "--data-order", order]
    reports = answer(["--data-path", "0.5", a, "0.5", a, "--split", "1", *rest], capsys)
    assert [(one["indices"] > 0, one["built"] > 0) for one in reports[:2]] == [(True, True), (True, False)]
    evaluation = ["--eval-interval", "10", "--eval-iters", "1"]
    reports = answer(["--train-data-path", a, "--valid-data-path", a, *evaluation, *rest], capsys)
    assert all(one["indices"] for one in reports)
    evaluation = ["--eval-interval", "10", "--full-validation"]
    _, valid = answer(["--train-data-path", a, "--valid-data-path", a, *evaluation, *rest], capsys)
    assert valid["samples"] == [0, valid["samples_per_epoch"]]


def test_notes_are_printed(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(words, capsys)
    for file in (tmp_path / "cache").rglob("ends.npy"):
        file.write_bytes(b"damaged")
    assert main(words) == 0
    assert capsys.readouterr().err.count("is damaged: the index of ") == 5


def test_bad_input_help_and_mock_data_of_data_index(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data-path", "nothing", "--train-iters", "5", "--vocab-size", "9"]) == 2
    assert "data path nothing" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "usage: megalite data index" in capsys.readouterr().out
    assert main(["--mock-data", "--train-iters", "5", "--vocab-size", "9"]) == 0
    assert capsys.readouterr().out == "this data needs no index\n"
    assert main([*words, "--packing", "best-fit"]) == 0
    assert capsys.readouterr().out.startswith("packing best-fit stores no index: ")

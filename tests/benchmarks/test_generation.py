"""The benchmark of generation runs, and its contenders say the same."""

import json
from pathlib import Path

import pytest

from benchmarks.generation import run as generation


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tiny", "--rounds", "2", "--json", str(tmp_path / "a.json")]
    assert generation.main(words) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["family"], row["batch"]) for row in rows] == [
        *(("gpt2", case.batch) for case in generation.TINY_CASES),
        *(("llama", case.batch) for case in generation.TINY_CASES),
    ]
    assert all(row["ours"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) >= 4


def test_different_texts_are_not_timed() -> None:
    made = {"megalite": lambda count: [[1] * count], "transformers": lambda count: [[1] * (count - 1) + [2]]}
    case = generation.Case(1, 1, 3)
    with pytest.raises(SystemExit, match="do not give the same tokens"):
        generation.agree(made, case, exact=True)
    generation.agree(made, case, exact=False)

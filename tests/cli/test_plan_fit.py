"""Test `megalite plan-fit` on steps of a machine with known constants."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.main import main
from megalite.planner.cost.calibrate import read_rows
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, load_stack

Captured = pytest.CaptureFixture[str]
NAMES = ("gpus", "preset", "vocab_size", "precision", "seq_length", "tp", "micro_batch_size", "global_batch_size")


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Return steps of dgx-h100 with slower products and attention."""
    cluster = load_cluster("dgx-h100")
    cluster = replace(cluster, efficiency=replace(cluster.efficiency, gemm=0.55))
    stack = replace(load_stack("fused"), attention_efficiency=0.55)
    sizes = [(8, "llama3.1-8b", 1, 1), (16, "mistral-7b", 4, 2), (8, "qwen3-8b", 8, 1)]
    plain = [
        [gpus, preset, "", "bf16", length, tp, micro, 8 * gpus, "true" if tp > 1 else ""]
        for gpus, preset, tp, micro in sizes
        for length in (1024, 8192)
    ]
    path = tmp_path / "steps.csv"
    write(path, [*NAMES, "sequence_parallel", "seconds"], [[*row, 1.0] for row in plain])
    seconds = [predict(row.measured.config, cluster, stack).step_seconds for row in read_rows(path)]
    speeds = [row[7] * row[4] / row[0] / taken for row, taken in zip(plain, seconds)]
    names = [*NAMES, "sequence_parallel", "tokens_per_second_per_gpu"]
    write(path, names, [[*row, speed] for row, speed in zip(plain, speeds)])
    return path


def write(path: Path, names: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def test_constants_are_recovered_and_written(steps: Path, tmp_path: Path, capsys: Captured) -> None:
    fit = ["plan-fit", str(steps), "--cluster", "dgx-h100"]
    two, left_out = ["--fit", "gemm", "--fit", "attention_efficiency"], ["--leave-out", "preset"]
    written = ["--output", str(tmp_path / "ours.yaml")]
    assert main([*fit, *two, *left_out, *written, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["errors"]["before"]["mean"] > 0.1 and data["errors"]["after"]["mean"] < 0.03
    assert data["errors"]["after"]["mean"] < data["errors"]["left out"]["mean"] < 0.05
    assert len(data["rows"]) == 6
    assert load_cluster(data["written"][0]).efficiency.gemm == data["constants"]["gemm"][1]
    assert load_stack(data["written"][1]).provenance["attention_efficiency"] == "fitted on 6 steps of steps.csv"
    assert {name: after for name, (_, after) in data["constants"].items()} == pytest.approx(
        {"gemm": 0.55, "attention_efficiency": 0.55}, rel=0.1
    )
    assert main([*fit, *written]) == 2
    assert "ours.yaml exists already" in capsys.readouterr().err
    steps.write_text("\n".join(steps.read_text().splitlines()[:4]))
    assert main([*fit, *left_out, "--fit", "gemm"]) == 0
    said = capsys.readouterr().out
    assert "each preset left out" in said and "gemm" in said


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("gpus", "7", "line 2: "),
        ("gpus", "eight", "line 2: gpus takes a whole number such as 8, got 'eight'"),
        ("tokens_per_second_per_gpu", "-3", "line 2: tokens_per_second_per_gpu is '-3'; it must be above 0"),
        ("tokens_per_second_per_gpu", "", "line 2 has no time; use one of seconds, tokens_per_second, "),
        ("preset", "gpt5", "line 2: --preset: unknown preset gpt5"),
        ("tp", "two", "line 2"),
    ],
)
def test_bad_cells_are_named(column: str, cell: str, message: str, steps: Path, capsys: Captured) -> None:
    names, first, *rest = csv.reader(steps.read_text().splitlines())
    first[names.index(column)] = cell
    write(steps, names, [first, *rest])
    assert main(["plan-fit", str(steps), "--cluster", "dgx-h100"]) == 2
    assert message in capsys.readouterr().err


def test_table_of_the_page_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    (tmp_path / "steps.csv").write_text(page.split("```csv\n")[1].split("```")[0], "utf-8-sig")
    rows = [row.measured for row in read_rows(tmp_path / "steps.csv")]
    assert [(row.config.parallel.tp, row.config.parallel.dp) for row in rows] == [(1, 8), (2, 32)]
    assert [row.seconds for row in rows] == pytest.approx([64 * 8192 / 8 / 7100, 512 * 8192 / 64 / 6500])


def test_bad_tables_and_columns_are_errors(steps: Path, capsys: Captured) -> None:
    fit = ["plan-fit", str(steps), "--cluster", "dgx-h100"]
    for more, message in (
        (["--leave-out", "presets"], "no column is named presets: did you mean preset?"),
        (["--leave-out", "precision"], "all rows have bf16; nothing is left to fit on"),
        (["--fit", "gem"], "cannot fit gem: did you mean gemm?"),
    ):
        assert main([*fit, *more]) == 2
        assert message in capsys.readouterr().err
    steps.write_text("tp,seconds\n1,2\n")
    assert main(fit) == 2
    assert "has columns tp, seconds; the first line has names: gpus, one of seconds, " in capsys.readouterr().err
    steps.write_text("gpus,seconds\n1,2.5\n")
    assert main(fit) == 2
    assert "line 2 has no vocab_size; add the column, e.g. 50257" in capsys.readouterr().err
    steps.write_text("gpus,seconds\n1\n")
    assert main(fit) == 2
    assert "line 2 has more or fewer cells than the 2 names" in capsys.readouterr().err

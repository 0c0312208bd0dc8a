"""The planner's benchmark: its goals, what is fitted on what, and published steps with the files that come along."""

import sys
from typing import Any

import planner
import planner_time
import pytest
from planner import Goal
from planner_rows import Row, published

from megalite.planner.cost.calibrate import Calibration, Measured
from megalite.planner.cost.step import predict
from megalite.planner.hardware.cluster import load_cluster
from megalite.planner.hardware.stack import load_stack

CLUSTER = load_cluster("dgx-a100")


def _errors(stack: str, rows: list[Row]) -> list[float]:
    return [
        predict(row.measured.config, CLUSTER, load_stack(stack), with_memory=False).step_seconds
        / row.measured.seconds
        - 1.0
        for row in rows
    ]


@pytest.fixture(scope="module")
def table_5() -> list[Row]:
    return [row for row in published() if row.size != "SC'21"]


def test_published_steps_with_the_shipped_files(table_5: list[Row]) -> None:
    (largest,) = _errors("unfused", [row for row in published() if row.size == "SC'21"])
    assert abs(largest) < 0.05
    newer = _errors("unfused-2022", table_5)
    assert sum(map(abs, newer)) / len(newer) < 0.03
    assert max(map(abs, newer)) < 0.06


def test_no_model_of_the_table_is_judged_by_what_was_fitted_on_it(
    table_5: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[set[int], list[str]]] = []

    def fit(rows: list[Measured], cluster: Any, stack: Any, *, only: list[str]) -> Calibration:
        assert not stack.overlap_tensor_gradients and stack.overlap_gathers
        asked.append(({row.config.model.hidden_size for row in rows}, only))
        return Calibration(cluster, stack, (), ())

    monkeypatch.setattr(planner_time, "fit", fit)
    monkeypatch.setattr(planner_time, "errors_of", lambda rows, found: [0.01 * len(rows)] * len(rows))
    found = Calibration(CLUSTER, load_stack("unfused"), (), ())
    result = planner_time.leave_one_model_out(table_5, found)
    widths = {6144, 12288, 20480, 25600}
    assert [sizes for sizes, _ in asked] == [widths - {each} for each in sorted(widths)]
    assert all(only == ["gemm"] for _, only in asked)
    assert result["errors_percent"]["rows"] == len(result["rows"]) == 8


def test_a_goal_is_met_on_its_side_of_the_bound() -> None:
    def goal(measured: float, at_least: bool) -> Goal:
        return Goal(part="time", what="it", measured=measured, bound=3.0, unit="%", at_least=at_least)

    assert goal(2.9, False).met and goal(3.0, False).met and not goal(3.1, False).met
    assert goal(3.1, True).met and not goal(2.9, True).met
    assert goal(2.9, False).line.endswith("met") and "MISSED" in goal(2.9, True).line


def test_goals_of_the_time_part() -> None:
    def errors(mean: float, median: float) -> dict[str, Any]:
        return {"errors_percent": {"mean": mean, "median": median}}

    parts = {
        planner_time.TOGETHER: {**errors(7.0, 4.5), "regret": [0.0, 0.02]},
        "single node": {**errors(6.0, 3.0), "regret": [{"regret": 0.1}, {"regret": 0.0}]},
        planner_time.LEFT_OUT: errors(2.0, 2.0),
        "SC'21": errors(0.5, 0.5),
    }
    goals = planner.time_goals(parts)
    assert [goal.measured for goal in goals] == pytest.approx([7.0, 4.5, 1.0, 6.0, 3.0, 5.0, 10.0, 2.0, 0.5])
    assert [goal.what for goal in goals if not goal.met] == [
        "several nodes, each size left out, median",
        "one node, regret of the pick, mean of 2",
        "one node, regret of the pick, worst group",
    ]


@pytest.mark.parametrize(("part", "flag"), [("time", "--data"), ("sweep", "--folder")])
def test_a_part_without_its_folder_is_refused(
    part: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["planner.py", "--parts", part])
    with pytest.raises(SystemExit):
        planner.main()
    assert f"part {part} takes {flag} FOLDER" in capsys.readouterr().err

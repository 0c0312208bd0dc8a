"""The planner's benchmark: which rows a fit uses, and errors of published steps with the shipped files."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import chain, megatron, sc21
from benchmarks.planner import step_times as planner_time
from benchmarks.planner.step_times import Row, published
from megalite.planner.chain.inputs import find_profile, read_cluster
from megalite.planner.cost.calibrate import Calibration, Measured
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, load_stack

CLUSTER = load_cluster("dgx-a100")


def _errors(stack: str, rows: list[Row]) -> list[float]:
    return [
        predict(row.measured.config, CLUSTER, load_stack(stack)).step_seconds / row.measured.seconds - 1.0
        for row in rows
    ]


@pytest.fixture(scope="module")
def table_5() -> list[Row]:
    return [row for row in published() if row.size != "SC'21"]


def test_published_steps_are_predicted_with_shipped_files(table_5: list[Row]) -> None:
    (largest,) = _errors("unfused", [row for row in published() if row.size == "SC'21"])
    assert abs(largest) < 0.05
    newer = _errors("unfused-2022", table_5)
    assert sum(map(abs, newer)) / len(newer) < 0.03
    assert max(map(abs, newer)) < 0.06


def test_megatron_tables_are_predicted_with_shipped_files(tmp_path: Path) -> None:
    """Test rows of each kind, and that a model with other FLOPs than the table's is an error."""
    machine, lines = megatron.machines(), megatron.TABLE.read_text().splitlines()
    table = tmp_path / "few.csv"
    table.write_text("\n".join([lines[0], *(line for line in lines if line.split(",")[1] in ("16b", "llama3-70b"))]))
    rows = megatron.read_rows(table, machine)
    assert {part: len(found) for part, found in rows.items()} == {
        "lm": 1,
        "nemo": 1,
        "bridge": 2,
        "b200": 1,
        "gb200_mx": 5,
    }
    for part, found in rows.items():
        errors = megatron.errors_of(found, Calibration(*machine[megatron.machine_of(part)], (), ()))
        assert max(abs(errors)) < 0.1
    another = next(line for line in lines if "nemotron-340b" in line).replace("nemotron-340b", "gpt3-175b")
    table.write_text(f"{lines[0]}\n{another}")
    with pytest.raises(ValueError, match=r"gpt3-175b.*TFLOP/s by this model's FLOPs"):
        megatron.read_rows(table, machine)


def test_sc21_rows_are_predicted_within_ten_percent() -> None:
    assert [row.tp * row.pp * 4 <= row.gpus for row in sc21.TABLE_1].count(True) == 10
    for published_row in (sc21.TABLE_1[0], sc21.TABLE_1[4], sc21.TABLE_2[3]):
        found = sc21.row(published_row)
        assert abs(found["tflops"] / found["paper"] - 1) < 0.1


def test_scatter_gather_and_interleaving_speed_up_as_in_the_paper() -> None:
    """175B on 96 GPUs: both are faster, and more so for a smaller batch."""
    words = f"{sc21._175B} --tp 8 --pp 12 --recompute-granularity full"
    speeds = [
        [y for _, y in sc21.curve(96, f"{words} {more}", "global-batch-size", (12, 60))]
        for more in ("--vpp 2", "--vpp 2 --no-scatter-gather-tensors-in-pipeline", "")
    ]
    for other in speeds[1:]:
        assert speeds[0][0] / other[0] > speeds[0][1] / other[1] > 1.0


def test_leave_one_out_excludes_the_predicted_model_from_the_fit(
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


def test_plans_of_the_paper_cover_all_layers_and_gpus() -> None:
    for model, plans in chain.PLANS.items():
        for where in plans:
            cluster, profile = read_cluster(where), find_profile(model)
            stages = chain.paper_stages(model, where, profile, cluster)
            assert stages is not None
            assert [stages[0].first, stages[-1].last] == [0, len(profile.layers)]
            assert sum(stage.replicas for stage in stages) == cluster.num_gpus

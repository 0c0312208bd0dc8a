"""Regret, rank correlation and error against hand-computed numbers; the HTML report; calibration."""

import dataclasses
import html
import re
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.planner.cost.calibrate import Machine
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, load_stack, require_new_file, stack_file
from megalite.sweep.candidates import Predicted, Run, read_machine
from megalite.sweep.report import calibrate, judge, report, spearman, summary
from megalite.sweep.results import OOM, Result
from tests.sweep.sweeps import measured, read_runs, write_sweep


def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of each row with an id."""
    found = re.findall(r'<tr[^>]* id="([^"]+)"[^>]*>(.*?)</tr>', page, re.DOTALL)
    return {
        key: [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for key, row in found
    }


def test_report_has_every_run(tmp_path: Path) -> None:
    machine = read_machine("cpu-box", "fused")
    path = write_sweep(tmp_path, ranks=4, grid={"tp": [1, 2, 3], "pp": [1, 2]})
    _, runs = read_runs(path, machine=machine)
    good = [run for run in runs if run.refused is None]
    results: dict[str, Result] = {run.key: measured(run, 0.5 - 0.1 * n) for n, run in enumerate(good)}
    broken = good[-1]
    results[broken.key] = dataclasses.replace(
        results[broken.key], status=OOM, error="CUDA <out> & done", step_seconds=None, tokens_per_second=None
    )
    text = report('Sweep "a<b".yaml', runs, results)
    rows = rows_of(text)
    assert set(rows) == {run.key for run in runs}
    assert rows[broken.key][-1] == "oom: CUDA <out> & done"
    assert rows[next(run.key for run in runs if run.refused)][-1] == "not run yet"
    assert text.count("<svg") == 2
    assert text.count("<circle") == 2 * (len(good) - 1)
    for tag in ("html", "body", "table", "tr", "td", "svg"):
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>"), tag
    for word in (" src=", " href=", "http:", "https:", "//", "<script "):
        assert word not in text
    fastest = good[-2]
    assert next(iter(rows)) == fastest.key, "fastest first"
    assert f"Fastest: {fastest.label} with" in text
    assert "regret" in text
    assert "Rank correlation (Spearman)" in text


def test_report_of_an_unfinished_sweep(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path))
    page = report("Sweep", runs, {})
    assert set(rows_of(page)) == {run.key for run in runs} and "<svg" not in page
    refused = sum(run.refused is not None for run in runs)
    assert refused == 1
    assert summary(runs, {}) == ["4 configurations: 4 not run yet."]
    one = {runs[0].key: measured(runs[0], 0.5)}
    assert "<svg" in report("Sweep", runs, one)


def predicted(run: Run, seconds: float) -> Run:
    """A run with a predicted time."""
    return dataclasses.replace(run, predicted=Predicted(memory_bytes=1, first_rank_bytes=1, step_seconds=seconds))


def test_spearman_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = 0, 1, 1, 0
    assert spearman([1, 2, 3, 4], [1, 30, 20, 400]) == pytest.approx(1 - 6 * 2 / 60)
    # Ties share their rank: 0.5, 0.5, 2, 3 against 0, 1, 2, 3.
    assert spearman([5, 5, 9, 10], [1, 2, 3, 4]) == pytest.approx(0.9**0.5)
    assert spearman([1, 1], [1, 2]) is None
    assert spearman([1], [1]) is None


def test_regret_of_the_predicted_best(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path, ranks=None, grid={"tp": [1, 2, 4], "pp": [1, 2]}))
    times = [(0.1, 0.25), (0.2, 0.2), (0.3, 0.4), (0.4, 0.3), (0.05, None), (0.9, 0.8)]
    runs = tuple(predicted(run, expected) for run, (expected, _) in zip(runs, times))
    results = {
        run.key: measured(run, found) if found else measured(run, 1.0, status=OOM)
        for run, (_, found) in zip(runs, times)
    }
    found = judge(runs, results)
    assert found.pick is not None
    assert found.best is not None
    assert (found.pick.run, found.best.run) == (runs[0], runs[1])
    assert found.regret == pytest.approx(0.25 / 0.2 - 1)
    assert found.missed == (runs[4],), "predicted fastest of all, and out of memory"
    assert len(found.pairs) == 5
    assert found.correlation == pytest.approx(1 - 6 * 4 / 120)  # swapped: the first two, and the next two
    errors = [0.1 / 0.25, 0.2 / 0.2, 0.3 / 0.4, 0.4 / 0.3, 0.9 / 0.8]
    assert found.mean_error == pytest.approx(sum(abs(error - 1) for error in errors) / 5)


def test_speed_is_tokens_per_second_if_batches_differ(tmp_path: Path) -> None:
    _, (small, large) = read_runs(write_sweep(tmp_path, grid={"tp": [1], "global_batch_size": [8, 32]}))
    small, large = predicted(small, 1.0), predicted(large, 2.0)
    found = judge((small, large), {small.key: measured(small, 1.0), large.key: measured(large, 3.0)})
    assert found.pick is not None
    assert found.pick.run == large
    assert found.regret == 0.0


def test_fit_predicts_the_measurements(tmp_path: Path) -> None:
    machine = read_machine("dgx-a100", "fused")
    assert machine is not None
    model = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}
    rest = {"vocab_size": 4096, "mock_data": True, "precision": "bf16", "global_batch_size": 16}
    path = write_sweep(tmp_path, settings=model | rest, ranks=4, grid={"tp": [1, 2], "pp": [1, 2]})
    _, runs = read_runs(path, machine=machine)
    # Products are slower here than in the file.
    efficiency = dataclasses.replace(machine.cluster.efficiency, gemm=0.6 * machine.cluster.efficiency.gemm, memory=0.6)
    truth = dataclasses.replace(machine.cluster, efficiency=efficiency)
    seconds = {run.key: predict(run.config, truth, machine.stack).step_seconds for run in runs}
    results = {run.key: measured(run, seconds[run.key]) for run in runs}
    out = tmp_path / "mine.yaml"
    said = calibrate(runs, results, machine, out, source="steps of sweep.yaml")
    fitted = Machine(cluster=load_cluster(str(out)), stack=load_stack(str(stack_file(out))))
    assert f"wrote {out}" in said
    assert fitted.cluster.provenance["efficiency.gemm"] == "fitted on 4 steps of sweep.yaml"
    assert fitted.cluster.accelerator == machine.cluster.accelerator

    def errors(of: Machine) -> list[float]:
        found = [predict(run.config, of.cluster, of.stack).step_seconds / seconds[run.key] for run in runs]
        return [abs(each - 1.0) for each in found]

    assert min(errors(machine)) > 0.1
    assert max(errors(fitted)) < 0.05


def test_errors_of_fits_and_files(tmp_path: Path) -> None:
    machine = read_machine("cpu-box", "fused")
    assert machine is not None
    _, runs = read_runs(write_sweep(tmp_path), machine=machine)
    with pytest.raises(ConfigError, match="--calibrate requires 3 successful runs, got 1"):
        calibrate(runs, {runs[0].key: measured(runs[0], 1.0)}, machine, tmp_path / "a.yaml", source="steps")
    require_new_file(tmp_path / "a.yaml", "--calibrate")
    (tmp_path / "a-stack.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"a-stack.yaml exists already"):
        require_new_file(tmp_path / "a.yaml", "--calibrate")
    with pytest.raises(ConfigError, match=r"must end in .yaml"):
        require_new_file(tmp_path / "a", "--calibrate")
    with pytest.raises(ConfigError, match=r"folder .* does not exist"):
        require_new_file(tmp_path / "no" / "b.yaml", "--calibrate")

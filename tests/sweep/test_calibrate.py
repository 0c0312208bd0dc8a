"""--calibrate: what was measured moves the constants."""

import dataclasses
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.planner.cost.calibrate import Machine
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, load_stack, refuse_taken, stack_file
from megalite.sweep.candidates import read_machine
from megalite.sweep.report import calibrate
from tests.sweep.sweeps import measured, read_runs, write_sweep


def test_a_fit_predicts_what_was_measured(tmp_path: Path) -> None:
    machine = read_machine("dgx-a100", "fused")
    assert machine is not None
    model = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}
    rest = {"vocab_size": 4096, "mock_data": True, "precision": "bf16", "global_batch_size": 16}
    path = write_sweep(tmp_path, settings=model | rest, ranks=4, grid={"tp": [1, 2], "pp": [1, 2]})
    _, runs = read_runs(path, machine=machine)
    # A machine whose products are slower than the file says.
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


def test_what_cannot_be_fitted_or_written(tmp_path: Path) -> None:
    machine = read_machine("cpu-box", "fused")
    assert machine is not None
    _, runs = read_runs(write_sweep(tmp_path), machine=machine)
    with pytest.raises(ConfigError, match="--calibrate needs 3 runs that ended well, there are 1"):
        calibrate(runs, {runs[0].key: measured(runs[0], 1.0)}, machine, tmp_path / "a.yaml", source="steps")
    refuse_taken(tmp_path / "a.yaml", "--calibrate")
    (tmp_path / "a-stack.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"a-stack.yaml is there already"):
        refuse_taken(tmp_path / "a.yaml", "--calibrate")
    with pytest.raises(ConfigError, match=r"must end in .yaml"):
        refuse_taken(tmp_path / "a", "--calibrate")
    with pytest.raises(ConfigError, match="there is no folder"):
        refuse_taken(tmp_path / "no" / "b.yaml", "--calibrate")

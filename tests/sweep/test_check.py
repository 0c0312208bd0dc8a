"""Checks before anything runs."""

from pathlib import Path

from megalite.config import files
from megalite.config.describe import replace
from megalite.config.validate import validate
from megalite.planner.cost.step import predict
from megalite.sweep.candidates import read_machine
from tests.sweep.sweeps import MODEL, read_runs, write_sweep


def test_refused_ones_say_why_and_the_others_go_on(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path, ranks=4, grid={"tp": [1, 3, 8], "pp": [1, 4]}))
    refused = {run.label: run.refused for run in runs}
    assert refused["tp 1, pp 1"] is None
    assert refused["tp 1, pp 4"] is None
    assert "4 ranks" in str(refused["tp 3, pp 1"]) or "world" in str(refused["tp 3, pp 1"])
    assert sum(each is None for each in refused.values()) == 2


def test_a_schedule_that_does_not_take_the_microbatches_is_refused(tmp_path: Path) -> None:
    changes = {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved", "global_batch_size": 5}
    path = write_sweep(tmp_path, grid=None, list=[changes | {"microbatch_group_size": 4}, {"pp": 2}])
    _, (bad, good) = read_runs(path)
    assert "microbatch" in str(bad.refused)
    assert good.refused is None


def test_memory_limit(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, grid={"tp": [1, 2]})
    _, (whole, half) = read_runs(path)
    assert whole.predicted is not None
    assert half.predicted is not None
    assert whole.predicted.memory_bytes > half.predicted.memory_bytes
    limit = float(half.predicted.memory_bytes)
    _, (large, fits) = read_runs(path, memory_limit=limit)
    assert "per rank, over memory_limit" in str(large.refused)
    assert fits.refused is None


def test_times_are_those_of_predict(tmp_path: Path) -> None:
    machine = read_machine("cpu-box", "fused")
    assert machine is not None
    _, runs = read_runs(write_sweep(tmp_path), machine=machine)
    for run in runs:
        if run.refused is None:
            assert run.predicted is not None
            assert run.predicted.step_seconds == predict(run.config, machine.cluster, machine.stack).step_seconds
    # A precision that the cluster has no figure for is refused, and ends nothing.
    slow = write_sweep(tmp_path, settings=MODEL | {"precision": "bf16"}, ranks=1, grid={"tp": [1]})
    v100 = read_machine("v100", "fused")
    _, (run,) = read_runs(slow, machine=v100)
    assert "has no peak for bf16" in str(run.refused)


def test_the_same_configuration_is_one_run(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path, ranks=1, grid={"tp": [1]}, list=[{"pp": 1}, {"dp": 1}]))
    assert len(runs) == 1


def test_what_all_runs_change_alike_is_recorded_too(tmp_path: Path) -> None:
    entries = [{"tp": 2, "micro_batch_size": 4}, {"tp": 1, "micro_batch_size": 4, "seq_length": 16}]
    _, runs = read_runs(write_sweep(tmp_path, grid=None, list=entries))
    # seq_length is as in the base; tp sets the runs apart, and makes their names.
    assert [run.settings for run in runs] == [{"micro_batch_size": 4, "tp": 2}, {"micro_batch_size": 4, "tp": 1}]
    assert [run.label for run in runs] == ["tp 2", "tp 1"]
    _, (alone,) = read_runs(write_sweep(tmp_path, grid=None, list=entries[:1]))
    assert alone.settings == {"micro_batch_size": 4, "tp": 2}
    assert alone.label == "tp 2, micro_batch_size 4"


def test_what_is_launched_reads_back_as_checked(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path))
    for run in (run for run in runs if run.refused is None):
        path = tmp_path / "config.yaml"
        path.write_text(files.dump(replace(run.config, run_dir="somewhere")))
        again = validate(files.load(path), run.ranks)
        assert replace(again, run_dir=None) == run.config
    assert len({run.key for run in runs}) == 4


def test_the_vocabulary_of_a_tokenizer(tmp_path: Path) -> None:
    model = {name: value for name, value in MODEL.items() if name not in ("vocab_size", "mock_data")}
    data = {"data_path": ["nowhere"], "tokenizer_type": "ByteLevelTokenizer"}
    _, (run,) = read_runs(write_sweep(tmp_path, settings=model | data, grid={"tp": [1]}))
    assert run.refused is None
    assert run.config.model.vocab_size is not None
    missing = {"data_path": ["nowhere"], "tokenizer_model": str(tmp_path / "none.model")}
    _, (run,) = read_runs(write_sweep(tmp_path, settings=model | missing, grid={"tp": [1]}))
    assert "none.model" in str(run.refused)

"""From a sweep to configurations: grid, list, plan, conditions, fixed settings, and checks before any run."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from megalite.config import files
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition import pipeline
from megalite.pipeline.ir import auto
from megalite.pipeline.ir.auto import _known as list_search
from megalite.planner.cost import stage
from megalite.planner.cost.step import predict
from megalite.sweep.candidates import Expansion, check_all, expand, read_machine
from megalite.sweep.spec import read_spec
from tests.support.tiny import words
from tests.sweep.sweeps import MODEL, read_runs, write_sweep


def layouts(path: Path) -> list[tuple[int, int]]:
    """(tp, pp) of all configurations, in order."""
    found = expand(read_spec(path)).candidates
    return [(each.config.parallel.tp, each.config.parallel.pp) for each in found]


def test_plan_list_and_grid_are_in_order(tmp_path: Path) -> None:
    plans = [{"tp": 4, "train_iters": 9}, {"tp": 2, "pp": 4}, {"tp": 8}]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"plans": plans, "cluster": "dgx-a100"}))
    path = write_sweep(tmp_path, from_plan="plan.yaml", top=2, list=[{"pp": 4}])
    assert layouts(path) == [(4, 1), (2, 4), (1, 4), (1, 1), (1, 2), (2, 1), (2, 2)]
    sources = [each.source for each in expand(read_spec(path)).candidates]
    assert sources == ["plan 1", "plan 2", "list, entry 1", *["grid"] * 4]


def test_conditions_see_settings_of_the_base(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, settings=MODEL | {"pp": 2}, grid={"tp": [1, 2, 4]}, exclude=["tp * pp > 4"])
    assert layouts(path) == [(1, 2), (2, 2)]
    assert expand(read_spec(path)).left_out == 1
    path = write_sweep(tmp_path, only=["dp == 1"])  # of the 2 ranks
    assert layouts(path) == [(1, 2), (2, 1)]
    with pytest.raises(ConfigError, match="exclude and only remove all 4 configurations"):
        expand(read_spec(write_sweep(tmp_path, exclude=["tp > 0"])))


def test_base_and_ignored_settings(tmp_path: Path) -> None:
    base = MODEL | words(
        "train_samples=999 save_interval=5 save=here keep_latest=2 eval_interval=10 eval_iters=3 lr_warmup_iters=2000 "
        "min_lr=1e-5 run_dir=there log_interval=50 rampup_batch_size=[4,4,100]"
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base))
    path = write_sweep(tmp_path, base="run.yaml", settings={"hidden_size": 64})
    expansion = expand(read_spec(path))
    assert set(expansion.ignored) == set(base) - set(MODEL)
    (run, *_) = check_all(expansion, memory_limit=None, machine=None)
    assert run.refused is None
    config = run.config
    assert (config.training.train_iters, config.training.train_samples) == (3, None)
    assert config.checkpoint.save is None
    assert config.logging.run_dir is None
    assert config.optimizer.lr_warmup_iters is None
    assert config.model.hidden_size == 64, "settings override the base"


def test_default_ranks_are_those_of_the_layout(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, ranks=None, grid={"tp": [1, 2], "dp": [1, 3]})
    assert [each.ranks for each in expand(read_spec(path)).candidates] == [1, 3, 2, 6]


def test_huge_grid_is_an_error(tmp_path: Path) -> None:
    names = ("tp", "pp", "vpp", "cp", "micro_batch_size", "hidden_size")
    path = write_sweep(tmp_path, grid={name: list(range(1, 11)) for name in names})
    with pytest.raises(ConfigError, match="the grid has 1000000 configurations, more than 100000"):
        expand(read_spec(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best: []", "has no list of plans, only 'best'"),
        ("plans: []", "plans takes a list that is not empty"),
        ("plans: [3]", "plan 1 takes `name: value` lines"),
        ("plans: [{tpp: 3}]", "plan 1: unknown section or key tpp"),
    ],
)
def test_bad_plans_are_errors(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        expand(read_spec(write_sweep(tmp_path, grid=None, from_plan="plan.yaml")))


def test_training_config_of_a_plan_is_not_a_list_of_plans(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("tp: 2\npp: 4\n")
    path = write_sweep(tmp_path, grid=None, from_plan="plan.yaml")
    with pytest.raises(ConfigError, match=r"plan.yaml has no list of plans, only 'tp, pp'$"):
        expand(read_spec(path))
    (tmp_path / "plan-alternatives.yaml").write_text("plans: [{tp: 2}]")
    with pytest.raises(ConfigError, match=r"use plan-alternatives.yaml beside it$"):
        expand(read_spec(path))


def test_imports_of_a_sweep_are_in_each_config(tmp_path: Path) -> None:
    """A run reads it from its file."""
    settings = MODEL | {"imports": ["examples.extend.lion"]}
    _, runs = read_runs(write_sweep(tmp_path, settings=settings, grid={"optimizer": ["adam", "lion"]}))
    assert [run.config.optimizer.optimizer for run in runs] == ["adam", "lion"]
    assert [run.refused for run in runs] == [None, None]
    for run in runs:
        assert load_from(files.dump(run.config), tmp_path).training.imports == ["examples.extend.lion"]


def load_from(text: str, folder: Path) -> RunConfig:
    (folder / "dumped.yaml").write_text(text)
    return files.load(folder / "dumped.yaml")


# Checks before any run.


def test_refused_configurations_have_a_reason_and_others_run(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path, ranks=4, grid={"tp": [1, 3, 8], "pp": [1, 4]}))
    refused = {run.label: run.refused for run in runs}
    assert refused["tp 1, pp 1"] is None
    assert refused["tp 1, pp 4"] is None
    assert "4 ranks" in str(refused["tp 3, pp 1"]) or "world" in str(refused["tp 3, pp 1"])
    assert sum(each is None for each in refused.values()) == 2


def test_schedule_with_invalid_microbatches_is_refused(tmp_path: Path) -> None:
    changes = {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved", "global_batch_size": 5}
    path = write_sweep(tmp_path, grid=None, list=[changes | {"microbatch_group_size": 4}, {"pp": 2}])
    _, (bad, good) = read_runs(path)
    assert "microbatch" in str(bad.refused)
    assert good.refused is None


def test_memory_limit_refuses_configurations(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, grid={"tp": [1, 2]})
    _, (whole, half) = read_runs(path)
    assert whole.predicted is not None
    assert half.predicted is not None
    assert whole.predicted.memory_bytes > half.predicted.memory_bytes
    limit = float(half.predicted.memory_bytes)
    _, (large, fits) = read_runs(path, memory_limit=limit)
    assert "per rank, over memory_limit" in str(large.refused)
    assert fits.refused is None


def test_schedule_is_built_for_the_known_memory(tmp_path: Path) -> None:
    changes = {"pipeline_schedule": "auto", "global_batch_size": 16, "micro_batch_size": 1, "pp": 2, "dp": 1}
    path = write_sweep(tmp_path, settings=MODEL | changes, grid={"vpp": [1, 2]})
    _, free = read_runs(path)
    machine = read_machine("dgx-h100", "fused")
    assert machine is not None
    for run in free:
        assert run.predicted is not None
        limit = 0.95 * run.predicted.memory_bytes
        node = dataclasses.replace(machine.cluster.accelerator, memory_bytes=limit / 0.9)
        smaller = machine._replace(cluster=dataclasses.replace(machine.cluster, accelerator=node))
        for given in ({"memory_limit": limit}, {"machine": smaller}):
            found = {each.label: each for each in read_runs(path, **given)[1]}[run.label]
            assert found.refused is None
            assert found.predicted is not None
            assert found.predicted.memory_bytes <= limit
            assert found.config.parallel.pipeline_memory_limit is not None
    for least, why in ((5e5, "nothing fits the memory limit"), (4e4, "per rank without activations, over 39.06 KiB")):
        assert all(why in str(run.refused) for run in read_runs(path, memory_limit=least)[1])


def test_times_equal_predict(tmp_path: Path) -> None:
    machine = read_machine("cpu-box", "fused")
    assert machine is not None
    _, runs = read_runs(write_sweep(tmp_path), machine=machine)
    for run in runs:
        if run.refused is None:
            assert run.predicted is not None
            assert run.predicted.step_seconds == predict(run.config, machine.cluster, machine.stack).step_seconds
    # A precision that the cluster has no peak for is refused; the sweep continues.
    slow = write_sweep(tmp_path, settings=MODEL | {"precision": "bf16"}, ranks=1, grid={"tp": [1]})
    v100 = read_machine("v100", "fused")
    _, (run,) = read_runs(slow, machine=v100)
    assert "has no peak for bf16" in str(run.refused)


def test_equal_configurations_are_one_run(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path, ranks=1, grid={"tp": [1]}, list=[{"pp": 1}, {"dp": 1}]))
    assert len(runs) == 1


def test_common_changes_are_recorded(tmp_path: Path) -> None:
    entries = [{"tp": 2, "micro_batch_size": 4}, {"tp": 1, "micro_batch_size": 4, "seq_length": 16}]
    _, runs = read_runs(write_sweep(tmp_path, grid=None, list=entries))
    # seq_length is as in the base; tp distinguishes the runs, so the labels use it.
    assert [run.settings for run in runs] == [{"micro_batch_size": 4, "tp": 2}, {"micro_batch_size": 4, "tp": 1}]
    assert [run.label for run in runs] == ["tp 2", "tp 1"]
    _, (alone,) = read_runs(write_sweep(tmp_path, grid=None, list=entries[:1]))
    assert alone.settings == {"micro_batch_size": 4, "tp": 2}
    assert alone.label == "tp 2, micro_batch_size 4"


def test_launched_config_equals_the_checked_one(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path))
    for run in (run for run in runs if run.refused is None):
        path = tmp_path / "config.yaml"
        path.write_text(files.dump(replace(run.config, run_dir="somewhere")))
        again = validate(files.load(path), run.ranks)
        assert replace(again, run_dir=None) == run.config
    assert len({run.key for run in runs}) == 4


def test_vocabulary_size_of_a_tokenizer(tmp_path: Path) -> None:
    model = {name: value for name, value in MODEL.items() if name not in ("vocab_size", "mock_data")}
    data = {"data_path": ["nowhere"], "tokenizer_type": "ByteLevelTokenizer"}
    _, (run,) = read_runs(write_sweep(tmp_path, settings=model | data, grid={"tp": [1]}))
    assert run.refused is None
    assert run.config.model.vocab_size is not None
    missing = {"data_path": ["nowhere"], "tokenizer_model": str(tmp_path / "none.model")}
    _, (run,) = read_runs(write_sweep(tmp_path, settings=model | missing, grid={"tp": [1]}))
    assert "none.model" in str(run.refused)


def test_predictions_equal_single_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached parts give exactly the same numbers as separate predictions."""
    axes = {"tp": [1, 2], "pp": [1, 2], "micro_batch_size": [1, 2], "recompute_granularity": ["none", "full"]}
    axes |= {"dp_strategy": ["all-reduce", "distributed-optimizer", "fully-sharded"], "vpp": [1, 2]}
    settings = MODEL | {"global_batch_size": 16, "optimizer": "muon", "num_experts": 4}
    path = write_sweep(tmp_path, settings=settings, grid=axes, ranks=4, cluster="dgx-a100")
    machine = read_machine("dgx-a100", "fused")
    shared = check_all(expand(read_spec(path)), memory_limit=None, machine=machine)
    monkeypatch.setattr("megalite.config.run._values", lambda config, names: (object(),))
    alone = []
    for each in expand(read_spec(path)).candidates:
        for cached in (list_search, auto._bounds, pipeline._built, stage._pricing):
            cached.cache_clear()
        alone += check_all(Expansion((each,), RunConfig(), 0, ()), memory_limit=None, machine=machine)
    assert [each.key for each in shared] == [each.key for each in alone]
    assert [(each.refused, each.predicted) for each in shared] == [(each.refused, each.predicted) for each in alone]
    assert sum(each.predicted is not None for each in shared) > 50


def test_labels_name_differing_settings(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, list=[{"dp_strategy": "distributed-optimizer"}], grid={"tp": [1, 2], "pp": [1]})
    assert [run.label for run in read_runs(path)[1]] == ["dp_strategy distributed-optimizer", "tp 1", "tp 2"]

"""sweep.yaml: legal content, conditions, and errors."""

from pathlib import Path
from typing import Any

import pytest

from megalite.config.describe import values_of
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.sweep.spec import read_condition, read_spec
from tests.sweep.sweeps import write_sweep


def test_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("plans: []")
    (tmp_path / "train.py").write_text("")
    path = write_sweep(
        tmp_path,
        preset="gpt2-124m",
        base=["a.yaml", "b.yaml"],
        grid={"tensor_model_parallel_size": [1, 2], "pipeline_layers": [[1, 3], [2, 2]], "bf16": [True]},
        list=[{"parallel": {"tp": 2}}],
        from_plan="plan.yaml",
        top=3,
        exclude=["tp > 2"],
        only=[{"pp": 1}],
        timeout=60,
        memory_limit="2GiB",
        cluster="mine.yaml",
        stack="unfused",
        environment={"OMP_NUM_THREADS": 1},
        program="train.py",
        sbatch={"gpus_per_node": 4, "options": {"partition": "gpu", "mem": 0}, "setup": "module load x"},
    )
    spec = read_spec(path)
    assert dict(spec.grid)["tensor_model_parallel_size"] == ({"tp": 1}, {"tp": 2})
    assert dict(spec.grid)["pipeline_layers"] == ({"pipeline_layers": [1, 3]}, {"pipeline_layers": [2, 2]})
    assert dict(spec.grid)["bf16"] == ({"precision": "bf16"},)
    assert spec.list == ({"tp": 2},)
    assert spec.base == (tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert (spec.from_plan, spec.top) == (tmp_path / "plan.yaml", 3)
    assert spec.cluster == str(tmp_path / "mine.yaml"), "a file beside the sweep"
    assert spec.stack == "unfused"
    assert spec.memory_limit == 2 * 2**30
    assert spec.environment == {"OMP_NUM_THREADS": "1"}
    assert spec.program == tmp_path / "train.py"
    assert (spec.sbatch.gpus_per_node, spec.sbatch.setup) == (4, ("module load x",))
    assert spec.sbatch.options == {"partition": "gpu", "mem": "0"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gird": {}}, "unknown key gird: did you mean grid"),
        ({"grid": None}, "is empty; add from_plan, list or grid"),
        ({"grid": {}}, "grid takes `name: value` lines"),
        ({"grid": {"tp": 2}}, "grid: tp takes a list that is not empty, got 2"),
        ({"grid": {"tp": [1, "two"]}}, "grid: tp takes a whole number such as 4, got 'two'"),
        ({"grid": {"tpp": [1]}}, "unknown section or key tpp"),
        ({"grid": {"tp": [1, 1]}}, "tp has 1 twice"),
        ({"grid": {"tp": [1], "tensor_model_parallel_size": [2]}}, "both set tp"),
        ({"grid": {"train_iters": [1, 2]}}, "train_iters cannot be set: steps sets the length of a run"),
        ({"settings": {"save": "here"}}, "save cannot be set: runs of a sweep neither load nor save"),
        ({"list": [{"lr_warmup_iters": 3}]}, "list, entry 1: lr_warmup_iters cannot be set"),
        ({"list": [{"num_layers_per_virtual_pipeline_stage": 1}]}, "sets other settings; use vpp"),
        ({"ranks": 0}, "ranks is 0; it must be above 0"),
        ({"ranks": "two"}, "ranks takes a whole number such as 8, got 'two'"),
        ({"steps": 3, "warm_up_steps": 3}, "warm_up_steps 3 needs steps: 8"),
        ({"timeout": -1}, "timeout is -1; it must be above 0"),
        ({"memory_limit": "70"}, "memory_limit takes a size such as 70GB"),
        ({"top": 3}, "top has no effect without from_plan"),
        ({"stack": "fused"}, "stack has no effect without cluster"),
        ({"environment": {"A": [1]}}, "environment: A takes text or a number"),
        ({"program": "none.py"}, "program .*none.py does not exist"),
        ({"sbatch": {"partition": "gpu"}}, "sbatch: unknown key partition"),
        ({"exclude": "tp > 2"}, "exclude takes a list"),
    ],
)
def test_error_names_the_wrong_key(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(write_sweep(tmp_path, **keys))


def test_bad_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    with pytest.raises(ConfigError, match="does not exist"):
        read_spec(path)
    for text, message in (
        ("grid: {tp: [1]\n", "is not YAML"),
        ("- 1\n", "must hold `key: value`"),
        ("ranks: 1\nranks: 2\n", "ranks is given twice"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_spec(path)


SETTINGS: dict[str, Any] = values_of(RunConfig()) | {
    "tp": 4,
    "pp": 2,
    "dp": 3,
    "ranks": 24,
    "pipeline_layers": [1, 3],
    "pipeline_schedule": "zb-h1",
}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"tp": 4}, True),
        ({"tp": 4, "pp": 1}, False),
        ({"tp": [2, 4], "pp": [2]}, True),
        ({"tensor_model_parallel_size": 4}, True),
        ({"pipeline_layers": [1, 3]}, True),
        ({"pipeline_layers": [2, 2]}, False),
        ({"ranks": [8, 24]}, True),
        ({"pipeline_schedule_file": None}, True),
        ({"bf16": True}, False),
        ("tp * pp > 8", False),
        ("tp * pp >= 8 and dp == 3", True),
        ("1 < pp < tp", True),
        ("1 < pp < 2", False),
        ("not (tp + pp == 6)", False),
        ("ranks // tp - dp == 3 or tp % 3 == 2", True),
        ("-tp < 0", True),
        ("pipeline_schedule in ['zb-h1', 'zb-v']", True),
        ("pipeline_schedule not in ('zb-h1', 'zb-v')", False),
        ("vpp == 1 and pipeline_schedule_file == None", True),
    ],
)
def test_conditions_that_hold(condition: Any, holds: bool) -> None:
    assert read_condition(condition, "here").holds(SETTINGS) is holds


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (3, "here takes conditions such as"),
        ({}, "here takes conditions such as"),
        ("tp >", "tp > is not a formula"),
        ("tpp > 1", "tpp is not a setting: did you mean"),
        ("print(tp)", "print is not a setting"),
        ({"tp": "four"}, "tp takes a whole number"),
        ({"tpp": 4}, "unknown section or key tpp"),
    ],
)
def test_invalid_conditions_are_errors(condition: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_condition(condition, "here")


@pytest.mark.parametrize("condition", ["etp > 1", "tp / (pp - 2) > 1"])
def test_undefined_results_of_conditions_are_errors(condition: str) -> None:
    with pytest.raises(ConfigError, match=r"here: .* cannot be evaluated"):
        read_condition(condition, "here").holds(SETTINGS)

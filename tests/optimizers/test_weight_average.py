"""Test the moving average of the weights: equation, layouts, evaluation, saving and reading."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.weights import export_checkpoint
from megalite.conversion.native import NativeWeights
from megalite.conversion.open import load_model, open_weights
from megalite.parity.trajectory import assemble, local_parts
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.topology import Topology
from megalite.training.replica import consensus
from tests.conversion.samples import run as convert_run
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, save_run, silent
from tests.support.tiny import MOE, Z1, Part, Runner, build, tiny_config

Settings = dict[str, Any]

DECAY = 0.6
SMALL: Settings = {"num_layers": 2, "global_batch_size": 4, "ema_decay": DECAY, "eval_ema": True}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "tp2-dp2-zero2": (4, {"tp": 2, **Z1, "shard_gradients": True}),
    "dp2-zero3-muon": (2, {"dp_strategy": "fully-sharded", "optimizer": "muon"}),
    "ep2-server": (2, {"ep": 2, **MOE, "dp_strategy": "sharded-parameter-server"}),
}
Found = tuple[dict[str, Part], float]


def averaged(context: RankContext, world: int, settings: Settings, folder: str | None = None) -> Found:
    """Return the average after three steps and its loss on the next batch; save it, or load it from a folder."""
    config = tiny_config(world, **SMALL, **settings)
    if folder is not None and Path(folder).exists():
        runner = continued(context, config, folder)
    else:
        runner = Runner(build(context, config))
        for _ in range(3):
            runner.step()
        if folder is not None:
            save_run(runner, folder)
    with consensus(runner.replica):
        loss = runner.evaluate()
    found = local_parts(runner.replica, "ema"), loss
    runner.replica.strategy.close()
    return found


@cache
def alone(optimizer: str, experts: bool) -> Found:
    return averaged(RankContext(0), 1, {"optimizer": optimizer, **(MOE if experts else {})})


def test_average_equals_the_equation_and_is_evaluated() -> None:
    runner = Runner(build(RankContext(0), tiny_config(1, **SMALL)))
    wanted = {name: values for name, (_, _, values) in local_parts(runner.replica, "weight").items()}
    for _ in range(3):
        runner.step()
        for name, (_, _, values) in local_parts(runner.replica, "weight").items():
            wanted[name] = DECAY * wanted[name] + (1 - DECAY) * values
    found = {name: values for name, (_, _, values) in local_parts(runner.replica, "ema").items()}
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-15, err_msg=name)
    before, parameters = local_parts(runner.replica, "weight"), [*runner.replica.stages[0].parameters()]
    with consensus(runner.replica):
        loss = runner.evaluate()
        with consensus(runner.replica, saved=True):
            inside = {p.info.spec.name: p.data.clone() for p in parameters if isinstance(p, ShardedParameter)}
    for name, (_, _, values) in local_parts(runner.replica, "weight").items():
        assert np.array_equal(values, before[name][2]), "training continues with its weights"
        assert np.array_equal(inside[name].numpy(), found[name])
        assert not np.array_equal(values, found[name])
    assert loss != runner.evaluate()


def test_skipped_step_does_not_change_the_average() -> None:
    fp16: Settings = {"precision": "fp16", "initial_loss_scale": 2.0**30, "hysteresis": 1}
    runner = Runner(build(RankContext(0), tiny_config(1, **SMALL, **fp16)))
    before = local_parts(runner.replica, "ema")
    assert runner.step().skipped
    for name, (_, _, values) in local_parts(runner.replica, "ema").items():
        assert np.array_equal(values, before[name][2]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_average_is_equal_in_all_layouts_and_checkpoints(layout: str, tmp_path: Path) -> None:
    world, settings = LAYOUTS[layout]
    optimizer = settings.get("optimizer", "adam")
    parts, loss = alone(optimizer, "ep" in settings)
    folder = str(tmp_path / "saved")
    ranks = run_ranks(world, averaged, world, settings, folder)
    plain = {"optimizer": optimizer, **(MOE if "ep" in settings else {})}
    again = averaged(RankContext(0), 1, plain, folder)
    for found in (ranks, [again]):
        assert found[0][1] == pytest.approx(loss, rel=1e-9)
        whole = assemble([part for part, _ in found])
        for name, values in assemble([parts]).items():
            np.testing.assert_allclose(whole[name], values, rtol=1e-8, atol=1e-10, err_msg=name)


def test_readers_load_the_average(tmp_path: Path) -> None:
    """A run that starts from weights only initializes its average with them."""
    runner = Runner(build(RankContext(0), tiny_config(1, **SMALL, precision="bf16")))
    for _ in range(2):
        runner.step()
    save_run(runner, tmp_path)
    wanted = {name: values for name, (_, _, values) in local_parts(runner.replica, "ema").items()}
    converted = NativeWeights(tmp_path, ema=True)
    model = load_model(
        tmp_path, Topology.solo(), ema=True, dtype=torch.float32, needs_tokenizer=False, log=silent
    ).stage
    loaded = {p.info.spec.name: p.data for p in model.parameters() if isinstance(p, ShardedParameter)}
    for name, values in wanted.items():
        assert np.array_equal(converted.read(name).numpy(), values), name
        assert np.array_equal(loaded[name].numpy(), values), name
    changes: Settings = {"precision": "bf16", "load": str(tmp_path), "finetune": True}
    other = continued(RankContext(0), tiny_config(1, **SMALL, **changes), tmp_path)
    main = local_parts(other.replica, "main_param")
    for name, (_, _, values) in local_parts(other.replica, "ema").items():
        assert np.array_equal(values, main[name][2]), name


def test_checkpoint_without_an_average_is_refused(tmp_path: Path) -> None:
    plain: Settings = {**SMALL, "ema_decay": None, "eval_ema": False}
    runner = Runner(build(RankContext(0), tiny_config(1, **plain)))
    save_run(runner, tmp_path)
    with pytest.raises(ConfigError, match=r"no moving average of the weights.*--weights trained"):
        open_weights(tmp_path, ema=True)
    other = continued(RankContext(0), tiny_config(1, **SMALL), tmp_path)
    main = local_parts(other.replica, "main_param")
    for name, (_, _, values) in local_parts(other.replica, "ema").items():
        assert np.array_equal(values, main[name][2]), "it starts from the parameters"


def test_exports_can_use_the_average(tmp_path: Path) -> None:
    """`megalite convert --weights ema` writes what `--export-hf` writes with `eval_ema`, and not what it writes without."""
    runner = Runner(build(RankContext(0), tiny_config(1, **SMALL, precision="fp32")))
    runner.step()
    step = save_run(runner, tmp_path / "saved")
    quiet = {"advance": lambda count: None, "log": silent}
    for name, ema in (("hf-ema", True), ("hf", False)):
        export_checkpoint(step.parent, 1, tmp_path / name, **quiet, ema=ema)
    assert convert_run(step, tmp_path / "by-hand", "--to", "huggingface", "--weights", "ema") == 0
    found = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("hf-ema", "hf", "by-hand")}
    assert found["by-hand"] == found["hf-ema"] != found["hf"]
    with pytest.raises(ConfigError, match=r"--weights ema has no effect on .*, a huggingface folder"):
        open_weights(tmp_path / "hf", ema=True)

"""Test main parameters stored as the 16 bits that bf16 weights lack: exact values and equal steps."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.data_parallel import shards
from megalite.data_parallel.shards import SplitMain, unfolded
from tests.data_parallel.toy import SHAPES, ToyRun, trajectory
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, save_run
from tests.support.tiny import Z1, Runner, build, tiny_config

SPLIT: dict[str, Any] = {"precision": "bf16", "main_params": "split"}
WHOLE: dict[str, Any] = {"precision": "bf16", "main_params": "fp32"}


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_value_is_restored(low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test all upper halves with lower halves around the ties; NaN stays NaN."""
    monkeypatch.setattr(shards, "PIECE", 10_000)
    bits = torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(16) | low
    main = torch.nn.Parameter(bits.clone().view(torch.float32))
    nan = main.isnan()
    made = SplitMain(main, main.data.to(torch.bfloat16))
    assert main.data.untyped_storage().nbytes() == 4 and main.data.isnan().all()
    made.unfold()
    assert torch.equal(main.data.view(torch.int32)[~nan], bits[~nan])
    assert main.data[nan].isnan().all()


def test_values_written_while_unfolded_are_kept() -> None:
    main = torch.nn.Parameter(torch.randn(1000))
    weights = main.data.to(torch.bfloat16)
    made = SplitMain(main, weights)
    for step in range(3):
        with unfolded([made]), unfolded([made]):
            main.data.add_(torch.randn(1000, generator=torch.Generator().manual_seed(step)) * 1e-3)
            expected = main.data.clone()
            weights.copy_(main.data)
        assert not made.in_memory
        with unfolded([made]):
            assert torch.equal(main.data, expected)


@pytest.mark.parametrize("settings", [{}, Z1, {**Z1, "overlap_param_gather": False}], ids=str)
def test_split_main_does_not_change_steps(settings: dict[str, Any]) -> None:
    ours = run_ranks(3, trajectory, 3, {**settings, **SPLIT}, 12)
    theirs = run_ranks(3, trajectory, 3, {**settings, **WHOLE}, 12)
    for one, other in zip(ours, theirs, strict=True):
        for step, (weights, wanted) in enumerate(zip(one, other, strict=True)):
            for name in SHAPES:
                assert torch.equal(weights[name], wanted[name]), (step, name)


OTHERS: list[dict[str, Any]] = [
    {**Z1, "shard_gradients": True},
    {"dp_strategy": "fully-sharded"},
    {"dp_strategy": "fused-all-reduce"},
    {"dp_strategy": "sharded-parameter-server"},
    {"grad_compression": "onebit"},
    {"optimizer": "onebit-adam", "freeze_step": 2},
    {"optimizer": "lamb"},
    {"optimizer": "sgd"},
    {"optimizer": "muon"},
    {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
]


def both_forms(context: RankContext) -> list[str]:
    """Return the settings for which the two forms give different weights."""
    found = []
    for settings in OTHERS:
        ours, theirs = (trajectory(context, 2, {**settings, **form}, 5) for form in (SPLIT, WHOLE))
        if not all(torch.equal(ours[-1][name], theirs[-1][name]) for name in SHAPES):
            found.append(str(settings))
    return found


def test_split_main_does_not_change_other_strategies_and_optimizers() -> None:
    assert run_ranks(2, both_forms) == [[], []]


GPT: dict[str, Any] = {"num_layers": 2, "micro_batch_size": 2, "ddp_bucket_size": 3000}


def saved_and_resumed(
    context: RankContext, world: int, layout: dict[str, Any], folders: list[str], forms: list[dict[str, Any]]
) -> list[Any]:
    """Return (results, weights, main parameters) of runs that resume from each other's checkpoints.

    Both forms train and save; then each loads the other's checkpoint."""
    found: list[Any] = []
    for form, folder in zip(forms, folders, strict=True):
        runner = Runner(build(context, tiny_config(world, **GPT, **layout, **form)))
        for _ in range(3):
            runner.step()
        save_run(runner, folder)
        found.append((str([runner.step() for _ in range(2)]), state(runner)))
    for form, folder in zip(forms, reversed(folders), strict=True):
        runner = continued(context, tiny_config(world, **GPT, **layout, **form, load=folder), folder)
        found.append((str([runner.step() for _ in range(2)]), state(runner)))
    return found


def state(runner: Runner) -> dict[str, torch.Tensor]:
    strategy = runner.replica.strategy
    with strategy.consensus():
        return {
            f"{number} {name}": values.clone()
            for number, shard in enumerate(strategy.shards)
            for name, values in (("weights", shard.bucket.data), ("main", shard.main))
        }


def assert_resumed_alike(world: int, layout: dict[str, Any], folder: Path, forms: list[dict[str, Any]]) -> None:
    folders = [str(folder / "one"), str(folder / "other")]
    for (results, tensors), *others in run_ranks(world, saved_and_resumed, world, layout, folders, forms):
        for other_results, other in others:
            assert other_results == results
            for name, values in tensors.items():
                assert torch.equal(other[name], values), name


@pytest.mark.parametrize("world, layout", [(2, {"tp": 2}), (4, {"pp": 2, "dp": 2, **Z1})], ids=str)
def test_both_forms_load_each_others_checkpoints(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    assert_resumed_alike(world, layout, tmp_path, [SPLIT, WHOLE])


def alive(context: RankContext, settings: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of all storages of a run between two steps, and the number of parameters."""
    before = {id(tensor) for tensor in tensors()}
    run = ToyRun(context.topology(dp=1), {"ddp_bucket_size": 300, **settings})
    run.step()
    new = [tensor.untyped_storage() for tensor in tensors() if id(tensor) not in before]
    storages = {storage.data_ptr(): storage.nbytes() for storage in new}
    return sum(storages.values()), sum(shard.main_param.numel() for shard in run.strategy.shards)


def tensors() -> list[torch.Tensor]:
    """Return all live tensors. (isinstance would call methods of objects, and some of torch's warn.)"""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def test_split_main_saves_two_bytes_per_parameter_between_steps() -> None:
    (ours, count), (theirs, _) = (alive(RankContext(0), settings) for settings in (SPLIT, WHOLE))
    # A listed tie takes 8 bytes; there is about one per 2^17 elements.
    assert theirs - ours == pytest.approx(2 * count, abs=80)


def test_main_parameters_have_memory_only_during_an_update() -> None:
    run = ToyRun(RankContext(0).topology(dp=1), SPLIT)

    def in_memory() -> set[bool]:
        return {shard.main_param.untyped_storage().nbytes() > 4 for shard in run.strategy.shards}

    assert in_memory() == {False}
    run.gradients()
    assert in_memory() == {False}
    run.step()
    assert in_memory() == {False}
    with run.strategy.consensus():
        assert in_memory() == {True}

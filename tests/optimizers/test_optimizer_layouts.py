"""Test that optimizers that need whole tensors give one rank's numbers in every layout, and resume."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megalite.optimizers import matrices
from megalite.optimizers.lamb import LAMB
from megalite.optimizers.matrix_optimizers import Muon
from megalite.parity.report import worst_tensor
from megalite.parity.trajectory import RankTrajectory, Trajectory, one_rank_trajectory, rank_trajectory
from megalite.training.state_tensors import matrix_states
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, save_run
from tests.support.tiny import (
    LLAMA,
    Z1,
    Part,
    Runner,
    assemble,
    assert_same_numbers,
    build,
    local_parts,
    tiny_config,
    whole,
)

Settings = dict[str, Any]

STEPS = 3
SMALL: Settings = {"num_layers": 2, "global_batch_size": 4, "micro_batch_size": 1, "train_iters": 4}
HIDDEN = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
EXPERTS: Settings = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 16, "moe_first_dense_layers": 1}

LAYOUTS: dict[str, tuple[int, Settings]] = {
    "tp2-dp2-zero": (4, {"tp": 2, **Z1}),
    "pp2-dp2": (4, {"pp": 2, "dp": 2}),
    "tp2-ep2-etp1-zero": (4, {"tp": 2, "ep": 2, "etp": 1, **EXPERTS, **Z1, "sequence_parallel": True}),
}


def settings_of(layout: str, optimizer: str, **more: Any) -> Settings:
    return {**SMALL, **optimizer_settings(optimizer), **LAYOUTS[layout][1], **more}


def optimizer_settings(optimizer: str) -> Settings:
    more: dict[str, Settings] = {
        "schedule-free-adamw": {"lr_decay_style": "constant"},
        **{name: {"soap_frequency": 1} for name in ("soap", "one-sided-soap")},
    }
    return {"optimizer": optimizer, **more.get(optimizer, {})}


def run(context: RankContext, world: int, settings: Settings) -> RankTrajectory:
    return rank_trajectory(context, tiny_config(world, **settings), STEPS)


@cache
def reference(optimizer: str, experts: bool) -> Trajectory:
    model = EXPERTS if experts else {}
    return one_rank_trajectory(tiny_config(1, **SMALL, **model, **optimizer_settings(optimizer)), STEPS)


CASES = [*((layout, "lamb") for layout in LAYOUTS), ("tp2-dp2-zero", "sgd"), ("tp2-ep2-etp1-zero", "one-sided-soap")]
"""Optimizers and layouts that are not in `tests/parity`."""


@pytest.mark.parametrize(("layout", "optimizer"), CASES)
def test_layout_does_not_change_numbers(layout: str, optimizer: str) -> None:
    """Compare losses, gradients and weights; replicated values are bit-equal."""
    world, settings = LAYOUTS[layout]
    found = run_ranks(world, run, world, settings_of(layout, optimizer))
    one_rank = reference(optimizer, "num_experts" in settings)
    assert_same_numbers(whole(found), one_rank)


def ratios(context: RankContext, world: int, settings: Settings) -> dict[str, float]:
    """Return this rank's trust ratios after two steps."""
    runner = Runner(build(context, tiny_config(world, **settings)))
    for _ in range(2):
        runner.step()
    optimizer = runner.replica.optimizer
    assert isinstance(optimizer, LAMB)
    return optimizer.trust_ratios


@pytest.mark.parametrize("layout", ["pp2-dp2", "tp2-ep2-etp1-zero"])
def test_trust_ratios_are_those_of_whole_tensors(layout: str) -> None:
    world, settings = LAYOUTS[layout]
    settings = settings_of(layout, "lamb")
    found = run_ranks(world, ratios, world, settings)
    assert all(rank == found[0] for rank in found), "every rank has those of the whole model"
    plain = {name: value for name, value in settings.items() if name in {**SMALL, **EXPERTS, "optimizer": 0}}
    wanted = ratios(RankContext(0), 1, plain)
    assert found[0] == pytest.approx(wanted, rel=1e-9)
    assert 0.01 < min(wanted.values()) < max(wanted.values()) < 10.0, "ratios must not all be clipped"


def shared_work(context: RankContext, settings: Settings) -> dict[str, Any]:
    """Return the matrices of this rank and whether parts are sent, with several small waves."""
    with mock.patch.object(matrices, "WAVE", 10_000):
        config = tiny_config(2, **SMALL, **settings, optimizer="muon", tie_embeddings=False)
        optimizer = build(context, config).optimizer
    assert isinstance(optimizer, Muon)
    waves = optimizer._waves
    return {
        "waves": len(waves),
        "owned": [matrix.key for wave in waves for matrix in wave.owned],
        "cost": sum(
            matrix.rows * matrix.columns * min(matrix.rows, matrix.columns) for wave in waves for matrix in wave.owned
        ),
        "gathers": any(wave.gather.moves for wave in waves),
        "gives_back": any(wave.scatter.moves for wave in waves),
    }


@pytest.mark.parametrize(
    ("settings", "gathers", "gives_back"), [({}, False, True), (Z1, True, True), ({"tp": 2}, True, True)]
)
def test_each_matrix_is_orthogonalised_by_one_rank(settings: Settings, gathers: bool, gives_back: bool) -> None:
    """Two ranks share the work about evenly, also if both have all parameters and need not gather first.

    Embeddings and the head have no owner."""
    first, second = run_ranks(2, shared_work, settings)
    assert not set(first["owned"]) & set(second["owned"])
    names = {f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in HIDDEN}
    assert {name for name, _ in first["owned"] + second["owned"]} == names
    assert 0.6 < first["cost"] / second["cost"] < 1.7
    for rank in (first, second):
        assert (rank["gathers"], rank["gives_back"]) == (gathers, gives_back)
        assert rank["waves"] > 1


def work_of_replicas(context: RankContext) -> tuple[bool, list[str], dict[str, np.ndarray]]:
    """Return, for replicas with different weights, whether matrices are sent, those of this rank, and its weights."""
    settings = {**SMALL, "dp_strategy": "local-sgd", "sync_interval": 4, "optimizer": "muon"}
    runner = Runner(build(context, tiny_config(2, **settings)))
    runner.step()
    optimizer = runner.replica.optimizer
    assert isinstance(optimizer, Muon)
    moves = any(wave.gather.moves or wave.scatter.moves for wave in optimizer._waves)
    owned = sorted(matrix.key[0] for wave in optimizer._waves for matrix in wave.owned)
    return (moves, owned, {name: values for name, (_, _, values) in local_parts(runner.replica, "weight").items()})


def test_replicas_with_different_weights_share_no_work() -> None:
    first, second = run_ranks(2, work_of_replicas)
    assert first[:2] == second[:2]
    assert not first[0] and len(first[1]) == 2 * len(HIDDEN)
    name = "layers.0.mlp.up.weight"
    assert not np.array_equal(first[2][name], second[2][name]), "each uses its own gradients"


def small_waves(context: RankContext, world: int, settings: Settings) -> RankTrajectory:
    with mock.patch.object(matrices, "WAVE", 3_000):
        return run(context, world, settings)


def test_size_of_waves_does_not_change_numbers() -> None:
    world, _ = LAYOUTS["tp2-dp2-zero"]
    found = run_ranks(world, small_waves, world, settings_of("tp2-dp2-zero", "muon"))
    assert_same_numbers(whole(found), reference("muon", False))


def saved_or_resumed(context: RankContext, world: int, settings: Settings, folder: str, stop: bool) -> dict[str, Part]:
    """Return the weights after four steps of a run that saves after two, or that resumes from there."""
    if stop:
        runner = continued(context, tiny_config(world, **settings, load=folder), folder)
        assert runner.replica.optimizer.updates == 2
    else:
        runner = Runner(build(context, tiny_config(world, **settings)))
        for _ in range(2):
            runner.step()
        save_run(runner, folder)
    for _ in range(2):
        runner.step()
    runner.replica.strategy.wait_for_parameters()
    return local_parts(runner.replica, "weight")


@pytest.mark.parametrize("optimizer", ["muon", "soap", "one-sided-soap", "schedule-free-adamw"])
def test_one_rank_resumes_a_checkpoint_of_four(optimizer: str, tmp_path: Path) -> None:
    """The numbers are equal. (On the same layout they are bit-equal: test_every_strategy_resumes_from_any_step.)"""
    settings = settings_of("tp2-dp2-zero", optimizer)
    ranks = run_ranks(4, saved_or_resumed, 4, settings, str(tmp_path), False)
    plain = {**SMALL, **optimizer_settings(optimizer)}
    work_of_replicas = saved_or_resumed(RankContext(0), 1, plain, str(tmp_path), True)
    difference, name, *_ = worst_tensor(assemble([work_of_replicas]), assemble(ranks), negligible=1e-3)
    assert difference < 1e-9, name


Squares = dict[tuple[Any, ...], np.ndarray]


def squares(context: RankContext, world: int, settings: Settings, folder: str, loads: bool) -> Squares:
    """Return this rank's matrix states of a run that saves after two steps, or that loads them."""
    if loads:
        runner = continued(context, tiny_config(world, **settings, load=folder), folder)
    else:
        runner = Runner(build(context, tiny_config(world, **settings)))
        runner.step()
        runner.step()
        save_run(runner, folder)
    states = matrix_states(runner.replica)
    return {(state.name, state.spec.name, state.spec.slice): state.values.numpy().copy() for state in states}


def joined(ranks: list[Squares]) -> Squares:
    found = {key: values for rank in ranks for key, values in rank.items()}
    assert len(found) == sum(map(len, ranks)), "one rank has a matrix"
    return found


def test_matrix_states_load_exactly_on_other_ranks(tmp_path: Path) -> None:
    wrote = joined(run_ranks(4, squares, 4, settings_of("tp2-ep2-etp1-zero", "soap"), str(tmp_path), False))
    basis = wrote["eigenbasis_right", "layers.1.moe.experts.up.weight", ((5, 6), (0, 32), (0, 32))][0]
    assert np.abs(basis - np.eye(32)).max() > 0.1 > 1e-12 > np.abs(basis @ basis.T - np.eye(32)).max()
    for world, other in ((1, {"optimizer_cpu_offload": True}), (2, {"pp": 2})):
        settings = {**SMALL, **EXPERTS, **optimizer_settings("soap"), **other}
        read = joined(run_ranks(world, squares, world, settings, str(tmp_path), True))
        assert read.keys() == wrote.keys()
        assert all(np.array_equal(values, wrote[key]) for key, values in read.items())


def test_other_number_of_replicas_loads_one_replicas_basis(tmp_path: Path) -> None:
    """The mean of two bases is not a basis."""
    own = settings_of("tp2-dp2-zero", "one-sided-soap", tp=1, dp_strategy="local-sgd", sync_interval=2)
    wrote = joined(run_ranks(2, squares, 2, own, str(tmp_path), False))
    for world, wanted in ((1, (0,)), (4, (0, 1, 0, 1))):
        read = run_ranks(
            world, squares, world, own | ({"dp_strategy": "all-reduce"} if world == 1 else {}), str(tmp_path), True
        )
        for replica, rank in zip(wanted, read, strict=True):
            assert len(rank) == 2 * 2 * len(HIDDEN)
            for (state, name, bounds), values in rank.items():
                there = wrote[state, name, ((replica, replica + 1), *bounds[-3:])]
                assert np.array_equal(values.reshape(there.shape), there)

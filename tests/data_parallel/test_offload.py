"""Test offloaded optimizer states: equal steps, planned bytes, and exchangeable checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.optimizer import HOST_SLOTS
from megalite.data_parallel import shards
from megalite.data_parallel.facts import choose_offloaded
from megalite.optimizers import base, lamb
from megalite.partition.memory import held_buckets, rank_memory, stages_of_rank
from megalite.rehearsal.run import rehearse
from megalite.training.replica import Replica, consensus
from tests.data_parallel.test_split_main import WHOLE, assert_resumed_alike
from tests.data_parallel.toy import SHAPES, trajectory
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import hashes, interrupted
from tests.support.tiny import Z1, Runner, build, tiny_config, words

HOST: dict[str, Any] = {"optimizer_cpu_offload": True}
HALF: dict[str, Any] = {**HOST, "optimizer_offload_fraction": 0.5}
OTHERS: list[dict[str, Any]] = [
    {},
    {"precision": "fp16"},
    {"precision": "fp32"},
    {**Z1, "overlap_param_gather": False},
    {**Z1, "shard_gradients": True},
    {"dp_strategy": "fully-sharded"},
    {"dp_strategy": "fused-all-reduce"},
    {"dp_strategy": "parameter-server"},
    {"dp_strategy": "sharded-parameter-server"},
    {"grad_compression": "onebit"},
    {"optimizer": "lamb"},
    {"optimizer": "lamb", "precision": "fp32", **Z1},
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "sgd_momentum": 0.0},
    {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
    {"exp_avg_dtype": "bf16", **Z1},
    {"ema_decay": 0.9, **Z1},
    {"ema_decay": 0.9, "precision": "fp32", "optimizer": "sgd", "sgd_momentum": 0.0},
    {"ema_decay": 0.9, "optimizer": "lamb"},
    {"optimizer": "muon", **Z1},
    {"optimizer": "muon", "precision": "fp32", "muon_nesterov": False},
    {"optimizer": "soap", "soap_frequency": 1, "ema_decay": 0.9, **Z1},
    {"optimizer": "muon", "ema_decay": 0.9, "dp_strategy": "fully-sharded"},
]


@contextmanager
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "HOST_PIECE", 128)
        patch.setattr(shards, "HOST_PIECE", 128)
        patch.setitem(lamb.BLOCKS, "cpu", 128)
        yield


def both_places(context: RankContext) -> list[str]:
    """Return the settings for which offloading changes the weights."""
    found = []
    with small_pieces():
        for settings in OTHERS:
            there = trajectory(context, 2, {"precision": "bf16", **settings}, 4)
            for form in (HOST, HALF):
                here = trajectory(context, 2, {"precision": "bf16", **settings, **form}, 4)
                same = (torch.equal(a[name], b[name]) for a, b in zip(here, there, strict=True) for name in SHAPES)
                if not all(same):
                    found.append(str(settings | form))
    return found


def test_offload_does_not_change_steps() -> None:
    assert run_ranks(2, both_places) == [[], []]


CLIPPED: dict[str, Any] = {"ema_decay": 0.6, "qk_clip": True, "qk_clip_threshold": 1e-3}
MODELS: list[tuple[int, dict[str, Any]]] = [
    (1, {"precision": "fp32", "optimizer": "sgd", **CLIPPED, "eval_ema": True}),
    (2, {"tp": 2, "precision": "bf16", "optimizer": "lamb", **CLIPPED}),
    (2, words("dp=2 dp_strategy=fully-sharded precision=bf16 optimizer=muon eval_ema") | CLIPPED),
]


def models_in_both(context: RankContext, world: int, settings: dict[str, Any]) -> list[str]:
    """Return the differences after steps and an evaluation: losses, weights, main parameters, states and averages."""
    found = []
    with small_pieces():
        for form in ({}, HOST, HALF):
            runner = Runner(build(context, tiny_config(world, num_layers=2, **settings, **form)))
            seen: list[Any] = []
            for _ in range(2):
                seen.append(str(runner.step()))
                with consensus(runner.replica):
                    seen.append(runner.evaluate())
                seen.append(hashes(runner.replica))
            found.append(seen)
            assert (pinned_bytes(runner.replica) > 0) is bool(form) or context.rank > 0
            runner.replica.strategy.close()
    plain, *others = found
    return [f"{one} is not {two}" for other in others for one, two in zip(other, plain, strict=True) if one != two]


@pytest.mark.parametrize("world, settings", MODELS, ids=str)
def test_offload_does_not_change_clipping_and_averages(world: int, settings: dict[str, Any]) -> None:
    assert run_ranks(world, models_in_both, world, settings) == [[]] * world


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "optimizer": "muon", **CLIPPED, **Z1}], ids=str)
def test_checkpoints_load_with_and_without_offload(layout: dict[str, Any], tmp_path: Path) -> None:
    assert_resumed_alike(2, layout, tmp_path, [WHOLE | HOST, WHOLE])


@pytest.mark.parametrize(
    "settings", [{"dp_strategy": "fully-sharded"}, {"optimizer": "muon", **CLIPPED, "eval_ema": True}], ids=str
)
def test_resume_with_offload_is_exact(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {"dp": 2, "precision": "bf16", "num_layers": 2, "global_batch_size": 4, **HOST, **settings}
    assert run_ranks(2, interrupted, 2, settings, str(tmp_path), 4, [2]) == [[], []]


def pinned_bytes(replica: Replica) -> int:
    total = 0
    for shard in replica.strategy.shards:
        if shard.host is not None:
            kept = [*replica.optimizer.state(shard.main_param).values()]
            kept += [] if shard.host_main is None else [shard.host_main]
            total += sum(values.nbytes for values in kept)
    return total


MUON: dict[str, Any] = {"precision": "bf16", "optimizer": "muon", "ema_decay": 0.9}
LAYOUTS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "bf16", **Z1},
    {"precision": "bf16", "dp_strategy": "fully-sharded"},
    {"precision": "fp32", "dp_strategy": "parameter-server"},
    {"precision": "bf16", "exp_avg_dtype": "bf16", **Z1},
    {"precision": "bf16", "ema_decay": 0.9, **Z1},
    {**MUON, "dp_strategy": "fully-sharded"},
]


def held_and_planned(context: RankContext) -> list[tuple[int, int, int, int]]:
    """Return (bytes in host memory, planned, bytes on the device for pieces, planned)."""
    found = []
    for settings, form in [*((settings, HOST) for settings in LAYOUTS), (LAYOUTS[1], HALF)]:
        here, there = (tiny_config(2, dp=2, num_layers=2, **settings, **place) for place in (form, {}))
        runner = Runner(build(context, here))
        runner.step()
        held, rank = runner.replica.strategy, context.rank
        planned = sum(bucket.host_bytes for bucket in held_buckets(here, rank))
        assert held._host is not None or planned == 0
        slots = 0 if held._host is None else HOST_SLOTS * held._host._slots[0].nbytes
        plan, without = (rank_memory(each, stages_of_rank(each, rank)).workspace_bytes for each in (here, there))
        found.append((pinned_bytes(runner.replica), planned, slots, plan - without))
        held.close()
    return found


def test_offloaded_bytes_equal_the_plan() -> None:
    first, second = run_ranks(2, held_and_planned)
    for held, planned, slots, room in first:
        assert held == planned > 0 and slots == room > 0
    for held, planned, slots, room in second:
        assert held == planned and slots in (0, room)


@pytest.mark.parametrize("settings", [LAYOUTS[2], LAYOUTS[5], MUON], ids=str)
def test_device_memory_decreases_as_planned(settings: dict[str, Any]) -> None:
    """Compare live bytes after the build, on a device that counts them in blocks of 512 bytes."""
    shape = {"dp": 2, "hidden_size": 64}
    there, here = (tiny_config(2, **shape, **settings, **form) for form in ({}, HOST))
    found, before = rehearse(here, 0), rehearse(there, 0)
    plan = rank_memory(here, stages_of_rank(here, 0))
    without = rank_memory(there, stages_of_rank(there, 0))
    assert found.host_bytes == pytest.approx(plan.host_bytes, rel=0.03) and before.host_bytes == 0
    saved = without.optimizer_bytes + without.workspace_bytes - plan.optimizer_bytes - plan.workspace_bytes
    assert before.built_bytes - found.built_bytes == pytest.approx(saved, rel=0.1)
    assert found.peak_bytes < before.peak_bytes


def test_fraction_selects_whole_ranges_from_the_first() -> None:
    assert choose_offloaded([5, 0, 5, 10], 1.0) == [True, False, True, True]
    assert choose_offloaded([5, 0, 5, 10], 0.3) == [True, False, True, False]
    assert choose_offloaded([5, 5, 10], 0.25) == [True, False, False]
    assert choose_offloaded([5, 5], 0.0) == [False, False]


def params_norms(context: RankContext) -> set[float]:
    with small_pieces():
        found = set()
        for form in ({}, HOST):
            runner = Runner(build(context, tiny_config(1, precision="bf16", **form)))
            runner.step()
            found.add(float(runner.replica.strategy.local_params_squared()))
    return found


def test_parameter_norm_is_the_same() -> None:
    one, *other = params_norms(RankContext(0))
    assert other == pytest.approx([one], rel=1e-12) or not other

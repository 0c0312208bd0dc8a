"""Test replicas with different weights on a real model: tp and pp, skipped steps, evaluation, other replica counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data_parallel.replicas import FRAGMENTS, LOCAL, SGD, mean
from tests.data_parallel.toy import SHAPES, ToyRun, gradient
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, save_run
from tests.support.tiny import Runner, assemble, build, local_parts, tiny_config

Settings = dict[str, Any]

SMALL: Settings = {"num_layers": 2, "global_batch_size": 4, "lr_warmup_iters": None}
RING: Settings = {"dp_strategy": "gossip"}
LATE: Settings = {"dp_strategy": "local-sgd", "sync_interval": 4, "sync_delay": 2}
CHOCO: Settings = {**RING, "gossip_algorithm": "choco-sgd"}
DECENTLAM: Settings = {**RING, "gossip_algorithm": "decentlam", **SGD}
BF16: Settings = {"precision": "bf16", "wire_dtype": "bf16"}
FP16: Settings = {"precision": "fp16", "initial_loss_scale": 2.0**20, "hysteresis": 1}
"""The first steps overflow."""


def trained(context: RankContext, world: int, settings: Settings, steps: int) -> dict[str, Any]:
    runner = Runner(build(context, tiny_config(world, **SMALL, **settings)))
    results = [runner.step() for _ in range(steps)]
    with runner.replica.strategy.consensus():
        evaluated = runner.evaluate()
    runner.replica.strategy.close()
    return {
        "scalars": [(each.loss, each.grad_norm) for each in results],
        "skipped": [each.skipped for each in results],
        "evaluation": evaluated,
        "dp": runner.replica.topology.dp.rank,
        "main": local_parts(runner.replica, "main_param"),
    }


def by_replica(ranks: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Return the whole main parameters of each replica; raise if copies on its tp or pp ranks have drifted."""
    return [assemble([rank["main"] for rank in ranks if rank["dp"] == dp]) for dp in range(2)]


def differ(replicas: list[dict[str, np.ndarray]]) -> bool:
    return any((replicas[0][name] != values).any() for name, values in replicas[1].items())


TP: Settings = {"tp": 2, "sequence_parallel": True}
PP: Settings = {"pp": 2}


@pytest.mark.parametrize(
    ("settings", "layouts", "steps"),
    [(FRAGMENTS, [TP, PP], 5), (DECENTLAM, [TP], 3), (LATE, [PP], 7)],
    ids=["diloco", "decentlam", "asynchronous"],
)
def test_tp_and_pp_do_not_change_numbers(settings: Settings, layouts: list[Settings], steps: int) -> None:
    plain = run_ranks(2, trained, 2, {"dp": 2, **settings}, steps)
    wanted = by_replica(plain)
    assert differ(wanted)
    for layout in layouts:
        ranks = run_ranks(4, trained, 4, {"dp": 2, **layout, **settings}, steps)
        for rank in ranks:
            np.testing.assert_allclose(rank["scalars"], plain[0]["scalars"], rtol=1e-8)
            assert rank["evaluation"] == pytest.approx(plain[0]["evaluation"], rel=1e-8)
        for ours, theirs in zip(by_replica(ranks), wanted, strict=True):
            for name, values in theirs.items():
                np.testing.assert_allclose(ours[name], values, rtol=1e-6, atol=1e-8, err_msg=name)


def test_tp_does_not_change_numbers_of_instances() -> None:
    settings = {"dp": 4, "dp_instances": 2, "dp_strategy": "local-sgd", "sync_interval": 2, "sync_delay": 1}
    plain, split = (run_ranks(world, trained, world, {**settings, "tp": world // 4}, 4) for world in (4, 8))
    for rank in split:
        np.testing.assert_allclose(rank["scalars"], plain[0]["scalars"], rtol=1e-8)
        assert rank["evaluation"] == pytest.approx(plain[0]["evaluation"], rel=1e-8)
    for first in (0, 2):
        ours, wanted = (
            assemble([rank["main"] for rank in ranks if rank["dp"] // 2 * 2 == first]) for ranks in (split, plain)
        )
        for name, values in wanted.items():
            np.testing.assert_allclose(ours[name], values, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize(("layout", "settings"), [({"pp": 2}, {**LOCAL, **BF16}), ({"tp": 2}, {**CHOCO, **FP16})])
def test_copies_on_tp_and_pp_ranks_never_drift(layout: Settings, settings: Settings) -> None:
    ranks = run_ranks(4, trained, 4, {"dp": 2, **layout, **settings}, 8)
    assert differ(by_replica(ranks))
    assert len({str(rank["scalars"]) for rank in ranks}) == 1
    if "fp16" in settings.values():
        assert {*ranks[0]["skipped"]} == {True, False}
    losses = [loss for loss, _ in ranks[0]["scalars"]]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def norms(context: RankContext, ranks: int, settings: Settings) -> list[tuple[float, float]]:
    """Return (logged, clipping) of a step in the warm-up and of one after it, with different gradient sizes per rank."""
    run, found = ToyRun(context.topology(dp=ranks, instances=settings.get("dp_instances", 1)), settings), []
    for _ in range(2):
        result = run.strategy.norms(run.gradients(scale=1.0 + context.rank))
        found.append((result.logged, result.clipping))
        run.step()
    run.strategy.close()
    return found


@pytest.mark.parametrize(
    ("settings", "replicas", "members"), [(LOCAL, 3, 1), (RING, 3, 1), ({**LOCAL, "dp_instances": 2}, 2, 2)]
)
def test_each_replica_clips_by_its_norm(settings: Settings, replicas: int, members: int) -> None:
    def norm(step: int, ranks: range) -> float:
        flat = [sum((1.0 + rank) * gradient(name, step, rank).double().view(-1) for rank in ranks) for name in SHAPES]
        return float(torch.cat(flat).norm())

    ranks = replicas * members
    own = [replicas * norm(2, range(first, first + members)) for first in range(0, ranks, members)]
    for rank, found in enumerate(run_ranks(ranks, norms, ranks, {**settings, "sync_warmup_steps": 1})):
        assert found[0] == pytest.approx((norm(1, range(ranks)),) * 2, rel=1e-6)
        assert found[1] == pytest.approx((np.sqrt(np.mean(np.square(own))), own[rank // members]), rel=1e-6)


KINDS = ("main_param", "exp_avg", "exp_avg_sq")


def drifted(context: RankContext, folder: str, settings: Settings) -> dict[str, Any]:
    runner = Runner(build(context, tiny_config(4, dp=4, **SMALL, **settings)))
    for _ in range(2):
        runner.step()
    save_run(runner, folder)
    return {kind: local_parts(runner.replica, kind) for kind in KINDS}


def loaded(context: RankContext, dp: int, folder: str, settings: Settings, target: str | None) -> dict[str, Any]:
    runner = continued(context, tiny_config(dp, dp=dp, load=folder, **SMALL, **settings), folder)
    found: dict[str, Any] = {kind: local_parts(runner.replica, kind) for kind in (*KINDS, "weight")}
    if target is not None:
        save_run(runner, target)
    runner.step()
    runner.replica.strategy.close()
    return found


def average(ranks: list[dict[str, Any]], kind: str) -> dict[str, torch.Tensor]:
    return {name: mean([torch.from_numpy(rank[kind][name][2]) for rank in ranks]) for name in ranks[0][kind]}


def assert_all_have(ranks: list[dict[str, Any]], kind: str, wanted: dict[str, torch.Tensor]) -> None:
    for rank in ranks:
        for name, values in wanted.items():
            np.testing.assert_array_equal(rank[kind][name][2], values.numpy(), err_msg=f"{kind} {name}")


def test_fewer_or_more_replicas_start_from_the_mean(tmp_path: Path) -> None:
    settings = {"dp_strategy": "local-sgd", "sync_interval": 5, "precision": "bf16"}
    four, two = str(tmp_path / "four"), str(tmp_path / "two")
    old = run_ranks(4, drifted, four, settings)
    for dp, folder, target in ((2, four, two), (4, two, None)):
        found = run_ranks(dp, loaded, dp, folder, settings, target)
        for kind in KINDS:
            assert_all_have(found, kind, average(old, kind))
    # So does a strategy with equal replicas, including the low bits of main parameters.
    other = run_ranks(2, loaded, 2, four, {"precision": "bf16"}, None)
    for kind in KINDS:
        assert_all_have(other, kind, average(old, kind))
    weights = average(old, "main_param")
    assert_all_have(other, "weight", {name: values.bfloat16().float() for name, values in weights.items()})


def copies_equal_common_weights(context: RankContext, folder: str) -> list[bool]:
    """Return, after a change of the number of replicas, whether each copy equals the common weights."""
    runner = continued(context, tiny_config(2, dp=2, load=folder, precision="fp32", **SMALL, **CHOCO), folder)
    mains = {shard.bucket: shard.main_param.data for shard in runner.replica.strategy.shards}
    copies = [state for state in runner.replica.strategy.states() if state.name.startswith("gossip_")]
    runner.replica.strategy.close()
    return [torch.equal(state.values, mains[state.bucket]) for state in copies]


def test_copies_of_other_replicas_start_from_the_mean(tmp_path: Path) -> None:
    run_ranks(4, drifted, str(tmp_path), {**CHOCO, "precision": "fp32"})
    for same in run_ranks(2, copies_equal_common_weights, str(tmp_path)):
        assert same and all(same)


def test_instances_load_as_ranks(tmp_path: Path) -> None:
    """Two instances of two ranks are two replicas, so two ranks can load them."""
    settings = {**LATE, "precision": "fp32"}
    old = run_ranks(4, drifted, str(tmp_path), {**settings, "dp_instances": 2})
    found = run_ranks(2, loaded, 2, str(tmp_path), settings, None)
    for kind in KINDS:
        for rank, ours in enumerate(found):
            for name, (_, _, values) in ours[kind].items():
                np.testing.assert_array_equal(values, old[2 * rank][kind][name][2], err_msg=f"{kind} {name}")
                assert not np.array_equal(values, old[2 * (1 - rank)][kind][name][2]) or not values.any()


def failed_evaluation(context: RankContext, settings: Settings) -> list[bool]:
    """Run an evaluation that fails; return whether replicas were equal inside, and whether their weights came back."""
    run = ToyRun(context.topology(dp=3), settings)
    run.step()
    strategy, verdicts = run.strategy, []
    own, mains = run.weights(), [shard.main_param.data.clone() for shard in strategy.shards]
    with pytest.raises(InterruptedError), strategy.consensus():
        for shard in strategy.shards:
            least, most = shard.bucket.data.clone(), shard.bucket.data.clone()
            context.topology(dp=3).dp.all_reduce(least, op="min")
            context.topology(dp=3).dp.all_reduce(most, op="max")
            verdicts.append(torch.equal(least, most))
        private = [state.values for state in strategy.states() if state.name == "replica_param"]
        verdicts += [torch.equal(a, b) for a, b in zip(private, mains, strict=True)]
        verdicts.append(all(not torch.equal(a, own[name]) for name, a in run.weights().items()))
        raise InterruptedError
    verdicts += [torch.equal(a, own[name]) for name, a in run.weights().items()]
    verdicts += [torch.equal(shard.main_param.data, a) for shard, a in zip(strategy.shards, mains, strict=True)]
    strategy.close()
    return verdicts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mean_inside_and_own_weights_after_an_error(precision: str) -> None:
    for settings in (LOCAL, FRAGMENTS | {"sync_warmup_steps": 0}):
        for verdicts in run_ranks(3, failed_evaluation, {**settings, "precision": precision}):
            assert all(verdicts), verdicts


def counted(context: RankContext, settings: Settings, look: bool) -> list[float]:
    """Return the bytes that each step sends, with or without an evaluation in between."""
    run, found = ToyRun(context.topology(dp=3), settings), []
    for _ in range(4):
        run.step()
        if look:
            with run.strategy.consensus():
                pass
        found.append(run.strategy.wire_counter.take())
    run.strategy.close()
    return found


def test_bytes_of_evaluation_do_not_count() -> None:
    plain, looked = (run_ranks(3, counted, RING, look) for look in (False, True))
    assert looked == plain and sum(plain[0]) > 0

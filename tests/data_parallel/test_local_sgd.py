"""Local SGD against one process that plays all replicas."""

from typing import Any

import pytest
import torch

from tests.data_parallel.replicas import (
    BF16_WIRE,
    DECENTLAM,
    DILOCO,
    GOSSIP,
    LR,
    SGD,
    STREAMING,
    Replica,
    Weights,
    assert_same,
    mean,
    play,
    run_toy,
    sent,
    start,
)
from tests.data_parallel.toy import SHAPES, trajectory
from tests.support.ranks import run_ranks

STEPS = 5
LOCAL = {"dp_strategy": "local-sgd", "sync_interval": 2}
WARM = {"sync_warmup_steps": 1}
MOMENTS = {"average_optimizer_state": True}


def simulated(ranks: int, *, warm_up: int = 0, wire: torch.dtype | None = None, moments: bool = False) -> Any:
    common: Weights = start()

    def turn(replicas: list[Replica], step: int) -> None:
        for replica in replicas:
            replica.step(step, together=step <= warm_up, wire=wire)
        if step == warm_up:
            common.update(replicas[0].copy())
        if step <= warm_up or (step - warm_up) % 2:
            return
        for name in SHAPES:
            weights = [replica.weights[name].data for replica in replicas]
            if wire is None:
                common[name] = mean(weights)
            else:
                apart = [sent(each - common[name], wire) for each in weights]
                common[name] = common[name] + mean(apart).float()
            for each in weights:
                each.copy_(common[name])
        for kind in ("exp_avg", "exp_avg_sq") if moments else ():
            for name in SHAPES:
                states = [replica.state(kind)[name] for replica in replicas]
                average = mean([sent(each, wire) for each in states]).float()
                for each in states:
                    each.copy_(average)

    return play(ranks, STEPS, turn)


@pytest.mark.parametrize(
    ("ranks", "more", "how"),
    [
        (4, {}, {}),
        (3, WARM, {"warm_up": 1}),
        (4, MOMENTS, {"moments": True}),
        (4, BF16_WIRE | MOMENTS, {"wire": torch.bfloat16, "moments": True}),
        (3, BF16_WIRE | WARM, {"wire": torch.bfloat16, "warm_up": 1}),
    ],
)
def test_several_processes_do_what_one_does(ranks: int, more: dict[str, Any], how: dict[str, Any]) -> None:
    found = run_ranks(ranks, run_toy, ranks, LOCAL | more, STEPS)
    assert_same(found, simulated(ranks, **how))
    warm_up = how.get("warm_up", 0)
    for step in range(1, STEPS + 1):
        together = step <= warm_up or (step - warm_up) % 2 == 0
        for name in SHAPES:
            same = [torch.equal(rank["weights"][step - 1][name], found[0]["weights"][step - 1][name]) for rank in found]
            assert all(same) if together else not any(same[1:]), f"{name} after step {step}"


def test_what_it_sends_and_when() -> None:
    ranks = run_ranks(4, run_toy, 4, LOCAL | WARM, STEPS)
    assert ranks[0]["phases"] == ["gradients", "local", "weights", "local", "weights"]
    whole = 2 * 3 / 4 * 4 * ranks[0]["elements"]
    assert ranks[0]["bytes"] == [whole, 0.0, whole, 0.0, whole]
    assert run_ranks(4, run_toy, 4, LOCAL | BF16_WIRE, 2)[0]["bytes"] == [0.0, whole / 2]


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (LOCAL | WARM | MOMENTS | BF16_WIRE, {}),
        (DILOCO | STREAMING | BF16_WIRE, {}),
        (GOSSIP, {}),
        (GOSSIP | BF16_WIRE, {}),
        (GOSSIP | DECENTLAM, SGD),
    ],
    ids=str,
)
def test_one_rank_is_the_optimizer(settings: dict[str, Any], optimizer: dict[str, Any]) -> None:
    (alone,) = run_ranks(1, run_toy, 1, settings, STEPS)
    assert_same([alone], run_ranks(1, trajectory, 1, optimizer, STEPS))
    assert sum(alone["bytes"]) == 0.0


def test_plain_sgd_met_after_each_step_is_all_reduce() -> None:
    plain = SGD | {"sgd_momentum": 0.0}
    found = run_ranks(4, run_toy, 4, LOCAL | plain | {"sync_interval": 1}, 3)
    wanted = run_ranks(4, trajectory, 4, {"dp_strategy": "all-reduce", **plain}, 3)
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours["weights"], theirs, strict=True):
            for name in SHAPES:
                torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5 * LR)

"""Compare local SGD and DiLoCo, with and without fragments, with one process that simulates all replicas."""

from typing import Any

import numpy as np
import pytest
import torch

from megalite.data_parallel.local_sgd import fragment_of
from tests.data_parallel import toy
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
    assert_near,
    assert_same,
    mean,
    play,
    replica_gradient,
    run_toy,
    sent,
    start,
    toy_fragment,
)
from tests.data_parallel.toy import NO_DECAY, SHAPES, Toy, gradient, trajectory
from tests.support.ranks import RankContext, run_ranks

STEPS = 5
LOCAL = {"dp_strategy": "local-sgd", "sync_interval": 2}
WARM = {"sync_warmup_steps": 1}
LATE = {"dp_strategy": "local-sgd", "sync_interval": 4, "sync_delay": 3}
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
        (3, WARM, {"warm_up": 1}),
        (4, MOMENTS, {"moments": True}),
        (3, BF16_WIRE | WARM | MOMENTS, {"wire": torch.bfloat16, "warm_up": 1, "moments": True}),
    ],
)
def test_local_sgd_equals_the_simulation(ranks: int, more: dict[str, Any], how: dict[str, Any]) -> None:
    found = run_ranks(ranks, run_toy, ranks, LOCAL | more, STEPS)
    assert_same(found, simulated(ranks, **how))
    warm_up = how.get("warm_up", 0)
    for step in range(1, STEPS + 1):
        together = step <= warm_up or (step - warm_up) % 2 == 0
        for name in SHAPES:
            same = [torch.equal(rank["weights"][step - 1][name], found[0]["weights"][step - 1][name]) for rank in found]
            assert all(same) if together else not any(same[1:]), f"{name} after step {step}"


def model_average(
    ranks: int, steps: int, *, warm_up: int, interval: int, delay: int, members: int = 1
) -> list[list[dict[str, Any]]]:
    """Compute x += mean(s) - s, where s is x of `delay` steps ago, in numpy and fp64 (heavy ball, decoupled decay)."""
    first = {name: getattr(Toy(torch.float64), name).detach().numpy() for name in SHAPES}
    x = [{name: values.copy() for name, values in first.items()} for _ in range(ranks)]
    momenta = [{name: np.zeros_like(values) for name, values in first.items()} for _ in range(ranks)]
    sent: dict[int, list[dict[str, Any]]] = {}
    found: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for step in range(1, steps + 1):
        for rank in range(ranks):
            for name in SHAPES:
                parts = [replica_gradient(name, step, other, members) for other in range(ranks)]
                g = sum(parts) if step <= warm_up else ranks * parts[rank]
                momenta[rank][name] = 0.9 * momenta[rank][name] + g
                kept = 1.0 if name in NO_DECAY else 1.0 - LR * 0.1
                x[rank][name] = kept * x[rank][name] - LR * momenta[rank][name]
        if step > warm_up and (step - warm_up) % interval == 0:
            sent[step + delay] = [dict(each) for each in x]
        for each, own in zip(x, sent.get(step, []), strict=False):
            for name in SHAPES:
                each[name] = each[name] + np.mean([other[name] for other in sent[step]], axis=0) - own[name]
        for each, into in zip(x, found, strict=True):
            into.append(dict(each))
    return found


@pytest.mark.parametrize(
    ("replicas", "warm_up", "interval", "delay", "members"), [(2, 0, 4, 3, 1), (3, 2, 3, 1, 1), (2, 1, 3, 2, 2)]
)
def test_delayed_averaging_equals_the_formula(
    replicas: int, warm_up: int, interval: int, delay: int, members: int
) -> None:
    settings = {"sync_warmup_steps": warm_up, "sync_interval": interval, "sync_delay": delay, "precision": "fp64"}
    settings |= {"dp_instances": replicas} if members > 1 else {}
    # Requesting the mean, also during an exchange, changes nothing.
    found = run_ranks(replicas * members, run_toy, replicas * members, LATE | SGD | settings, 10, (2, 5, 7))
    wanted = model_average(replicas, 10, warm_up=warm_up, interval=interval, delay=delay, members=members)
    assert_near(found, wanted, members)


def test_delayed_average_is_sent_during_steps() -> None:
    ranks = run_ranks(4, run_toy, 4, LATE | BF16_WIRE, 8)
    one_way = 3 / 4 * 2 * ranks[0]["elements"]
    assert ranks[0]["phases"] == ["local", "local", "local", "send", "local", "local", "use", "send"]
    assert ranks[0]["bytes"] == [0.0, 0.0, 0.0, one_way, one_way, 0.0, 0.0, one_way]


def test_bytes_and_phases() -> None:
    ranks = run_ranks(4, run_toy, 4, LOCAL | WARM, STEPS)
    assert ranks[0]["phases"] == ["gradients", "local", "weights", "local", "weights"]
    whole = 2 * 3 / 4 * 4 * ranks[0]["elements"]
    assert ranks[0]["bytes"] == [whole, 0.0, whole, 0.0, whole]
    assert run_ranks(4, run_toy, 4, LOCAL | BF16_WIRE, 2)[0]["bytes"] == [0.0, whole / 2]


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [(LOCAL | WARM | MOMENTS | BF16_WIRE, {}), (DILOCO | STREAMING | BF16_WIRE, {}), (GOSSIP | DECENTLAM, SGD)],
    ids=str,
)
def test_one_rank_equals_the_optimizer(settings: dict[str, Any], optimizer: dict[str, Any]) -> None:
    (alone,) = run_ranks(1, run_toy, 1, settings, STEPS)
    assert_same([alone], run_ranks(1, trajectory, 1, optimizer, STEPS))
    assert sum(alone["bytes"]) == 0.0


ROUND_STEPS = 10


def simulated_diloco(
    ranks: int,
    *,
    warm_up: int = 0,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    wire: torch.dtype | None = None,
    skipped: tuple[int, ...] = (),
) -> Any:
    """Simulate DiLoCo with torch's SGD with Nesterov momentum as the outer optimizer."""
    anchor = {name: torch.nn.Parameter(value) for name, value in start().items()}
    outer = {name: torch.optim.SGD([value], lr=0.7, momentum=0.9, nesterov=True) for name, value in anchor.items()}
    changes: dict[str, torch.Tensor] = {}
    made = [step for step in range(1, ROUND_STEPS + 1) if step not in skipped]

    def turn(replicas: list[Replica], step: int) -> None:
        for replica in replicas:
            replica.step(made[step - 1], together=step <= warm_up, wire=wire)
        local = step - warm_up
        if local == 0:
            for name, value in replicas[0].copy().items():
                anchor[name].data.copy_(value)
        for name in SHAPES:
            starts = (toy_fragment(name, fragments) + 1) * (4 // fragments)
            if local > 0 and (local - starts) % 4 == 0:
                apart = [sent(anchor[name].data - each.weights[name].data, wire) for each in replicas]
                changes[name] = mean(apart).float()
            if local > delay and (local - delay - starts) % 4 == 0:
                anchor[name].grad = changes[name]
                outer[name].step()
                for replica in replicas:
                    value = replica.weights[name].data
                    value.mul_(mix).add_(anchor[name].data, alpha=1.0 - mix)

    return play(ranks, len(made), turn)


@pytest.mark.parametrize(
    ("ranks", "more", "how"),
    [
        (4, BF16_WIRE | {"sync_warmup_steps": 1}, {"wire": torch.bfloat16, "warm_up": 1}),
        (4, STREAMING, {"fragments": 2, "delay": 1, "mix": 0.25}),
        (3, {"sync_delay": 3}, {"delay": 3}),
    ],
)
def test_diloco_equals_the_simulation(ranks: int, more: dict[str, Any], how: dict[str, Any]) -> None:
    # Requesting the mean, also during an exchange, changes nothing.
    found = run_ranks(ranks, run_toy, ranks, DILOCO | more, ROUND_STEPS, (2, 3, 6))
    wanted = simulated_diloco(ranks, **how)
    assert_same(found, wanted)
    for step in found[0]["means"]:
        for name in SHAPES:
            average = mean([rank[step - 1][name] for rank in wanted])
            for rank in found:
                assert torch.equal(rank["means"][step][name], average), f"{name} after step {step}"
    assert found[0]["means"].keys() == {2, 3, 6}


def test_exchange_of_a_skipped_step_happens_in_the_next() -> None:
    for skipped in ((2, 3), (5,)):
        found = run_ranks(3, run_toy, 3, DILOCO | STREAMING, ROUND_STEPS, (), skipped)
        assert_same(found, simulated_diloco(3, fragments=2, delay=1, mix=0.25, skipped=skipped))


def test_bytes_and_phases_of_fragments() -> None:
    found = run_ranks(4, run_toy, 4, DILOCO | STREAMING, 9)
    assert found[0]["phases"] == [
        *("local", "send 0", "use 0", "send 1", "use 1"),
        *("send 0", "use 0", "send 1", "use 1"),
    ]
    sizes = [
        sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if toy_fragment(name, 2) == part)
        for part in range(2)
    ]
    one_way = 3 / 4 * 4
    assert found[0]["bytes"][0] == 0.0
    for step, nbytes in enumerate(found[0]["bytes"][1:], start=2):
        # Parts are sent when the exchange starts, and their means one update later.
        size = sizes[(step // 2 + 1) % 2]
        assert size * one_way <= nbytes <= (size + 1024) * one_way, f"step {step}"


def test_layers_are_assigned_to_fragments_in_turn() -> None:
    names = ["embedding.word.weight", *(f"layers.{layer}.mlp.up.weight" for layer in range(5)), "final_norm.bias"]
    assert [fragment_of(name, 3) for name in names] == [0, 0, 1, 2, 0, 1, 0]
    assert {fragment_of(name, 1) for name in names} == {0}


INSTANCES = {"dp_instances": 2}


def merged(name: str, step: int, rank: int, scale: float = 1.0) -> torch.Tensor:
    first, second = (gradient(name, step, member, scale).double() for member in (2 * rank, 2 * rank + 1))
    return first + second


def run_merged(context: RankContext, *how: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "gradient", merged)
        return run_toy(context, *how)


@pytest.mark.parametrize(
    "settings",
    [
        LOCAL | WARM | MOMENTS,
        DILOCO | STREAMING | BF16_WIRE,
        GOSSIP | WARM | {"gossip_graph": "one-peer"},
        GOSSIP | DECENTLAM,
    ],
    ids=str,
)
def test_instance_equals_a_replica(settings: dict[str, Any]) -> None:
    """Two instances of two ranks equal two ranks with the sums of their gradients; with a bf16 wire, except for the
    rounding of gradients inside an instance."""
    found = run_ranks(4, run_toy, 4, settings | INSTANCES | {"precision": "fp64"}, 9, (3, 5))
    plain = run_ranks(2, run_merged, 2, settings | {"precision": "fp64"}, 9, (3, 5))
    assert found[0]["phases"] == plain[0]["phases"]
    for rank, ours in enumerate(found):
        for step in range(9):
            for name in SHAPES:
                weights = ours["weights"][step][name]
                gap = (weights - plain[rank // 2]["weights"][step][name]).abs()
                assert gap.mean() < 0.01 if "wire_dtype" in settings else gap.max() < 1e-10
                assert torch.equal(weights, found[rank // 2 * 2]["weights"][step][name])

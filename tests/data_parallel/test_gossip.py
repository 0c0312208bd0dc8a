"""Compare gossip with one process that simulates all replicas; test its graphs."""

from typing import Any

import numpy as np
import pytest
import torch

from megalite.data_parallel.facts import strategy_states
from megalite.data_parallel.local_sgd import peers_of
from tests.data_parallel.replicas import (
    BF16_WIRE,
    DECENTLAM,
    GOSSIP,
    LR,
    SGD,
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
)
from tests.data_parallel.toy import NO_DECAY, SHAPES, Toy, ToyRun, padded
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import tiny_config

PEER = {"gossip_graph": "one-peer"}
WARM = {"sync_warmup_steps": 1}
STEPS = 4


def peers(graph: str, ranks: int, rank: int, turn: int) -> list[int]:
    """Return the peers by a second implementation: a ring, or one bit after the other."""
    if graph == "ring":
        return sorted({(rank + 1) % ranks, (rank - 1) % ranks})
    return [rank ^ (1, 2)[turn % 2]]


def pulls(values: list[torch.Tensor], graph: str, turn: int, wire: torch.dtype | None) -> list[torch.Tensor]:
    found = []
    travelled = [sent(each, wire).float() for each in values]
    for rank, own in enumerate(travelled):
        others = peers(graph, len(values), rank, turn)
        total = torch.zeros_like(own)
        for other in others:
            total = total + (travelled[other] - own)
        found.append(total * (1.0 / (len(others) + 1)))
    return found


def d_psgd(
    ranks: int, *, graph: str = "ring", warm_up: int = 0, wire: torch.dtype | None = None, skipped: int = 0
) -> Any:
    made = [step for step in range(1, STEPS + 1) if step != skipped]

    def turn(replicas: list[Replica], step: int) -> None:
        if step > warm_up:
            for name in SHAPES:
                weights = [replica.weights[name].data for replica in replicas]
                for each, pull in zip(weights, pulls(weights, graph, step - warm_up - 1, wire), strict=True):
                    each += pull
        for replica in replicas:
            replica.step(made[step - 1], together=step <= warm_up, wire=wire)

    return play(ranks, len(made), turn)


def decentlam(ranks: int, *, warm_up: int = 0, wire: torch.dtype | None = None) -> Any:
    lags: list[Weights] = [{name: torch.zeros_like(values) for name, values in start().items()} for _ in range(ranks)]

    def turn(replicas: list[Replica], step: int) -> None:
        if step > warm_up:
            for name in SHAPES:
                halves = [
                    torch.add(each.weights[name].data, each.own_gradient(name, step), alpha=-LR) for each in replicas
                ]
                for lag, pull in zip(lags, pulls(halves, "ring", step - warm_up - 1, wire), strict=True):
                    lag[name] = lag[name] * 0.9 - pull
        for replica, lag in zip(replicas, lags, strict=True):
            replica.step(step, together=step <= warm_up, wire=wire)
            for name in SHAPES:
                replica.weights[name].data -= lag[name]

    return play(ranks, STEPS, turn, optimizer="sgd")


@pytest.mark.parametrize(
    ("ranks", "more", "how"),
    [
        (3, WARM | BF16_WIRE, {"warm_up": 1, "wire": torch.bfloat16}),
        (2, {}, {}),
        (4, PEER | WARM, {"graph": "one-peer", "warm_up": 1}),
    ],
)
def test_d_psgd_equals_the_simulation(ranks: int, more: dict[str, Any], how: dict[str, Any]) -> None:
    assert_same(run_ranks(ranks, run_toy, ranks, GOSSIP | more, STEPS, (2,)), d_psgd(ranks, **how))


def test_skipped_step_delays_its_exchange() -> None:
    """Its exchange happens in the next step."""
    found = run_ranks(4, run_toy, 4, GOSSIP | PEER, STEPS, (), (2,))
    assert_same(found, d_psgd(4, graph="one-peer", skipped=2))


@pytest.mark.parametrize(
    ("ranks", "more", "how"), [(3, WARM, {"warm_up": 1}), (4, BF16_WIRE, {"wire": torch.bfloat16})]
)
def test_decentlam_equals_the_simulation(ranks: int, more: dict[str, Any], how: dict[str, Any]) -> None:
    assert_same(run_ranks(ranks, run_toy, ranks, GOSSIP | DECENTLAM | more, STEPS), decentlam(ranks, **how))


def test_decentlam_equals_the_paper_with_a_constant_rate() -> None:
    """Compare with m = βm + (x - Σ W (x_j - γ g_j))/γ, x = x - γ m in fp64, without weight decay on two tensors."""
    ranks, names = 4, ("bias", "norm")
    replicas = [Replica(rank, ranks) for rank in range(ranks)]
    weights = {name: [each.weights[name].data.double() for each in replicas] for name in names}
    momenta = {name: [torch.zeros_like(weights[name][0])] * ranks for name in names}
    found = run_ranks(ranks, run_toy, ranks, GOSSIP | DECENTLAM, STEPS)
    for step in range(1, STEPS + 1):
        for name in names:
            x = weights[name]
            half = [x[rank] - LR * replicas[rank].own_gradient(name, step).double() for rank in range(ranks)]
            mixed = [(half[rank] + half[rank - 1] + half[(rank + 1) % ranks]) / 3 for rank in range(ranks)]
            momenta[name] = [0.9 * m + (a - b) / LR for m, a, b in zip(momenta[name], x, mixed, strict=True)]
            weights[name] = [a - LR * m for a, m in zip(x, momenta[name], strict=True)]
            for rank in range(ranks):
                torch.testing.assert_close(
                    padded(found[rank]["weights"][step - 1][name]).double(), weights[name][rank], rtol=1e-5, atol=1e-5
                )


EIGHT_BITS = {"gossip_algorithm": "choco-sgd"}
CHOCO = {**EIGHT_BITS, "precision": "fp64", **SGD}
BUCKETS = (("norm", "bias"), ("down",), ("up",), ("table",))


def rounded(change: dict[str, Any], members: int, ranks: int) -> dict[str, Any]:
    """Round to 8 bits with one scale for each part of a bucket: each rank of a replica has one part."""
    found = {}
    for bucket in BUCKETS:
        flat = np.concatenate([change[name].ravel() for name in bucket])
        parts = np.pad(flat, (0, -flat.size % (64 * ranks))).reshape(members, -1)
        scale = np.abs(parts).max(axis=1, keepdims=True) / 127
        flat = (scale * np.round(parts / np.where(scale == 0.0, 1.0, scale))).ravel()
        for name in bucket:
            found[name], flat = flat[: change[name].size].reshape(change[name].shape), flat[change[name].size :]
    return found


def choco_sgd(ranks: int, steps: int, warm_up: int = 0, members: int = 1) -> list[list[dict[str, Any]]]:
    """Return, in numpy with decoupled decay and heavy ball, the weights by replica (of `members` ranks) and step."""
    first = {name: getattr(Toy(torch.float64), name).detach().numpy() for name in SHAPES}
    weights = [{name: values.copy() for name, values in first.items()} for _ in range(ranks)]
    public = [{name: values.copy() for name, values in first.items()} for _ in range(ranks)]
    momenta = [{name: np.zeros_like(values) for name, values in first.items()} for _ in range(ranks)]
    found: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for step in range(1, steps + 1):
        gradients = [{name: replica_gradient(name, step, rank, members) for name in SHAPES} for rank in range(ranks)]
        for x, p in zip(weights, public, strict=True):
            sent = rounded({name: x[name] - p[name] for name in SHAPES}, members, ranks * members)
            for name in SHAPES if step > warm_up else ():
                p[name] = p[name] + sent[name]
        for rank, (x, m) in enumerate(zip(weights, momenta, strict=True)):
            others = sorted({(rank - 1) % ranks, (rank + 1) % ranks})
            for name in SHAPES:
                if step > warm_up:
                    mine, g = public[rank][name], ranks * gradients[rank][name]
                    x[name] = x[name] + sum(public[other][name] - mine for other in others) / (len(others) + 1)
                else:
                    g = sum(each[name] for each in gradients)
                m[name] = 0.9 * m[name] + g
                x[name] = x[name] * (1.0 if name in NO_DECAY else 1.0 - LR * 0.1) - LR * m[name]
            found[rank].append(dict(x))
        if step == warm_up:
            public = [dict(x) for x in weights]
    return found


@pytest.mark.parametrize(("replicas", "warm_up", "members"), [(2, 0, 1), (3, 2, 1), (2, 1, 2)])
def test_choco_sgd_equals_the_paper(replicas: int, warm_up: int, members: int) -> None:
    ranks, settings = replicas * members, {"sync_warmup_steps": warm_up}
    settings |= {"dp_instances": replicas} if members > 1 else {}
    found = run_ranks(ranks, run_toy, ranks, GOSSIP | CHOCO | settings, 8, (3,))
    assert_near(found, choco_sgd(replicas, 8, warm_up, members), members)


def copies(context: RankContext) -> dict[str, list[torch.Tensor]]:
    """Return this rank's public copies after a few steps, one of them skipped."""
    run = ToyRun(context.topology(dp=4), GOSSIP | EIGHT_BITS)
    for step in range(5):
        if step == 2:
            run.gradients(scale=float("inf"))
            run.steps += 1
        else:
            run.step()
    found: dict[str, list[torch.Tensor]] = {}
    for state in run.strategy.states():
        found.setdefault(state.name, []).append(state.values.clone())
    run.strategy.close()
    return found


def test_public_copies_are_equal() -> None:
    found = run_ranks(4, copies)
    assert set(found[0]) - {"replica_param"} == set(strategy_states(tiny_config(4, dp=4, **GOSSIP, **EIGHT_BITS)))
    for rank, ours in enumerate(found):
        for index, own in enumerate(ours["gossip_own"]):
            assert torch.equal(own, found[(rank + 1) % 4]["gossip_left"][index])
            assert torch.equal(own, found[rank - 1]["gossip_right"][index])
            apart = (ours["replica_param"][index] - own).norm() / own.norm()
            assert 0.0 < apart < 0.1


def drift(replicas: list[Replica], step: int) -> None:
    for replica in replicas:
        replica.step(step)


@pytest.mark.parametrize("more", [{}, DECENTLAM, EIGHT_BITS])
def test_rounding_on_the_wire_keeps_the_mean(more: dict[str, Any]) -> None:
    """The mean equals that of replicas without exchanges: with plain SGD it does not depend on the peers."""
    plain = SGD | more | BF16_WIRE | {"sgd_momentum": 0.0}
    found = run_ranks(4, run_toy, 4, GOSSIP | plain, 6)
    alone = play(4, 6, drift, optimizer="sgd", momentum=0.0)
    for name in SHAPES:
        ours, theirs = [rank["weights"][5][name] for rank in found], [rank[5][name] for rank in alone]
        torch.testing.assert_close(mean(ours), mean(theirs), rtol=1e-5, atol=3e-6)
        assert torch.stack(ours).std(dim=0).mean() < 0.7 * torch.stack(theirs).std(dim=0).mean()


def test_logged_distance_is_that_of_the_weights() -> None:
    found = run_ranks(4, run_toy, 4, GOSSIP, 3, (3,))
    flat = [torch.cat([rank["weights"][2][name].view(-1) for name in SHAPES]).double() for rank in found]
    average = sum(flat[1:], flat[0]) / 4
    share = np.sqrt(np.mean([float((each - average).square().sum()) for each in flat])) / float(average.norm())
    said = float(found[0]["notes"][0].split(": ")[1].split()[0])
    assert said == pytest.approx(share, rel=1e-3)
    assert all(rank["notes"] == found[0]["notes"] for rank in found)


@pytest.mark.parametrize(("more", "bytes_each"), [({}, 8), (PEER | BF16_WIRE, 2), (EIGHT_BITS, 2)])
def test_bytes_and_phases(more: dict[str, Any], bytes_each: int) -> None:
    """The bytes go to each peer; with 8 bits there is also an fp32 scale for each bucket here."""
    scales = 2 * 4 * len(BUCKETS) if more == EIGHT_BITS else 0
    for rank in run_ranks(4, run_toy, 4, GOSSIP | more, 2):
        assert rank["bytes"] == [bytes_each * rank["elements"] + scales] * 2
        assert rank["phases"] == ["mix", "mix"]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("graph", ["ring", "one-peer"])
def test_graphs_are_symmetric_and_connected(graph: str, size: int) -> None:
    if graph == "one-peer" and size % 2 and size > 1:
        with pytest.raises(AssertionError):
            peers_of(graph, 0, size, 0)
        return
    knows = [{rank} for rank in range(size)]
    for turn in range(2 * size):
        found = [peers_of(graph, rank, size, turn) for rank in range(size)]
        for rank, others in enumerate(found):
            assert rank not in others and list(others) == sorted(set(others))
            assert all(rank in found[other] for other in others)
            assert len(others) == min(size - 1, 2 if graph == "ring" else 1)
        knows = [knows[rank].union(*(knows[other] for other in found[rank])) for rank in range(size)]
    assert all(len(each) == size for each in knows)

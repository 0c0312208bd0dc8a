"""Simulate replicas with different weights in one process, for bitwise comparison with real ranks."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from megalite.data_parallel import local_sgd
from tests.data_parallel.toy import NO_DECAY, SHAPES, ToyRun, gradient, initial, padded
from tests.support.ranks import RankContext

Weights = dict[str, torch.Tensor]

LR = 0.05
SGD = {"optimizer": "sgd", "sgd_momentum": 0.9}
BF16_WIRE = {"wire_dtype": "bf16"}
DILOCO = {"dp_strategy": "diloco", "sync_interval": 4}
STREAMING = {"sync_fragments": 2, "sync_delay": 1, "sync_mix": 0.25}
LOCAL: dict[str, Any] = {"dp_strategy": "local-sgd", "sync_interval": 3, "average_optimizer_state": True}
FRAGMENTS: dict[str, Any] = {**DILOCO, **STREAMING, "sync_mix": 0.5, "sync_warmup_steps": 1}
GOSSIP = {"dp_strategy": "gossip"}
DECENTLAM = {"gossip_algorithm": "decentlam", **SGD}


def start() -> Weights:
    return {name: padded(values) for name, values in initial().items()}


class Replica:
    """Torch's optimizer over `Toy`'s flat tensors, on one of several ranks."""

    def __init__(self, rank: int, ranks: int, *, optimizer: str = "adam", momentum: float = 0.9) -> None:
        self.rank, self.ranks = rank, ranks
        self.weights = {name: torch.nn.Parameter(value) for name, value in start().items()}
        groups = [
            {"params": [self.weights[name] for name in SHAPES if (name in NO_DECAY) == plain], "decay": decay}
            for plain, decay in ((False, 0.1), (True, 0.0))
        ]
        self._decays = optimizer == "sgd"
        self.optimizer: torch.optim.Optimizer
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(groups, lr=LR, momentum=momentum, fused=True)
        else:
            for group in groups:
                group["weight_decay"] = group["decay"]
            self.optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)

    def own_gradient(self, name: str, step: int) -> torch.Tensor:
        """Return the gradient as if the other ranks had the same samples."""
        return padded(gradient(name, step, self.rank)) * self.ranks

    def step(self, step: int, *, together: bool = False, wire: torch.dtype | None = None) -> None:
        """Take a step; `together`: by the sum of all ranks' gradients in the wire's format."""
        for name, weight in self.weights.items():
            parts = [sent(padded(gradient(name, step, rank)), wire).float() for rank in range(self.ranks)]
            whole = sent(torch.stack(parts).sum(dim=0), wire).float()
            weight.grad = whole if together else self.own_gradient(name, step)
            if self._decays and name not in NO_DECAY:
                weight.data.mul_(1.0 - LR * 0.1)
        self.optimizer.step()

    def state(self, kind: str) -> Weights:
        return {name: self.optimizer.state[weight][kind] for name, weight in self.weights.items()}

    def copy(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def shaped(self) -> Weights:
        sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
        return {name: values[: sizes[name]].view(SHAPES[name]) for name, values in self.copy().items()}


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean, added by rank in fp64 and rounded once."""
    total = values[0].double()
    for each in values[1:]:
        total = total + each.double()
    return (total / len(values)).to(values[0].dtype)


def sent(values: torch.Tensor, wire: torch.dtype | None) -> torch.Tensor:
    return values if wire is None else values.to(wire)


def toy_fragment(name: str, fragments: int) -> int:
    """Return a fixed fragment for each tensor, as `Toy` has no layers."""
    return list(SHAPES).index(name) % fragments


def run_toy(
    context: RankContext,
    dp: int,
    settings: Mapping[str, Any],
    steps: int,
    consensus_at: tuple[int, ...] = (),
    overflow_at: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return, for run_ranks, this rank's weights, phase, bytes and notes after each step. `consensus_at`: steps after
    which the mean is requested and recorded. `overflow_at`: steps that are skipped, without a record, as the last
    rank's gradients are infinite."""
    found: dict[str, Any] = {"weights": [], "phases": [], "bytes": [], "means": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_sgd, "fragment_of", toy_fragment)
        topology = context.topology(dp=dp, instances=settings.get("dp_instances", 1))
        run = ToyRun(topology, {"reduction_order": "rank", **settings})
    for step in range(1, steps + 1):
        if step in overflow_at:
            sums = run.gradients(scale=float("inf") if context.rank == dp - 1 else 1.0)
            assert not math.isfinite(run.strategy.norms(sums).logged), "every rank must get it"
            run.steps += 1
            continue
        run.step()
        found["weights"].append(run.weights())
        found["phases"].append(run.strategy.phase(step))
        found["bytes"].append(run.strategy.take_wire_bytes())
        if step in consensus_at:
            with run.strategy.consensus():
                found["means"][step] = run.weights()
            run.strategy.take_wire_bytes()
    found["notes"] = list(run.strategy.notes)
    found["elements"] = sum(bucket.data.numel() for bucket in run.strategy.all_buckets())
    run.strategy.close()
    return found


def play(ranks: int, steps: int, turn: Callable[[list[Replica], int], None], **optimizer: Any) -> list[Any]:
    """Return the weights by rank and step; `turn` runs one step of all replicas."""
    replicas = [Replica(rank, ranks, **optimizer) for rank in range(ranks)]
    found: list[list[Weights]] = [[] for _ in replicas]
    for step in range(1, steps + 1):
        turn(replicas, step)
        for replica, weights in zip(replicas, found, strict=True):
            weights.append(replica.shaped())
    return found


def replica_gradient(name: str, step: int, replica: int, members: int) -> Any:
    """Return, in numpy and fp64, the part of the gradient of all ranks of one replica."""
    ranks = range(replica * members, (replica + 1) * members)
    return sum(gradient(name, step, rank).double().numpy() for rank in ranks)


def assert_near(found: list[dict[str, Any]], wanted: list[list[dict[str, Any]]], members: int) -> None:
    """Assert that all ranks' weights are within 1e-10 of the simulated replicas', and bit-equal within a replica."""
    assert len(found) == members * len(wanted)
    for rank, ours in enumerate(found):
        for one, other, first in zip(
            ours["weights"], wanted[rank // members], found[rank // members * members]["weights"], strict=True
        ):
            for name in SHAPES:
                np.testing.assert_allclose(one[name].numpy(), other[name], rtol=1e-10, atol=1e-10, err_msg=name)
                assert torch.equal(one[name], first[name])


def assert_same(found: list[dict[str, Any]], wanted: list[list[Weights]]) -> None:
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for step, (ours, theirs) in enumerate(zip(one["weights"], other, strict=True), start=1):
            for name in SHAPES:
                assert torch.equal(ours[name], theirs[name]), f"{name} on rank {rank} after step {step}"

"""Chains and clusters for tests."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

from megalite.planner.chain.inputs import ChainCluster, ChainProfile, Layer
from megalite.planner.chain.plan import Counts, Judge, Judged, Stage, Stages


def chain(
    layers: Sequence[tuple[float, float, float]], *, batch: int = 1, kept: float = 1e6, state: float = 4.0
) -> ChainProfile:
    """(forward ms, output MB, parameter MB) of each layer; a backward takes two forwards."""
    return ChainProfile(
        name="test",
        batch_size=batch,
        smallest_batch=1,
        state_factor=state,
        provenance="made up",
        layers=tuple(
            Layer(
                name=f"layer.{number}",
                forward_ms=forward,
                backward_ms=2 * forward,
                output_bytes=1e6 * output,
                activation_bytes=kept,
                parameter_bytes=1e6 * parameters,
            )
            for number, (forward, output, parameters) in enumerate(layers)
        ),
    )


def cluster(
    machines: int, gpus: int, *, network: float = 3.0, message: float = 1.0, latency_us: float = 0.0
) -> ChainCluster:
    """GB/s; devices of 16 GB."""
    return ChainCluster(
        name=f"{machines}x{gpus}",
        machines=machines,
        gpus_per_machine=gpus,
        link_gb_per_s=25.0,
        ring_gb_per_s=100.0,
        network_gb_per_s=network,
        message_gb_per_s=message,
        memory_gb=16.0,
        latency_us=latency_us,
    )


def random_chain(seed: int, count: int) -> ChainProfile:
    """Layers that differ by an order of magnitude in everything; a backward takes one to four forwards."""
    draw = random.Random(seed)
    profile = chain(
        [
            (10 ** draw.uniform(0.0, 1.0), 10 ** draw.uniform(-0.5, 1.0), 10 ** draw.uniform(0.0, 2.0))
            for _ in range(count)
        ]
    )
    layers = [replace(layer, backward_ms=layer.forward_ms * draw.uniform(1.0, 4.0)) for layer in profile.layers]
    return replace(profile, layers=tuple(layers))


def all_stages(layers: int, machines: int, gpus: int) -> Iterator[Stages]:
    """Every cut with every number of devices per machine and stage; devices may stay unused."""
    for count in range(1, min(layers, machines * gpus) + 1):
        shares = [share for share in product(range(gpus + 1), repeat=count) if sum(share) <= gpus]
        for cuts in combinations(range(1, layers), count - 1):
            ends = (0, *cuts, layers)
            for on_machines in product(shares, repeat=machines):
                devices: list[Counts] = list(zip(*on_machines, strict=True))
                if all(map(any, devices)):
                    yield tuple(map(Stage, ends, ends[1:], devices))


def brute_force(judge: Judge) -> Judged:
    """The fastest of all plans by simulation; plans with a latency bound above the fastest are skipped."""
    problem = judge.problem
    every = all_stages(len(problem.profile.layers), problem.cluster.machines, problem.cluster.gpus_per_machine)
    best: Judged | None = None
    for stages in every:
        # Machines are equal: one order of them is enough.
        order = [tuple(stage.devices[m] for stage in stages) for m in range(problem.cluster.machines)]
        if order == sorted(order, reverse=True):
            best = judge.best(stages, below=best.seconds if best else float("inf")) or best
    assert best is not None
    return best

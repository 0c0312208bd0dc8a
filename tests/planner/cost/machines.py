"""Machines and configs for tests of the cost model."""

from dataclasses import replace
from typing import Any

from megalite.config import describe
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.hardware import Cluster, SoftwareStack, load_cluster, load_stack

BASE = load_cluster("dgx-a100")
NEUTRAL = {"product_rate": 1.0, "attention_backward": 1.0, "overlap_cost": 0.0, "elementwise_slowdown": 1.0}
NEUTRAL |= {"recompute_stops_early": False}
STACK = replace(load_stack("fused"), attention_efficiency=0.75, **NEUTRAL)
ENDLESS = 1e30


def cluster_with(**changes: Any) -> Cluster:
    """dgx-a100 with other values, by field name."""
    cluster = BASE
    for name, value in changes.items():
        for part in ("accelerator", "node", "network", "efficiency"):
            if name in vars(getattr(cluster, part)):
                cluster = replace(cluster, **{part: replace(getattr(cluster, part), **{name: value})})
                break
        else:
            raise AssertionError(name)
    return cluster


def free_communication(cluster: Cluster = BASE) -> Cluster:
    """All links infinitely fast, without latency."""
    return replace(
        cluster,
        node=replace(cluster.node, link_bandwidth=ENDLESS, link_latency=0.0),
        network=replace(cluster.network, nic_bandwidth=ENDLESS, latency=0.0),
    )


def without_host(stack: SoftwareStack = STACK) -> SoftwareStack:
    """All constants are 0."""
    names = ("operation_seconds", "collective_seconds", "microbatch_seconds", "step_seconds")
    return replace(stack, **{name: 0.0 for name in names})


def config_of(world: int, **settings: Any) -> RunConfig:
    """A GPT of a few layers of real width."""
    common = {"num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 1024}
    common |= {"vocab_size": 51200, "precision": "bf16"}
    return validate(describe.replace(RunConfig(), **{**common, **settings}), world)


def from_flags(flags: str, world: int) -> RunConfig:
    return validate(parse_arguments(flags.split()).config, world)

"""The speed of ranks while others wait: on two real ranks, and in the cluster file."""

import dataclasses
import itertools
import time

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.planner.hardware import load_cluster
from megalite.profiling.collectives import (
    Machine,
    TurnTime,
    _ranks_per_node,
    describe_machine,
    make_groups,
    measure_turns,
    round_trip,
)
from megalite.profiling.timing import Timer
from tests.profiling.made_up import CPU, cpu_cluster, fitted_to, measurements, took
from tests.support.ranks import RankContext, run_ranks

BASE = load_cluster("cpu-box")


@pytest.mark.parametrize(
    ("at_once", "in_turn", "cores", "ranks_per_core"),
    [
        (2.0, 2.0, 2, 2.0),  # 4 ranks, half as fast as alone: nothing is lost
        (2.0, 2.5, 2, 1.6),
        (2.0, 1.8, 2, 2.0),  # more than the cores allow is noise
        (2.0, 9.0, 2, 1.0),  # waiting ranks never make others slower
        (4.0, 5.0, 1, 3.2),  # four ranks per core; pairs in turn can show a factor of two
    ],
)
def test_speed_beside_waiting_ranks_in_the_file(
    at_once: float, in_turn: float, cores: int, ranks_per_core: float
) -> None:
    turns = TurnTime(at_once=took(at_once), in_turn=took(in_turn))
    crowded = dataclasses.replace(CPU, cores=cores, nodes=1)
    measured = dataclasses.replace(measurements(cpu_cluster(BASE), crowded), turns=turns)
    node = fitted_to(measured, BASE).node
    assert node.ranks_per_core == pytest.approx(ranks_per_core)


def _spans(context: RankContext) -> list[tuple[float, float]]:
    """Return when this rank computed, on the clock that all processes share."""
    device, spans = torch.device("cpu"), []
    machine = describe_machine(context.topology(dp=2).world, node="one")
    channels, *_ = make_groups(machine, context.rank, device, reuse=context.groups)

    def compute() -> None:
        start = time.monotonic()
        time.sleep(0.01)
        spans.append((start, time.monotonic()))

    run = round_trip(channels, torch.zeros(1), compute)
    for _ in range(3):
        run()
    return spans


def test_neighbours_never_compute_simultaneously() -> None:
    first, second = run_ranks(2, _spans)
    in_turn = [span for pair in zip(first, second, strict=True) for span in pair]
    assert len(in_turn) == 6
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(in_turn))


def _turns(context: RankContext) -> TurnTime:
    world = context.topology(dp=2).world
    device = torch.device("cpu")
    machine = describe_machine(world, node="one")
    channels, *_ = make_groups(machine, context.rank, device, reuse=context.groups)
    timer = Timer(device, world, crowded=True)
    return measure_turns(timer, channels, seconds=0.05)


def test_pairs_are_measured_in_turn() -> None:
    """The measurement ends, and all ranks get the same result."""
    turns, other = run_ranks(2, _turns)
    assert turns == other
    assert min(turns.at_once.samples, turns.in_turn.samples) >= 3
    assert min(turns.at_once.seconds, turns.in_turn.seconds) > 0.0


def _describe(context: RankContext, hosts: list[str]) -> Machine | str:
    world = context.topology(dp=len(hosts)).world
    try:
        return describe_machine(world, node=hosts[context.rank])
    except ConfigError as error:
        return str(error)


def _more_threads(context: RankContext) -> str:
    torch.set_num_threads(1 + context.rank)
    try:
        return str(_describe(context, ["a", "b"]))
    finally:
        torch.set_num_threads(1)


def test_all_ranks_get_the_same_result() -> None:
    first, second = run_ranks(2, _describe, ["a", "b"])
    assert first == second
    assert (first.nodes, first.ranks_per_node, first.ranks, first.threads) == (2, 1, 2, 1)
    assert not first.shares_cores
    alone, _ = run_ranks(2, _describe, ["a", "a"])
    assert (alone.nodes, alone.ranks_per_node, alone.shares_cores) == (1, 2, True)
    assert alone.memory_bytes == first.memory_bytes // 2
    said = run_ranks(2, _more_threads)
    assert said[0] == said[1]
    assert said[0].startswith("the number of threads is 1 on rank 0, 2 on 1")


def test_uneven_nodes_are_refused() -> None:
    assert _ranks_per_node(["a", "a", "b", "b"]) == 2
    for hosts, message in (
        ("aab", r"unevenly.*\(2 on a, 1 on b\).*--nproc-per-node 1"),
        ("abab", "unevenly"),
        ("abbb", "unevenly"),
    ):
        with pytest.raises(ConfigError, match=message):
            _ranks_per_node(list(hosts))

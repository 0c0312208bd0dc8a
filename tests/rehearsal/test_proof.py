"""Faults injected into ranks' operations are found and named; correct programs have none."""

import json
import multiprocessing
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megalite.cli.main import main
from megalite.config.errors import ConfigError
from megalite.partition.pipeline import layout_of
from megalite.preprocess import workers
from megalite.rehearsal import run
from megalite.rehearsal.communication import (
    Journal,
    Operation,
    RehearsedGroup,
    asymmetries,
    covered,
    deadlock,
    mismatches,
)
from megalite.rehearsal.device import Device
from megalite.rehearsal.run import check, corners, rehearse, rehearse_world
from megalite.topology import topology
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.training import step
from megalite.training.replica import Replica
from megalite.training.saving import tensors_to_save
from tests.support.ranks import forked_pools
from tests.support.tiny import LLAMA, tiny_config

Z1 = {"dp_strategy": "distributed-optimizer", "overlap_param_gather": True}
HIERARCHICAL = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
CLEAN: dict[str, tuple[int, dict[str, Any]]] = {
    "all axes": (16, {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "sequence_parallel": True, **LLAMA}),
    "zero bubble in a V": (8, {"tp": 2, "pp": 4, "vpp": 2, "num_layers": 8, "pipeline_schedule": "zb-v"}),
    "instances": (16, {"tp": 2, "pp": 2, "dp": 4, "dp_instances": 2, **Z1}),
    "instances of experts and weights": (
        16,
        {"dp": 8, "cp": 2, "ep": 4, **LLAMA, "num_experts": 4, "dp_strategy": "fully-sharded", "dp_instances": 4},
    ),
    "experts": (8, {"tp": 2, "etp": 1, "pp": 2, "dp": 2, "ep": 4, "num_experts": 4, "moe_router_topk": 2}),
    "heads in groups": (16, {"tp": 2, "cp": 4, "dp": 2, **HIERARCHICAL, **LLAMA, "sequence_parallel": True}),
    "documents balanced": (
        4,
        {"cp": 4, "reset_attention_mask": True, "context_parallel_load_balancer": "area", **LLAMA},
    ),
    "server": (4, {"dp": 4, "dp_strategy": "sharded-parameter-server"}),
}


@pytest.mark.parametrize("layout", CLEAN)
def test_layouts_are_consistent(layout: str) -> None:
    world, settings = CLEAN[layout]
    config = tiny_config(world, **settings)
    rehearsals, faults = rehearse_world(config)
    assert faults == []
    assert [each.rank for each in rehearsals] == [rank for place in corners(layout_of(config)) for rank in place]


def test_workers_give_the_same_result() -> None:
    config = tiny_config(2, pp=2)
    with forked_pools(workers):
        (alone, faults), (together, others) = (rehearse_world(config, workers=count) for count in (1, 2))
    assert faults == others == []
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.rank, ours.peak_bytes, ours.kernels) == (theirs.rank, theirs.peak_bytes, theirs.kernels)
        assert ours.journal.operations == theirs.journal.operations and ours.journal.events == theirs.journal.events


def test_dead_worker_is_an_error_with_a_remedy() -> None:
    others = set(multiprocessing.active_children())  # the rank pool of other tests

    def kill_others(count: int, total: int) -> None:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()

    with forked_pools(workers), pytest.raises(ConfigError, match=r"died \(out of memory\?\); use fewer: --workers 1$"):
        rehearse_world(tiny_config(8, tp=2, pp=4, num_layers=4), workers=2, done=kill_others)


def test_extra_operation_of_one_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor-parallel rank counts its tokens twice."""
    count = step.token_denominators

    def counts_twice(microbatches: Sequence[Any], *, dp: Group, **how: Any) -> torch.Tensor:
        if dp.ranks[0] % 2:
            count(microbatches, dp=dp, **how)
        return count(microbatches, dp=dp, **how)

    monkeypatch.setattr(step, "token_denominators", counts_twice)
    _, faults = rehearse_world(tiny_config(4, tp=2, dp=2))
    assert any("ranks 0 and 3" in fault and "all_reduce sum of 1 float64" in fault for fault in faults)


def test_extra_operation_in_a_save_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def says_more(replica: Replica, step: int, *, newest: str) -> Any:
        if replica.topology.rank == 3:
            replica.topology.world.gather_json("again")
        return tensors_to_save(replica, step, newest=newest)

    monkeypatch.setattr(run, "tensors_to_save", says_more)
    _, faults = rehearse_world(tiny_config(4, tp=2, dp=2))
    assert any("gather_json" in fault and "over world" in fault and "in save" in fault for fault in faults)


def test_swapped_operations_are_named() -> None:
    """Swap two different adjacent operations of rank 1 on one communicator."""
    config = tiny_config(4, tp=2, dp=2, **Z1)
    ranks = {rank: rehearse(config, rank).journal for rank in range(4)}
    assert list(mismatches(ranks)) == [] and deadlock(ranks) is None
    operations = ranks[1].operations
    place = next(
        index
        for index in range(len(operations) - 1)
        if operations[index].ranks == operations[index + 1].ranks
        and operations[index].elements != operations[index + 1].elements
    )
    first, second = operations[place], operations[place + 1]
    operations[place : place + 2] = [second, first]
    found = list(mismatches(ranks))
    assert found and any(str(first) in fault or str(second) in fault for fault in found)
    assert list(asymmetries((1, ranks[1]), (3, ranks[3])))


def journal_of(*steps: str) -> Journal:
    """`a` starts an operation over ranks 0 and 1 on communicator a and waits for it; `+a` only starts, `-a` waits."""
    journal, works = Journal(Device()), dict[str, Any]()
    for word in steps:
        name = word.strip("+-")
        if not word.startswith("-"):
            operation = Operation(name, (0, 1), name, "all_reduce sum", 1, "float32", 4, f"{name}.py:1", "test")
            works[name] = journal.start(operation)
        if not word.startswith("+"):
            works[name].wait()
    return journal


def test_deadlocked_ranks_are_named() -> None:
    assert deadlock({0: journal_of("a", "b"), 1: journal_of("a", "b")}) is None
    assert deadlock({0: journal_of("+a", "b", "-a"), 1: journal_of("b", "a")}) is None
    stuck = deadlock({0: journal_of("a", "b"), 1: journal_of("b", "a")})
    assert stuck is not None and stuck.startswith("these ranks wait for each other and will not continue: ")
    assert "rank 0 waits for all_reduce sum of 1 float32 over a [0, 1] at a.py:1" in stuck
    assert "rank 1 waits for all_reduce sum of 1 float32 over b [0, 1] at b.py:1" in stuck
    ended = deadlock({0: journal_of("a", "a"), 1: journal_of("a")})
    assert ended is not None and "rank 0 waits for" in ended and "rank 1 has ended" in ended


def test_overlap_lost_by_a_shared_queue_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-1's gathers overlap with the forward, unless the token count follows them on their communicator."""
    config = tiny_config(4, tp=2, dp=2, **Z1)
    found = rehearse(config, 0)
    assert covered(found.journal, found.second_step) == []
    monkeypatch.setattr(topology, "communicator_of", lambda kind: "shared")
    found = rehearse(config, 0)
    lost = [
        each for each in covered(found.journal, found.second_step) if each.covered.startswith("all_gather over dp-cp")
    ]
    assert [each.waited.partition(" at ")[0] for each in lost] == ["all_reduce sum over dp-cp"]
    assert lost[0].times > 1 and lost[0].kernels > 0


def test_gathers_do_not_wait_for_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3's gathers alternate with reduce-scatters, without waiting for each other."""
    config = tiny_config(4, dp=4, dp_strategy="fully-sharded", num_layers=4)
    found = rehearse(config, 0)
    assert covered(found.journal, found.second_step) == []
    gathers = [one for one in found.journal.operations if one.queue == "gathers"]
    assert gathers and {one.name for one in gathers} == {"all_gather"}
    sources = topology.group_sources(ParallelLayout(dp=4, instances=2), separate_gathers=True)
    assert sources["dp_cp_gathers"] == ("intra-dp-cp", "gathers"), "inside an instance"
    monkeypatch.setattr(topology, "GATHERED_KINDS", ())
    found = rehearse(config, 0)
    lost = covered(found.journal, found.second_step)
    assert [(each.waited.split()[0], each.covered.split()[0]) for each in lost] == [("reduce_scatter", "all_gather")]


def test_corner_ranks_of_a_layout() -> None:
    assert corners(ParallelLayout(tp=2, dp=3, pp=2)) == [(0, 5), (6, 11)]
    assert corners(ParallelLayout(pp=2)) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("settings", "rank", "message"),
    [
        (
            {"dp": 2, "dp_strategy": "async-parameter-server"},
            None,
            r"async-parameter-server .*--dp-strategy parameter-server",
        ),
        ({"tp": 2, "optimizer": "muon"}, None, r"muon .* tp 2 .*--tp 1 --dp-strategy all-reduce"),
        ({"dp": 2}, 2, "--rank 2 is not one of 2 ranks; use 0 to 1"),
    ],
)
def test_unsupported_configs_are_errors(settings: dict[str, Any], rank: int | None, message: str) -> None:
    config = tiny_config(2, **settings)
    with pytest.raises(ConfigError, match=message):
        check(config, layout_of(config), rank)


FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 96 --mock-data --lr 1e-3 "
FLAGS += "--train-iters 4 --micro-batch-size 1 --global-batch-size 8 --tp 2 --pp 2 --world-size 8 --bf16"


def test_command_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["rehearse", *FLAGS.split(), "--all-kinds", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "two steps of 4 of 8 ranks, without devices or peers" in said
    assert "a checkpoint of these steps: what each rank writes" in said and "4 gather_json over background" in said
    assert "in every group all ranks start the same operations" in said and "training/step.py:" in said
    assert main(["rehearse", *FLAGS.split(), "--rank", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world_size"], found["faults"]) == (8, None)
    (rank,) = found["ranks"]
    assert (rank["rank"], rank["coordinate"]) == (5, {"tp": 1, "cp": 0, "dp": 0, "pp": 1})
    assert 0 < rank["built_bytes"] < rank["peak_bytes"] and rank["planned_bytes"] > 0
    assert list(rank["save"]["files"]) == ["weights-00005.safetensors", "optimizer-00005.safetensors"]
    assert rank["save"]["bytes"] > rank["save"]["async_host_bytes"] > 0
    assert {"group": "background", "operation": "gather_json", "dtype": "uint8", "count": 4, "bytes": 0} in rank[
        "save"
    ]["communication"]
    half = 32 * 64 * 2 // 2  # half of a message on each of two tensor-parallel ranks
    message = {"group": "edge", "operation": "receive", "dtype": "bfloat16", "count": 4, "bytes": 4 * half}
    assert message in rank["communication"]
    # An edge's receiver expects less than is sent.
    record = RehearsedGroup._record

    def smaller(group: RehearsedGroup, name: str, tensor: torch.Tensor) -> Any:
        return record(group, name, tensor[1:] if name == "receive" else tensor)

    monkeypatch.setattr(RehearsedGroup, "_record", smaller)
    assert main(["rehearse", *FLAGS.split(), "--all-kinds", "--workers", "1"]) == 1
    (fault, *_) = [line for line in capsys.readouterr().out.splitlines() if "operation 0 differs: " in line]
    assert "starts send of" in fault and "receive of" in fault and "over edge" in fault

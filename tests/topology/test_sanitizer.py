"""Test that planted faults of asynchronous communication are found and named, and that the program has none."""

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from megalite.kernels.bases import Function
from megalite.topology.sanitizer import CommunicationFault, SanitizedGroup, calling_line, poison
from megalite.training.non_finite import NonFiniteError
from tests.support.ranks import RankContext, run_ranks, stop_ranks
from tests.support.tiny import LLAMA, Z1, Runner, build, tiny_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"tp": 2, "sequence_parallel": True},
    "overlapped": {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    "pp": {"pp": 2},
    "cp": {"cp": 2, **LLAMA},
    "dp": {"dp": 2},
    "zero": {"dp": 2, **Z1},
    "zero3": {"dp": 2, "dp_strategy": "fully-sharded"},
    "bf16 wire": {"dp": 2, "wire_dtype": "bf16", "precision": "fp32"},
    "experts": {"dp": 2, "ep": 2, "num_experts": 4, "moe_router_topk": 2},
    "gossip": {"dp": 2, "dp_strategy": "gossip"},
}


class Plant(NamedTuple):
    """A replacement of text in a function of the program."""

    layout: str
    place: str  # `module:qualified name`
    old: str
    new: str = "pass"


PLANTS = {
    "the input gradient before its sum": Plant("sp", "tensor_parallel.layers:_Linear.backward", "reducing.wait()"),
    "gathered inputs before they are there": Plant(
        "sp", "tensor_parallel.parameter:linear_weight_gradient", "gathering.wait()"
    ),
    "pieces of overlapped products": Plant(
        "overlapped", "tensor_parallel.overlapped_linear:receive_parts", "work.wait()"
    ),
    "the next keys of a ring": Plant("cp", "context_parallel.attention:_Ring.keys_and_values", "exchange.wait()"),
    "gradients of keys written while they travel": Plant(
        "cp",
        "context_parallel.attention:_RingAttention.backward",
        "arriving, exchange = ring.cp.rotate_async(grad_kv)",
        "arriving, exchange = ring.cp.rotate_async(grad_kv); grad_kv.add_(1.0)",
    ),
    "an activation before it has come": Plant("pp", "pipeline.executor:Executor._compute", "work.wait()"),
    "gradients before their reduction": Plant(
        "dp", "data_parallel.strategy:DataParallelStrategy._finish_reductions", "work.wait()"
    ),
    "gradients scaled while they are reduced": Plant(
        "dp",
        "data_parallel.strategy:AllReduce._reduce",
        "return self.channel(bucket).all_reduce_async(bucket.grad)",
        "work = self.channel(bucket).all_reduce_async(bucket.grad); bucket.grad.mul_(0.5); return work",
    ),
    "parameters before ZeRO-1's gather": Plant(
        "zero", "data_parallel.buckets:ParameterWaits._wait_for", "self._coming.pop(bucket, DONE).wait()"
    ),
    "parameters before ZeRO-3's gather": Plant(
        "zero3", "data_parallel.fully_sharded:FullySharded._finish_gathers", ".wait()", ""
    ),
    "rounded gradients before they are exchanged": Plant(
        "bf16 wire", "data_parallel.wire:Channel._gathers", "work.wait()"
    ),
    "a neighbour's weights before they have come": Plant(
        "gossip", "data_parallel.local_sgd:Gossip._step", "works.wait()"
    ),
}


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    module, _, path = plant.place.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(f"megalite.{module}")
    space = vars(owner)
    for each in outer:
        owner = getattr(owner, each)
    before = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(before))
    assert source.count(plant.old) >= 1, (plant, source)
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(plant.old, plant.new), space, made)
    # Other modules may have imported the name.
    modules = [each for key, each in sys.modules.items() if key.startswith("megalite.")]
    owners = [owner, *(each for each in modules if vars(each).get(name) is before)]
    for each in owners:
        _put(each, name, made[name])
    try:
        yield
    finally:
        for each in owners:
            _put(each, name, before)


def _put(owner: Any, name: str, function: Any) -> None:
    setattr(owner, name, function)
    if name == "backward" and issubclass(owner, Function):
        owner._backward_cls.apply = owner.backward  # the autograd engine calls this one


def losses(context: RankContext, layout: str, *, sanitized: bool = True) -> list[float]:
    settings = LAYOUTS[layout]
    runner = Runner(build(context, tiny_config(2, sanitize_communication=sanitized, **settings)))
    found = [runner.step().loss for _ in range(2)]
    runner.replica.strategy.wait_until_idle()
    for group in vars(runner.replica.topology).values():
        assert not isinstance(group, SanitizedGroup) or not group.forgotten, group.forgotten
    return found


def outcome(context: RankContext, plant: Plant) -> str:
    with planted(plant):
        try:
            return str(losses(context, plant.layout))
        except (CommunicationFault, NonFiniteError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.fixture
def fresh() -> Iterator[None]:
    yield
    stop_ranks()


@pytest.mark.parametrize("layout", ["overlapped", "bf16 wire", "gossip"])
def test_clean_program_passes_with_the_same_numbers(layout: str) -> None:
    """(`tests/parity` checks all layouts.)"""
    assert run_ranks(2, losses, layout) == run_ranks(2, losses, layout, sanitized=False)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", PLANTS)
def test_planted_fault_is_found(name: str) -> None:
    for found in run_ranks(2, outcome, PLANTS[name]):
        assert found.startswith(("CommunicationFault: ", "NonFiniteError: ")), found


def group_of(context: RankContext) -> SanitizedGroup:
    group = context.topology(dp=2, sanitized=True).dp
    assert isinstance(group, SanitizedGroup)
    return group


def each_operation(context: RankContext) -> list[str]:
    """Check each operation: results, NaN before the wait, and an error that names the line after an early write."""
    group, said = group_of(context), list[str]()
    other = 1 - group.rank
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "rotate", "message"):
        for spoil in (None, "input", "output"):
            x = torch.arange(4.0) + 10 * group.rank
            y = (
                torch.full((2,), 7.0)
                if name == "reduce_scatter"
                else torch.full((8,) if name == "all_gather" else (4,), 7.0)
            )
            works = []
            if name == "all_reduce":
                y = x
                works.append(group.all_reduce_async(x))
                wanted = torch.tensor([10.0, 12.0, 14.0, 16.0])
            elif name == "all_gather":
                works.append(group.all_gather_async(y, x))
                wanted = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
            elif name == "reduce_scatter":
                works.append(group.reduce_scatter_async(y, x))
                wanted = torch.tensor([10.0, 12.0]) + 4 * group.rank
            elif name == "all_to_all":
                works.append(group.all_to_all_equal_async(y, x))
                wanted = torch.tensor([0.0, 1, 10, 11]) + 2 * group.rank
            elif name == "rotate":
                y, work = group.rotate_async(x)
                works.append(work)
                wanted = torch.arange(4.0) + 10 * other
            else:
                works += [group.send_async(x, to=other), group.receive_async(y, source=other)]
                wanted = torch.arange(4.0) + 10 * other
            assert y[::2].isnan().all(), name
            if spoil is not None:
                (x if spoil == "input" else y)[0] = 3.0
            try:
                for work in works:
                    work.wait()
                    work.wait()
            except CommunicationFault as fault:
                said.append(f"{name} {spoil}: {fault}")
                for work in works:
                    if not work._is_waited_for:  # type: ignore[attr-defined]
                        work.work.wait()  # type: ignore[attr-defined]  # or it would be dropped in flight
                        work._is_waited_for = True  # type: ignore[attr-defined]
            else:
                assert spoil is None and torch.equal(y, wanted), (name, spoil, y)
        group.all_reduce(torch.zeros(1))  # a barrier
    return said


@pytest.mark.usefixtures("fresh")
def test_each_operation_is_checked() -> None:
    for rank, said in enumerate(run_ranks(2, each_operation)):
        assert len(said) == 12
        for line in said:
            assert f"rank {rank}: " in line and "was written before the operation was waited for" in line


def dropped_operation(context: RankContext) -> str:
    group = group_of(context)
    group.all_reduce_async(torch.ones(2))
    try:
        group.all_reduce_async(torch.ones(2))
    except CommunicationFault as fault:
        return str(fault)
    return "nothing"


@pytest.mark.usefixtures("fresh")
def test_dropped_operation_is_named() -> None:
    for rank, said in enumerate(run_ranks(2, dropped_operation)):
        assert said.startswith(f"rank {rank}: all_reduce over dp started at ") and "was never waited for" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_poisoned_values(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    poison(tensor)
    assert tensor[::2].isnan().all() if dtype.is_floating_point else (tensor != 0).all()


def test_calling_line_is_outside_the_package() -> None:
    assert calling_line().partition(":")[0] == __file__


def test_groups_of_one_rank_are_not_checked() -> None:
    group = SanitizedGroup.solo("tp")
    tensor = torch.ones(2)
    group.all_reduce_async(tensor).wait()
    assert group.rotate_async(tensor)[0] is tensor and torch.equal(tensor, torch.ones(2))

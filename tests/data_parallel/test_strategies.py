"""Test when gradients are reduced, what each rank owns afterwards, and when modules wait for parameters."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import megalite.pipeline.executor as executor
from megalite.data_parallel.buckets import Bucket, has_memory
from megalite.data_parallel.facts import ALIGNMENT
from megalite.data_parallel.zero import DistributedOptimizer
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group, Work
from tests.data_parallel.toy import ToyRun, bare
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import MOE, Z1, Runner, assemble, build, local_parts, tiny_config

SP = {"sequence_parallel": True}


def reductions(context: RankContext, settings: dict[str, Any]) -> list[list[str]]:
    """Return, per step, begin and end of each backward and the start of each reduction with its kind."""
    runner = Runner(build(context, tiny_config(**settings)))
    strategy = runner.replica.strategy
    events: list[str] = []
    backward, reduce = executor._engine_backward, strategy._reduce

    def noted_backward(output: torch.Tensor, grad: torch.Tensor | None) -> None:
        events.append("begin")
        backward(output, grad)
        events.append("end")

    def noted_reduce(bucket: Bucket) -> Work:
        vectors = all(placed.parameter.dim() == 1 for placed in bucket.placed)
        late = bucket.kind.tied or bucket.kind.partial_over_tp
        events.append("late" if late else "vectors" if vectors else "reduce")
        return reduce(bucket)

    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_engine_backward", noted_backward)
        patch.setattr(strategy, "_reduce", noted_reduce)
        for _ in range(2):
            events.clear()
            runner.step()
            steps.append(list(events))
    return steps


@pytest.mark.parametrize("strategy", ["all-reduce", "distributed-optimizer"])
def test_reduction_starts_inside_the_last_backward(strategy: str) -> None:
    for events in reductions(RankContext(0, {}), {"dp_strategy": strategy}):
        last = len(events) - 1 - events[::-1].index("begin")
        assert events[:last] == ["begin", "end"] * 7
        inside = events[last + 1 :]
        end = inside.index("end")
        assert end >= 5 and set(inside[:end]) == {"reduce"}, "matrices are complete before the end of the backward"
        assert set(inside[end + 1 :]) == {"vectors"}, "gradients of autograd are collected at its end"


def test_without_overlap_reduction_waits_for_the_backward() -> None:
    for events in reductions(RankContext(0, {}), {"overlap_grad_reduce": False}):
        assert events[:16] == ["begin", "end"] * 8
        assert set(events[16:]) == {"reduce", "vectors"}


def test_total_adds_buckets_in_a_fixed_order() -> None:
    """The order of gradients must not change any bit."""
    strategy = build(RankContext(0, {}), tiny_config()).strategy
    squares = [torch.tensor(value, dtype=torch.float64) for value in (1e16, 1.0, 1.0)]
    pairs = list(zip(strategy.all_buckets(), squares))
    assert float(strategy.total(dict(pairs))) == float(strategy.total(dict(reversed(pairs)))) == 1e16


def on_two_ranks(context: RankContext, settings: dict[str, Any]) -> list[list[str]]:
    return reductions(context, {"world_size": 2, **settings})


@pytest.mark.parametrize("settings", [{"tp": 2, **SP}, {"pp": 2, "vpp": 2}])
def test_partial_gradients_are_summed_before_the_reduction(settings: dict[str, Any]) -> None:
    """Norms with sequence parallelism and tied embeddings are reduced last; the others overlap with the backward."""
    for rank in run_ranks(2, on_two_ranks, settings):
        for events in rank:
            assert "late" in events and "reduce" in events
            assert set(events[events.index("late") :]) == {"late"}
            last = len(events) - 1 - events[::-1].index("end")
            assert "reduce" in events[:last]


class Layer(torch.nn.Module):
    """A module with one parameter that records its forwards."""

    def __init__(self, name: str, factory: ParameterFactory, events: list[str]) -> None:
        super().__init__()
        self.name, self.events = name, events
        self.weight = factory.parameter(name, (10, 10), std=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append(f"forward {self.name}")
        return x + self.weight.sum()


class SpyWork:
    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def wait(self) -> None:
        self.note()


class SpyGroup(Group):
    """A group of two ranks without processes that records the sizes of gathers."""

    def all_gather_async(self, output: torch.Tensor, part: torch.Tensor) -> SpyWork:
        name = NAMES[output.data_ptr()]
        EVENTS.append(f"start {name}")
        return SpyWork(lambda: EVENTS.append(f"wait {name}"))


EVENTS: list[str] = []
NAMES: dict[int, str] = {}


def strategy_of(dp: Group, *, overlap: bool) -> tuple[DistributedOptimizer, torch.nn.Sequential]:
    factory = ParameterFactory(tp=Group.solo("tp"), seed=1, dtype=torch.float32, device=torch.device("cpu"))
    model = torch.nn.Sequential(*(Layer(name, factory, EVENTS) for name in "abc"))
    stages = {0: model[:2], 1: model[2:]}
    made = bare(DistributedOptimizer, stages, groups={"dp": dp}, overlap_param_gather=overlap)
    EVENTS.clear()
    NAMES.clear()
    for bucket in made.all_buckets():
        NAMES[bucket.data.data_ptr()] = bucket.placed[0].parameter.info.spec.name
    return made, model


def test_each_module_waits_for_its_parameters_before_its_forward() -> None:
    made, model = strategy_of(SpyGroup("dp", (0, 1), 0), overlap=True)
    made.publish_parameters()
    assert EVENTS == ["start a", "start b", "start c"], "gathers are in the order of use"
    model(torch.zeros(1))
    assert EVENTS[3:] == ["wait a", "forward a", "wait b", "forward b", "wait c", "forward c"]
    EVENTS.clear()
    model(torch.zeros(1))
    made.wait_for_parameters()
    assert EVENTS == ["forward a", "forward b", "forward c"], "complete gathers are not waited for again"


def test_parameters_are_complete_at_once_without_overlap() -> None:
    made, model = strategy_of(SpyGroup("dp", (0, 1), 0), overlap=False)
    made.publish_parameters()
    assert EVENTS == ["start a", "start b", "start c", "wait a", "wait b", "wait c"]
    model(torch.zeros(1))
    assert EVENTS[6:] == ["forward a", "forward b", "forward c"]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shards_partition_each_bucket(size: int) -> None:
    made = [strategy_of(Group("dp", tuple(range(size)), rank), overlap=True)[0] for rank in range(size)]
    for index, first in enumerate(made[0].shards):
        shards = [strategy.shards[index] for strategy in made]
        ends = [0, *(shard.stop for shard in shards)]
        assert [shard.start for shard in shards] == ends[:-1]
        assert ends[-1] == first.bucket.data.numel()
        assert all(shard.start % ALIGNMENT == 0 for shard in shards)
        touched = [list(shard.bucket.within(shard.start, shard.stop)) for shard in shards]
        for shard, placed in zip(shards, touched, strict=True):
            assert bool(placed) == (shard.start < first.bucket.placed[-1].stop)
            assert shard.main_param.numel() == shard.stop - shard.start
            assert shard.main_param.grad is not None
            assert shard.main_param.grad.data_ptr() == shard.bucket.grad[shard.start :].data_ptr()


def norms(context: RankContext, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    runner = Runner(build(context, tiny_config(world, clip_grad=0.0, **settings)))
    norm = runner.step().grad_norm
    return {"norm": norm, "grads": local_parts(runner.replica, "grad")}


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2},
        {"pp": 2, "vpp": 2, "dp": 2, **Z1},
        {"tp": 2, "pp": 2, **SP},
        {"dp": 2, "tp": 2, "etp": 1, "ep": 2, **MOE},
    ],
)
def test_norm_is_that_of_the_full_gradients(settings: dict[str, Any]) -> None:
    """Each parameter counts once: not for each tp rank that replicates it, nor for both copies of a tied one."""
    world = int(np.prod([settings.get(axis, 1) for axis in ("tp", "pp", "dp")]))
    found = run_ranks(world, norms, world, settings)
    full = assemble([rank["grads"] for rank in found])
    expected = np.sqrt(sum((grad**2).sum() for grad in full.values()))
    for rank in found:
        assert rank["norm"] == pytest.approx(expected, rel=1e-12)


def left_behind(context: RankContext, settings: dict[str, Any], steps: int) -> list[float]:
    """Run several runs over the same groups, dropping each when it has finished; return the distance of replicas."""
    topology, found = context.topology(dp=3), []
    for _ in range(3):
        run = ToyRun(topology, settings)
        for _ in range(steps):
            run.step()
        run.strategy.finish()
        run.strategy.close()
        strategy: Any = run.strategy
        assert not getattr(strategy, "_sending", None), "the server's sends are complete"
        if settings["dp_strategy"] == "fully-sharded":
            assert not any(has_memory(bucket.data) for bucket in strategy.all_buckets())
        else:
            assert not strategy._arrivals._coming, "nothing is pending"
        del run, strategy
        gc.collect()
        probe = torch.tensor([float(topology.dp.rank)])
        topology.dp_cp.all_reduce(probe)
        found.append(float(probe))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"dp_strategy": "parameter-server"},
        {"dp_strategy": "sharded-parameter-server"},
        {"dp_strategy": "distributed-optimizer"},
        {"dp_strategy": "fully-sharded"},
    ],
    ids=lambda settings: settings["dp_strategy"],
)
def test_finished_run_leaves_no_messages(settings: dict[str, Any]) -> None:
    """Dropped receives would leave their bytes in the connection, and the next receive would get them."""
    assert run_ranks(3, left_behind, settings, 2) == [[3.0] * 3] * 3

"""Test that a flipped bit in one rank's weights or states is found and named."""

from typing import Any

import pytest
import torch

from megalite.training.state_tensors import ReplicasDifferError, check_replicas, fingerprints, replicated_states
from tests.data_parallel.toy import ToyRun
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import MOE, Runner, build, tiny_config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fingerprint_depends_on_each_bit_and_position(dtype: torch.dtype) -> None:
    values = torch.randn(50, dtype=dtype, generator=torch.Generator().manual_seed(1))
    bits = values.view(torch.uint8)
    swapped = values.clone()
    swapped[3], swapped[4] = values[4], values[3]
    others = [swapped, values.roll(1), torch.cat([values, values.new_zeros(1)])]
    for place in range(0, bits.numel(), 7):
        for bit in range(8):
            flipped = bits.clone()
            flipped[place] ^= 1 << bit
            others.append(flipped.view(dtype))
    (own, *prints) = fingerprints([values, *others])
    assert own not in prints and len(set(prints)) == len(prints)
    assert fingerprints([values.clone()]) == [own]


def flip(parameter: torch.Tensor, element: int) -> None:
    bits = parameter.data.view(-1).view(torch.int32)
    bits[element] ^= 1


def verdict(*about: Any, **more: Any) -> str:
    """The check's error, with its type."""
    try:
        check_replicas(*about, **more)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors(context: RankContext, settings: dict[str, Any], culprit: int, name: str, element: int) -> tuple[str, str]:
    """Return the check's errors after a good step, and after a flip of a bit in the culprit's tensor."""
    run = ToyRun(context.topology(dp=4), settings)
    run.step()
    found = []
    for flips in (False, True):
        if flips and context.rank == culprit:
            flip(getattr(run.toy, name), element)
        found.append(verdict(run.strategy, step=7, world=run.topology.world))
    return found[0], found[1]


@pytest.mark.parametrize(
    "strategy, culprit, name, element", [("all-reduce", 2, "up", 329), ("distributed-optimizer", 0, "norm", 0)]
)
def test_flipped_bit_of_a_weight_is_named(strategy: str, culprit: int, name: str, element: int) -> None:
    other = culprit or 1
    for good, bad in run_ranks(4, errors, {"dp_strategy": strategy}, culprit, name, element):
        assert good == ""
        assert bad.startswith(
            f"ReplicasDifferError: after step 7 ranks 0 and {other} should have the same weights but differ in {name}: "
        )


def with_experts(context: RankContext) -> list[str]:
    """Return errors with dp 4, ep 2: ranks 0 and 2 have the same experts, 1 and 3 others, all the same dense layers."""
    runner = Runner(build(context, tiny_config(4, **{**MOE, "num_layers": 2, "precision": "fp32", "dp": 4, "ep": 2})))
    runner.step()
    strategy, found = runner.replica.strategy, []
    by_name = {
        placed.parameter.info.spec.name: placed.parameter
        for bucket in strategy.all_buckets()
        for placed in bucket.placed
    }
    experts = next(name for name, parameter in by_name.items() if parameter.info.expert)
    for name, culprit in ((None, 0), (experts, 3), ("layers.0.mlp.down.weight", 1)):
        if name is not None and context.rank == culprit:
            flip(by_name[name], 5)
        found.append(verdict(strategy, step=1, world=runner.replica.topology.world))
        if name is not None and context.rank == culprit:
            flip(by_name[name], 5)
    return [experts, *found]


def test_experts_are_compared_over_ranks_with_the_same_ones() -> None:
    for rank, (experts, good, expert, dense) in enumerate(run_ranks(4, with_experts)):
        assert good == ""
        # Ranks 0 and 2 get a RuntimeError: their experts are equal.
        kind = "ReplicasDifferError" if rank in (1, 3) else "RemoteError: rank 1 failed: ReplicasDifferError"
        assert expert.startswith(f"{kind}: after step 1")
        assert f"ranks 1 and 3 should have the same weights but differ in {experts}" in expert
        assert dense.startswith("ReplicasDifferError")
        assert "ranks 0 and 1 should have the same weights but differ in layers.0.mlp.down.weight:" in dense


def states(context: RankContext, strategy: str, culprit: str | None) -> str:
    """Return the check's error after a flip of one bit of rank 1's state of a tensor."""
    config = tiny_config(2, dp=2, dp_strategy=strategy, precision="bf16", num_layers=2)
    runner = Runner(build(context, config))
    runner.step()
    held = replicated_states(runner.replica)
    if culprit is not None and context.rank == 1:
        flip(next(state.values for state in held if state.name == culprit), 3)
    try:
        strategy_here = runner.replica.strategy
        check_replicas(strategy_here, states=held, step=1, world=runner.replica.topology.world)
    except ReplicasDifferError as error:
        return str(error)
    return "" if held else "nothing is held twice"


def test_flipped_bit_of_a_state_is_named() -> None:
    culprit = "exp_avg_sq"
    for said in run_ranks(2, states, "all-reduce", culprit):
        assert said.startswith(
            f"after step 1 ranks 0 and 1 should have the same optimizer states but differ in {culprit} of "
        )


def test_equal_states_pass() -> None:
    assert run_ranks(2, states, "all-reduce", None) == ["", ""]
    assert run_ranks(2, states, "distributed-optimizer", None) == ["nothing is held twice"] * 2


def shards(context: RankContext, strategy: str, culprit: str | None) -> str:
    """Return the check's error, with dp 4 in two instances, after a flip of one bit of rank 3's shard."""
    config = tiny_config(4, dp=4, dp_strategy=strategy, dp_instances=2, precision="fp32", num_layers=2)
    runner = Runner(build(context, config))
    runner.step()
    here, held = runner.replica.strategy, replicated_states(runner.replica)
    assert {state.name for state in held} == {"exp_avg", "exp_avg_sq"}
    if culprit is not None and context.rank == 3:
        weights = [here.weights(shard) for shard in here.shards]
        here.wait_until_idle()
        own = [state.values for state in [*weights, *held] if state.name == culprit]
        flip(max(own, key=torch.numel), 3)  # small shards contain only padding here
    return verdict(here, states=held, step=1, world=runner.replica.topology.world)


@pytest.mark.parametrize(
    ("strategy", "culprit", "what"),
    [("distributed-optimizer", "exp_avg", "optimizer states"), ("fully-sharded", "weight", "weights")],
)
def test_shards_are_compared_over_instances(strategy: str, culprit: str, what: str) -> None:
    assert run_ranks(4, shards, strategy, None) == [""] * 4
    for rank, said in enumerate(run_ranks(4, shards, strategy, culprit)):
        kind = "ReplicasDifferError" if rank % 2 else "RemoteError: rank 1 failed: ReplicasDifferError"
        assert said.startswith(f"{kind}: after step 1 ranks 1 and 3 should have the same {what} but differ in ")


def all_differ(context: RankContext) -> str:
    run = ToyRun(context.topology(dp=2), {})
    if context.rank == 1:
        for parameter in run.toy.parameters():
            flip(parameter, 0)
    with pytest.raises(RuntimeError, match="and 4 more tensors") as caught:
        check_replicas(run.strategy, step=1, world=run.topology.world)
    return str(caught.value)


def test_all_ranks_raise_the_same_error() -> None:
    one, other = run_ranks(2, all_differ)
    assert one == other

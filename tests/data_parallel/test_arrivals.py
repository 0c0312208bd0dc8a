"""Test that no forward reads a parameter before it has been gathered, however late the gather ends."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest

from megalite.data_parallel.buckets import Bucket, ParameterWaits
from megalite.topology.group import Work
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, MOE, Z1, Runner, build, tiny_config

Settings = dict[str, Any]

SMALL: Settings = {"num_layers": 2, "micro_batch_size": 2, "ddp_bucket_size": 1}
SP: Settings = {"tp": 2, "sequence_parallel": True}
NORMS: Settings = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp_act"]}


class _Late:
    """Work with a result that is hidden until `wait`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._values = bucket, bucket.data.clone()
        bucket.data.fill_(float("nan"))

    def wait(self) -> None:
        self._bucket.data.copy_(self._values)


@contextmanager
def _late_arrivals() -> Iterator[None]:
    expect = ParameterWaits.expect

    def late(self: ParameterWaits, bucket: Bucket, work: Work) -> None:
        work.wait()
        expect(self, bucket, _Late(bucket))

    with mock.patch.object(ParameterWaits, "expect", late):
        yield


def steps(context: RankContext, world: int, settings: Settings, late: bool) -> list[tuple[float, float]]:
    runner = Runner(build(context, tiny_config(world, **SMALL, **settings)))
    with _late_arrivals() if late else nullcontext():
        return [(result.loss, result.grad_norm) for result in (runner.step(), runner.step())]


CASES: dict[str, tuple[int, Settings]] = {
    "gpt": (2, Z1),
    "moe": (2, {**Z1, **MOE, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 16, "qk_norm": True}),
    "norms": (2, {**Z1, **NORMS}),
    "sp": (4, {**Z1, **SP, "recompute_granularity": "full", "recompute_method": "uniform"}),
    "zero2": (2, {**Z1, "shard_gradients": True, **LLAMA}),
    "server": (2, {"dp_strategy": "parameter-server"}),
}


@pytest.mark.parametrize("name", CASES)
def test_forwards_wait_for_their_parameters(name: str) -> None:
    """Each bucket has one parameter, and contains NaN until its wait: an early read gives NaN."""
    world, settings = CASES[name]
    assert run_ranks(world, steps, world, settings, True) == run_ranks(world, steps, world, settings, False)


def orders(context: RankContext, settings: Settings) -> list[int]:
    """Return the positions in the order of gathers of the buckets for which the next forward waits."""
    runner = Runner(build(context, tiny_config(2, **SMALL, **settings)))
    runner.step()
    strategy: Any = runner.replica.strategy
    asked = list(strategy._arrivals._coming)
    with mock.patch.object(ParameterWaits, "_wait_for", autospec=True, side_effect=ParameterWaits._wait_for) as waits:
        runner.step()
    return [asked.index(bucket) for bucket in dict.fromkeys(each for call in waits.mock_calls for each in call.args[1])]


@pytest.mark.parametrize("settings", [Z1, {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.001}])
def test_gathers_are_in_the_order_of_use(settings: Settings) -> None:
    for found in run_ranks(2, orders, settings):
        assert found == list(range(len(found))) and len(found) > 10

"""When a bucket's reduction starts, if the stage's last gradients are a whole backward's or those of its matrices alone."""

from collections import Counter

import pytest
import torch

from megalite.data_parallel.buckets import Bucket, make_buckets
from megalite.data_parallel.shards import StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import AllReduce
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import DONE, Group, Work

FACTORY = ParameterFactory(
    tp=Group("tp", (0, 1), 0), seed=1, dtype=torch.float32, device=torch.device("cpu"), sequence_parallel=True
)
SHAPE = (4, 5)


class Stage(torch.nn.Module):
    """Two matrices in buckets of their own, one that is table and head at once, a norm summed over tp, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = FACTORY.parameter("first", SHAPE, shard_dim=0, std=1.0)
        self.second = FACTORY.parameter("second", SHAPE, shard_dim=0, std=1.0)
        self.table = FACTORY.parameter("table", SHAPE, shard_dim=0, std=1.0, uses=2)
        self.norm = FACTORY.parameter("norm", (5,), decay=False, in_sequence_region=True)
        self.bias = FACTORY.parameter("bias", (4,), shard_dim=0, decay=False)


class Armed:
    """A strategy of one stage with a note of each reduction that starts."""

    def __init__(self, *, overlap: bool = True) -> None:
        self.stage, self.started = Stage(), list[str]()
        self.strategy = AllReduce(
            {3: self.stage},
            groups=StrategyGroups(
                dp=Group.solo("dp"), tp=Group.solo("tp"), embedding=None, expert_dp=Group.solo("expert-dp")
            ),
            options=StrategyOptions(bucket_size=1, grad_dtype=torch.float32, overlap=overlap),
        )
        self.strategy._reduce = self._reduce  # type: ignore[method-assign]

    def _reduce(self, bucket: Bucket) -> Work:
        self.started += [placed.parameter.info.spec.name for placed in bucket.placed]
        return DONE

    def give(self, *names: str) -> list[str]:
        """Contributions to these, in order; what has started since the last call."""
        for name in names:
            parameter = getattr(self.stage, name)
            assert isinstance(parameter, ShardedParameter)
            parameter.accumulate(torch.ones_like(parameter))
        started, self.started[:] = list(self.started), []
        return started


def test_a_whole_backward_gives_each_parameter_its_share() -> None:
    me = Armed()
    me.strategy.enable_grad_sync(3)
    assert me.give() == []
    assert me.give("bias", "table") == ["bias"]
    assert me.give("second", "table", "first", "norm") == ["second", "table", "first"]
    me.strategy.start_grad_sync(3)
    assert me.give() == [], "the norm's bucket is summed over tp first"
    me.strategy.finish_grad_sync()
    assert me.give() == ["norm"]


def test_with_matrices_pending_the_rest_starts_at_once_and_each_of_them_when_it_is_full() -> None:
    me = Armed()
    stage = me.stage
    assert me.give("norm", "bias", "first") == []
    me.strategy.enable_grad_sync(3, [stage.table, stage.second, stage.table])
    assert sorted(me.give()) == ["bias", "first"]
    assert me.give("table") == []
    assert me.give("second") == ["second"]
    assert me.give("table") == ["table"]
    me.strategy.start_grad_sync(3)
    assert me.give() == []


def test_with_nothing_pending_everything_starts() -> None:
    me = Armed()
    me.strategy.enable_grad_sync(3, [])
    assert sorted(me.give()) == ["bias", "first", "second", "table"]


@pytest.mark.parametrize("pending", [None, ["second"], []], ids=str)
def test_without_overlap_nothing_starts_before_the_launch(pending: list[str] | None) -> None:
    me = Armed(overlap=False)
    me.strategy.enable_grad_sync(3, None if pending is None else [getattr(me.stage, name) for name in pending])
    assert me.give("norm", "bias", "table", "second", "table", "first") == []
    me.strategy.start_grad_sync(3)
    assert sorted(me.give()) == ["bias", "first", "second", "table"]


def test_a_bucket_counts_what_is_pending_of_its_own() -> None:
    stage, calls = Stage(), list[str]()
    (bucket,) = make_buckets(
        [stage.first, stage.second], bucket_size=10**6, replicas=lambda kind: 1, grad_dtype=torch.float32
    )
    grad = torch.ones(stage.first.shape)
    bucket.start_counting(lambda: calls.append("full"), Counter([stage.second, stage.table, stage.second]))
    stage.second.accumulate(grad)
    assert calls == [], "one of two; the third is another bucket's"
    stage.second.accumulate(grad)
    assert calls == ["full"]
    bucket.start_counting(lambda: calls.append("none"), Counter([stage.table]))
    assert calls == ["full", "none"]

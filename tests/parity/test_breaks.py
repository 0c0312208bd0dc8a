"""The parity comparison sees what it is there for: one thing broken on purpose, and it fails."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import megalite.tensor_parallel.layers as layers
import megalite.training.step as step_module
from megalite.data.loader import Microbatch
from megalite.data_parallel.all_reduce import AllReduce
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.strategy import DataParallelStrategy, OptimizerShard
from megalite.tensor_parallel.random import DropoutStream
from megalite.topology.group import DONE, Group, Work
from tests.parity.layouts import FAMILIES
from tests.parity.test_parity import assert_same_numbers, one_rank, trajectory, whole
from tests.support.ranks import RankContext, run_ranks


def nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The control: all is well."""


def local_denominator(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each data-parallel rank divides by the tokens it has itself."""

    def denominator(microbatches: Sequence[Microbatch], *, dp: Group, device: torch.device) -> torch.Tensor:
        counts = [microbatch.loss_mask.sum(dtype=torch.float64) for microbatch in microbatches]
        return dp.size * torch.stack(counts).sum()

    patch.setattr(step_module, "token_denominator", denominator)


def _with_groups(patch: pytest.MonkeyPatch, **groups: Any) -> None:
    finish = DataParallelStrategy.finish_gradients

    def finish_gradients(strategy: DataParallelStrategy) -> None:
        strategy.groups = dataclasses.replace(strategy.groups, **groups)
        finish(strategy)

    patch.setattr(DataParallelStrategy, "finish_gradients", finish_gradients)


def tied_sum_left_out(patch: pytest.MonkeyPatch, rank: int) -> None:
    """First and last stage keep their own gradients of the word embedding."""
    _with_groups(patch, embedding=None)


def partial_sum_left_out(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Norms keep the gradients of their own part of the sequence."""
    _with_groups(patch, tp=Group.solo("tp"))


def everything_counted(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The norm counts what several ranks hold once for each of them."""
    norm = DataParallelStrategy.local_norm_squared

    def local_norm_squared(strategy: DataParallelStrategy) -> torch.Tensor:
        counted = [dataclasses.replace(shard, counts_in_norm=True) for shard in strategy.shards]
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(strategy, "shards", counted)
            return norm(strategy)

    patch.setattr(DataParallelStrategy, "local_norm_squared", local_norm_squared)


def no_dp_sum(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Data-parallel ranks keep their own gradients."""

    def reduce(strategy: AllReduce, bucket: Bucket) -> Work:
        return DONE

    patch.setattr(AllReduce, "_reduce", reduce)


def input_gradient_left_in_parts(patch: pytest.MonkeyPatch, rank: int) -> None:
    """What a column-parallel layer sends back is each rank's part of the sum."""

    def reduce(ctx: Any, grad_x: torch.Tensor) -> tuple[torch.Tensor, Work]:
        return grad_x, DONE

    patch.setattr(layers, "_reduce_input_grad", reduce)


def masks_by_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Dropout draws from a generator of the rank, not of the sample."""
    keep = DropoutStream.keep

    def own(stream: DropoutStream, site: str, sample: int, *rest: Any) -> torch.Tensor:
        return keep(stream, f"{site} of rank {rank}", sample, *rest)

    patch.setattr(DropoutStream, "keep", own)


def half_published(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The distributed optimizer's second rank steps none of its part."""
    make = DataParallelStrategy._make_shard

    def make_shard(strategy: DataParallelStrategy, bucket: Bucket) -> OptimizerShard:
        shard = make(strategy, bucket)
        if strategy.groups.dp.rank == 1:
            apart = torch.nn.Parameter(shard.main_param.data.clone())
            apart.grad = shard.main_param.grad
            return dataclasses.replace(shard, main_param=apart)
        return shard

    patch.setattr(DataParallelStrategy, "_make_shard", make_shard)


Z1 = {"dp_strategy": "distributed-optimizer"}
SP = {"sequence_parallel": True}

BREAKS: list[tuple[Callable[[pytest.MonkeyPatch, int], None], str, dict[str, Any]]] = [
    (local_denominator, "gpt", {"dp": 2}),
    (local_denominator, "gpt", {"dp": 2, **Z1}),
    (tied_sum_left_out, "gpt", {"pp": 2}),
    (tied_sum_left_out, "gpt", {"pp": 2, "vpp": 2}),
    (partial_sum_left_out, "gpt", {"tp": 2, **SP}),
    (partial_sum_left_out, "llama", {"tp": 2, **SP}),
    (everything_counted, "gpt", {"tp": 2}),
    (everything_counted, "gpt", {"dp": 2}),
    (everything_counted, "gpt", {"pp": 2}),
    (no_dp_sum, "gpt", {"dp": 2}),
    (input_gradient_left_in_parts, "gpt", {"tp": 2}),
    (masks_by_rank, "gpt-dropout", {"tp": 2}),
    (half_published, "gpt", {"dp": 2, **Z1}),
]


def broken_trajectory(
    context: RankContext,
    break_it: Callable[[pytest.MonkeyPatch, int], None],
    world: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch, context.rank)
        return trajectory(context, world, settings)


def run(
    break_it: Callable[[pytest.MonkeyPatch, int], None], family: str, settings: dict[str, Any]
) -> list[Any]:
    return run_ranks(2, broken_trajectory, break_it, 2, {**FAMILIES[family], **settings})


@pytest.mark.parametrize(
    "break_it, family, settings", BREAKS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_break_is_detected(break_it: Any, family: str, settings: dict[str, Any]) -> None:
    ranks = run(break_it, family, settings)
    with pytest.raises(AssertionError):
        assert_same_numbers(whole(ranks), one_rank(family))


@pytest.mark.parametrize(
    "family, settings", [("gpt", {"pp": 2}), ("gpt", {"tp": 2, **SP}), ("gpt", {"dp": 2})]
)
def test_without_a_break_the_same_path_passes(family: str, settings: dict[str, Any]) -> None:
    assert_same_numbers(whole(run(nothing, family, settings)), one_rank(family))

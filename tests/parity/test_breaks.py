"""The parity comparison sees what it is there for: one thing broken on purpose, and it fails."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import megalite.context_parallel.ring as ring
import megalite.context_parallel.ulysses as ulysses
import megalite.models.gpt as gpt
import megalite.models.moe.router as router
import megalite.tensor_parallel.layers as layers
import megalite.training.step as step_module
from megalite.data.loader import Microbatch
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.facts import BucketKind
from megalite.data_parallel.shards import OptimizerShard, StrategyGroups
from megalite.data_parallel.strategy import AllReduce, DataParallelStrategy
from megalite.models.context import ForwardContext
from megalite.parity.trajectory import RankTrajectory, rank_trajectory, whole
from megalite.tensor_parallel.random import DropoutStream
from megalite.topology.group import DONE, Group, Work
from tests.parity.factors import FAMILIES, LOSSES, Settings, world_of
from tests.parity.reference import STEPS, TOLERANCE, reference
from tests.support.ranks import RankContext, run_ranks
from tests.support.same import require_same
from tests.support.tiny import tiny_config

Break = Callable[[pytest.MonkeyPatch, int], None]  # what is done to one rank's process; the rank is given


def nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The control: all is well."""


def local_denominator(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank divides by the tokens it has itself, and the mean over data and context ranks is taken."""

    def denominators(microbatches: Sequence[Microbatch], *, dp: Group, **_: Any) -> torch.Tensor:
        counts = [microbatch.loss_mask.sum(dtype=torch.float64) for microbatch in microbatches]
        return dp.size * torch.stack(counts).sum(0, keepdim=True)

    patch.setattr(step_module, "token_denominators", denominators)


def _with_groups(patch: pytest.MonkeyPatch, **groups: Any) -> None:
    finish = DataParallelStrategy.finish_grad_sync

    def finish_grad_sync(strategy: DataParallelStrategy) -> None:
        strategy.groups = dataclasses.replace(strategy.groups, **groups)
        finish(strategy)

    patch.setattr(DataParallelStrategy, "finish_grad_sync", finish_grad_sync)


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
    fill = DropoutStream.fill

    def own(stream: DropoutStream, *masks: Any, site: str, **rest: Any) -> None:
        fill(stream, *masks, site=f"{site} of rank {rank}", **rest)

    patch.setattr(DropoutStream, "fill", own)


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


def positions_of_the_first_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Every context-parallel rank takes its rows for those of the first."""
    spans = gpt.sequence_spans

    def of_the_first(seq_length: int, *, cp_rank: int, cp_size: int) -> tuple[tuple[int, int], ...]:
        return spans(seq_length, cp_rank=0, cp_size=cp_size)

    patch.setattr(gpt, "sequence_spans", of_the_first)


def contiguous_parts(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The model takes its rows for one stretch of the sequence, while the loader hands out two chunks."""

    def stretch(seq_length: int, *, cp_rank: int, cp_size: int) -> tuple[tuple[int, int], ...]:
        part = seq_length // cp_size
        return ((cp_rank * part, (cp_rank + 1) * part),)

    patch.setattr(gpt, "sequence_spans", stretch)


def merged_without_logsumexp(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The ring adds up what each rank's keys give as if their softmax had the same denominator."""

    def merge(out: torch.Tensor, logsumexp: torch.Tensor, tile_out: torch.Tensor, tile_logsumexp: torch.Tensor) -> None:
        first = torch.isinf(logsumexp).unsqueeze(-1)
        out.copy_(torch.where(first, tile_out, (out + tile_out) / 2))
        logsumexp.copy_(torch.logaddexp(logsumexp, tile_logsumexp))

    patch.setattr(ring, "_merge", merge)


def heads_in_rank_order(patch: pytest.MonkeyPatch, rank: int) -> None:
    """After the all-to-all the sequence stays in the order in which ranks hold it."""

    def unordered(by_rank: torch.Tensor, held: object) -> torch.Tensor:
        return by_rank.flatten(0, 1)

    patch.setattr(ulysses, "to_true_order", unordered)


def documents_of_the_first_sample(patch: pytest.MonkeyPatch, rank: int) -> None:
    """All samples of a microbatch are cut where the first one is."""
    context = gpt.GPTStage.context

    def of_the_first(stage: gpt.GPTStage, ids: tuple[int, ...] = (), **more: Any) -> ForwardContext:
        starts = more["attention_documents"]
        return context(stage, ids, **{**more, "attention_documents": starts[:1] * len(starts)})

    patch.setattr(gpt.GPTStage, "context", of_the_first)


def experts_reduced_with_the_rest(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Expert gradients are summed over all data-parallel ranks, as if those had the same experts."""

    def replicas(groups: StrategyGroups, kind: BucketKind) -> Group:
        return groups.dp

    patch.setattr(StrategyGroups, "replicas", replicas)


def experts_averaged_over_ep(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Expert gradients are scaled by 1/ep, of which every rank's tokens have been through them already."""
    finish = DataParallelStrategy.finish_grad_sync

    def finish_grad_sync(strategy: DataParallelStrategy) -> None:
        finish(strategy)
        for bucket in strategy.all_buckets():
            if bucket.kind.expert:
                bucket.grad.div_(2)

    patch.setattr(DataParallelStrategy, "finish_grad_sync", finish_grad_sync)


def balance_of_the_own_part(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The load-balancing loss counts the choices of the rank's own part of the sequence."""
    make = router.Router.__init__

    def with_own_part(module: router.Router, *arguments: Any, **more: Any) -> None:
        make(module, *arguments, **more)
        module.sequence = Group.solo("tp-cp")

    patch.setattr(router.Router, "__init__", with_own_part)


def balance_of_the_own_batch(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Auxiliary losses are means over the sequences of a data-parallel rank."""
    make = step_module.AuxiliaryLosses

    def of_the_rank(*, per_sequence: float, per_token: float, **more: Any) -> Any:
        return make(per_sequence=2 * per_sequence, per_token=2 * per_token, **more)

    patch.setattr(step_module, "AuxiliaryLosses", of_the_rank)


def capacity_of_the_own_part(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Who has room at an expert is decided in each rank's part of the sequence."""
    within = router.within_capacity

    def alone(*arguments: Any, capacity: int, sequence: Group, **more: Any) -> torch.Tensor:
        solo = Group.solo("tp-cp")
        return within(*arguments, capacity=capacity // sequence.size, sequence=solo, **more)

    patch.setattr(router, "within_capacity", alone)


Z1: Settings = {"dp_strategy": "distributed-optimizer"}
SP: Settings = {"sequence_parallel": True}
GPT: Settings = {}
LLAMA, QWEN = FAMILIES["llama"], FAMILIES["qwen"]
MIXTRAL: Settings = {**FAMILIES["mixtral"], **LOSSES}
FULL_EXPERTS: Settings = {**FAMILIES["mixtral"], "moe_expert_capacity_factor": 1.0}
DROPOUT: Settings = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
A2A: Settings = {"cp": 2, "cp_comm_type": "a2a"}

BREAKS: list[tuple[Break, Settings]] = [
    (local_denominator, {"dp": 2}),
    (local_denominator, {"dp": 2, **Z1}),
    (local_denominator, {"cp": 2}),
    (local_denominator, {"dp": 2, "ep": 2, **MIXTRAL}),
    (tied_sum_left_out, {"pp": 2}),
    (tied_sum_left_out, {"pp": 2, "vpp": 2, "num_layers": 4}),
    (partial_sum_left_out, {"tp": 2, **SP}),
    (partial_sum_left_out, {"tp": 2, **SP, **LLAMA}),
    (partial_sum_left_out, {"tp": 2, **QWEN}),  # the norms of queries and keys
    (partial_sum_left_out, {"tp": 2, **MIXTRAL}),  # the router
    (everything_counted, {"tp": 2}),
    (everything_counted, {"dp": 2}),
    (everything_counted, {"pp": 2}),
    (everything_counted, {"cp": 2}),
    (everything_counted, {"dp": 2, **MIXTRAL}),
    (no_dp_sum, {"dp": 2}),
    (no_dp_sum, {"cp": 2}),
    (input_gradient_left_in_parts, {"tp": 2}),
    (masks_by_rank, {"tp": 2, **DROPOUT}),
    (masks_by_rank, {"cp": 2, **DROPOUT}),
    (half_published, {"dp": 2, **Z1}),
    (positions_of_the_first_rank, {"cp": 2}),
    (positions_of_the_first_rank, {"cp": 2, **LLAMA}),
    (contiguous_parts, {"cp": 2, **LLAMA}),
    (merged_without_logsumexp, {"cp": 2}),
    (heads_in_rank_order, A2A),
    (documents_of_the_first_sample, {"pp": 2, "micro_batch_size": 2, "reset_attention_mask": True}),
    (experts_reduced_with_the_rest, {"dp": 2, "ep": 2, **MIXTRAL}),
    (experts_reduced_with_the_rest, {"cp": 2, "ep": 2, **MIXTRAL, **Z1}),
    (experts_averaged_over_ep, {"dp": 2, "ep": 2, **MIXTRAL}),
    (balance_of_the_own_part, {"tp": 2, **MIXTRAL}),
    (balance_of_the_own_part, {"cp": 2, **MIXTRAL}),
    (balance_of_the_own_batch, {"dp": 2, **MIXTRAL}),
    (capacity_of_the_own_part, {"tp": 2, **FULL_EXPERTS}),
    (capacity_of_the_own_part, {"cp": 2, **FULL_EXPERTS}),
]

WELL: list[Settings] = [
    {"pp": 2},
    {"tp": 2, **SP},
    {"dp": 2},
    A2A,
    {"cp": 2, **LLAMA},
    {"cp": 2, **MIXTRAL},
    {"dp": 2, "ep": 2, **MIXTRAL},
    {"tp": 2, **FULL_EXPERTS},
]
"""Layouts of breaks as they are when nothing is broken."""


FEW: Settings = {"num_layers": 2, "global_batch_size": 4}


def broken_trajectory(context: RankContext, break_it: Break, settings: Settings) -> RankTrajectory:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch, context.rank)
        return rank_trajectory(context, tiny_config(world_of(settings), **settings), STEPS)


@pytest.mark.parametrize(
    "break_it, settings", BREAKS, ids=[f"{index}-{row[0].__name__}" for index, row in enumerate(BREAKS)]
)
def test_a_break_is_detected(break_it: Break, settings: Settings) -> None:
    settings = {**FEW, **settings}
    ranks = run_ranks(world_of(settings), broken_trajectory, break_it, settings)
    with pytest.raises(AssertionError):
        require_same(whole(ranks), reference(settings), TOLERANCE)


@pytest.mark.parametrize("settings", WELL, ids=str)
def test_without_a_break_the_same_path_passes(settings: Settings) -> None:
    settings = {**FEW, **settings}
    ranks = run_ranks(world_of(settings), broken_trajectory, nothing, settings)
    require_same(whole(ranks), reference(settings), TOLERANCE)

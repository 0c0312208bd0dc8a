"""Test properties of low-rank means only."""

from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.codec import PowerSGD
from megalite.data_parallel.wire import Background, Channel, WireCounter
from tests.data_parallel.compression.replicas import SHAPES, odd_bucket, random_values
from tests.support.ranks import RankContext, run_ranks


def codec_of(context: RankContext, ranks: int, rank: int) -> tuple[Bucket, PowerSGD]:
    bucket = odd_bucket(ranks)
    group = context.topology(dp=ranks).dp
    channel = Channel(group, WireCounter(), Background(torch.device("cpu")), wire_dtype=torch.bfloat16)
    return bucket, PowerSGD(bucket, channel, rank=rank)


def low_rank_values(rank: int, bucket: Bucket) -> torch.Tensor:
    """Return matrices with full rank on each of two replicas, and with rank 1 in their mean."""
    values = torch.zeros_like(bucket.grad)
    generator = torch.Generator().manual_seed(4)
    for placed in bucket.placed:
        shape = placed.parameter.shape
        if len(shape) > 1:
            own = torch.randn(shape, generator=generator) * (1 - 2 * rank)
            column = torch.randn(*shape[:-1], 1, generator=generator)
            row = torch.randn(*shape[:-2], 1, shape[-1], generator=generator)
            values[placed.start : placed.stop] = (own + column * row).view(-1)
        else:
            values[placed.start : placed.stop] = torch.randn(shape, generator=generator)
    return values


def first_mean(context: RankContext) -> list[torch.Tensor]:
    bucket, codec = codec_of(context, 2, 2)
    values = low_rank_values(context.topology(dp=2).dp.rank, bucket)
    codec.mean(values)
    return [values, codec.error]


def test_mean_of_low_rank_is_exact_in_one_step() -> None:
    """This holds however replicas differ. Their errors sum to the part of the mean outside the factors, which is 0."""
    (out, first), (_, second) = run_ranks(2, first_mean)
    bucket = odd_bucket(1)
    wanted = sum((low_rank_values(rank, bucket)[: len(out)] / 2 for rank in (0, 1)), torch.zeros(len(bucket.grad)))
    used = bucket.placed[-1].stop
    assert (out[:used] - wanted[:used]).norm() < 2e-6 * wanted.norm()
    assert first.norm() > 1.0
    assert (first + second).norm() < 1e-5 * first.norm()


def test_small_tensors_and_vectors_are_not_compressed() -> None:
    (out, error), _ = run_ranks(2, first_mean)
    bucket = odd_bucket(1)
    parts = [low_rank_values(rank, bucket) for rank in (0, 1)]
    for placed, name in zip(bucket.placed, SHAPES, strict=True):
        place = slice(placed.start, placed.stop)
        whole = name in ("one", "few", "vector")
        assert torch.equal(out[place], (parts[0][place] + parts[1][place]) / 2) is whole
        assert error[place].any().item() is not whole


def unlike_replicas(context: RankContext) -> list[float]:
    """Return error sizes for constant inputs that differ between replicas, with a mean of full rank."""
    bucket, codec = codec_of(context, 2, 4)
    mine, found = (random_values(1, context.topology(dp=2).dp.rank, len(bucket.grad)).clamp_(-1, 1), list[float]())
    for step in range(120):
        values = mine.clone()
        codec.mean(values)
        if step % 30 == 29:
            found.append(codec.error.norm().item() / mine.norm().item())
    return found


def test_errors_stay_bounded_if_replicas_always_differ() -> None:
    """With M_i - out as the error instead, each step would add (M_i - mean) to it."""
    for norms in run_ranks(2, unlike_replicas):
        assert norms[-1] < 1.3 * norms[0]


def states(context: RankContext, steps: int) -> dict[str, Any]:
    bucket, codec = codec_of(context, 2, 2)
    rank = context.topology(dp=2).dp.rank
    for step in range(steps):
        codec.mean(random_values(step, rank, len(bucket.grad)))
    return {state.placed.parameter.info.spec.name: state.values.clone() for state in codec.tensor_states()}


def test_initial_factors_are_equal_on_all_ranks() -> None:
    for steps in (0, 3):
        first, second = run_ranks(2, states, steps)
        assert list(first) == ["wide", "experts", "tall"], "in the order of their shorter sides"
        for name, q in first.items():
            assert torch.equal(q, second[name])
            assert q.shape == (2 if name == "experts" else 1, 2, max(SHAPES[name][-2:]))
            if steps:
                assert torch.equal(q.abs().amax(dim=(1, 2)), torch.ones(len(q)))

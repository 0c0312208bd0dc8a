"""Test every codec: bits of an oracle, error feedback, convergence on constant inputs, and bytes; the selection of top-k and low rank."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.codec import SMALL, STRIDE, PowerSGD, largest
from megalite.data_parallel.wire import Background, Channel, WireCounter
from tests.data_parallel.compression.oracles import EightBits, Largest, LowRank
from tests.data_parallel.compression.replicas import (
    CODECS,
    SHAPES,
    USED,
    Found,
    Values,
    constant_values,
    means,
    odd_bucket,
    owed,
    random_values,
    true_mean,
)
from tests.support.ranks import RankContext, run_ranks

COUNT = math.ceil(0.05 * USED)


def oracle(name: str, ranks: int, size: int) -> EightBits | Largest | LowRank:
    if name == "uint8":
        return EightBits(ranks, size)
    if name == "topk":
        return Largest(ranks, size, COUNT)
    return LowRank(ranks, size, 2, SHAPES)


@pytest.fixture(scope="module", params=[("uint8", 3), ("topk", 3), ("powersgd", 4)], ids=str)
def run(request: pytest.FixtureRequest) -> tuple[str, list[Found]]:
    name, ranks = request.param
    return name, run_ranks(ranks, means, ranks, name, random_values, 4)


def test_means_equal_those_of_the_oracle(run: tuple[str, list[Found]]) -> None:
    name, ranks = run
    played = oracle(name, len(ranks), ranks[0].size)
    for step in range(1, 5):
        wanted = played.mean([random_values(step, rank, ranks[0].size) for rank in range(len(ranks))])
        for rank, found in enumerate(ranks):
            assert torch.equal(found.outs[step - 1], wanted), (step, rank)
    for found, error in zip(ranks, played.errors, strict=True):
        assert torch.equal(torch.as_tensor(found.private), torch.as_tensor(error))


def test_outputs_and_errors_sum_to_the_means(run: tuple[str, list[Found]]) -> None:
    """Σ out + mean of the errors = Σ means, up to rounding in fp32."""
    _, ranks = run
    size = ranks[0].size
    wanted = sum((true_mean(random_values, step, len(ranks), size) for step in range(1, 5)), torch.zeros(size))
    came = sum((out.double() for out in ranks[0].outs), owed(ranks))
    assert owed(ranks).norm() > 0.01 * wanted.norm() or run[0] == "uint8"
    assert (came - wanted).norm() <= 1e-6 * wanted.norm()
    assert not came[USED:].any()


def test_bytes_equal_the_formula(run: tuple[str, list[Found]]) -> None:
    name, ranks = run
    n, size = len(ranks), ranks[0].size
    low = sum(batch * 2 * (a + b) for batch, a, b in ((1, 130, 40), (2, 24, 70), (1, 20, 90)))
    whole = 1 + 15 + 77
    wanted = {
        "uint8": 2 * (n - 1) * (size // n + 4 * math.ceil(size // n / 2048)),
        "topk": (n - 1) * 8 * COUNT,
        "powersgd": 2 * (n - 1) / n * 4 * (low + whole),
    }[name]
    for found in ranks:
        assert found.sent == [found.said] * 4
        # Low rank pads each of its two sums to a multiple of the ranks.
        assert wanted <= found.sent[0] <= wanted + (8 * n * 2 if name == "powersgd" else 0)


def distance(ranks: list[Found], steps: int) -> float:
    wanted = true_mean(constant_values, 1, len(ranks), ranks[0].size)
    mean = torch.stack(ranks[0].outs[:steps]).double().mean(dim=0)
    return float((mean - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", CODECS)
def test_constant_inputs_converge_only_with_error_feedback(name: str) -> None:
    """The distance decreases about as 1/t, as errors are bounded; without error feedback it does not."""
    with_errors = run_ranks(3, means, 3, name, constant_values, 64)
    without = run_ranks(3, means, 3, name, constant_values, 64, keep_errors=False)
    near, far = distance(with_errors, 16), distance(with_errors, 64)
    assert far < near / 2.5
    assert far < distance(without, 64) / 4
    assert distance(without, 64) > 0.5 * distance(without, 16)


def scaled(step: int, rank: int, size: int, *, factor: float, most: float = math.inf) -> torch.Tensor:
    return random_values(step, rank, size).clamp(-most, most) * factor


def equal(step: int, rank: int, size: int) -> torch.Tensor:
    return torch.ones(size)


def mixed(step: int, rank: int, size: int) -> torch.Tensor:
    values = random_values(step, rank, size)
    return torch.cat([values[: size // 2] * 1e30, values[size // 2 :] * 1e-25])


ROWS: dict[str, Values] = {
    "zeros": partial(scaled, factor=0.0),
    "equal": equal,
    "huge": partial(scaled, factor=1e30),
    "small": partial(scaled, factor=1e-25),
    "denormal": partial(scaled, factor=1e-40, most=1.0),
    "mixed": mixed,
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("name", CODECS)
def test_extreme_values(name: str, kind: str) -> None:
    """No result is infinite and no value is lost."""
    values = ROWS[kind]
    ranks = run_ranks(2, means, 2, name, values, 3)
    for found in ranks:
        for mine, first in zip(found.outs, ranks[0].outs, strict=True):
            assert torch.equal(mine, first) and mine.isfinite().all()
    size = ranks[0].size
    wanted = sum((true_mean(values, step, 2, size) for step in (1, 2, 3)), torch.zeros(size).double())
    came = sum((out.double() for out in ranks[0].outs), owed(ranks))
    if kind == "equal":  # including the padding
        wanted, came = wanted[:USED], came[:USED]
    # Subnormal numbers have few digits.
    assert (came - wanted).norm() <= 2e-6 * wanted.norm() + 1e-42


def spoiled(step: int, rank: int, size: int) -> torch.Tensor:
    values = random_values(step, rank, size)
    if rank == 1:
        values[700] = (math.nan, math.inf, -math.inf)[step - 1]
    return values


@pytest.mark.parametrize("name", CODECS)
def test_non_finite_values_are_kept(name: str) -> None:
    """The gradient's norm is then not finite on every rank."""
    for found in run_ranks(2, means, 2, name, spoiled, 3, keep_errors=False):
        for out in found.outs:
            assert not out.isfinite().all()


SIZE = 3 * SMALL + 5


def sorted_out(values: torch.Tensor, count: int) -> torch.Tensor:
    return torch.argsort(values, stable=True, descending=True)[:count].sort().values


def rows(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(SIZE, generator=generator).abs()
    if kind == "few values":
        return (values * 3).floor()
    if kind == "zeros":
        return values * 0.0
    if kind == "sparse":
        return values * (torch.rand(SIZE, generator=generator) < 0.005)
    if kind == "sample sees only large ones":
        values[::STRIDE] += 10.0
    if kind == "sample sees only small ones":
        values += 10.0
        values[::STRIDE] -= 10.0
    if kind == "infinities":
        values[5::1000] = torch.inf
    if kind == "nan":
        values[7::2000] = torch.nan
    return values


@pytest.mark.parametrize(
    "kind",
    [
        *("random", "few values", "zeros", "sparse", "infinities", "nan"),
        *("sample sees only large ones", "sample sees only small ones"),
    ],
)
@pytest.mark.parametrize("count", [1, 10, SIZE // 100, SIZE // 2, SIZE])
def test_selection_equals_a_stable_sort(kind: str, count: int) -> None:
    values = rows(kind)
    before = values.clone()
    assert torch.equal(largest(values, count), sorted_out(values, count))
    assert torch.equal(values.nan_to_num(-1.0), before.nan_to_num(-1.0))


@pytest.mark.parametrize("size", [1, 2, 100, SMALL - 1, SMALL])
def test_selection_of_other_sizes(size: int) -> None:
    values = torch.rand(size, generator=torch.Generator().manual_seed(2))
    for count in {1, (size + 1) // 2, size}:
        assert torch.equal(largest(values, count), sorted_out(values, count))


def test_more_nan_than_selected_elements() -> None:
    values = torch.full((100,), torch.nan)
    assert torch.equal(largest(values, 3), torch.arange(3))


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

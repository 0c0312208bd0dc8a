"""Test every codec: bits of an oracle, error feedback, convergence on constant inputs, and bytes."""

import math
from functools import partial

import pytest
import torch

from tests.data_parallel.compression.oracles import EightBits, Largest, LowRank
from tests.data_parallel.compression.replicas import (
    CODECS,
    SHAPES,
    USED,
    Found,
    Values,
    constant_values,
    means,
    owed,
    random_values,
    true_mean,
)
from tests.support.ranks import run_ranks

COUNT = math.ceil(0.05 * USED)


def oracle(name: str, ranks: int, size: int) -> EightBits | Largest | LowRank:
    """Return the oracle of a codec, with the settings of `means`."""
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
    """Return the relative distance of the mean of the first outputs from the mean of constant inputs."""
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

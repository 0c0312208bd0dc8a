"""Test stochastic rounding: unbiased, and independent of an element's position."""

import hashlib
import math

import pytest
import torch

from megalite.optimizers.adam import global_indices, random_bits, round_to
from megalite.optimizers.base import FlatParameter, Segment

CPU = torch.device("cpu")


def segment(
    shape: tuple[int, ...],
    bounds: tuple[tuple[int, int], ...] | None = None,
    *,
    name: str = "w",
    start: int = 0,
    offset: int = 0,
    count: int | None = None,
) -> Segment:
    """Return a segment of `count` elements from `offset` of a tensor's slice, at `start` of a flat parameter."""
    bounds = bounds or tuple((0, size) for size in shape)
    local = tuple(high - low for low, high in bounds)
    stop = start + (math.prod(local) - offset if count is None else count)
    return Segment(name, start, stop, offset, shape, bounds, True)


def flat(*segments: Segment) -> FlatParameter:
    return FlatParameter(torch.nn.Parameter(torch.zeros(segments[-1].stop)), True, segments)


def bits_of(parameter: FlatParameter, start: int, stop: int, *, step: int = 3, seed: int = 5) -> torch.Tensor:
    return random_bits(parameter, start, stop, seed=seed, step=step)


SHAPE = (6, 10, 8)
CUTS = [((0, 6), (0, 10), (0, 8)), ((2, 4), (0, 10), (0, 8)), ((3, 6), (0, 10), (4, 8)), ((2, 4), (2, 7), (6, 8))]


@pytest.mark.parametrize("bounds", CUTS, ids=str)
def test_indices_equal_those_of_the_whole_tensor(bounds: tuple[tuple[int, int], ...]) -> None:
    whole = torch.arange(math.prod(SHAPE)).view(SHAPE)
    expected = whole[tuple(slice(low, high) for low, high in bounds)].flatten()
    one = segment(SHAPE, bounds, start=7)
    size = expected.numel()
    for start, stop in ((0, size), (3, size - 2), (5, 6), (size - 1, size), (11, 11), (1, 9)):
        assert torch.equal(global_indices(one, 7 + start, 7 + stop, CPU), expected[start:stop])


@pytest.mark.parametrize("bounds", CUTS, ids=str)
def test_bits_do_not_depend_on_the_position(bounds: tuple[tuple[int, int], ...]) -> None:
    """A range of a slice, next to another tensor, gets the bits of the whole tensor."""
    whole = bits_of(flat(segment(SHAPE)), 0, math.prod(SHAPE)).view(SHAPE)
    expected = whole[tuple(slice(low, high) for low, high in bounds)].flatten()
    count = expected.numel() - 5
    other = segment((4, 3), name="other")
    moved = flat(other, segment(SHAPE, bounds, start=12, offset=2, count=count))
    found = torch.cat([bits_of(moved, 0, 20), bits_of(moved, 20, 12 + count)])
    assert torch.equal(found[12:], expected[2 : 2 + count])
    assert torch.equal(found[:12], bits_of(flat(other), 0, 12))


def hashed(index: int, *, seed: int, step: int, name: str) -> int:
    """Return the bits of one element, computed with unsigned numbers: a resumed run must round in the same way."""
    digest = hashlib.blake2b(f"{seed}:{step}:{name}".encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "little") for half in (digest[:4], digest[4:]))
    x = (index % 2**32 * 0x9E3779B1 + first + (index >> 32) * 0xC2B2AE3D) % 2**32
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32 ^ second
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32 ^ second
    return x ^ x >> 16


def test_bits_are_unchanged() -> None:
    for seed, step, name in ((5, 3, "w"), (6, 3, "w"), (5, 4, "w"), (5, 3, "v")):
        found = bits_of(flat(segment((500,), name=name)), 0, 500, seed=seed, step=step).tolist()
        assert [bits % 2**32 for bits in found] == [hashed(i, seed=seed, step=step, name=name) for i in range(500)]
    rows = ((1 << 16, (1 << 16) + 1), (0, 1 << 16))
    far = bits_of(flat(segment((1 << 17, 1 << 16), rows)), 100, 120).tolist()
    expected = [hashed((1 << 32) + i, seed=5, step=3, name="w") for i in range(100, 120)]
    assert [bits % 2**32 for bits in far] == expected


def test_bits_are_uniform_and_independent() -> None:
    size = 1 << 15
    bits = bits_of(flat(segment((size,))), 0, size)
    columns = torch.stack([(bits >> place & 1).double() for place in range(32)]) * 2 - 1
    deviation = size**-0.5
    assert columns.mean(dim=1).abs().max() < 4.5 * deviation
    between = (columns @ columns.T / size).fill_diagonal_(0.0)
    assert between.abs().max() < 5 * deviation
    for lag in (1, 2, 64, 1024):
        assert (columns[:, lag:] * columns[:, :-lag]).mean(dim=1).abs().max() < 4.5 * deviation


def rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    target = torch.zeros_like(values, dtype=torch.bfloat16)
    round_to(target, values, bits.clone())
    return target


@pytest.mark.parametrize("value", [1.001, -7.77e8, 1e-39])
def test_rounding_is_unbiased(value: float) -> None:
    size = 1 << 16
    values = torch.full((size,), value)
    found = rounded(values, bits_of(flat(segment((size,))), 0, size)).double()
    below, above = found.min().item(), found.max().item()
    exact = values[0].double().item()
    assert below < exact < above and found.unique().numel() == 2
    share = (exact - below) / (above - below)
    deviation = (share * (1 - share) / size) ** 0.5 * (above - below)
    assert abs(found.mean().item() - exact) < 4 * deviation


def test_exact_values_are_unchanged() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    for bits in (0, -1, 0xFFFF, 0x1234):
        found = rounded(every, torch.full((1 << 16,), bits, dtype=torch.int32))
        assert torch.equal(found.view(torch.int16)[~every.isnan()], every.bfloat16().view(torch.int16)[~every.isnan()])
        assert torch.equal(found.isnan(), every.isnan())


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7FC00000, -0x400000, 0x7FFF8001])
def test_nan_stays_nan(pattern: int) -> None:
    """This covers all bit patterns, also those that devices produce."""
    value = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    for bits in (0, 1, 0x8000, 0xFFFF, -1):
        assert rounded(value, torch.tensor([bits], dtype=torch.int32)).isnan().all()

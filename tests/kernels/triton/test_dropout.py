"""Dropout masks by numpy and Triton against the generator's published definition in plain integers."""

import math

import pytest
import torch
from torch import Tensor

from megalite.kernels import layer_ops
from megalite.kernels.triton.elementwise import dropout_mask

KEY, HALF = 0x5A17_C0DE_1234_5678, 1 << 64
CPU = torch.device("cpu")


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011)."""
    for _ in range(10):
        first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            second // HALF ^ counter[1] ^ key[0],
            second % HALF,
            first // HALF ^ counter[3] ^ key[1],
            first % HALF,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) % HALF, (key[1] + 0xBB67AE8584CAA73B) % HALF]
    return counter


def expected_row(sample: int, head: int, row: int, width: int, p: float) -> list[bool]:
    kept, blocks = [], math.ceil(width / 8)
    for block in range(blocks):
        for word in philox([row * blocks + block + 1, 0, head, 0], [KEY, sample]):
            kept += [word % (1 << 32) >= layer_ops.drop_threshold(p), word >> 32 >= layer_ops.drop_threshold(p)]
    return kept[:width]


def test_generator_equals_the_paper() -> None:
    """One of the authors' known-answer tests."""
    assert philox([0] * 4, [0] * 2) == [
        *(0x16554D9ECA36314C, 0xDB20FE9D672D0FDC),
        *(0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ]


@pytest.mark.parametrize("width", [8, 13, 40])
def test_mask_equals_its_definition(width: int) -> None:
    rows, samples = [0, 1, 2, 7, 8, 30_000_000_000], [5, 6, 1 << 40]
    keep = torch.empty(3, 2, len(rows), width, dtype=torch.bool)
    layer_ops.dropout_mask(keep, torch.tensor(rows), key=KEY, samples=samples, first_head=4, p=0.3)
    expected = [[[expected_row(s, h, row, width, 0.3) for row in rows] for h in (4, 5)] for s in samples]
    assert keep.tolist() == expected


@pytest.mark.parametrize(
    ("shape", "transposed"),
    [((2, 3, 11, 40), False), ((3, 1, 70, 96), True), ((2, 2, 9, 13), False), ((1, 1, 600, 8), True)],
)
@pytest.mark.parametrize("p", [0.1, 0.999])
def test_triton_mask_equals_numpy(shape: tuple[int, ...], transposed: bool, p: float, device: torch.device) -> None:
    rows = torch.cat((torch.arange(3, 3 + shape[2] // 2), torch.arange(1000, 1000 + shape[2] - shape[2] // 2)))
    found: dict[str, Tensor] = {}
    for name, draw, where in (("numpy", layer_ops.dropout_mask, CPU), ("triton", dropout_mask, device)):
        # A mask of activations [s, b, h] has their memory order.
        keep = torch.zeros(shape[2], shape[0], shape[3], dtype=torch.bool, device=where).transpose(0, 1).unsqueeze(1)
        keep = keep if transposed else torch.zeros(shape, dtype=torch.bool, device=where)
        samples = range((1 << 31) - 1, (1 << 31) - 1 + shape[0])
        draw(keep, rows.to(where), key=KEY, samples=samples, first_head=2, p=p)
        found[name] = keep.cpu()
    assert torch.equal(found["numpy"], found["triton"])
    share = found["numpy"].double().mean().item()
    assert share == pytest.approx(1 - p, abs=5 * (p * (1 - p) / found["numpy"].numel()) ** 0.5)


@pytest.mark.gpu
def test_numpy_fills_a_mask_on_a_device(device: torch.device) -> None:
    keep, rows = torch.empty(2, 1, 30, 24, dtype=torch.bool), torch.arange(30)
    layer_ops.dropout_mask(keep, rows, key=KEY, samples=(1, 2), first_head=0, p=0.5)
    there = torch.empty_like(keep, device=device)
    layer_ops.dropout_mask(there, rows.to(device), key=KEY, samples=(1, 2), first_head=0, p=0.5)
    assert torch.equal(there.cpu(), keep)

"""The norm kernel against float64."""

import pytest
import torch

from megalite.kernels.triton.l2norm import BLOCK, l2norm


def random(n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device, dtype)


def expected(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.double().flatten() for x in tensors]).norm()


@pytest.mark.parametrize(
    "sizes", [[1], [BLOCK], [BLOCK + 1], [10 * BLOCK - 3], [7, 0, 2 * BLOCK, 5000], [0, 0]], ids=str
)
def test_sizes(sizes: list[int], device: torch.device) -> None:
    """More blocks than programs, a last block in part, none at all."""
    tensors = [random(n, device) for n in sizes]
    found = l2norm(tensors)
    assert found.shape == ()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected(*tensors), rtol=1e-14, atol=0.0)


def test_types_together(device: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = [random(300 + i, device, dtype) for i, dtype in enumerate(dtypes)]
    torch.testing.assert_close(l2norm(tensors), expected(*tensors), rtol=1e-14, atol=0.0)


def test_numbers_whose_squares_fp32_cannot_hold(device: torch.device) -> None:
    large, small = random(50, device) * 1e30, random(50, device) * 1e-30
    torch.testing.assert_close(l2norm([large]), expected(large), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(l2norm([small]), expected(small), rtol=1e-14, atol=0.0)


def test_many_small_beside_a_large(device: torch.device) -> None:
    """In fp32 nothing of the small ones would be seen."""
    x = torch.full((3 * BLOCK,), 1e-5, device=device)
    x[0] = 1.0
    torch.testing.assert_close(l2norm([x]), expected(x), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_shows(value: float, device: torch.device) -> None:
    x = random(BLOCK + 9, device)
    x[-1] = value
    torch.testing.assert_close(l2norm([x]), expected(x), equal_nan=True)


def test_a_piece_of_a_buffer(device: torch.device) -> None:
    buffer = random(3000, device)
    torch.testing.assert_close(l2norm([buffer[17:2000]]), expected(buffer[17:2000]), rtol=1e-14, atol=0.0)


def test_twice_the_same_bits(device: torch.device) -> None:
    tensors = [random(n, device) for n in (9 * BLOCK + 11, 301)]
    assert torch.equal(l2norm(tensors), l2norm(tensors))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.zeros(2**31 + 9, dtype=torch.bfloat16, device="cuda")
    x[-3:] = 2.0
    x[:1] = 2.0
    torch.full(
        (4096,), float("nan"), dtype=torch.float64, device="cuda"
    )  # freed: what partial sums are written over
    assert float(l2norm([x])) == 4.0

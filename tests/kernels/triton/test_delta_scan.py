"""The scan of linear attention by Triton against torch's in float64: outputs, last state and the gradient of every input."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.config.model import LINEAR_CHUNK as CHUNK
from megalite.kernels.linear_attention import DeltaScan, delta_scan, linear_attention
from megalite.kernels.triton.delta_scan import COLUMNS
from megalite.kernels.triton.delta_scan import delta_scan as by_triton
from tests.kernels.triton.exact import compare, draw

LIMIT = 5e-6  # many products of fp32 in a row


def rule(
    scan: DeltaScan, q: Tensor, k: Tensor, v: Tensor, strengths: Tensor, decays: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    k = k / k.norm(dim=-1, keepdim=True)
    return linear_attention(q, k, v, -decays.exp(), strengths=strengths.sigmoid(), scan=scan, state=state)


@pytest.mark.parametrize(
    ("length", "dk", "dv"),
    [(3 * CHUNK, 16, COLUMNS), (2 * CHUNK + 9, 20, COLUMNS + 1), (CHUNK, 33, 2 * COLUMNS), (5, 3, 7), (1, 16, 16)],
)
def test_outputs_and_gradients_equal_float64(
    length: int, dk: int, dv: int, device: torch.device, poisoned: None
) -> None:
    """Several chunks or one; tokens, rows and columns of the state that do not fill a block."""
    make = partial(draw, dtype=torch.float32, device=device)
    q, k = (make(2, 2, length, dk, seed=seed) for seed in (1, 2))
    v, state = make(2, 2, 3, length, dv, seed=3), make(2, 2, 3, dk, dv, seed=4)
    gates = (make(2, 2, 3, length, seed=seed) for seed in (5, 6))
    compare(partial(rule, by_triton), partial(rule, delta_scan), (q, k, v, *gates, state), LIMIT)


def test_a_transposed_state_is_read_as_it_is(device: torch.device) -> None:
    written, read, keys = (draw(2, 2, 16, 16, dtype=torch.float32, device=device, seed=n) / 8 for n in (1, 2, 3))
    decays, state = torch.ones(2, 2, device=device), draw(2, 16, 16, dtype=torch.float32, device=device, seed=4)
    for ours, copied in zip(
        by_triton(written, read, keys, decays, state.mT.contiguous().mT),
        by_triton(written, read, keys, decays, state),
        strict=True,
    ):
        assert torch.equal(ours, copied)


def test_unused_space_of_a_slice_is_not_read(device: torch.device) -> None:
    """Rows may be further apart than they are long."""
    both = draw(2, 3, CHUNK, 40 + 16, dtype=torch.float32, device=device, seed=1) / 8
    written, read = both.split((40, 16), dim=-1)
    keys, decays = read.flip(1) / 8, draw(2, 3, dtype=torch.float32, device=device, seed=2).sigmoid()
    state = torch.zeros(2, 16, 40, device=device)
    sliced = by_triton(written, read, keys, decays, state)
    for ours, copied in zip(sliced, by_triton(written.clone(), read.clone(), keys, decays, state), strict=True):
        assert torch.equal(ours, copied)
        assert not ours.isnan().any() and ours.count_nonzero()

"""torch's LAMB step, the reference of the others, against the formula in float64."""

import pytest
import torch

from megalite.kernels.lamb import lamb_moments, lamb_step
from tests.kernels.lamb_formula import TERMS, exact, off, piece, run

KERNEL = lamb_moments, lamb_step


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_in_float64(weight_decay: float, step: int) -> None:
    terms = {**TERMS, "weight_decay": weight_decay, "step": step, "rate": 0.3}
    tensors = piece(1500, dtype=torch.float64)
    wanted = exact(tensors, **terms)
    found = off(run(KERNEL, tensors, **terms), wanted)
    assert max(found.values()) < 1e-14, found


def test_in_float32() -> None:
    tensors = piece(5000)
    terms = {**TERMS, "step": 2, "rate": 0.3}
    wanted = exact(tensors, **terms)
    found = off(run(KERNEL, tensors, **terms), wanted)
    assert max(found.values()) < 3e-7, found


def test_norms_only_where_they_are_wanted() -> None:
    tensors, same = piece(40), piece(40)
    assert lamb_moments(*tensors, **TERMS, step=3, norms=False) == ()
    lamb_moments(*same, **TERMS, step=3, norms=True)
    assert all(torch.equal(one, other) for one, other in zip(tensors, same, strict=True))

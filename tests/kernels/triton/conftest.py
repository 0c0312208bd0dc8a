"""The device of the kernels' tests: without a CUDA device, Triton's interpreter runs them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=not CUDA, scope="session")
def _rounding_to_fp8() -> None:
    """Fix the interpreter, which loses the carry if rounding reaches the next power of two; devices keep it."""
    from triton.runtime import interpreter

    formats = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    convert = interpreter._convert_float

    def convert_with_carry(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) not in formats:
            return convert(values, source, target, rounding)
        return torch.from_numpy(values).to(formats[str(target)]).view(torch.uint8).numpy()

    interpreter._convert_float = convert_with_carry


@pytest.fixture
def device() -> torch.device:
    """Return a CUDA device, or the CPU with interpreted kernels."""
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, to reveal elements that a kernel does not write."""
    monkeypatch.setattr(torch, "empty", _full_of_nan(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _full_of_nan(torch.empty_like))


def _full_of_nan(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
        new = allocate(*args, **kwargs)
        return new.fill_(float("nan")) if new.is_floating_point() else new

    return allocate_and_fill

"""Fixtures shared by the tests of the runtime."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, as the ranks of the pool have: several add products up in another order, and bits are compared."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

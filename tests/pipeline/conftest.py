"""Fixtures shared by the tests of the runtime."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, as ranks of the pool do: more threads sum in another order, and tests compare bits."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

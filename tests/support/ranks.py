"""`run_ranks(n, fn, ...)`: run a function on n gloo ranks of the test run's `RankPool`.

New ranks would take ten seconds per test; the pool forks from a process that has torch imported. Warnings are errors in the
workers too.
"""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from megalite.parity import pool as rank_pool
from megalite.parity.pool import RankContext, RankFailure, RankPool
from tests.support.fork_server import fork_server

__all__ = ["POOL_SIZE", "RankContext", "RankFailure", "forked_pools", "run_ranks"]

POOL_SIZE = 8

_pools: list[RankPool] = []

rank_pool._MOST_GROUPS = 128
"""Limit of process groups per pool. In forks a group adds no thread (`tests/support/forks.py`)."""


@contextmanager
def forked_pools(module: ModuleType = rank_pool) -> Iterator[None]:
    """Make pools of this module, by default `RankPool`, fork their workers from the fork server, which has torch
    imported."""
    forks = SimpleNamespace(get_context=lambda method: fork_server())
    with mock.patch.object(module, "multiprocessing", forks):
        yield


@atexit.register
def _stop_pools() -> None:
    for pool in _pools:
        pool.stop()
    _pools.clear()


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
    """Call `fn(context, *args, **kwargs)` on ranks 0..size-1 together and return their results in rank order.

    Args:
        size: number of ranks, at most `POOL_SIZE`.
        fn: a function at module level (workers import it); `context` is a `RankContext`.
        timeout: seconds without any rank finishing before the pool is killed and the test fails.

    Raises:
        RankFailure: with the traceback of the first rank that raised.
    """
    if _pools and _pools[0].stopped:
        _pools.clear()
    if not _pools:
        with forked_pools():
            _pools.append(RankPool(POOL_SIZE, strict=True))
    return _pools[0].run(size, fn, *args, timeout=timeout, **kwargs)

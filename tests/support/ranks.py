"""`run_ranks(n, fn, ...)`: run a function on n gloo ranks of the test run's `RankPool` of this size.

New ranks would take ten seconds per test; pools fork from a process that has torch imported. Warnings are errors in the
workers too."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from megalite.parity import pool as rank_pool
from megalite.parity.pool import RankContext, RankFailure, RankPool
from tests.support.fork_server import fork_server

__all__ = ["RankContext", "RankFailure", "forked_pools", "run_ranks", "stop_ranks"]

_MOST_POOLS = 4
_pools: dict[int, RankPool] = {}
"""Number of ranks -> pool, the least recently used first. To keep several is cheaper than to replace the groups of one."""

rank_pool._MOST_GROUPS = 128
"""Limit of process groups per pool. In forks a group adds no thread (`tests/support/forks.py`)."""


@contextmanager
def forked_pools(module: ModuleType = rank_pool) -> Iterator[None]:
    """Make pools of this module, by default `RankPool`, fork their workers from the fork server, which has torch."""
    forks = SimpleNamespace(get_context=lambda method: fork_server())
    with mock.patch.object(module, "multiprocessing", forks):
        yield


@atexit.register
def stop_ranks() -> None:
    """Stop all ranks. After a fault they may be in different operations, which later tests must not meet."""
    for pool in _pools.values():
        pool.stop()
    _pools.clear()


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
    """Call `fn(context, *args, **kwargs)` on ranks 0..size-1 together and return their results in rank order.

    Args:
        size: number of ranks.
        fn: a function at module level (workers import it); `context` is a `RankContext`.
        timeout: seconds without any rank finishing before the pool is killed and the test fails.

    Raises:
        RankFailure: with the traceback of the first rank that raised."""
    pool = _pools.pop(size, None)
    if pool is None or pool.stopped:
        if len(_pools) == _MOST_POOLS:
            _pools.pop(next(iter(_pools))).stop()
        with forked_pools():
            pool = RankPool(size, strict=True)
    _pools[size] = pool
    return pool.run(size, fn, *args, timeout=timeout, **kwargs)

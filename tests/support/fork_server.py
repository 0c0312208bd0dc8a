"""`fork_server()`: a process that has torch and the trainer imported, to fork ranks from.

To start a Python process with torch takes each rank seconds, far longer than what most tests do with it.
"""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

PRELOAD = ("pytest", "torch._dynamo", "megalite.training.trainer", "tests.support.fork_server")
"""torch._dynamo is imported by the first optimizer."""


@cache
def fork_server() -> ForkServerContext:
    """One thread in the process that is forked, whatever this one has: it is safe to fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context

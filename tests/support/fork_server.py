"""`fork_server()`: a process that has torch and the trainer imported, to fork ranks from.

To start a Python process with torch takes each rank seconds, far longer than what most tests do with it.
"""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

PRELOAD = (
    *("pytest", "torch._dynamo", "megalite.cli.train", "megalite.training.trainer", "megalite.training.writers"),
    *("tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2", "tensorboard.compat.proto"),
    *("tensorboard.summary.writer.record_writer", "tests.support.fork_server", "tests.support.forks"),
)
"""What each run imports sooner or later; torch._dynamo where it recomputes."""


@cache
def fork_server() -> ForkServerContext:
    """One thread in the process that is forked, whatever this one has: it is safe to fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context

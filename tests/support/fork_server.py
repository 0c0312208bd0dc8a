"""`fork_server()`: a process with torch and the trainer imported, from which ranks are forked.

Starting Python with torch takes seconds per rank, much longer than most tests."""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

PRELOAD = (
    *("tests.conftest", "torch._dynamo", "megalite.cli.train", "megalite.training.trainer"),
    *("megalite.training.writers", "tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2"),
    *("tensorboard.summary.writer.record_writer", "tests.support.fork_server", "tests.support.forks"),
)
"""Modules that a run imports sooner or later; torch._dynamo is imported by recomputation."""


@cache
def fork_server() -> ForkServerContext:
    """Return the fork server. It has one thread, so forking is safe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context

"""What must be said before torch, which counts the cores, and Triton are imported.

One thread a process, for all tests and whatever they start: their tensors are too small for two. Two threads would wait
for each other busily, and much longer still where ranks or other tests want the cores; and results would depend on the
machine. And where there is no GPU, Triton's interpreter runs the kernels.

Nor does Python look for garbage while tests are collected: what is made then stays. That took a quarter of the
collection's time, and would continue at every full collection, were those objects not set aside.
"""

import gc
import os
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs that tests start find the package compiled

import pytest
import torch

gc.disable()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All tests are known: from here on garbage is looked for among what they make."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


WAITING = (
    "tests/e2e/",
    "tests/training/test_stop",
    "tests/watchdog/",
    "tests/sweep/test_command.py",
    "tests/topology/",
)
"""Tests that mostly wait: for processes to start, for time-outs, for the ends of runs."""
LONGEST = "tests/parity/test_parity.py"
"""A sixth of all: begun late, it would end alone."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files; of three or more workers the last begins with those that wait: the others keep the cores busy meanwhile."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Lanes(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            waits = len(self.registered_collections) > 2 and node is list(self.registered_collections)[-1]
            files = sorted(self.workqueue, key=lambda file: file != LONGEST)
            fitting = (file for file in files if file.startswith(WAITING) == waits)
            self.workqueue.move_to_end(next(fitting, files[0]), last=False)
            super()._assign_work_unit(node)

    return Lanes(config, log) if config.getoption("dist") == "loadfile" else None

"""Settings needed before torch, which counts the cores, and Triton are imported.

Tests and the processes that they start use one thread: their tensors are too small for two, and two would busily wait for
each other, even longer if ranks or other tests need the cores; results would also depend on the machine. Without a GPU,
Triton's interpreter runs the kernels.

Python's garbage collector is off while torch is imported and tests are collected, as all their objects live on: it took a
third and a quarter of the time. Afterwards these objects are frozen, so that later full collections skip them."""

import gc
import os
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs started by tests find the compiled package
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(name, None)  # the tests are no ranks, even where the shell that starts them is one
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collection is complete: from here on the garbage collector looks at objects of the tests."""
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
"""Tests that mostly wait: for processes to start, for timeouts, for runs to end."""
LONGEST = "tests/parity/test_parity.py"
"""A sixth of all tests: started late, it would end alone."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files; the last of three or more workers starts with the waiting tests, while the others keep the cores busy."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Lanes(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            waits = len(self.registered_collections) > 2 and node is list(self.registered_collections)[-1]
            files = sorted(self.workqueue, key=lambda file: file != LONGEST)
            fitting = (file for file in files if file.startswith(WAITING) == waits)
            self.workqueue.move_to_end(next(fitting, files[0]), last=False)
            super()._assign_work_unit(node)

    return Lanes(config, log) if config.getoption("dist") == "loadfile" else None

"""What must be said before torch, which counts the cores, and Triton are imported.

One thread a process, for all tests and whatever they start: their tensors are too small for two. Two threads would wait
for each other busily, and much longer still where ranks or other tests want the cores; and results would depend on the
machine. And where there is no GPU, Triton's interpreter runs the kernels.

Nor does Python look for garbage while tests are collected: what is made then stays. That took a quarter of the
collection's time, and would continue at every full collection, were those objects not set aside.
"""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

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

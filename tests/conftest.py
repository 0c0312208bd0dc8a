"""What must be said before torch, which counts the cores, and Triton are imported.

One thread a process, for all tests and whatever they start: their tensors are too small for two. Two threads would wait
for each other busily, and much longer still where ranks or other tests want the cores; and results would depend on the
machine. And where there is no GPU, Triton's interpreter runs the kernels.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

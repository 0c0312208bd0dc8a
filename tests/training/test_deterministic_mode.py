"""`--deterministic-mode`: torch refuses operations without a deterministic kernel, and a CPU run goes through."""

import subprocess
import sys

RUN = """
import os, torch
from megalite.cli.train import main

status = main("--mock-data --vocab-size 64 --train-iters 2 --log-interval 1 --deterministic-mode --device cpu "
              "--num-experts 4 --position-embedding-type rope --hidden-dropout 0.1 --attention-dropout 0.1".split())
print(status, torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""


def test_a_run_is_deterministic_by_torchs_own_rule() -> None:
    """In its own process: the switch is of the whole process."""
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 True :4096:8"

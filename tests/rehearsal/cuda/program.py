"""Started by `run.py` on each rank: runs `pretrain_gpt.py` on the simulated device and counts waits and launches."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megalite.cli.train import main
from megalite.models import moe_dispatch
from megalite.training.reporter import Reporter
from megalite.training.step import Stepper
from megalite.training.trainer import Trainer


def watch(runtime: ctypes.CDLL, steps: list[tuple[int, int]]) -> None:
    """Append (launches, host waits) of each step to `steps`, without those of its log line."""
    for name in ("rehearsal_launches", "rehearsal_waits"):
        getattr(runtime, name).restype = ctypes.c_long
    step, report, compute = Trainer._step, Reporter.step, Stepper.step

    def now() -> tuple[int, int]:
        return runtime.rehearsal_launches(), runtime.rehearsal_waits()

    def counted(self: Trainer) -> None:
        begun = now()
        step(self)
        launches, waits = steps[-1]
        steps[-1] = launches - begun[0], waits - begun[1]

    def reported(self: Reporter, *args: Any, **kwargs: Any) -> None:
        steps.append(now())  # the end of the step, for `counted`
        report(self, *args, **kwargs)

    def computed(self: Stepper, *args: Any, **kwargs: Any) -> Any:
        if len(steps) == 2 and os.environ["RANK"] == os.environ.get("REHEARSED_SLEEPER"):
            time.sleep(600)  # by then all others use their devices
        return compute(self, *args, **kwargs)

    Trainer._step, Reporter.step, Stepper.step = counted, reported, computed  # type: ignore[method-assign]


def share_rows_evenly() -> None:
    """No kernel counts rows of experts: each gets the same number after the host has waited for the counts."""
    count = moe_dispatch._count_rows

    def counted(chosen: torch.Tensor, experts: int, *groups: Any) -> moe_dispatch.RowCounts:
        counts, each = count(chosen, experts, *groups), chosen.numel() // experts
        read = counts.copy.read
        counts.copy.read = lambda: read().fill_(each)  # type: ignore[method-assign]
        return counts

    moe_dispatch._count_rows = counted


if __name__ == "__main__":
    # cuDNN requires more of the driver than is simulated here.
    torch.backends.cuda.enable_cudnn_sdp(False)
    found: list[tuple[int, int]] = []
    runtime = ctypes.CDLL(os.environ["REHEARSED_RUNTIME"])
    watch(runtime, found)
    share_rows_evenly()
    status = main(sys.argv[1:], program="pretrain_gpt.py")
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["REHEARSED_STEPS"]).write_text(json.dumps([*found[-1], runtime.rehearsal_limited()]))
    sys.exit(status)

"""What `run.py` starts on each rank: `pretrain_gpt.py` on the played device, with the host's waits and launches per step."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megalite.cli.train import main
from megalite.training.step import Stepper


def watch(runtime: ctypes.CDLL, steps: list[tuple[int, int]]) -> None:
    """Append (launches, host waits) of each step to `steps`."""
    for name in ("rehearsal_launches", "rehearsal_waits"):
        getattr(runtime, name).restype = ctypes.c_long
    step = Stepper.step

    def counted(self: Stepper, *args: Any, **kwargs: Any) -> Any:
        if len(steps) == 2 and os.environ["RANK"] == os.environ.get("REHEARSED_SLEEPER"):
            time.sleep(600)
        before = runtime.rehearsal_launches(), runtime.rehearsal_waits()
        result = step(self, *args, **kwargs)
        steps.append((runtime.rehearsal_launches() - before[0], runtime.rehearsal_waits() - before[1]))
        return result

    Stepper.step = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    # cuDNN asks the driver for more than is played here.
    torch.backends.cuda.enable_cudnn_sdp(False)
    found: list[tuple[int, int]] = []
    watch(ctypes.CDLL(os.environ["REHEARSED_RUNTIME"]), found)
    status = main(sys.argv[1:], program="pretrain_gpt.py")
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["REHEARSED_STEPS"]).write_text(json.dumps(found))
    sys.exit(status)

"""A process of gpu.run: imports, waits for its tasks on stdin, and prints a line per row. Not for use by hand.

If a task raises, its row has the reason. If the device is broken afterwards, the process ends, and gpu.run starts another
for the remaining tasks. A step that runs out of memory is repeated once with half the microbatch and twice as many."""

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.legs import BEGIN, END, MARK, OUT_OF_MEMORY, Row, Task, failure, reason_of

PARTS = dict.fromkeys(("machine", "ceilings"), "benchmarks.gpu.ceilings")
PARTS |= dict.fromkeys(("step", "peer"), "benchmarks.gpu.step")
PARTS["kernels"] = "benchmarks.gpu.kernels"  # part -> the module with its `rows(task)`


def send(message: Row | str) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


def broken() -> bool:
    """Return whether the device fails, as after an illegal access, or draws no numbers, as after a failed CUDA graph."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.rand(1, device="cuda").item()
    except Exception:
        return True
    return False


def attempt(worker: Callable[[Task], Iterator[Row]], task: Task) -> str | None:
    """Send a task's rows. Return why it ended early, which is sent too, or None."""
    try:
        for row in worker(task):
            send(row)
    except Exception as error:
        traceback.print_exc()
        reason = reason_of(error)
        send(failure(task, reason))
        return reason
    return None


def main() -> None:
    workers = {part: importlib.import_module(PARTS[part]).rows for part in sys.argv[1:]}
    line = sys.stdin.readline()
    tasks: list[dict[str, Any]] = json.loads(line) if line else []
    for task in tasks:
        send(BEGIN)
        reason = attempt(workers[task["part"]], task)
        release()
        if reason == OUT_OF_MEMORY and task.get("microbatch", 1) > 1:
            twice = [2 * count for count in task["accumulations"]]
            half = {**task, "microbatch": task["microbatch"] // 2, "accumulations": twice}
            attempt(workers[task["part"]], half)
            release()
        send(END)
        if reason is not None and broken():
            os._exit(0)


def release() -> None:
    """Free the memory of the last task."""
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # reported by broken()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

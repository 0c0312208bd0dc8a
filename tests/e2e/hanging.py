"""Ranks of a real run that hang in the middle of a step, each in a different way."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from megalite.topology.group import DONE, Group, Work
from megalite.training.step import Stepper

STEP = 3
"""The step with the fault; the first step has a longer timeout."""


def device() -> None:
    """Read numbers from a device that never finishes."""
    torch.Tensor.tolist = lambda tensor: time.sleep(1000)  # type: ignore[method-assign, assignment]


def stop() -> None:
    """Stop the process by a signal."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # the watchdog wakes it to ask for its stack: stay near this line


def hold() -> None:
    """Block in native code while holding the GIL."""
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # a signal does not end it


def skip() -> None:
    """Skip the next all-reduce."""
    _instead(lambda group, tensor, begin: DONE)


def reshape() -> None:
    """Start the next all-reduce with a tensor of another shape."""
    _instead(lambda group, tensor, begin: begin(group, torch.cat([tensor.flatten(), tensor.flatten()])))


def _instead(do: Callable[[Group, torch.Tensor, Callable[..., Work]], Work]) -> None:
    begin = Group.all_reduce_async

    def once(group: Group, tensor: torch.Tensor, **more: Any) -> Work:
        if group.size == 1:
            return DONE
        Group.all_reduce_async = begin  # type: ignore[method-assign]
        return do(group, tensor, begin)

    Group.all_reduce_async = once  # type: ignore[method-assign, assignment]


FAULTS: dict[str, Callable[[], None]] = {fault.__name__: fault for fault in (device, stop, hold, skip, reshape)}


def install(fault: str, rank: int) -> None:
    """Make this process hang in `STEP` if it has the given rank."""
    take = Stepper.step

    def faulty(self: Stepper, *arguments: Any, **named: Any) -> Any:
        if named["before"].step + 1 == STEP and int(os.environ["RANK"]) == rank:
            FAULTS[fault]()
        return take(self, *arguments, **named)

    Stepper.step = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    import sys

    from megalite.cli.train import main

    install(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))

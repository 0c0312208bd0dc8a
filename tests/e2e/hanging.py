"""Ranks of a real run that stop in the midst of a step, each in its own way."""

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
"""The step in which they do; in the first one a run is given longer."""


def device() -> None:
    """Read numbers of a device that does not finish."""
    torch.Tensor.tolist = lambda tensor: time.sleep(1000)  # type: ignore[method-assign, assignment]


def stop() -> None:
    """Be stopped from outside."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # the watch wakes it to ask where it is: not far from here


def hold() -> None:
    """Be in native code that keeps Python's lock."""
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # a signal does not end it


def skip() -> None:
    """Leave out the next all-reduce."""
    _instead(lambda group, tensor, begin: DONE)


def reshape() -> None:
    """Begin the next all-reduce with a tensor of another shape."""
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
    """From here on this process, if it is that rank, stops in `STEP`."""
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

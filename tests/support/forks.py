"""Imported last and only into the fork server: makes its forks, including ranks of pools, cheaper.

All process groups of each rank share one gloo device. A device is a thread that wakes up a hundred times per second; gloo makes one
per group, and the ranks of a few pools have hundreds of groups.

The garbage collector ignores objects that exist before the fork: collecting them would copy their pages into each fork."""

import gc
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d


class _OneDevice(ProcessGroupGloo):
    """Use the device of the world's group, which is created first."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        world = dist.GroupMember.WORLD
        if world is None:
            super().__init__(store, rank, size, timeout)
            return
        backend: Any = world._get_backend(torch.device("cpu"))
        known, options = backend.options, backend._Options()
        options._devices, options._threads, options._timeout = known._devices, known._threads, timeout
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = _OneDevice  # type: ignore[misc]
gc.collect()
gc.freeze()
gc.enable()  # tests/conftest.py disables it

"""Imported into the fork server last, and nowhere else: what makes its forks, ranks of the pools among them, cheaper.

All process groups of one rank share one of gloo's devices. A device is a thread that wakes a hundred times per second, whatever
there is to do; gloo makes one for each group, and the ranks of a few pools have hundreds of groups between them.

And no collection of garbage walks over what has been imported, which would copy it into each fork.
"""

import gc
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d


class _OneDevice(ProcessGroupGloo):
    """On the device of the world's group, which comes first."""

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

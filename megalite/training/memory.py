"""Memory of this rank, of its GPU or of the host."""

import ctypes
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megalite.config.registry import Registry
from megalite.config.run import RunConfig
from megalite.topology.topology import Launch

_EXPLAINED: Registry[Callable[..., Exception]] = Registry(
    "out of memory", {"error": "megalite.training.out_of_memory:explained"}
)
_STATM = Path("/proc/self/statm")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of glibc's mallopt (malloc.h)."""


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory of this rank so far: allocated on the GPU, or resident in the host for cpu."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_now(device: torch.device) -> dict[str, int]:
    """What is taken at the moment, under the names of records: on cpu the resident pages, where /proc has them."""
    if device.type == "cuda":
        return {
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(device),
            "memory_allocated_count": torch.cuda.memory_stats(device).get("allocation.all.current", 0),
        }
    if not _STATM.exists():
        return {}
    return {"memory_allocated_bytes": int(_STATM.read_text().split()[1]) * resource.getpagesize()}


def keep_freed_memory() -> bool:
    """Have glibc's allocator reuse what is freed, whatever its size; False where the C library is another one.

    A tensor above 32 MiB, as logits are, is otherwise mapped again at each allocation and unmapped when freed: in a step of
    a small GPT the kernel then clears tens of thousands of pages.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_MAX, 0)) and bool(libc.mallopt(_TRIM_THRESHOLD, -1))


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def explaining_out_of_memory(config: RunConfig, explicit: frozenset[str], launch: Launch) -> Iterator[None]:
    """Turns torch's error of a full device into an `OutOfMemoryError`.

    Args:
        config, explicit: as for `Trainer`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _EXPLAINED.get("error")(error, config, explicit, launch) from error

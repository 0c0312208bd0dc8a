"""How much memory this rank has taken: of its GPU, or of the host on cpu."""

import resource
import sys
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory of this rank so far: allocated on the GPU, or resident in the host for cpu."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_now(device: torch.device) -> dict[str, int]:
    """What is taken at the moment, under the names of records: on cpu the resident pages, where /proc tells them."""
    if device.type == "cuda":
        return {
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(device),
            "memory_allocated_count": torch.cuda.memory_stats(device).get("allocation.all.current", 0),
        }
    if not _STATM.exists():
        return {}
    return {"memory_allocated_bytes": int(_STATM.read_text().split()[1]) * resource.getpagesize()}

"""Measures the memory of this rank, on its GPU or host, and explains errors when it runs out."""

import ctypes
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megalite.config.errors import ConfigError, RankError
from megalite.config.numbers import format_bytes
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.memory import RankMemory, planned_memory
from megalite.partition.pipeline import layout_of
from megalite.topology.topology import Launch

_STATM = Path("/proc/self/statm")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt (malloc.h)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory so far: allocated on the GPU, or resident on the host for cpu."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_now(device: torch.device) -> dict[str, int]:
    """Return the current memory as fields of a record: on cpu the resident size, if /proc exists."""
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
    """Make glibc's allocator reuse freed memory of any size. Returns False for other C libraries.

    By default each allocation above 32 MiB, such as logits, is mapped again and unmapped when freed: the kernel then
    clears tens of thousands of pages in a step of a small GPT."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_MAX, 0)) and bool(libc.mallopt(_TRIM_THRESHOLD, -1))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the host, ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def explaining_out_of_memory(config: RunConfig, explicit: frozenset[str], launch: Launch) -> Iterator[None]:
    """Turn torch's out-of-memory error into an `OutOfMemoryError` with remedies."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise oom_error(error, config, explicit, launch) from error


_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]iB|\d+ bytes)")


class OutOfMemoryError(RankError):
    """This rank's device or host ran out of memory."""


def oom_error(error: BaseException, config: RunConfig, explicit: frozenset[str], launch: Launch) -> OutOfMemoryError:
    """Return the error with its message in one line; with record_memory_history write the history first."""
    on_cuda = isinstance(error, torch.OutOfMemoryError)
    asked = _ASKED.search(str(error))
    parts = [
        f"rank {launch.rank} (host {platform.node()}) ran out of {'GPU' if on_cuda else 'host'} memory"
        f"{f' when it asked for {asked[1]}' if asked else ''}"
    ]
    if on_cuda:
        device = torch.device("cuda", torch.cuda.current_device())
        parts.append(
            f"the device has {format_bytes(torch.cuda.get_device_properties(device).total_memory)}, at most "
            f"{format_bytes(peak_memory_bytes(device))} were allocated"
        )
    plan = predicted(config, explicit, launch)
    if plan is not None:
        parts.append(
            f"the planner counts {format_bytes(plan.total_bytes)} here (parameters {format_bytes(plan.parameter_bytes)}, "
            f"gradients {format_bytes(plan.gradient_bytes)}, optimizer {format_bytes(plan.optimizer_bytes)}, activations "
            f"{format_bytes(plan.activation_bytes + plan.workspace_bytes)}), fragments and kernels' workspaces come on top"
        )
    parts.append(f"use {' or '.join(remedies(config))}; megalite plan finds layouts that fit")
    if on_cuda and config.logging.record_memory_history:
        path = Path(str(config.logging.run_dir)) / f"out-of-memory-rank-{launch.rank}.pickle"
        try:
            torch.cuda.memory._dump_snapshot(str(path))
            parts.append(f"wrote its allocations to {path} for pytorch.org/memory_viz")
        except (OSError, RuntimeError) as fault:
            parts.append(f"its allocations could not be written to {path}: {fault}")
    return OutOfMemoryError("; ".join(parts))


def predicted(config: RunConfig, explicit: frozenset[str], launch: Launch) -> RankMemory | None:
    """Return the planner's memory of this rank; None if it cannot be computed, as without a vocabulary size."""
    try:
        config = validate(config, launch.world_size, explicit)
        if config.model.vocab_size is None:
            return None
        return planned_memory(config)[layout_of(config).coordinate(launch.rank).pp]
    except ConfigError:
        return None


def remedies(config: RunConfig) -> list[str]:
    """Return settings that need less memory, those that cost least first."""
    t, p = config.training, config.parallel
    found = {
        "--dp-strategy distributed-optimizer (with dp above 1)": p.dp_strategy == "all-reduce",
        f"--micro-batch-size {t.micro_batch_size // 2}": t.micro_batch_size > 1,
        "--sequence-parallel": p.tp > 1 and not p.sequence_parallel,
        "--recompute-granularity selective": t.recompute_granularity == "none",
        "--recompute-granularity full": t.recompute_granularity != "full",
        "a larger --tp or --pp": True,
    }
    return [remedy for remedy, helps in found.items() if helps]

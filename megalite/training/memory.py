"""Memory of this rank, of its GPU or of the host; and what an out-of-memory error reports."""

import ctypes
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megalite.config.batch import microbatch_counts
from megalite.config.byte_size import format_bytes
from megalite.config.errors import ConfigError, RankError
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.memory import RankMemory, activation_peaks, rank_memory
from megalite.partition.pipeline import layout_of, plan_stages, schedule_of
from megalite.topology.topology import Launch

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


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of glibc's mallopt (malloc.h)."""


def keep_freed_memory() -> bool:
    """Have glibc's allocator reuse what is freed, whatever its size; False where the C library is another one.

    A tensor above 32 MiB, as logits are, is otherwise mapped anew at each allocation and unmapped when freed: in a step of
    a small GPT the kernel then clears tens of thousands of pages.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_MAX, 0)) and bool(libc.mallopt(_TRIM_THRESHOLD, -1))


_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]iB|\d+ bytes)")
_CPU_WORDS = "DefaultCPUAllocator"
_HISTORY = 200_000
"""Allocations that the history keeps."""


class OutOfMemoryError(RankError):
    """This rank's device has no room for what a step needs."""


@contextmanager
def explaining_out_of_memory(config: RunConfig, explicit: frozenset[str], launch: Launch) -> Iterator[None]:
    """Turns torch's error of a full device into an `OutOfMemoryError`; with `record_memory_history` it writes the history
    first.

    Args:
        config, explicit: as for `Trainer`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(explanation(error, config, explicit, launch)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_WORDS in str(error)


def check_memory_history(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if allocations are to be noted where nobody notes them."""
    if config.logging.record_memory_history and device.type != "cuda":
        raise ConfigError(
            f"record_memory_history has no effect on {device.type}: only CUDA's allocator keeps one; remove it"
        )


def record_memory_history(device: torch.device) -> None:
    """From here on CUDA's allocator notes each allocation with its stack."""
    torch.cuda.memory._record_memory_history(max_entries=_HISTORY, device=device)


def explanation(error: BaseException, config: RunConfig, explicit: frozenset[str], launch: Launch) -> str:
    """What the user is told, in one line; the memory history is written if there is one."""
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
        parts.append(_write_history(config, launch.rank))
    return "; ".join(parts)


def predicted(config: RunConfig, explicit: frozenset[str], launch: Launch) -> RankMemory | None:
    """The planner's memory of this rank; None where it cannot tell, as without the size of the vocabulary."""
    try:
        config = validate(config, launch.world_size, explicit)
        if config.model.vocab_size is None:
            return None
        stages, place = plan_stages(config), layout_of(config).coordinate(launch.rank).pp
        peaks = activation_peaks(config, stages, schedule_of(config, microbatch_counts(config)[-1]))
        return rank_memory(config, [plan for plan in stages if plan.rank == place], peaks[place])
    except ConfigError:
        return None


def remedies(config: RunConfig) -> list[str]:
    """Settings that need less memory, those that cost least first."""
    t, p = config.training, config.parallel
    found = []
    if p.dp_strategy == "all-reduce":
        found.append("--dp-strategy distributed-optimizer (with dp above 1)")
    if t.micro_batch_size > 1:
        found.append(f"--micro-batch-size {t.micro_batch_size // 2}")
    if p.tp > 1 and not p.sequence_parallel:
        found.append("--sequence-parallel")
    if t.recompute_granularity == "none":
        found.append("--recompute-granularity selective")
    if t.recompute_granularity != "full":
        found.append("--recompute-granularity full")
    found.append("a larger --tp or --pp")
    return found


def _write_history(config: RunConfig, rank: int) -> str:
    path = Path(str(config.logging.run_dir)) / f"out-of-memory-rank-{rank}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"its allocations could not be written to {path}: {error}"
    return f"wrote its allocations to {path} for pytorch.org/memory_viz"

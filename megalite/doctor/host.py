"""Findings, and the processor, memory and limits of this host, as far as this process may use them."""

import os
import re
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megalite.config.byte_size import format_bytes
from megalite.profiling.collectives import device_facts

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""A warning costs speed, or works on one node alone; an error keeps a run from working."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    topic: str
    """What it belongs to, such as `network`."""
    name: str
    level: Level = "ok"
    text: str
    """What was found, in a line."""
    remedy: str | None = None
    """What to do, in a line; every warning and error has one."""
    data: dict[str, Any] = field(default_factory=dict)
    """The same for programs; JSON can hold it."""

    def __post_init__(self) -> None:
        if self.level != "ok" and self.remedy is None:
            raise ValueError(f"{self.topic} {self.name}: a {self.level} without a remedy")


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level among them; ok if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def finding(
    topic: str,
    name: str,
    text: str,
    data: dict[str, Any] | None = None,
    remedy: str | None = None,
    level: Level = "warning",
) -> Finding:
    """A finding that is ok without a remedy, and of that level with one."""
    return Finding(
        topic=topic, name=name, level=level if remedy else "ok", text=text, remedy=remedy, data=data if data else {}
    )


def read(path: Path) -> str:
    """A small file of Linux's, empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


_found = partial(finding, "host")
GIB = 1 << 30
LEAST_FILES = 4096
"""Open files: a rank has a socket to each of its peers, in each group, beside data files and logs."""
LEAST_SHARED = GIB
"""Bytes of /dev/shm: NCCL keeps some 10 MB of buffers there for each pair of GPUs of a node; containers often have 64 MB."""
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where Linux says things; tests have their own."""

    processor: Path = Path("/proc/cpuinfo")
    memory: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/sys/fs/cgroup")
    shared: Path = Path("/dev/shm")
    infiniband: Path = Path("/sys/class/infiniband")


def examine(environment: Mapping[str, str], *, gpus: int, places: Places | None = None) -> Iterator[Finding]:
    """Findings on cores and threads, instructions, memory, shared memory and limits of a host with so many GPUs."""
    places = places or Places()
    yield _cores(environment, places)
    yield _instructions(places)
    yield _memory(places)
    yield _shared_memory(places, gpus)
    yield _open_files()
    yield _locked_memory(places, gpus)


def _cores(environment: Mapping[str, str], places: Places) -> Finding:
    name, _, _ = device_facts(torch.device("cpu"))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = read(places.cgroup / "cpu.max").partition(" ")
    share = int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
    threads = torch.get_num_threads()
    text = f"{name}, {usable} of {os.cpu_count()} cores usable, torch computes with {threads} threads"
    if share is not None and share < usable:
        text += f", and the container gets the time of {share:g} cores"
    most = max(1, min(usable, share or usable))
    return _found(
        "processor",
        text,
        {"model": name, "cores": os.cpu_count(), "usable_cores": usable, "cpu_limit": share, "threads": threads},
        f"threads would wait for each other: export OMP_NUM_THREADS={int(most)}" if threads > most else None,
    )


def _instructions(places: Places) -> Finding:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", read(places.processor), re.MULTILINE)
    words = flags[1].split() if flags else []
    found = [name for name in _INSTRUCTIONS if name in words]
    fast = any(name in found for name in ("avx512_bf16", "amx_bf16", "bf16"))
    uses = torch.backends.cpu.get_cpu_capability()
    note = "bf16 products in hardware" if fast else "no bf16 products in hardware: fp32 is faster on this CPU"
    text = f"{', '.join(found) or 'none known'}; torch uses {uses}; {note}"
    return _found("instructions", text, {"instructions": found, "torch_uses": uses, "bf16": fast})


def _memory(places: Places) -> Finding:
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read(places.memory), re.MULTILINE))
    total, free = int(rows.get("MemTotal", 0)) << 10, int(rows.get("MemAvailable", 0)) << 10
    limit = read(places.cgroup / "memory.max")
    data: dict[str, int | None] = {"bytes": total, "available": free, "limit": None}
    text = f"{format_bytes(total)}, {format_bytes(free)} available"
    if limit.isdecimal() and int(limit) < total:
        used = read(places.cgroup / "memory.current")
        free = min(free, int(limit) - (int(used) if used.isdecimal() else 0))
        data |= {"limit": int(limit), "available": free}
        text = f"{format_bytes(int(limit))} for this container, {format_bytes(max(free, 0))} available"
    remedy = "end other programs, or take a machine with more: a rank starts with about half a GiB"
    return _found("memory", text, data, remedy if total and free < GIB else None)


def _shared_memory(places: Places, gpus: int) -> Finding:
    try:
        size = shutil.disk_usage(places.shared)
    except OSError:
        return _found("shared memory", f"there is no {places.shared}", {"bytes": None})
    text = f"{places.shared}: {format_bytes(size.total)}, {format_bytes(size.free)} free"
    remedy = "NCCL needs more between GPUs: docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes"
    little = gpus > 1 and size.free < LEAST_SHARED
    return _found("shared memory", text, {"bytes": size.total, "free": size.free}, remedy if little else None)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"many ranks need more: ulimit -n {LEAST_FILES if hard < 0 else min(hard, 1 << 16)}"
    few = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    limits = [("unlimited" if limit == resource.RLIM_INFINITY else str(limit)) for limit in (soft, hard)]
    return _found(
        "open files", f"{limits[0]} (up to {limits[1]})", {"soft": soft, "hard": hard}, remedy if few else None
    )


def _locked_memory(places: Places, gpus: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    needed = gpus and places.infiniband.is_dir() and any(places.infiniband.iterdir())
    remedy = "InfiniBand registers memory: ulimit -l unlimited (docker run --ulimit memlock=-1)"
    text = format_bytes(soft) if limited else "unlimited"
    return _found("locked memory", text, {"soft": soft, "hard": hard}, remedy if limited and needed else None)

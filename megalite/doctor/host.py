"""Defines findings, and checks this host: processor, memory, limits, disk, package versions, and its network."""

import fcntl
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

import torch

import megalite
from megalite.checkpoint.files import write_all
from megalite.config.numbers import format_bytes
from megalite.profiling.collectives import device_facts
from megalite.watchdog.processes import usable_cores

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")  # a warning costs speed, an error a run


@dataclass(frozen=True, kw_only=True)
class Finding:
    topic: str  # such as `network`
    name: str
    level: Level = "ok"
    text: str  # the result in one line
    remedy: str | None = None  # one line; every warning and error has one
    data: dict[str, Any] = field(default_factory=dict)  # the result as JSON, for programs


def worst(findings: Iterable[Finding]) -> Level:
    """Return the highest level of all findings; ok if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def finding(
    topic: str,
    name: str,
    text: str,
    data: dict[str, Any] | None = None,
    remedy: str | None = None,
    level: Level = "warning",
) -> Finding:
    """Create a finding: of this level with a remedy, else ok."""
    level = level if remedy else "ok"
    return Finding(topic=topic, name=name, level=level, text=text, remedy=remedy, data=data or {})


def read(path: Path) -> str:
    """Read a small file of /proc or /sys; return an empty string if it is missing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


_found = partial(finding, "host")
GIB = 1 << 30
LEAST_FILES = 4096  # open files: a rank has a socket to each peer in each group, besides data files and logs
LEAST_SHARED = GIB  # of /dev/shm: NCCL uses about 10 MB for each pair of GPUs; containers often have 64 MB
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")


@dataclass(frozen=True, kw_only=True)
class Places:
    """Paths of Linux's system files; tests pass others."""

    processor: Path = Path("/proc/cpuinfo")
    memory: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/sys/fs/cgroup")
    shared: Path = Path("/dev/shm")
    infiniband: Path = Path("/sys/class/infiniband")


def examine(environment: Mapping[str, str], *, gpus: int, places: Places | None = None) -> Iterator[Finding]:
    """Yield findings on cores, threads, instructions, memory, shared memory and limits of a host with `gpus` GPUs."""
    places = places or Places()
    yield _cores(environment, places)
    yield _instructions(places)
    yield _memory(places)
    yield _shared_memory(places, gpus)
    yield _open_files()
    yield _locked_memory(places, gpus)


def _cores(environment: Mapping[str, str], places: Places) -> Finding:
    name, _, _ = device_facts(torch.device("cpu"))
    usable = usable_cores()
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
    text = f"{limits[0]} (up to {limits[1]})"
    return _found("open files", text, {"soft": soft, "hard": hard}, remedy if few else None)


def _locked_memory(places: Places, gpus: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    needed = gpus and places.infiniband.is_dir() and any(places.infiniband.iterdir())
    remedy = "InfiniBand registers memory: ulimit -l unlimited (docker run --ulimit memlock=-1)"
    text = format_bytes(soft) if limited else "unlimited"
    return _found("locked memory", text, {"soft": soft, "hard": hard}, remedy if limited and needed else None)


_on_disk = partial(finding, "disk")
BYTES = 64 << 20  # size of the test write; less on a slow disk
SYNCS = 20
SECONDS = 2.0  # limit of each of the two tests
LEAST_FREE = 1 << 30
SLOWEST_SYNC = 0.1  # seconds; other ranks wait for the syncs of metrics and checkpoints


def examine_disk(
    folder: Path, *, seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Finding]:
    """Yield findings on a run's folder, or on the nearest existing folder above it. Leaves no files. `seconds`: limit
    of each test. `clock`: returns seconds; tests pass another."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    data = {"folder": str(folder), "tested": str(place)}
    if not place.is_dir():
        yield _on_disk("folder", f"{place} is a file", data, "give a folder with --run-dir", "error")
        return
    try:
        # The file has no name, so nothing remains even after a crash.
        with tempfile.TemporaryFile(dir=place) as scratch:
            yield _space(place, folder, data)
            yield _locks(scratch.fileno())
            yield from _speed(scratch.fileno(), seconds, clock)
    except OSError as error:
        remedy = "give a folder that can be written to with --run-dir, or make room there"
        yield _on_disk("folder", f"cannot write to {place}: {error.strerror or error}", data, remedy, "error")


def _space(place: Path, folder: Path, data: dict[str, str]) -> Finding:
    usage = shutil.disk_usage(place)
    note = "" if place == folder.absolute() else f" (of {place}: {folder} does not exist yet)"
    text = f"{folder}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}{note}"
    remedy = "make room: a checkpoint takes 12 to 18 bytes per parameter, and two are kept while one is written"
    sizes = {**data, "free": usage.free, "bytes": usage.total}
    return _on_disk("folder", text, sizes, remedy if usage.free < LEAST_FREE else None)


def _locks(descriptor: int) -> Finding:
    """Check file locks, which keep a second run from saving to the same folder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        remedy = "make sure that no two runs save to one folder: megalite cannot detect it here"
        return _on_disk("locks", f"this file system has no file locks ({error.strerror})", {"work": False}, remedy)
    return _on_disk("locks", "a second run in a folder is detected", {"work": True})


def _speed(descriptor: int, seconds: float, clock: Callable[[], float]) -> Iterator[Finding]:
    """Measure the rate of a large write with its sync, and the time of a small one."""
    block = memoryview(os.urandom(1 << 20))  # random data, because some disks do not store zeros
    written, start = 0, clock()
    while written < BYTES and clock() - start < seconds / 2:
        write_all(descriptor, block)
        written += len(block)
    os.fsync(descriptor)
    rate = written / max(clock() - start, 1e-9)
    text = f"{rate / 1e6:,.0f} MB/s to the disk ({format_bytes(written)} and a sync)"
    yield _on_disk("writing", text, {"bytes_per_second": rate})
    times: list[float] = []
    start = clock()
    while len(times) < 3 or (len(times) < SYNCS and clock() - start < seconds):
        before = clock()
        os.pwrite(descriptor, block[:4096], 0)
        os.fsync(descriptor)
        times.append(clock() - before)
    median, longest = statistics.median(times), max(times)
    text = f"{1e3 * median:.1f} ms, at most {1e3 * longest:.1f} ms, for 4 KiB"
    remedy = "ranks wait for it: keep --run-dir on a faster disk, or save less often"
    data = {"seconds": median, "longest": longest}
    yield _on_disk("fsync", text, data, remedy if median > SLOWEST_SYNC else None)


VERSIONS = "versions"
_version = partial(finding, VERSIONS)
_REQUIREMENT = re.compile(r"""([\w.-]+)[^;>=]*(?:>=([\d.]+))?[^;]*(?:;.*\bextra == ["'](\w+)["'])?.*""")
_USED_OF_DEVELOPMENT = ("triton", "transformers")  # fused kernels; comparisons with Hugging Face's models


@dataclass(frozen=True)
class Package:
    name: str
    least: str  # oldest supported version; empty: any
    extra: str | None  # megalite's extra that installs it; None if it is always required


def packages() -> list[Package]:
    """Return the packages in megalite's metadata; an empty list if megalite is not installed."""
    lines = [] if installed_version("megalite") is None else importlib.metadata.requires("megalite") or []
    found = [Package(each[1], each[2] or "", each[3]) for each in map(_REQUIREMENT.fullmatch, lines) if each]
    return [each for each in found if each.extra not in ("dev", "all") or each.name in _USED_OF_DEVELOPMENT]


def examine_versions(version_of: Callable[[str], str | None] | None = None) -> Iterator[Finding]:
    """Yield a finding for Python, megalite and each package. `version_of`: returns the installed version of a
    distribution or None; default: in this environment."""
    version, system = platform.python_version(), f"{platform.system()} {platform.release()}, {platform.machine()}"
    data = {"version": version, "executable": sys.executable, "system": system}
    yield _version("python", f"{version} ({sys.executable}) on {system}", data)
    yield _version("megalite", megalite.__version__, {"version": megalite.__version__})
    for package in packages():
        yield _package_finding(package, (version_of or installed_version)(package.name))


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_finding(package: Package, version: str | None) -> Finding:
    least, extra = package.least, package.extra
    install = f"pip install 'megalite[{extra}]'" if extra else f"pip install '{package.name}{least and '>=' + least}'"
    text, wrong = version or "not installed", version is None and extra is None
    if version is None and extra is not None:
        text = f"not installed: {install}"
    elif version is not None and least and _numbers(version) < _numbers(least):
        text, wrong = f"{version}, older than {least}", True
    data = {"version": version, "least": least or None, "extra": extra}
    return _version(package.name, text, data, install if wrong else None, "error" if extra is None else "warning")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release as numbers: (2, 11, 0) for `2.11.0a0+cu128`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


_in_network = partial(finding, "network")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SHOWN = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_", "FI_")  # prefixes of variables that affect the network
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, kw_only=True)
class Interface:
    name: str
    address: str | None  # IPv4; None if it has none
    is_up: bool
    megabits: int | None  # per second; None if the driver does not report it

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo" or (self.address or "").startswith("127.")

    def __str__(self) -> str:
        speed = f", {self.megabits / 1000:g} Gbit/s" if self.megabits else ""
        return f"{self.name} ({self.address or 'no IPv4 address'}{'' if self.is_up else ', down'}{speed})"


def examine_network(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on the host's name, its interfaces, the variables that choose among them, and adapters."""
    found = interfaces()
    usable = [each for each in found if each.is_up and each.address and not each.is_loopback]
    yield _in_network(
        "interfaces", ", ".join(map(str, found)) or "none", {"interfaces": [vars(each) for each in found]}
    )
    yield host_name(socket.gethostname(), usable, environment)
    for variable in (GLOO, NCCL):
        if variable in environment:
            yield chosen(variable, environment[variable], found)
    if environment.get("MASTER_ADDR"):
        yield master(environment["MASTER_ADDR"])
    variables = {name: value for name, value in sorted(environment.items()) if name.startswith(SHOWN)}
    if variables:
        yield _in_network("variables", ", ".join(f"{name}={value}" for name, value in variables.items()), variables)
    yield adapters(Path("/sys/class/infiniband"))


def interfaces() -> list[Interface]:
    folder, found = Path("/sys/class/net"), []
    for _, name in socket.if_nameindex():
        state, speed = read(folder / name / "operstate"), read(folder / name / "speed")
        address = _address_of(name)
        found.append(
            Interface(
                name=name,
                address=address,
                # Loopback and tunnels report `unknown`; they are in use if they have an address.
                is_up=state == "up" or (state != "down" and address is not None),
                megabits=int(speed) if speed.isdecimal() and int(speed) < 1 << 31 else None,
            )
        )
    return found


def host_name(
    name: str,
    usable: Sequence[Interface],
    environment: Mapping[str, str],
    *,
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> Finding:
    """Check the address of the host's name, to which gloo binds: a loopback address works only within this node.
    `usable`: interfaces to other hosts. `resolve`: name -> IPv4 address."""
    address: str | None
    try:
        address = resolve(name)
    except OSError:
        address = None
    text = f"{name} is {address}" if address else f"{name} has no address"
    leads_nowhere = (address is None or ip_address(address).is_loopback) and not environment.get(GLOO)
    remedy = None
    if leads_nowhere and usable:
        text += ": gloo would bind to loopback, and other nodes could not reach it"
        remedy = f"for several nodes: export {GLOO}={usable[0].name}, or give {name} its address in /etc/hosts"
    elif leads_nowhere:
        text += ", and no interface leads to other hosts: only one node can train"
    return _in_network("host name", text, {"name": name, "address": address}, remedy)


def chosen(variable: str, value: str, found: Sequence[Interface]) -> Finding:
    """Report which of this host's interfaces a variable chooses. `variable`: GLOO with whole names, or NCCL with
    prefixes. `value`: names separated by commas; NCCL's may begin with `^` (all but these) or `=` (whole names)."""
    names = [interface.name for interface in found]
    excludes, exact = value.startswith("^"), variable == GLOO or value.startswith(("=", "^="))
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    missing = [word for word in words if word not in names] if variable == GLOO and not excludes else []
    fit = [name for name in names if any(name == word or (not exact and name.startswith(word)) for word in words)]
    if excludes:
        fit = [name for name in names if name not in fit]
    text, remedy = f"{value}: {', '.join(fit)}", None
    if missing or not fit:
        text = f"{value}, and this host has no {', '.join(missing) or value} (it has {', '.join(names)})"
        other = next((each.name for each in found if not each.is_loopback and each.is_up), "lo")
        remedy = f"export {variable}={other}, or unset it"
    elif not any(interface.is_up for interface in found if interface.name in fit):
        text, remedy = f"{value}, which is down", f"bring it up, or choose another with {variable}"
    return _in_network(variable, text, {"value": value, "interfaces": fit}, remedy, "error")


def master(address: str, *, resolve: Callable[[str], str] = socket.gethostbyname) -> Finding:
    """Check that MASTER_ADDR resolves to an address."""
    found, remedy = None, None
    try:
        found = resolve(address)
        text = address if found == address else f"{address} is {found}"
    except OSError as error:
        text = f"{address} has no address ({error.strerror or error})"
        remedy = "give the address of the first node, or correct its name in DNS or /etc/hosts"
    return _in_network("MASTER_ADDR", text, {"value": address, "address": found}, remedy, "error")


def adapters(folder: Path) -> Finding:
    ports = sorted(folder.glob("*/ports/*/state"))
    states = {f"{path.parts[-4]}:{path.parts[-2]}": read(path).partition(": ")[2] or "unknown" for path in ports}
    idle = [name for name, state in states.items() if state != "ACTIVE"]
    text = ", ".join(f"{name} {state}" for name, state in states.items())
    remedy = f"NCCL ignores or waits for {', '.join(idle)}: repair the link, or list the others in NCCL_IB_HCA"
    text = text or "none: NCCL and gloo use the interfaces above"
    return _in_network("infiniband", text, {"ports": states}, remedy if idle else None)


def _address_of(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])

"""GPUs, what drives them, and how they reach each other."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.config.byte_size import format_bytes
from megalite.doctor.host import Finding, finding
from megalite.kernels.probes import EXTENSIONS, why_not_apex, why_not_extension, why_not_triton

TOPIC, KERNELS = "devices", "kernels"
_found = partial(finding, TOPIC)
_DRIVER = Path("/proc/driver/nvidia/version")
_BUSY = 0.9
"""Share of a GPU's memory that should be free before a run."""
_LEAST_CAPABILITY = (8, 0)


def examine(*, driver: Path = _DRIVER) -> Iterator[Finding]:
    """Findings on torch's build, the driver, each GPU, their connections, and the backends of collectives."""
    yield build(driver_version(driver), torch.version.cuda, torch.cuda.is_available())
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    if torch.cuda.device_count() > 1:
        yield _peers()
    yield from _backends()


def driver_version(path: Path) -> str | None:
    """Of NVIDIA's kernel driver; None where there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "unknown"


def build(driver: str | None, cuda: str | None, available: bool) -> Finding:
    """Whether torch can use the GPUs that the driver is for.

    Args:
        driver: its version, None where there is none.
        cuda: that torch was built for, None for a CPU build.
        available: torch finds a device.
    """
    remedy = None
    if available:
        text = f"driver {driver or 'unknown'}, CUDA {cuda}, {torch.cuda.device_count()} devices"
    elif driver is None:
        text = "no NVIDIA driver: everything runs on the CPU"
    elif cuda is None:
        text = f"driver {driver}, but this torch is for CPUs"
        remedy = "install a torch for CUDA: pytorch.org/get-started"
    else:
        text = f"driver {driver}, torch for CUDA {cuda}, and no device can be used"
        remedy = "check CUDA_VISIBLE_DEVICES and nvidia-smi; an old driver needs a torch for an older CUDA"
    data = {"driver": driver, "cuda": cuda, "devices": torch.cuda.device_count()}
    return _found("cuda", text, data, remedy, "error")


def _gpu(index: int) -> Finding:
    name = f"cuda:{index}"
    try:
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        remedy = "see nvidia-smi and dmesg for the device's errors (Xid), then reset it or leave it out"
        return _found(name, f"cannot be used: {str(error).partition(chr(10))[0]}", None, remedy, "error")
    capability = (facts.major, facts.minor)
    size = f"{format_bytes(total)}, {format_bytes(free)} free"
    return _found(
        name,
        f"{facts.name}, {size}, compute capability {facts.major}.{facts.minor}",
        {"name": facts.name, "bytes": total, "free": free, "capability": list(capability)},
        "another process holds its memory (nvidia-smi names it): end that"
        if free < _BUSY * total
        else "it has no bf16: train with --fp16; our Triton kernels do not run on it"
        if capability < _LEAST_CAPABILITY
        else None,
    )


def _peers() -> Finding:
    """Whether each GPU can read each other's memory."""
    devices = range(torch.cuda.device_count())
    without = [(i, j) for i in devices for j in devices if i < j and not torch.cuda.can_device_access_peer(i, j)]
    return peers(len(devices), without)


def peers(count: int, without: Sequence[tuple[int, int]]) -> Finding:
    """What it means that some pairs of `count` GPUs have no access to each other's memory."""
    data = {"without_access": [list(pair) for pair in without]}
    if not without:
        return _found("peer access", f"all {count} read each other's memory", data)
    pairs = ", ".join(f"{one}-{other}" for one, other in without[:4]) + (", ..." if len(without) > 4 else "")
    text = f"{len(without)} of {count * (count - 1) // 2} pairs do not read each other's memory: {pairs}"
    remedy = "tp between them is slow: keep tp inside an NVLink island, or turn IOMMU and ACS off (nvidia-smi topo -m)"
    return _found("peer access", text, data, remedy)


def _backends() -> Iterator[Finding]:
    missing = "this torch is built without it"
    gloo = dist.is_available() and dist.is_gloo_available()
    remedy = "install torch from pytorch.org: ranks on CPUs, and checkpoints on GPUs, need gloo"
    yield _found("gloo", "there" if gloo else missing, {"available": gloo}, None if gloo else remedy, "error")
    if dist.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield _found("nccl", version, {"available": True, "version": version})
    elif torch.cuda.is_available():
        remedy = "install a torch for CUDA from pytorch.org: ranks on GPUs need it"
        yield _found("nccl", missing, {"available": False}, remedy, "error")
    else:
        yield _found("nccl", "not in this torch; no GPU here needs it", {"available": False})


def kernel_backends(device: torch.device) -> Iterator[Finding]:
    """Whether Triton's and apex's kernels can run here, or why not."""
    reason = why_not_triton(device.type)
    remedy = "pip install triton (wheels of torch for CUDA bring it); without it torch's own kernels serve, slower"
    needed = reason is not None and device.type != "cpu"
    yield finding(KERNELS, "triton", reason or "its kernels run here", {"reason": reason}, remedy if needed else None)
    reason = why_not_apex(device.type)  # it is optional everywhere
    broken = {} if reason else {name: why for name in EXTENSIONS if (why := why_not_extension(name)) is not None}
    text = reason or "; ".join(dict.fromkeys(broken.values())) or "all its extensions load"
    remedy = "build apex for this torch with its extensions, or leave it out: docs/kernels.md"
    yield finding(KERNELS, "apex", text, {"reason": reason, "without": broken}, remedy if broken else None)

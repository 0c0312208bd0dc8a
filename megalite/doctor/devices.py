"""GPUs, what drives them, and how they reach each other."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.config.byte_size import format_bytes
from megalite.doctor.host import Finding
from megalite.kernels.probes import EXTENSIONS, why_not_apex, why_not_extension, why_not_triton

TOPIC, KERNELS = "devices", "kernels"
_DRIVER = Path("/proc/driver/nvidia/version")
_BUSY = 0.9
"""Share of a GPU's memory that should be free before a run."""
_LEAST_CAPABILITY = (8, 0)


def examine(*, driver: Path = _DRIVER) -> Iterator[Finding]:
    """Findings on torch's build, the driver, each GPU, their connections, and the backends of collectives.

    Args:
        driver: where NVIDIA's driver says its version.
    """
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
    data = {"driver": driver, "cuda": cuda, "devices": torch.cuda.device_count()}
    if available:
        text = f"driver {driver or 'unknown'}, CUDA {cuda}, {torch.cuda.device_count()} devices"
        return Finding(topic=TOPIC, name="cuda", text=text, data=data)
    if driver is None:
        text = "no NVIDIA driver: everything runs on the CPU"
        return Finding(topic=TOPIC, name="cuda", text=text, data=data)
    if cuda is None:
        text, remedy = (
            f"driver {driver}, but this torch is for CPUs",
            "install a torch for CUDA: pytorch.org/get-started",
        )
    else:
        text = f"driver {driver}, torch for CUDA {cuda}, and no device can be used"
        remedy = "check CUDA_VISIBLE_DEVICES and nvidia-smi; an old driver needs a torch for an older CUDA"
    return Finding(topic=TOPIC, name="cuda", level="error", text=text, remedy=remedy, data=data)


def _gpu(index: int) -> Finding:
    name = f"cuda:{index}"
    try:
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        text = f"cannot be used: {str(error).partition(chr(10))[0]}"
        remedy = "see nvidia-smi and dmesg for the device's errors (Xid), then reset it or leave it out"
        return Finding(topic=TOPIC, name=name, level="error", text=text, remedy=remedy)
    capability = (facts.major, facts.minor)
    data = {"name": facts.name, "bytes": total, "free": free, "capability": list(capability)}
    text = (
        f"{facts.name}, {format_bytes(total)}, {format_bytes(free)} free, compute capability "
        f"{capability[0]}.{capability[1]}"
    )
    if free < _BUSY * total:
        remedy = "another process holds its memory (nvidia-smi names it): end that"
        return Finding(topic=TOPIC, name=name, level="warning", text=text, remedy=remedy, data=data)
    if capability < _LEAST_CAPABILITY:
        remedy = "it has no bf16: train with --fp16; our Triton kernels do not run on it"
        return Finding(topic=TOPIC, name=name, level="warning", text=text, remedy=remedy, data=data)
    return Finding(topic=TOPIC, name=name, text=text, data=data)


def _peers() -> Finding:
    """Whether each GPU can read each other's memory."""
    devices = range(torch.cuda.device_count())
    without = [(i, j) for i in devices for j in devices if i < j and not torch.cuda.can_device_access_peer(i, j)]
    return peers(len(devices), without)


def peers(count: int, without: Sequence[tuple[int, int]]) -> Finding:
    """What it means that some pairs of `count` GPUs have no access to each other's memory."""
    data = {"without_access": [list(pair) for pair in without]}
    if not without:
        text = f"all {count} read each other's memory"
        return Finding(topic=TOPIC, name="peer access", text=text, data=data)
    pairs = ", ".join(f"{one}-{other}" for one, other in without[:4]) + (", ..." if len(without) > 4 else "")
    return Finding(
        topic=TOPIC,
        name="peer access",
        level="warning",
        text=f"{len(without)} of {count * (count - 1) // 2} pairs do not read each other's memory: {pairs}",
        remedy="tp between them is slow: keep tp inside an NVLink island, or mend it (IOMMU and ACS off, nvidia-smi topo -m)",
        data=data,
    )


def _backends() -> Iterator[Finding]:
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        topic=TOPIC,
        name="gloo",
        level="ok" if gloo else "error",
        text="there" if gloo else "this torch is built without it",
        remedy=None if gloo else "install torch from pytorch.org: ranks on CPUs, and checkpoints on GPUs, need gloo",
        data={"available": gloo},
    )
    nccl = dist.is_available() and dist.is_nccl_available()
    if nccl:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding(topic=TOPIC, name="nccl", text=version, data={"available": True, "version": version})
    elif torch.cuda.is_available():
        remedy = "install a torch for CUDA from pytorch.org: ranks on GPUs need it"
        text = "this torch is built without it"
        yield Finding(topic=TOPIC, name="nccl", level="error", text=text, remedy=remedy, data={"available": False})
    else:
        text = "not in this torch; no GPU here needs it"
        yield Finding(topic=TOPIC, name="nccl", text=text, data={"available": False})


def kernel_backends(device: torch.device) -> Iterator[Finding]:
    """Whether Triton's and apex's kernels can run here, or why not."""
    reason = why_not_triton(device.type)
    data = {"reason": reason}
    if reason is None or device.type == "cpu":
        yield Finding(topic=KERNELS, name="triton", text=reason or "its kernels run here", data=data)
    else:
        remedy = "pip install triton (wheels of torch for CUDA bring it); without it torch's own kernels serve, slower"
        yield Finding(topic=KERNELS, name="triton", level="warning", text=reason, remedy=remedy, data=data)
    reason = why_not_apex(device.type)
    broken = {} if reason else {name: why for name in EXTENSIONS if (why := why_not_extension(name)) is not None}
    found: dict[str, object] = {"reason": reason, "without": broken}
    if reason is not None:
        # It is optional everywhere.
        yield Finding(topic=KERNELS, name="apex", text=reason, data=found)
    elif broken:
        text = "; ".join(dict.fromkeys(broken.values()))
        remedy = "build apex for this torch with its extensions, or leave it out: docs/kernels.md"
        yield Finding(topic=KERNELS, name="apex", level="warning", text=text, remedy=remedy, data=found)
    else:
        yield Finding(topic=KERNELS, name="apex", text="all its extensions load", data=found)

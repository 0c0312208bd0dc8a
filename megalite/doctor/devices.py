"""Checks GPUs, their driver and connections, and matrix products: errors against fp64, and speed."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.config.numbers import format_bytes
from megalite.doctor.host import Finding, Level, finding
from megalite.kernels.probes import EXTENSIONS, why_not_apex, why_not_extension, why_not_triton
from megalite.kernels.registry import Kernels
from megalite.profiling.timing import Timer
from megalite.topology.group import Group

TOPIC, KERNELS = "devices", "kernels"
_found = partial(finding, TOPIC)
_DRIVER = Path("/proc/driver/nvidia/version")
_BUSY = 0.9  # share of a GPU's memory that should be free before a run
_LEAST_CAPABILITY = (8, 0)


def examine(*, driver: Path = _DRIVER) -> Iterator[Finding]:
    """Yield findings on torch's build, the driver, each GPU, their connections, and the backends of collectives."""
    yield build(driver_version(driver), torch.version.cuda, torch.cuda.is_available())
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    devices = range(torch.cuda.device_count())
    if len(devices) > 1:
        able = torch.cuda.can_device_access_peer
        yield peers(len(devices), [(i, j) for i in devices for j in devices if i < j and not able(i, j)])
    yield from _backends()


def driver_version(path: Path) -> str | None:
    """Return the version of NVIDIA's kernel driver, None if it is not installed."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "unknown"


def build(driver: str | None, cuda: str | None, available: bool) -> Finding:
    """Report whether torch can use the driver's GPUs. `driver`: its version, None without a driver. `cuda`: version for
    which torch was built, None for a CPU build. `available`: torch finds a device."""
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
        "another process uses its memory (nvidia-smi names it): end that process"
        if free < _BUSY * total
        else "it has no bf16: train with --fp16; megalite's Triton kernels do not run on it"
        if capability < _LEAST_CAPABILITY
        else None,
    )


def peers(count: int, without: Sequence[tuple[int, int]]) -> Finding:
    """Report the pairs of `count` GPUs that cannot access each other's memory."""
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
    yield _found("gloo", "available" if gloo else missing, {"available": gloo}, None if gloo else remedy, "error")
    if dist.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield _found("nccl", version, {"available": True, "version": version})
    elif torch.cuda.is_available():
        remedy = "install a torch for CUDA from pytorch.org: ranks on GPUs need it"
        yield _found("nccl", missing, {"available": False}, remedy, "error")
    else:
        yield _found("nccl", "not in this torch; not needed without a GPU", {"available": False})


def kernel_backends(device: torch.device) -> Iterator[Finding]:
    """Yield findings on whether Triton's and apex's kernels run here."""
    reason = why_not_triton(device.type)
    remedy = "pip install triton (part of torch's wheels for CUDA); without it torch's slower kernels run"
    needed = reason is not None and device.type != "cpu"
    yield finding(KERNELS, "triton", reason or "its kernels run here", {"reason": reason}, remedy if needed else None)
    reason = why_not_apex(device.type)  # apex is always optional
    broken = {} if reason else {name: why for name in EXTENSIONS if (why := why_not_extension(name)) is not None}
    text = reason or "; ".join(dict.fromkeys(broken.values())) or "all its extensions load"
    remedy = "build apex for this torch with its extensions, or leave it out: docs/kernels.md"
    yield finding(KERNELS, "apex", text, {"reason": reason, "without": broken}, remedy if broken else None)


_product = partial(finding, "products")
CHECKED = 512  # rows, columns and inner size of the checked product


@dataclass(frozen=True)
class Precision:
    name: str
    dtype: torch.dtype
    bound: float


# Rounding the results causes an error of 2^-9/√3 for bf16. TF32 in place of fp32 would cause 3e-4.
FP32 = Precision("fp32", torch.float32, 1e-5)
BF16 = Precision("bf16", torch.bfloat16, 5e-3)
FP16 = Precision("fp16", torch.float16, 1e-3)
TF32_BOUND = 2e-3

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def product_of(dtype: torch.dtype, device: torch.device, *, size: int) -> Product:
    return Kernels().get("matmul", device=device, dtype=dtype, size=size)


def precisions(device: torch.device) -> tuple[Precision, ...]:
    return (BF16, FP16, FP32) if device.type == "cuda" else (FP32, BF16)


def examine_products(device: torch.device, *, seconds: float) -> Iterator[Finding]:
    """Yield a finding on errors and rate of each precision; all rates together take `seconds`."""
    kinds = precisions(device)
    timer = Timer(device, Group.solo("doctor"))
    for kind in kinds:
        try:
            error, repeats = checked(kind.dtype, device)
            rate = rate_of(timer, kind.dtype, seconds=seconds / len(kinds))
        except RuntimeError as failure:
            text = f"{kind.name}: {str(failure).partition(chr(10))[0]}"
            remedy = f"do not train in {kind.name} here, or install a torch that has these products"
            yield _product(str(device), text, None, remedy, "error")
            continue
        yield judged(kind, device, error=error, repeats=repeats, rate=rate)


def checked(dtype: torch.dtype, device: torch.device, *, multiply: Product | None = None) -> tuple[float, bool]:
    """Return a product's relative error against fp64 (in norm), and whether a second run gives the same bits.
    `multiply`: the tested function; None: the kernel of a training run."""
    multiply = multiply or product_of(dtype, device, size=CHECKED)
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randn(CHECKED, CHECKED, generator=numbers).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    a, b = a.to(device), b.to(device)
    first, second = multiply(a, b), multiply(a, b)
    error = (first.cpu().double() - exact).norm() / exact.norm()
    return float(error), torch.equal(first, second)


def rate_of(timer: Timer, dtype: torch.dtype, *, seconds: float) -> float:
    """Return this rank's FLOP/s in a large product, while all other ranks multiply too.

    Collectives: barriers over the timer's world."""
    size = 8192 if timer.device.type == "cuda" else 1024
    a = torch.randn(size, size, device=timer.device).to(dtype)
    multiply = product_of(dtype, timer.device, size=size)
    return 2 * size**3 / timer.each(lambda: multiply(a, a), seconds=seconds).seconds


def judged(kind: Precision, device: torch.device, *, error: float, repeats: bool, rate: float) -> Finding:
    text = f"{kind.name}: {rate / 1e12:.3g} TFLOP/s, off by {error:.1e} of the norm"
    level: Level = "warning"
    if error <= kind.bound and (repeats or device.type == "cpu"):
        remedy = None
    elif kind is FP32 and error <= TF32_BOUND:
        text += ": rounded to TF32"
        remedy = "unset NVIDIA_TF32_OVERRIDE: fp32 runs would lose 13 bits of each operand"
    else:
        text += f", more than {kind.bound:.0e}: wrong numbers" if error > kind.bound else ": bits differ between runs"
        remedy = "do not train on this device: run the vendor's diagnostics (dcgmi diag -r 3), or try another torch"
        level = "error"
    data = {"precision": kind.name, "flops_per_second": rate, "error": error, "repeats": repeats}
    return _product(str(device), text, data, remedy, level)

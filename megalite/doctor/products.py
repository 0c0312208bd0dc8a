"""Matrix products of the device: right numbers, beside fp64 on the CPU, and how fast."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from megalite.doctor.host import Finding, Level, finding
from megalite.kernels.registry import Kernels
from megalite.profiling.timing import Timer
from megalite.topology.group import Group

_found = partial(finding, "products")
CHECKED = 512
"""Rows, columns and terms of the product that is checked."""


@dataclass(frozen=True)
class Precision:
    """A type and how far its products may be from fp64's, as a share of their norm."""

    name: str
    dtype: torch.dtype
    bound: float


# The error is that of rounding the results: 2^-9/√3 for bf16. fp32 as TF32 would be off by 3e-4.
FP32 = Precision("fp32", torch.float32, 1e-5)
BF16 = Precision("bf16", torch.bfloat16, 5e-3)
FP16 = Precision("fp16", torch.float16, 1e-3)
TF32_BOUND = 2e-3

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def product_of(dtype: torch.dtype, device: torch.device, *, size: int) -> Product:
    """The kernel that a run would multiply square matrices with."""
    kernel: Product = Kernels().get("matmul", device=device, dtype=dtype, size=size)
    return kernel


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Those that runs on the device use."""
    return (BF16, FP16, FP32) if device.type == "cuda" else (FP32, BF16)


def examine(device: torch.device, *, seconds: float) -> Iterator[Finding]:
    """A finding for each precision: numbers and rate; `seconds` is for all rates together."""
    kinds = precisions(device)
    timer = Timer(device, Group.solo("doctor"))
    for kind in kinds:
        try:
            error, repeats = checked(kind.dtype, device)
            rate = rate_of(timer, kind.dtype, seconds=seconds / len(kinds))
        except RuntimeError as failure:
            text = f"{kind.name}: {str(failure).partition(chr(10))[0]}"
            remedy = f"do not train in {kind.name} here, or install a torch that has these products"
            yield _found(str(device), text, None, remedy, "error")
            continue
        yield judged(kind, device, error=error, repeats=repeats, rate=rate)


def checked(dtype: torch.dtype, device: torch.device, *, multiply: Product | None = None) -> tuple[float, bool]:
    """How far a product is from fp64's, as a share of its norm, and whether a second one has the same bits.

    Args:
        multiply: what is tested; None: what a run would take.
    """
    multiply = multiply or product_of(dtype, device, size=CHECKED)
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randn(CHECKED, CHECKED, generator=numbers).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    there = a.to(device), b.to(device)
    first, second = multiply(*there), multiply(*there)
    error = (first.cpu().double() - exact).norm() / exact.norm()
    return float(error), torch.equal(first, second)


def rate_of(timer: Timer, dtype: torch.dtype, *, seconds: float) -> float:
    """FLOP/s of a large product; on several ranks of this one, while the others multiply as well.

    Collectives: barriers over the timer's world.
    """
    size = 8192 if timer.device.type == "cuda" else 1024
    a = torch.randn(size, size, device=timer.device).to(dtype)
    multiply = product_of(dtype, timer.device, size=size)
    return 2 * size**3 / timer.each(lambda: multiply(a, a), seconds=seconds).seconds


def judged(kind: Precision, device: torch.device, *, error: float, repeats: bool, rate: float) -> Finding:
    """What the numbers say."""
    text = f"{kind.name}: {rate / 1e12:.3g} TFLOP/s, off by {error:.1e} of the norm"
    level: Level = "warning"
    if error <= kind.bound and (repeats or device.type == "cpu"):
        remedy = None
    elif kind is FP32 and error <= TF32_BOUND:
        text += ": rounded to TF32"
        remedy = "unset NVIDIA_TF32_OVERRIDE: fp32 runs would lose 13 bits of each operand"
    else:
        text += f", more than {kind.bound:.0e}: wrong numbers" if error > kind.bound else ": other bits each time"
        remedy = "do not train on this device: run its maker's diagnostics (dcgmi diag -r 3), or another torch"
        level = "error"
    data = {"precision": kind.name, "flops_per_second": rate, "error": error, "repeats": repeats}
    return _found(str(device), text, data, remedy, level)

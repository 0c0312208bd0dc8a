"""What is there: Triton, NVIDIA's apex with its extensions, which CPU. Found out once a process, with the reason where not."""

import importlib.util
from functools import cache
from pathlib import Path

import torch

from megalite.kernels.apex.detect import apex_extensions


@cache
def why_not_triton(device: str) -> str | None:
    """Why our Triton kernels cannot run on a device of that type, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if triton.knobs.runtime.interpret:
        return None  # by numpy, on any device
    if device != "cuda":
        return f"triton needs a CUDA device, this is a {device} (TRITON_INTERPRET=1 runs its kernels anywhere, slowly)"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"the kernels need compute capability 8.0, this is {major}.{minor}"


@cache
def why_not_apex(device: str) -> str | None:
    """Why apex cannot be used on a device of that type at all, or None; each kernel needs an extension beside."""
    if device != "cuda":
        return f"apex has no {device}; it needs a CUDA device"
    extensions, reason = apex_extensions()
    return reason if extensions is None else None


@cache
def cpu_kinds(about: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """What rules may call this machine's processor beside `cpu`: `amd-avx512`, or nothing.

    Args:
        about: where Linux describes it; there need be no such file.
    """
    amd = about.is_file() and "AuthenticAMD" in about.read_text(encoding="utf-8", errors="replace")
    return ("amd-avx512",) if amd and torch.backends.cpu.get_cpu_capability() == "AVX512" else ()

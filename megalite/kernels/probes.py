"""Detect Triton, NVIDIA's apex and its extensions, and the kind of CPU, once per process, with reasons for absence.

apex is searched on disk and never imported: PyPI's `apex` is another project, and importing would run its code.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

EXTENSIONS = (
    "amp_C",
    "fused_layer_norm_cuda",
    "fused_weight_gradient_mlp_cuda",
    "fused_rotary_positional_embedding",
    "scaled_upper_triang_masked_softmax_cuda",
    "xentropy_cuda",
)  # compiled modules of apex that our adapters use; a flag of apex's setup builds each

_FILES = ("multi_tensor_apply/multi_tensor_apply.py", "normalization/fused_layer_norm.py", "optimizers/fused_adam.py")
"""Files that identify the installed `apex` package as NVIDIA's."""


def why_not_capability(device: torch.device, least: tuple[int, int], products: str) -> str | None:
    """Return why a device has no `products`, which CUDA devices support from compute capability `least`, or None."""
    if device.type != "cuda":
        return f"{device.type} has no {products}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < least:
        return f"it requires compute capability {least[0]}.{least[1]} or more, but this device has {major}.{minor}"
    return None


@cache
def why_not_triton(device: str) -> str | None:
    """Return why our Triton kernels cannot run on this device type, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if triton.knobs.runtime.interpret:
        return None  # the interpreter uses numpy, on any device
    if device != "cuda":
        return f"triton needs a CUDA device, not {device} (TRITON_INTERPRET=1 runs its kernels anywhere, slowly)"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"the kernels need compute capability 8.0, this device has {major}.{minor}"


@cache
def why_not_apex(device: str) -> str | None:
    """Return why apex cannot be used on this device type, or None; each kernel also needs its extension."""
    if device != "cuda":
        return f"apex needs a CUDA device, not {device}"
    extensions, reason = apex_extensions()
    return reason if extensions is None else None


@cache
def apex_extensions() -> tuple[frozenset[str] | None, str]:
    """Return the installed extensions and "", or None and the reason why apex cannot be used."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None, "apex is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any(all((folder / file).is_file() for file in _FILES) for folder in folders):
        place = spec.origin or ", ".join(map(str, folders))
        return None, f"the apex at {place} is not NVIDIA's (PyPI has another project of that name)"
    return frozenset(name for name in EXTENSIONS if importlib.util.find_spec(name) is not None), ""


@cache
def why_not_extension(name: str) -> str | None:
    """Return why one of apex's compiled extensions cannot be used, or None. Imports it once, if apex is NVIDIA's."""
    extensions, reason = apex_extensions()
    if extensions is None:
        return reason
    if name not in extensions:
        return f"apex is installed without its extension {name}"
    try:
        extension(name)
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        first = str(error).partition("\n")[0]
        return f"apex's extension {name} cannot be loaded ({first}); build apex again for this torch"
    return None


def extension(name: str) -> ModuleType:
    """Import one of `EXTENSIONS`. Adapters call this when they run, because each extension is installed separately."""
    return importlib.import_module(name)


def softmax_limit(length: int) -> str | None:
    """Return why apex's causal softmax does not support sequences of this length, or None."""
    if not 16 < length <= 16384:
        return f"it supports sequences of 17 to 16384 tokens, not {length}"
    return None if length % 4 == 0 else f"it supports sequences of a multiple of 4 tokens, not {length}"


@cache
def why_not_onednn(device: str) -> str | None:
    """Return why oneDNN's fp32 products cannot be used on this device type, or None."""
    if device != "cpu":
        return f"onednn needs a CPU, not {device}"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    return None


@cache
def cpu_kinds(about: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return names for this processor (from `about`, Linux) besides `cpu` that rules may use: `amd-avx512`."""
    amd = about.is_file() and "AuthenticAMD" in about.read_text(encoding="utf-8", errors="replace")
    return ("amd-avx512",) if amd and torch.backends.cpu.get_cpu_capability() == "AVX512" else ()

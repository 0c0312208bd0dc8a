"""What is there: Triton, NVIDIA's apex with its extensions, which CPU. Probed once per process, with the reason where not.

apex is looked for on the disk and never imported: the `apex` of PyPI is another project, which importing would run.
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
)  # compiled modules of apex that our adapters use; each is built, or not, by a flag of apex's setup

_FILES = ("multi_tensor_apply/multi_tensor_apply.py", "normalization/fused_layer_norm.py", "optimizers/fused_adam.py")
"""What the package of that name has if it is NVIDIA's."""


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
    """Why apex cannot be used on a device of that type at all, or None; each kernel also needs its extension."""
    if device != "cuda":
        return f"apex has no {device}; it needs a CUDA device"
    extensions, reason = apex_extensions()
    return reason if extensions is None else None


@cache
def apex_extensions() -> tuple[frozenset[str] | None, str]:
    """The extensions that can be found, and ""; or None and why there is no apex."""
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
    """Why one of apex's compiled extensions cannot be used, or None. It is imported, once, if apex is NVIDIA's."""
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
    """One of `EXTENSIONS`. The adapters ask for it when they run, as each may be there without the others."""
    return importlib.import_module(name)


def softmax_limit(length: int) -> str | None:
    """Why apex's causal softmax does not take sequences of this length, or None."""
    if not 16 < length <= 16384:
        return f"it takes sequences of 17 to 16384 tokens, not {length}"
    return None if length % 4 == 0 else f"it takes sequences of a multiple of 4 tokens, not {length}"


@cache
def why_not_onednn(device: str) -> str | None:
    """Why oneDNN's fp32 products cannot be used on a device of that type, or None."""
    if device != "cpu":
        return f"onednn has no {device}; it serves CPUs"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    return None


@cache
def cpu_kinds(about: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """What rules may call this machine's processor, which Linux describes in `about`, in addition to `cpu`: `amd-avx512`."""
    amd = about.is_file() and "AuthenticAMD" in about.read_text(encoding="utf-8", errors="replace")
    return ("amd-avx512",) if amd and torch.backends.cpu.get_cpu_capability() == "AVX512" else ()

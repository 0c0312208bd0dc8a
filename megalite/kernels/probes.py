"""Find out which kernels can be used here: detect Triton, NVIDIA's apex, its extensions and the kind of CPU, once per
process, with reasons for absence; and check that a third-party kernel matches torch on a few rows before it is chosen.

apex is searched on disk and never imported: PyPI's `apex` is another project, and importing would run its code. apex's
extensions are built from many versions of its source with many versions of CUDA, and most of its functions hardly check
their arguments. torch's operator for oneDNN is not documented."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

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


ROWS = 64
# Upper bound on the checked size of operations without rows, or with as many rows as columns.
LONGEST = {"softmax": 1024, "adam": 1 << 16, "lamb": 1 << 16, "l2norm": 1 << 16}
LIMITS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}  # largest ‖kernel - torch‖/‖torch‖
Results = Mapping[str, Tensor]


class Inputs:
    """Standard normal numbers, the same in every instance; torch's global generators do not change."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def ids(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), generator=self._generator).to(self.device)


def why_wrong(
    backend: str, operation: str, kernel: Any, reference: Any, dtype: torch.dtype, device: str, size: int
) -> str | None:
    """Return why a backend's kernel must not be used on a device, or None. `reference`: torch's kernel. Both are a function or
    a tuple of functions."""
    return _why_wrong(backend, operation, kernel, reference, dtype, device, min(size, LONGEST.get(operation, size)))


@cache
def _why_wrong(
    backend: str, operation: str, kernel: Any, reference: Any, dtype: torch.dtype, device: str, size: int
) -> str | None:
    case = _CASES[operation]
    try:
        actual = case(kernel, Inputs(dtype, device), size)
    except (RuntimeError, TypeError, AttributeError) as raised:
        return f"{backend}'s kernel failed in its self-check ({str(raised).partition(chr(10))[0]})"
    expected = case(reference, Inputs(dtype, device), size)
    for name, wanted in expected.items():
        error = relative(actual[name], wanted)
        if not error <= LIMITS[dtype]:  # NaN too
            return (
                f"{backend}'s kernel differs from torch in its self-check: {name} has a relative error of {error:.1e}, "
                f"more than {LIMITS[dtype]:.0e}"
            )
    return None


def relative(actual: Tensor, reference: Tensor) -> float:
    actual, reference = actual.double(), reference.double()
    return (torch.linalg.vector_norm(actual - reference) / torch.linalg.vector_norm(reference)).item()


def through(function: Callable[..., Tensor], inputs: Sequence[Tensor], *rest: Any) -> Results:
    """Return the output and the gradients of all inputs, for the output gradient cos(output)."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        y = function(*leaves, *rest)
    grads = torch.autograd.grad(y, leaves, grad_outputs=torch.cos(y.detach()))
    return {"the output": y.detach()} | {f"gradient {place}": grad for place, grad in enumerate(grads, 1)}


def _norm(kernel: Any, draw: Inputs, size: int, *, parameters: int) -> Results:
    inputs = (draw.normal(ROWS, size), *(draw.normal(size) for _ in range(parameters)))
    return through(partial(kernel, zero_centered=False), inputs, 1e-5)


def _add_norm(kernel: Any, draw: Inputs, size: int) -> Results:
    keep = draw.normal(ROWS, size) > 0.0

    def both(branch: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
        first = branch, bias, keep, 0.5, residual
        return torch.cat(kernel(*first, weight, norm_bias, 1e-5, zero_centered=False, factor=0.75))

    shapes = ((ROWS, size), (size,), (ROWS, size), (size,), (size,))
    return through(both, [draw.normal(*shape) for shape in shapes])


def _activation(kernel: Any, draw: Inputs, size: int, *, gated: bool = True, tanh: bool = True) -> Results:
    """Run the exact form and, if the kernel has it, the tanh form."""
    inputs = [draw.normal(ROWS, 2 * size)] if gated else [draw.normal(ROWS, size), draw.normal(size)]
    if not tanh:
        return through(kernel, inputs)
    forms = {form: through(partial(kernel, tanh=form), inputs) for form in (False, True)}
    return {f"{name}, tanh {form}": actual for form, results in forms.items() for name, actual in results.items()}


def _l2norm(kernel: Any, draw: Inputs, size: int) -> Results:
    return {"the norm": kernel([draw.normal(size), draw.normal(size // 2 + 1)])}


def _rope(kernel: Any, draw: Inputs, size: int) -> Results:
    angles = draw.normal(ROWS // 4, 1, 1, size // 2, dtype=torch.float32)
    return through(kernel, (draw.normal(ROWS // 4, 2, 2, size),), angles.cos(), angles.sin())


def _softmax(kernel: Any, draw: Inputs, size: int) -> Results:
    scores, grad = draw.normal(2, 4, size, size), draw.normal(2, 4, size, size)
    probabilities = kernel[0](scores, 0.125).to(draw.dtype)
    return {"the output": probabilities, "gradient 1": kernel[1](grad, probabilities, 0.125)}


def _cross_entropy(kernel: Any, draw: Inputs, size: int) -> Results:
    logits, labels = draw.normal(ROWS, size), draw.ids(size, ROWS)
    grad = draw.normal(ROWS, dtype=torch.float32)
    (maximum, total, picked), saved = kernel[0](logits, labels, 0)
    log_total = total.log()
    return {
        "the loss": log_total - picked,
        "the log-sum-exp": log_total + maximum,
        "the gradient": kernel[1](saved, labels, 0, log_total + maximum, grad),
    }


def _dropout_mask(kernel: Any, draw: Inputs, size: int) -> Results:
    keep = torch.empty(2, 2, ROWS, size, dtype=torch.bool, device=draw.device)
    rows = torch.arange(ROWS, device=keep.device) * 3
    kernel(keep, rows, key=1 << 62, samples=(3, 4), first_head=1, p=0.3)
    return {"the mask": keep}


def _delta_scan(kernel: Any, draw: Inputs, size: int) -> Results:
    written, read = (draw.normal(1, 2, 2, 3, 16, ROWS + size) / 8).split((ROWS, size), dim=-1)
    keys, decays = draw.normal(1, 2, 2, 3, 16, size) / 8, draw.normal(1, 2, 2, 3, 16).sigmoid()[..., -1]
    states = draw.normal(1, 2, 2, 3, size, ROWS)
    names = ("the corrections", "the states", "the last state")
    return {
        f"{name}{of}": actual
        for of, added in (("", None), (" of the gradients", states))
        for name, actual in zip(names, kernel(written, read, keys, decays, states[..., 0, :, :], added), strict=True)
    }


def _fp8(kernel: Any, draw: Inputs, size: int) -> Results:
    x, (largest, cast, cast_rows) = draw.normal(ROWS, size), kernel
    actual = {
        "a tensor": cast(x, largest(x), torch.float8_e4m3fn),
        "turned": cast(x.t(), largest(x), torch.float8_e5m2),
        "rows": cast_rows(x, torch.float8_e4m3fn),
    }
    return {name: rounded.data.float() * rounded.undo for name, rounded in actual.items()}


def _matmul(kernel: Any, draw: Inputs, size: int) -> Results:
    x, weight, bias = draw.normal(2, ROWS // 2, size), draw.normal(ROWS, size), draw.normal(ROWS)
    return {
        "the output": kernel(x, weight.t(), bias),
        "the input's gradient": kernel(draw.normal(2, ROWS // 2, ROWS), weight),
    }


def _weight_grad(kernel: Any, draw: Inputs, size: int) -> Results:
    grad_y, x = draw.normal(ROWS, ROWS), draw.normal(ROWS, size)
    results = {}
    for dtype in {torch.float32: None, draw.dtype: None}:
        results[f"the {dtype} gradient"] = main = draw.normal(ROWS, size, dtype=dtype)
        kernel(main, grad_y, x)
    return results


def _adam(kernel: Any, draw: Inputs, size: int) -> Results:
    param, grad, exp_avg, exp_avg_sq = (draw.normal(size) for _ in range(4))
    exp_avg_sq.square_()
    copy, factor = torch.empty_like(param, dtype=torch.bfloat16), torch.full((), 0.5, device=param.device)
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    kernel(param, grad, exp_avg, exp_avg_sq, **settings, factor=factor, copy=copy)
    return {"the weights": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "the copy": copy}


def _lamb(kernel: Any, draw: Inputs, size: int) -> Results:
    param, grad, exp_avg, exp_avg_sq = (draw.normal(size) for _ in range(4))
    exp_avg_sq.square_()
    # A large eps reveals where it is added, and whether it is bias-corrected.
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 0.1, "weight_decay": 0.1, "step": 3}
    norms = kernel[0](param, grad, exp_avg, exp_avg_sq, **settings, norms=True)
    kernel[1](param, exp_avg, exp_avg_sq, **settings, rate=0.1)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return {"the norms": torch.stack(norms), **moments, "the weights": param, "the gradient": grad}


_CASES: Mapping[str, Callable[[Any, Inputs, int], Results]] = MappingProxyType(
    {
        "rmsnorm": partial(_norm, parameters=1),
        "layernorm": partial(_norm, parameters=2),
        "add_norm": _add_norm,
        "bias_gelu": partial(_activation, gated=False),
        "swiglu": partial(_activation, tanh=False),
        "geglu": _activation,
        "l2norm": _l2norm,
        "rope": _rope,
        "softmax": _softmax,
        "cross_entropy": _cross_entropy,
        "delta_scan": _delta_scan,
        "dropout_mask": _dropout_mask,
        "fp8": _fp8,
        "matmul": _matmul,
        "weight_grad": _weight_grad,
        "adam": _adam,
        "lamb": _lamb,
    }
)  # operation -> function that runs a kernel on inputs

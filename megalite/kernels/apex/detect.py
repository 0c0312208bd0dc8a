"""Is NVIDIA's apex here, and which of its extensions? Found on the disk; the package itself is never imported.

The `apex` of PyPI is another project, which importing would run.
"""

import importlib
import importlib.util
from functools import cache
from pathlib import Path

EXTENSIONS = (
    "amp_C",
    "fused_layer_norm_cuda",
    "fused_weight_gradient_mlp_cuda",
    "fused_rotary_positional_embedding",
    "scaled_upper_triang_masked_softmax_cuda",
    "xentropy_cuda",
)
"""Compiled modules that our adapters use; each is built, or not, by a flag of apex's setup."""

_FILES = (
    "multi_tensor_apply/multi_tensor_apply.py",
    "normalization/fused_layer_norm.py",
    "optimizers/fused_adam.py",
)
"""What the package of that name has if it is NVIDIA's."""


@cache
def apex_extensions() -> tuple[frozenset[str] | None, str]:
    """The extensions that can be found, and "" ; or None and why there is no apex."""
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
        importlib.import_module(name)
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # built for another torch or CUDA: an undefined symbol
        first = str(error).partition("\n")[0]
        return f"apex's extension {name} cannot be loaded ({first}); build apex again for this torch"
    return None

"""How exact and how repeatable torch's own operations are: TF32 products, deterministic algorithms. Both are of the process."""

import torch

from megalite.config.compute import ComputeConfig
from megalite.config.errors import ConfigError

_LEAST_CAPABILITY = (8, 0)


def why_not_tf32(device: torch.device) -> str | None:
    """Why the device cannot multiply in TF32, or None."""
    if device.type != "cuda":
        return f"{device.type} has no products in TF32"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _LEAST_CAPABILITY:
        return f"it takes compute capability 8.0 or more, and this device has {major}.{minor}"
    return None


def use_numerics(compute: ComputeConfig, device: torch.device) -> list[str]:
    """Do what `tf32` and `deterministic` ask for; returns lines for the log.

    Raises:
        ConfigError: TF32 is not there on the device.
    """
    lines = []
    if compute.tf32:
        if (reason := None if device.type == "meta" else why_not_tf32(device)) is not None:
            raise ConfigError(f"tf32 cannot be had: {reason}; remove it")
        # The older of torch's two spellings: it sets what the newer one does, and torch.compile still reads it.
        torch.backends.cuda.matmul.allow_tf32 = True
        lines.append("fp32 products in TF32")
    if compute.deterministic:
        torch.use_deterministic_algorithms(True)
        # Else torch fills each new tensor with NaN: nothing here is read before it was written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        lines.append("deterministic: operations of torch take repeatable forms, or are refused")
    return lines

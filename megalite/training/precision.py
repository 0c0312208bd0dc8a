"""Number formats of a run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`compute` is the type of parameters and activations, `main` that of gradients and main parameters."""

    compute: torch.dtype
    main: torch.dtype

    @classmethod
    def of(cls, name: str) -> "Precision":
        """The formats behind `fp32`, `bf16`, `fp16` or `fp64`."""
        compute = {
            "fp32": torch.float32,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "fp64": torch.float64,
        }[name]
        return cls(compute, torch.float64 if name == "fp64" else torch.float32)

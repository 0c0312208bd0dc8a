"""How fast a run is, in tokens, FLOPs and as a share of the hardware's peak."""

from dataclasses import dataclass

import torch

from megalite.config.run import RunConfig
from megalite.models.shapes import flops_per_token

PEAK_TFLOPS = (
    # Dense tensor-core peaks in bf16 (V100: fp16) from the vendor's data sheets; the first name that occurs counts.
    ("B200", 2250.0),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("V100", 125.0),
)


def device_peak_tflops(config: RunConfig, device: torch.device) -> float | None:
    """Peak TFLOP/s of one device: as given, or known for data-centre GPUs in half precision, else None."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops
    if device.type != "cuda" or config.training.precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS if known in name), None)


@dataclass(frozen=True)
class Speed:
    """Throughput over some steps."""

    ms_per_step: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    tflops_per_rank: float
    """Model FLOPs (PaLM convention: full attention, no recompute) a second and rank, in 10^12."""
    mfu: float | None
    """tflops_per_rank over the device's peak, if that is known."""


class SpeedMeter:
    """Turns times and samples into a `Speed`."""

    def __init__(self, config: RunConfig, *, world_size: int, device: torch.device) -> None:
        self._seq_length = config.training.seq_length
        self._flops = flops_per_token(config.model, self._seq_length, "palm")
        self._world_size = world_size
        self._peak = device_peak_tflops(config, device)

    def speed(self, *, seconds: float, steps: int, samples: int) -> Speed:
        """Throughput of `steps` steps over `samples` samples that took `seconds`."""
        tokens = samples * self._seq_length / seconds
        tflops = tokens * self._flops / self._world_size / 1e12
        return Speed(
            ms_per_step=1e3 * seconds / steps,
            tokens_per_second=tokens,
            tokens_per_second_per_rank=tokens / self._world_size,
            tflops_per_rank=tflops,
            mfu=None if self._peak is None else tflops / self._peak,
        )

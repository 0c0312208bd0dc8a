"""Tokens, FLOPs and MFU by hand."""

import pytest
import torch

from megalite.config.run import RunConfig
from megalite.training.reporter import SpeedMeter, device_peak_tflops
from tests.support.tiny import tiny_config

CPU = torch.device("cpu")

# The tiny model: h 32, 4 layers, padded vocabulary 96, sequence 16. A layer multiplies a token with 12·h² weights.
WEIGHTS = 4 * 12 * 32 * 32 + 96 * 32
FLOPS_PER_TOKEN = 6 * WEIGHTS + 12 * 4 * 32 * 16
"""PaLM, appendix B: 6·N + 12·layers·heads·head size·sequence."""


def config(**changes: float) -> RunConfig:
    return tiny_config(1, **changes)


def test_speed() -> None:
    meter = SpeedMeter(config(peak_tflops=0.001), world_size=4, device=CPU)
    speed = meter.speed(seconds=2.0, steps=5, samples=40)
    tokens = 40 * 16 / 2.0
    assert speed.ms_per_step == 400.0
    assert speed.tokens_per_second == tokens
    assert speed.tokens_per_second_per_rank == tokens / 4
    assert speed.tflops_per_rank == pytest.approx(tokens * FLOPS_PER_TOKEN / 4 / 1e12, rel=1e-12)
    assert speed.mfu == pytest.approx(tokens * FLOPS_PER_TOKEN / 4 / 1e9, rel=1e-12)


def test_mfu_needs_a_peak() -> None:
    speed = SpeedMeter(config(), world_size=1, device=CPU).speed(seconds=1.0, steps=1, samples=8)
    assert speed.mfu is None


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312.0),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_known_peaks(monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak_tflops(tiny_config(1, precision=precision), torch.device("cuda", 0)) == peak


def test_a_given_peak_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    given = tiny_config(1, precision="bf16", peak_tflops=77.0)
    assert device_peak_tflops(given, torch.device("cuda", 0)) == 77.0

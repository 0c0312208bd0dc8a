"""Checks of GPUs and kernel backends with and without GPUs, and of right and wrong matrix products."""

from pathlib import Path

import pytest
import torch

from megalite.doctor import devices
from megalite.doctor.devices import (
    BF16,
    FP16,
    FP32,
    Precision,
    build,
    checked,
    driver_version,
    examine,
    judged,
    kernel_backends,
    peers,
)
from megalite.doctor.host import Finding


def test_driver_findings(tmp_path: Path) -> None:
    said = tmp_path / "version"
    said.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Tue Jan\nGCC version: gcc 12.2.0\n")
    assert driver_version(said) == "570.86.10"
    said.write_text("")
    assert driver_version(said) == "unknown"
    assert driver_version(tmp_path / "nothing") is None


def test_torch_build_without_gpu_support() -> None:
    assert build(None, None, False).level == "ok"
    assert build("570.86", "12.8", True).level == "ok"
    cpu = build("570.86", None, False)
    assert cpu.level == "error" and "this torch is for CPUs" in cpu.text
    broken = build("470.1", "12.8", False)
    assert broken.level == "error" and broken.remedy is not None and "old driver" in broken.remedy


def test_gpu_pairs_without_peer_access() -> None:
    assert peers(8, []).text == "all 8 read each other's memory"
    some = peers(4, [(0, 2), (0, 3), (1, 2), (1, 3)])
    assert some.level == "warning" and some.text.startswith("4 of 6 pairs") and "0-2, 0-3, 1-2, 1-3" in some.text
    assert peers(8, [(0, place) for place in range(1, 8)]).text.endswith("0-4, ...")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_findings_on_a_cpu() -> None:
    rows = {finding.name: finding for finding in examine(driver=Path("/nothing"))}
    assert {name: row.level for name, row in rows.items()} == dict.fromkeys(("cuda", "gloo", "nccl"), "ok")
    assert rows["nccl"].text.startswith("not in this torch") or rows["nccl"].data["available"]


def rows_of(device: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in kernel_backends(torch.device(device))}


def test_kernel_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.level for row in rows_of("cpu").values()} == {"ok"}
    assert rows_of("cpu")["apex"].text == "apex needs a CUDA device, not cpu"
    monkeypatch.setattr(devices, "why_not_triton", lambda device: "triton is not installed")
    monkeypatch.setattr(devices, "why_not_apex", lambda device: "apex is not installed")
    rows = rows_of("cuda")
    assert (rows["triton"].level, rows["apex"].level) == ("warning", "ok")
    monkeypatch.setattr(devices, "why_not_triton", lambda device: None)
    monkeypatch.setattr(devices, "why_not_apex", lambda device: None)
    monkeypatch.setattr(devices, "why_not_extension", lambda name: None)
    rows = rows_of("cuda")
    assert (rows["triton"].text, rows["apex"].text) == ("its kernels run here", "all its extensions load")
    monkeypatch.setattr(devices, "why_not_extension", lambda name: "undefined symbol" if name == "amp_C" else None)
    assert (rows_of("cuda")["apex"].level, rows_of("cuda")["apex"].text) == ("warning", "undefined symbol")


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CHECKED", 128)
    monkeypatch.setattr(devices, "rate_of", lambda timer, dtype, *, seconds: 1e9)


@pytest.mark.parametrize("kind", [FP32, BF16, FP16], ids=lambda kind: kind.name)
def test_correct_products(kind: Precision) -> None:
    error, repeats = checked(kind.dtype, CPU)
    assert 0 < error <= kind.bound and repeats
    assert judged(kind, CPU, error=error, repeats=repeats, rate=1e12).level == "ok"


@pytest.mark.parametrize("kind", [FP32, BF16, FP16], ids=lambda kind: kind.name)
def test_wrong_element_is_detected(kind: Precision) -> None:
    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a @ b
        out[3, 5] += 1000  # one in 16384
        return out

    error, repeats = checked(kind.dtype, CPU, multiply=wrong)
    row = judged(kind, CPU, error=error, repeats=repeats, rate=1e12)
    assert row.level == "error" and "wrong numbers" in row.text


def test_tf32_operands_are_detected() -> None:
    def tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        def rounded(tensor: torch.Tensor) -> torch.Tensor:
            return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

        return rounded(a) @ rounded(b)

    error, repeats = checked(torch.float32, CPU, multiply=tf32)
    row = judged(FP32, CPU, error=error, repeats=repeats, rate=1e12)
    assert (row.level, row.text.endswith("rounded to TF32")) == ("warning", True)


def test_nondeterministic_gpu_is_detected() -> None:
    row = judged(BF16, torch.device("cuda"), error=1e-3, repeats=False, rate=1e15)
    assert row.level == "error" and "bits differ between runs" in row.text
    assert row.text.startswith("bf16: 1e+03 TFLOP/s")

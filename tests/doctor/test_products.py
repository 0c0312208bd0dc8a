"""Products: right ones pass, wrong ones are found."""

import pytest
import torch

from megalite.doctor import devices
from megalite.doctor.devices import BF16, FP16, FP32, Precision, checked, examine_products, judged

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CHECKED", 128)
    monkeypatch.setattr(devices, "rate_of", lambda timer, dtype, *, seconds: 1e9)


@pytest.mark.parametrize("kind", [FP32, BF16, FP16], ids=lambda kind: kind.name)
def test_right_products(kind: Precision) -> None:
    error, repeats = checked(kind.dtype, CPU)
    assert 0 < error <= kind.bound and repeats
    assert judged(kind, CPU, error=error, repeats=repeats, rate=1e12).level == "ok"


@pytest.mark.parametrize("kind", [FP32, BF16, FP16], ids=lambda kind: kind.name)
def test_a_wrong_element(kind: Precision) -> None:
    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a @ b
        out[3, 5] += 1000  # one in 16384
        return out

    error, repeats = checked(kind.dtype, CPU, multiply=wrong)
    row = judged(kind, CPU, error=error, repeats=repeats, rate=1e12)
    assert row.level == "error" and "wrong numbers" in row.text


def test_operands_in_fewer_bits_than_the_type_says() -> None:
    def tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        def rounded(tensor: torch.Tensor) -> torch.Tensor:
            return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

        return rounded(a) @ rounded(b)

    error, repeats = checked(torch.float32, CPU, multiply=tf32)
    row = judged(FP32, CPU, error=error, repeats=repeats, rate=1e12)
    assert (row.level, row.text.endswith("rounded to TF32")) == ("warning", True)


def test_a_gpu_that_does_not_repeat_itself() -> None:
    row = judged(BF16, torch.device("cuda"), error=1e-3, repeats=False, rate=1e15)
    assert row.level == "error" and "other bits each time" in row.text
    assert row.text.startswith("bf16: 1e+03 TFLOP/s")


def test_each_precision_has_a_row() -> None:
    rows = list(examine_products(CPU, seconds=0.0))
    assert [row.data["precision"] for row in rows] == ["fp32", "bf16"]


def test_a_type_that_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*operands: object, **options: object) -> None:
        raise RuntimeError('"addmm" not implemented\nmore')

    monkeypatch.setattr(devices, "checked", refuse)
    row = next(examine_products(CPU, seconds=0.0))
    assert (row.level, row.text) == ("error", 'fp32: "addmm" not implemented')

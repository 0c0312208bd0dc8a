"""The log line says everything that the run's owner looks for, and never leaves a number out."""

import math
import re
from typing import Any

import pytest
import torch

import megalite.training.reporter as reporter_module
from megalite.optimizers.schedules import Progress
from megalite.training.reporter import Reporter, SpeedMeter, device_peak_tflops
from megalite.training.step import StepResult
from tests.support.tiny import tiny_config

CPU = torch.device("cpu")


class Records:
    """A sink in memory."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.closed = False

    def write(self, record: dict[str, Any]) -> None:
        self.found.append(record)

    def close(self) -> None:
        self.closed = True


class Setup:
    """A reporter whose clock is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, interval: int = 2, **settings: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(reporter_module.time, "perf_counter", lambda: self.now)
        self.lines: list[str] = []
        self.sink = Records()
        self.reporter = Reporter(
            log=self.lines.append,
            sinks=[self.sink],
            meter=SpeedMeter(tiny_config(1, **settings), world_size=2, device=CPU),
            log_interval=interval,
            total_steps=20,
            device=CPU,
        )

    def step(self, number: int, seconds: float = 0.5, waited: float = 0.0, **changes: Any) -> None:
        self.now += seconds
        values = {"loss": 2.0, "grad_norm": 1.5, "lr": 3e-4, "loss_scale": 1.0, "skipped": False}
        values |= {"auxiliary": {}, "phase": "gradients", "wire_bytes": 96.0, **changes}
        after = Progress(number, 8 * number)
        self.reporter.step(StepResult(**values), after=after, batch_size=8, data_wait_seconds=waited)


def test_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, peak_tflops=0.001)
    setup.step(1, loss=3.0)
    assert setup.lines == []
    setup.step(2, 1.5, loss=2.0, loss_scale=65536.0, skipped=True)
    (line,) = setup.lines
    for part in (
        *("step  2/20", "samples 16", "loss 2.5000", "lr 3.000e-04", "grad norm 1.500", "loss scale 65536"),
        *("batch 8", "1000 ms/step", "128 tokens/s", "64 per rank", "skipped 1", "ETA 0:00:18"),
    ):
        assert part in line.split(" | "), (part, line)
    # 64 tokens/s and rank · 337,920 FLOPs a token
    tflops = 64 * (6 * (4 * 12 * 32 * 32 + 96 * 32) + 12 * 4 * 32 * 16) / 1e12
    assert f"{tflops:.4g} TFLOP/s per rank" in line
    assert f"MFU (PaLM) {100 * tflops / 0.001:.1f} %" in line
    assert re.search(r"\| mem \d+ MiB \|", line)


def test_auxiliary_losses_are_reported_beside_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    for number in (1, 2):
        setup.step(number, auxiliary={"load_balancing_loss": 0.0125, "z_loss": 0.5})
    (line,) = setup.lines
    assert "loss 2.0000 | load balancing loss 0.0125 | z loss 0.5000 | lr" in line
    assert setup.sink.found[0]["load_balancing_loss"] == 0.0125


def test_the_interval_starts_anew_after_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    for number in range(1, 5):
        setup.step(number, seconds=number, loss=float(number), skipped=number == 1)
    first, second = setup.lines
    assert "loss 1.5000" in first and "1500 ms/step" in first and "skipped 1" in first
    assert "loss 3.5000" in second and "3500 ms/step" in second and "skipped" not in second


def test_the_last_step_is_reported_whatever_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, interval=7)
    for number in range(1, 21):
        setup.step(number)
    assert [re.findall(r"step\s+(\d+)/20", line)[0] for line in setup.lines] == ["7", "14", "20"]
    assert setup.lines[-1].endswith("ETA 0:00:00")


def test_waiting_for_data_is_noted_and_said_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    for number, waited in enumerate((0.001, 0.008, 0.0005, 0.0095, 0.0, 0.01), start=1):
        setup.step(number, waited=waited)
    assert [re.findall(r"data wait (\S+) ms", line) for line in setup.lines] == [[], ["5.0"], ["5.0"]]
    assert [record["data_wait_ms"] for record in setup.sink.found[:2]] == [1.0, 8.0]


def test_nan_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    setup.step(1, loss=math.nan, grad_norm=math.nan)
    setup.step(2, grad_norm=math.inf)
    assert "loss nan" in setup.lines[0]
    assert "grad norm inf" in setup.lines[0]
    assert math.isnan(setup.sink.found[0]["loss"])


def test_an_unknown_peak_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, interval=1)
    setup.step(1)
    assert "MFU (PaLM) unknown peak" in setup.lines[0]
    assert setup.sink.found[0]["mfu"] is None


def test_every_step_goes_to_the_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, interval=10)
    setup.step(1, 0.25, loss=1.25)
    setup.step(2)
    assert [record["step"] for record in setup.sink.found] == [1, 2]
    first = setup.sink.found[0]
    assert (first["kind"], first["loss"], first["ms_per_step"]) == ("train", 1.25, 250.0)
    assert first["tokens_per_second"] == 8 * 16 / 0.25
    assert first["memory_bytes"] > 1 << 20
    assert (first["dp_phase"], first["dp_wire_bytes"]) == ("gradients", 96.0)
    setup.reporter.close()
    assert setup.sink.closed


def test_evaluation_is_said_and_takes_no_step_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, interval=1)
    setup.step(1)
    setup.now += 50.0
    setup.reporter.evaluation(math.log(8.0), at=Progress(1, 8))
    setup.step(2, 0.5)
    assert "step  1/20 | validation loss 2.0794 | validation perplexity 8.00" in setup.lines
    assert "500 ms/step" in setup.lines[-1]
    assert setup.sink.found[1] == {
        "kind": "valid",
        "step": 1,
        "consumed_samples": 8,
        "valid_loss": math.log(8.0),
        "valid_perplexity": pytest.approx(8.0),
    }


def test_the_test_split_s_loss_and_one_that_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    setup.reporter.evaluation(math.log(8.0), at=Progress(20, 160), split="test")
    setup.reporter.evaluation(math.nan, at=Progress(4, 32))
    assert setup.lines[0] == "step 20/20 | test loss 2.0794 | test perplexity 8.00"
    assert "validation loss nan | validation perplexity nan" in setup.lines[1]
    record = setup.sink.found[0]
    assert (record["kind"], record["test_loss"]) == ("test", math.log(8.0))
    assert record["test_perplexity"] == pytest.approx(8.0)


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

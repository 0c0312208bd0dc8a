"""The log line has all important numbers, and never omits one."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite.training.reporter as reporter_module
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.training.records import JsonLines
from megalite.training.reporter import LossSpikes, Reporter, SpeedMeter, device_peak_tflops
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
    """A reporter with a clock that the test advances."""

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


def test_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, peak_tflops=0.001)
    setup.step(1, loss=3.0)
    assert setup.lines == []
    setup.step(2, 1.5, loss=2.0)
    # 64 tokens/s and rank · 337,920 FLOPs per token
    tflops = 64 * (6 * (4 * 12 * 32 * 32 + 96 * 32) + 12 * 4 * 32 * 16) / 1e12
    assert setup.lines == [
        "step  2/20    256 tok  loss 2.5000  lr 3.00e-4  grad norm 1.50      64 tok/s/rank  "
        f"MFU {100 * tflops / 0.001:.1f}%  ETA 18s"
    ]
    first, second = setup.sink.found
    assert (first["kind"], first["step"], first["loss"], first["ms_per_step"]) == ("train", 1, 3.0, 500.0)
    assert (first["tokens_per_second"], first["dp_phase"], first["dp_wire_bytes"]) == (256.0, "gradients", 96.0)
    assert first["memory_bytes"] > 1 << 20 and second["tflops_per_rank"] == pytest.approx(tflops / 1.5)
    for number in range(3, 21):  # another interval begins, and the last step ends one
        setup.step(number, loss=5.0)
    assert (
        setup.lines[-1].startswith("step 20/20")
        and "loss 5.0000" in setup.lines[-1]
        and setup.lines[-1].endswith("ETA 0s")
    )
    setup.reporter.close()
    assert setup.sink.closed


def test_recompute_is_counted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, interval=1, peak_tflops=0.001, recompute_granularity="full")
    setup.step(1)
    found = setup.sink.found[0]
    layers = 4 * (2 * 12 * 32 * 32 + 4 * 32 * 16)  # one more forward of the layers
    again = 1 + layers / (3 * (layers + 2 * 96 * 32))
    assert found["hardware_tflops_per_rank"] == pytest.approx(again * found["tflops_per_rank"])
    assert found["hfu"] == pytest.approx(again * found["mfu"])
    assert f"with recompute (HFU {100 * found['hfu']:.1f}%)" in setup.lines[1]


def test_second_line_reports_unusual_values(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    for number in range(1, 9):
        scale = 65536.0 if number < 4 else 32768.0
        setup.step(number, loss_scale=scale, skipped=number == 3, waited=0.1 if number > 6 else 0.0)
    assert [line for line in setup.lines if line.startswith("  ")] == [
        "  skipped 1 of 2 steps  loss scale 65536 -> 32768",
        "  data wait 100.0 ms/step",
    ]
    setup.step(9)
    setup.now += 0.5
    result = StepResult(
        loss=2.0, grad_norm=1.5, lr=3e-4, loss_scale=32768.0, skipped=False, auxiliary={}, phase="", wire_bytes=0.0
    )
    setup.reporter.step(result, after=Progress(10, 88), batch_size=16, params_norm=lambda: 12.5)
    assert setup.lines[-1] == "  params norm 12.500  batch 8 -> 16"


def test_steps_without_a_token_to_learn_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when all responses are longer than a sequence."""
    setup = Setup(monkeypatch)
    for number in range(1, 5):
        setup.step(number, loss=float(number > 1))
    assert [line for line in setup.lines if line.startswith("  ")] == ["  no token to learn in 1 of 2 steps"]


def test_data_wait_is_recorded_and_logged_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    for number, waited in enumerate((0.001, 0.008, 0.0, 0.049, 0.0, 0.05), start=1):
        setup.step(number, waited=waited)
    assert [re.findall(r"data wait (\S+) ms", line) for line in setup.lines] == [[], [], [], ["25.0"]]
    assert [record["data_wait_ms"] for record in setup.sink.found[:2]] == [1.0, 8.0]


def test_log_line_with_nan_unknown_peak_and_auxiliary_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    setup.step(1, loss=math.nan, grad_norm=math.nan)
    setup.step(2, grad_norm=math.inf, auxiliary={"load_balancing_loss": 0.0125, "z_loss": 0.5})
    assert "loss nan" in setup.lines[0] and setup.lines[1] == "  load balancing loss 0.0125  z loss 0.5000"
    assert "MFU" not in setup.lines[0] and setup.sink.found[0]["mfu"] is None
    assert setup.sink.found[1]["z_loss"] == 0.5
    assert "grad norm inf" in setup.lines[0]
    assert math.isnan(setup.sink.found[0]["loss"])


def test_evaluation_is_logged_and_excluded_from_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, interval=1)
    setup.step(1)
    setup.now += 50.0
    setup.reporter.evaluation(math.log(8.0), at=Progress(1, 8))
    setup.step(2, 0.5)
    assert "step  1/20  validation loss 2.0794  perplexity 8.00" in setup.lines
    assert setup.lines[-1].endswith("ETA 9s"), "18 steps of half a second"
    losses = {"valid_loss": math.log(8.0), "valid_perplexity": pytest.approx(8.0)}
    assert setup.sink.found[1] == {"kind": "valid", "step": 1, "consumed_samples": 8, **losses}
    setup.reporter.evaluation(math.nan, at=Progress(20, 160), split="test")
    assert setup.lines[-1] == "step 20/20  test loss nan  perplexity nan"
    assert setup.sink.found[-1]["kind"] == "test" and math.isnan(setup.sink.found[-1]["test_loss"])


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312.0),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_peaks_of_known_gpus(monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda", 0)
    assert device_peak_tflops(tiny_config(1, precision=precision), device) == peak
    assert device_peak_tflops(tiny_config(1, precision=precision, peak_tflops=77.0), device) == 77.0


def losses(count: int, *, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [3.0 + 4.0 * math.exp(-step / 80) + draw.gauss(0.0, 0.03) for step in range(count)]


JUMPS = losses(400)
JUMPS[200:205], JUMPS[300] = [8.0] * 5, 9.0
LEVEL = [loss + (2.0 if step >= 200 else 0.0) for step, loss in enumerate(losses(400))]
LEVEL[390] = 12.0


@pytest.mark.parametrize(
    ("values", "window", "threshold", "expected"),
    [
        *((losses(600, seed=seed), 100, 10.0, []) for seed in range(5)),  # falling with noise
        (JUMPS, 100, 10.0, [200, 300]),  # one jump
        (JUMPS, 100, 0.0, []),
        (LEVEL, 50, 10.0, [200, 390]),  # a new level becomes normal
        ([2.0] * 100 + [2.01] + [2.0] * 20, 100, 10.0, []),  # no alarm for a tiny change
        ([2.0] * 100 + [2.2], 100, 10.0, [100]),
    ],
)
def test_loss_spikes_are_detected(values: list[float], window: int, threshold: float, expected: list[int]) -> None:
    spikes = LossSpikes(window=window, threshold=threshold)
    assert [step for step, loss in enumerate(values) if spikes.score(loss)[1]] == expected


def test_spike_detection_ignores_non_finite_losses() -> None:
    spikes = LossSpikes(window=20, threshold=5.0)
    for loss in losses(40):
        spikes.score(loss)
    score, _ = spikes.score(3.7)
    again = LossSpikes(window=20, threshold=5.0)
    for loss in losses(40):
        again.score(loss)
    for loss in (math.nan, math.inf, -math.inf):
        assert again.score(loss) == (None, False)
    assert again.score(3.7)[0] == score


def test_spike_detection_continues_after_resume(tmp_path: Path) -> None:
    config = replace(RunConfig(), loss_spike_window=30, run_dir=str(tmp_path))
    values = losses(200)
    values[150] = 9.0
    whole, scores = LossSpikes.resumed(config), []
    for loss in values:
        scores.append(whole.score(loss))
    sink = JsonLines(tmp_path / "metrics.jsonl", step=0)
    for step, loss in enumerate(values[:151], start=1):
        sink.write({"kind": "train", "step": step, "loss": loss})
    resumed = LossSpikes.resumed(config)
    assert [resumed.score(loss) for loss in values[151:]] == scores[151:]
    assert scores[150][1]

"""What a run reports: one line per log interval, every step to the sinks; loss spikes and throughput."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from megalite.config.run import RunConfig
from megalite.models.shapes import flops_per_token
from megalite.optimizers.schedules import Progress
from megalite.training.instruments import Instruments
from megalite.training.memory import peak_memory_bytes
from megalite.training.sinks import MetricSink, last_records
from megalite.training.step import StepResult

_LEAST = 16
"""Losses that say something of how they scatter."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_FLOOR = 0.002
"""Share of the median loss that counts as scatter at least: else a loss that hardly moves would alarm at a breath."""
_WAIT_SHARE = 0.01
"""Share of the time from which on waiting for data is worth a word in the line."""


class LossSpikes:
    """Scores each loss by those of the steps before it: z = (loss - median) / (1.4826 · median absolute deviation).

    Neither moves by single outliers, nor does a loss that falls slowly, as they do, score high. The alarm is raised once:
    it is armed again when a score is below half the threshold. A loss that stays high is the usual one after half a window.
    With threshold 0 no loss is a spike.
    """

    def __init__(self, *, window: int, threshold: float) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._least = min(window, _LEAST)
        self._threshold = threshold
        self._armed = True

    @classmethod
    def resumed(cls, config: RunConfig) -> "LossSpikes":
        """That of a run that may continue an earlier start, with losses in its metrics.jsonl. Called once that is open
        for writing: steps that will be made again are no longer in it."""
        logging = config.logging
        made = cls(window=logging.loss_spike_window, threshold=logging.loss_spike_threshold)
        before = last_records(logging.run_dir, "train")[-2 * logging.loss_spike_window :]
        for record in before:
            if "loss" in record:
                made.score(float(record["loss"]))
        return made

    def score(self, loss: float) -> tuple[float | None, bool]:
        """The loss's score (None while too few are known) and whether the alarm is raised. NaN, which `on_non_finite`
        is about, is passed over."""
        if self._threshold <= 0.0 or not math.isfinite(loss):
            return None, False
        score = None
        if len(self._losses) >= self._least:
            median = statistics.median(self._losses)
            scatter = _NORMAL * statistics.median(abs(other - median) for other in self._losses)
            score = (loss - median) / max(scatter, _FLOOR * abs(median), 1e-12)
        self._losses.append(loss)
        if score is None:
            return None, False
        alarm = self._armed and score >= self._threshold
        self._armed = (self._armed and not alarm) or score < self._threshold / 2
        return score, alarm

    def words(self, loss: float, score: float) -> str:
        """For the log."""
        return (
            f"loss {loss:.4f} is a spike: {score:.1f} times the usual scatter above the median of the last "
            f"{len(self._losses)} steps (loss_spike_threshold {self._threshold:g}); if it stays, continue from a checkpoint "
            "before it with a lower --lr or other data"
        )


PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "A100": 312.0, "V100": 125.0}
"""Dense tensor-core peaks in bf16 (V100: fp16) from the vendor's data sheets; the first name that occurs counts."""


def device_peak_tflops(config: RunConfig, device: torch.device) -> float | None:
    """Peak TFLOP/s of one device: as given, or known for data-centre GPUs in half precision, else None."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops
    if device.type != "cuda" or config.training.precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


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
    def __init__(self, config: RunConfig, *, world_size: int, device: torch.device) -> None:
        self._seq_length = config.training.seq_length
        self._flops = flops_per_token(config.model, self._seq_length, "palm")
        self._world_size = world_size
        self._peak = device_peak_tflops(config, device)

    def speed(self, *, seconds: float, steps: int, samples: int) -> Speed:
        tokens = samples * self._seq_length / seconds
        tflops = tokens * self._flops / self._world_size / 1e12
        mfu = None if self._peak is None else tflops / self._peak
        return Speed(1e3 * seconds / steps, tokens, tokens / self._world_size, tflops, mfu)


class Reporter:
    """Keeps the sums of the current log interval. `instruments` are notified of each step, and asked about each interval."""

    def __init__(
        self,
        *,
        log: Callable[[str], None],
        sinks: list[MetricSink],
        meter: SpeedMeter,
        log_interval: int,
        total_steps: int,
        device: torch.device,
        spikes: LossSpikes | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        self._log, self._sinks, self._meter, self._device = log, sinks, meter, device
        self._spikes, self._instruments = spikes, instruments
        self._interval, self._total = log_interval, total_steps
        self._begin_interval()
        self.restart_clock()

    def _begin_interval(self) -> None:
        self._losses: list[float] = []
        self._skipped = self._samples = 0
        self._seconds = self._waited = 0.0

    def restart_clock(self) -> None:
        """What lay between this and the last step is no step's time."""
        self._last = time.perf_counter()

    def step(
        self,
        result: StepResult,
        *,
        after: Progress,
        batch_size: int,
        bubble_fraction: float | None = None,
        data_wait_seconds: float = 0.0,
        params_norm: Callable[[], float] | None = None,
    ) -> None:
        """Take note of a step; every `log_interval` steps, and after the last, print a line and what the instruments say.

        Collectives: those of `Instruments.interval` and of `params_norm`, when a line is due.
        """
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._losses.append(result.loss)
        self._skipped += result.skipped
        self._samples += batch_size
        self._seconds += seconds
        self._waited += data_wait_seconds
        record = {
            "kind": "train",
            "step": after.step,
            "consumed_samples": after.samples,
            "loss": result.loss,
            **result.auxiliary,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "batch_size": batch_size,
            "memory_bytes": peak_memory_bytes(self._device),
            "data_wait_ms": 1e3 * data_wait_seconds,
            "dp_phase": result.phase,
            "dp_wire_bytes": result.wire_bytes,
            **asdict(self._meter.speed(seconds=seconds, steps=1, samples=batch_size)),
        }
        further = {"decoupled_lr": result.decoupled_lr, "num_zeros": result.num_zeros}
        record |= {name: value for name, value in further.items() if value is not None}
        if bubble_fraction is not None:
            record["bubble_fraction"] = bubble_fraction
        if result.fault is not None:
            self._log(result.fault)
        if self._spikes is not None:
            score, alarm = self._spikes.score(result.loss)
            if score is not None:
                record["loss_z"] = score
                if alarm:
                    self._log(f"warning: step {after.step}: {self._spikes.words(result.loss, score)}")
        due = after.step % self._interval == 0 or after.step == self._total
        lines: list[str] = []
        if self._instruments is not None:
            self._instruments.made(after.step, seconds=seconds, waited=data_wait_seconds)
            if due:
                fields, lines = self._instruments.interval(steps=len(self._losses), seconds=self._seconds)
                record |= fields
        if due and params_norm is not None:
            record["params_norm"] = params_norm()
        self._write(record)
        if due:
            for line in (self._line(result, after, batch_size, record.get("params_norm")), *lines):
                self._log(line)
            self._begin_interval()

    def _write(self, record: dict[str, object]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def _line(self, result: StepResult, after: Progress, batch_size: int, params_norm: object) -> str:
        steps = len(self._losses)
        speed = self._meter.speed(seconds=self._seconds, steps=steps, samples=self._samples)
        minutes, seconds = divmod(round((self._total - after.step) * speed.ms_per_step / 1e3), 60)
        parts = [
            self._at(after),
            f"samples {after.samples}",
            f"loss {math.fsum(self._losses) / steps:.4f}",
            *(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.auxiliary.items()),
            f"lr {result.lr:.3e}",
            *([] if result.decoupled_lr is None else [f"decoupled lr {result.decoupled_lr:.3e}"]),
            f"grad norm {result.grad_norm:.3f}",
            *([] if result.num_zeros is None else [f"num zeros {result.num_zeros}"]),
            *([f"params norm {params_norm:.3f}"] if isinstance(params_norm, float) else []),
            f"loss scale {result.loss_scale:g}",
            f"batch {batch_size}",
            f"{speed.ms_per_step:.0f} ms/step",
            f"{speed.tokens_per_second:.0f} tokens/s",
            f"{speed.tokens_per_second_per_rank:.0f} per rank",
            f"{speed.tflops_per_rank:.4g} TFLOP/s per rank",
            "MFU (PaLM) unknown peak" if speed.mfu is None else f"MFU (PaLM) {100.0 * speed.mfu:.1f} %",
            f"mem {peak_memory_bytes(self._device) / 2**20:.0f} MiB",
            f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02}",
        ]
        if self._waited >= _WAIT_SHARE * self._seconds:
            parts.append(f"data wait {1e3 * self._waited / steps:.1f} ms")
        if self._skipped:
            parts.append(f"skipped {self._skipped}")
        return " | ".join(parts)

    def _at(self, progress: Progress) -> str:
        return f"step {progress.step:>{len(str(self._total))}}/{self._total}"

    def evaluation(self, loss: float, *, at: Progress, split: str = "valid") -> None:
        """Take note of a loss on the validation or the test split."""
        name = "validation" if split == "valid" else split
        perplexity = math.exp(min(loss, 20.0)) if math.isfinite(loss) else loss
        self._log(f"{self._at(at)} | {name} loss {loss:.4f} | {name} perplexity {perplexity:.2f}")
        record = {"kind": split, "step": at.step, "consumed_samples": at.samples}
        self._write({**record, f"{split}_loss": loss, f"{split}_perplexity": perplexity})
        self.restart_clock()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

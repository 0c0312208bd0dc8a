"""What a run tells: one line a log interval, and every step to the sinks."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from megalite.optimizers.schedules import Progress
from megalite.training.device_memory import peak_memory_bytes
from megalite.training.instruments import Instruments
from megalite.training.loss_spikes import LossSpikes
from megalite.training.sinks import MetricSink
from megalite.training.step import StepResult
from megalite.training.throughput import Speed, SpeedMeter

_WAIT_SHARE = 0.01
"""Share of the time from which on waiting for data is worth a word in the line."""


class Reporter:
    """Keeps the sums of the current log interval.

    Args:
        log: prints a line.
        total_steps: length of the run, for "step 10/200" and the time left.
        spikes: knows the losses of the steps before.
        instruments: what is asked about each interval, and told of each step.
    """

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
        self._log = log
        self._spikes = spikes
        self._instruments = instruments
        self._sinks = sinks
        self._meter = meter
        self._interval = log_interval
        self._total = total_steps
        self._device = device
        self._losses: list[float] = []
        self._skipped = 0
        self._samples = 0
        self._seconds = 0.0
        self._waited = 0.0
        self._last = time.perf_counter()

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
    ) -> None:
        """Take note of a step; every `log_interval` steps, and after the last, print a line and what the instruments say.

        Collectives: those of `Instruments.interval`, when a line is due.

        Args:
            bubble_fraction: measured, where the step was traced.
            data_wait_seconds: part of the step in which the slowest rank waited for its batch.
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
        if bubble_fraction is not None:
            record["bubble_fraction"] = bubble_fraction
        if result.fault is not None:
            self._log(result.fault)
        if self._spikes is not None:
            score, alarm = self._spikes.score(result.loss)
            if score is not None:
                record["loss_z"] = score
                if alarm:
                    said = self._spikes.words(result.loss, score)
                    self._log(f"warning: step {after.step}: {said}")
        due = after.step % self._interval == 0 or after.step == self._total
        lines: list[str] = []
        if self._instruments is not None:
            self._instruments.made(after.step, seconds=seconds, waited=data_wait_seconds)
            if due:
                report = self._instruments.interval(steps=len(self._losses), seconds=self._seconds)
                record |= report.fields
                lines = report.lines
        for sink in self._sinks:
            sink.write(record)
        if due:
            self._print(result, after, batch_size)
            for line in lines:
                self._log(line)

    def _print(self, result: StepResult, after: Progress, batch_size: int) -> None:
        steps = len(self._losses)
        speed = self._meter.speed(seconds=self._seconds, steps=steps, samples=self._samples)
        parts = [
            f"step {after.step:>{len(str(self._total))}}/{self._total}",
            f"samples {after.samples}",
            f"loss {math.fsum(self._losses) / steps:.4f}",
            *(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.auxiliary.items()),
            f"lr {result.lr:.3e}",
            f"grad norm {result.grad_norm:.3f}",
            f"loss scale {result.loss_scale:g}",
            f"batch {batch_size}",
            *_speed_parts(speed),
            f"mem {peak_memory_bytes(self._device) / 2**20:.0f} MiB",
            f"ETA {_clock((self._total - after.step) * speed.ms_per_step / 1e3)}",
        ]
        if self._waited >= _WAIT_SHARE * self._seconds:
            parts.append(f"data wait {1e3 * self._waited / steps:.1f} ms")
        if self._skipped:
            parts.append(f"skipped {self._skipped}")
        self._log(" | ".join(parts))
        self._losses, self._skipped, self._samples, self._seconds, self._waited = [], 0, 0, 0.0, 0.0

    def evaluation(self, loss: float, *, at: Progress, split: str = "valid") -> None:
        """Take note of a loss on the validation or the test split."""
        name = {"valid": "validation", "test": "test"}[split]
        perplexity = math.exp(min(loss, 20.0)) if math.isfinite(loss) else loss
        self._log(
            f"step {at.step:>{len(str(self._total))}}/{self._total} | "
            f"{name} loss {loss:.4f} | {name} perplexity {perplexity:.2f}"
        )
        record = {"kind": split, "step": at.step, "consumed_samples": at.samples}
        for sink in self._sinks:
            sink.write({**record, f"{split}_loss": loss, f"{split}_perplexity": perplexity})
        self.restart_clock()

    def close(self) -> None:
        """Finish the sinks."""
        for sink in self._sinks:
            sink.close()


def _speed_parts(speed: Speed) -> list[str]:
    mfu = "MFU (PaLM) unknown peak" if speed.mfu is None else f"MFU (PaLM) {100.0 * speed.mfu:.1f} %"
    return [
        f"{speed.ms_per_step:.0f} ms/step",
        f"{speed.tokens_per_second:.0f} tokens/s",
        f"{speed.tokens_per_second_per_rank:.0f} a rank",
        f"{speed.tflops_per_rank:.4g} TFLOP/s a rank",
        mfu,
    ]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"

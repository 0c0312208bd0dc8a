"""Reports a run's progress: log lines, records for the sinks, loss spikes and throughput."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import torch

from megalite.config.batch import sequence_length, tokens_after
from megalite.config.run import RunConfig
from megalite.models.shapes import flops_per_token
from megalite.optimizers.schedules import Progress
from megalite.partition.pipeline import flops_per_token_with_recompute
from megalite.training.instruments import Instruments
from megalite.training.memory import peak_memory_bytes
from megalite.training.records import MetricSink, last_records
from megalite.training.step import StepResult

_LEAST = 16  # fewest losses for an estimate of their scatter
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_FLOOR = 0.002
"""Least scatter as a share of the median loss; without it a nearly constant loss would raise alarms."""
_WAIT_SHARE = 0.05  # waiting for data is reported from this share of the time on


class LossSpikes:
    """Scores each loss against the previous ones: z = (loss - median) / (1.4826 · median absolute deviation).

    Single outliers move neither statistic, and a slowly falling loss scores low. An alarm is raised once, and armed
    again when a score is below half the threshold. A loss that stays high counts as usual after half a window. With
    threshold 0 no loss is a spike."""

    def __init__(self, *, window: int, threshold: float) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._least = min(window, _LEAST)
        self._threshold = threshold
        self._armed = True

    @classmethod
    def resumed(cls, config: RunConfig) -> "LossSpikes":
        """Create one with the last losses in a run's metrics.jsonl. Call it once that file is open for writing, because
        then the steps to repeat are no longer in it."""
        logging = config.logging
        spikes = cls(window=logging.loss_spike_window, threshold=logging.loss_spike_threshold)
        before = last_records(logging.run_dir, "train")[-2 * logging.loss_spike_window :]
        for record in before:
            if "loss" in record:
                spikes.score(float(record["loss"]))
        return spikes

    def score(self, loss: float) -> tuple[float | None, bool]:
        """Return the score (None after too few losses) and whether to raise an alarm. Ignores non-finite losses."""
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
        """Return the warning for the log."""
        return (
            f"loss {loss:.4f} is a spike: {score:.1f} times the usual scatter above the median of the last "
            f"{len(self._losses)} steps (loss_spike_threshold {self._threshold:g}); if it stays, continue from a checkpoint "
            "before it with a lower --lr or other data"
        )


PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "A100": 312.0, "V100": 125.0}
"""Dense tensor-core peaks in bf16 (V100: fp16) from the vendor's data sheets, by the first matching name."""


def device_peak_tflops(config: RunConfig, device: torch.device) -> float | None:
    """Return the peak TFLOP/s of one device: `peak_tflops`, else the known peak in half precision, else None."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops
    if device.type != "cuda" or config.training.precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


@dataclass(frozen=True)
class Speed:
    """Throughput of some steps."""

    ms_per_step: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    tflops_per_rank: float  # model FLOPs (PaLM convention: full attention, no recompute) per second and rank, in 10^12
    mfu: float | None  # tflops_per_rank over the device's peak; None if the peak is unknown
    hardware_tflops_per_rank: float  # including the recomputed forwards
    hfu: float | None


class SpeedMeter:
    def __init__(self, config: RunConfig, *, world_size: int, device: torch.device) -> None:
        self._config = config
        self._world_size = world_size
        self._peak = device_peak_tflops(config, device)
        self._flops_per_token = cache(lambda length: flops_per_token(config.model, length, "palm"))  # of every layer
        self._recompute = 1.0
        """Ratio of FLOPs with recompute to model FLOPs."""
        if config.training.recompute_granularity != "none":
            model = flops_per_token(config.model, config.training.seq_length)
            self._recompute = flops_per_token_with_recompute(config) / model

    def tokens_after(self, after: Progress) -> int:
        return tokens_after(self._config, after.step, after.samples)

    def work(self, after: Progress, batch_size: int) -> tuple[int, float]:
        """Return the tokens and model FLOPs of the step that ends at `after`."""
        length = sequence_length(self._config, after.step - 1)
        tokens = batch_size * length
        return tokens, tokens * self._flops_per_token(length)

    def speed(self, *, seconds: float, steps: int, tokens: float, flops: float) -> Speed:
        tokens = tokens / seconds
        tflops = flops / seconds / self._world_size / 1e12
        mfu = None if self._peak is None else tflops / self._peak
        again = self._recompute
        with_recompute = again * tflops, None if mfu is None else again * mfu
        return Speed(1e3 * seconds / steps, tokens, tokens / self._world_size, tflops, mfu, *with_recompute)


def short(value: float) -> str:
    """Format a number in at most six columns: `0.345`, `12.3`, `1.00T`, `1.2e-4`, `nan`, `inf`."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale and math.isfinite(value):
            return f"{value / scale:#.3g}".rstrip(".") + unit
    if float(value).is_integer():
        return f"{value:.0f}"
    return _power(value, 1) if 0.0 < value < 0.1 else f"{value:#.3g}".rstrip(".")


def _power(value: float, digits: int) -> str:
    return f"{value:.{digits}e}".replace("e-0", "e-").replace("e+0", "e+")


def time_left(seconds: float) -> str:
    """Format a duration: `42s`, `9m59s`, `23h` or `1d3h`."""
    rest = round(seconds)
    for unit, scale, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if rest >= scale:
            count = rest // scale
            return f"{count}{unit}" if count >= 10 else f"{count}{unit}{rest % scale // part}{lower}"
    return f"{rest}s"


class Reporter:
    """Sums up the steps of the current log interval, and reports them. `instruments` add their fields and lines."""

    def __init__(
        self,
        *,
        log: Callable[[str], None],
        sinks: list[MetricSink],
        meter: SpeedMeter,
        log_interval: int,
        total_steps: int,
        skips: Sequence[int] = (),
        device: torch.device,
        is_cross_entropy: bool = True,
        spikes: LossSpikes | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        self._log, self._sinks, self._meter, self._device = log, sinks, meter, device
        self._spikes, self._instruments, self._is_cross_entropy = spikes, instruments, is_cross_entropy
        self._interval, self._total, self._end = log_interval, total_steps, total_steps
        while self._end in skips:  # the last step that is reported
            self._end -= 1
        self._step: int | None = None  # of the last report; iterations_to_skip leaves out some
        self._known: dict[str, float] = {}
        self._begin_interval()
        self.restart_clock()

    def _begin_interval(self) -> None:
        self._losses: list[float] = []
        self._skipped = self._tokens = 0
        self._flops = 0.0
        self._seconds = self._waited = 0.0

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the next one."""
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
        """Record a step; every `log_interval` steps, and after the last, log a line and those of the instruments.

        Collectives: those of `Instruments.interval` and of `params_norm`, when a line is due."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._losses.append(result.loss)
        self._skipped += result.skipped
        tokens, flops = self._meter.work(after, batch_size)
        self._tokens += tokens
        self._flops += flops
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
            **asdict(self._meter.speed(seconds=seconds, steps=1, tokens=tokens, flops=flops)),
        }
        optional = ("decoupled_lr", "num_zeros", "gradient_noise_scale")
        record |= {name: value for name in optional if (value := getattr(result, name)) is not None}
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
        before, self._step = after.step - 1 if self._step is None else self._step, after.step
        due = after.step // self._interval > before // self._interval or after.step == self._end
        lines: list[str] = []
        if self._instruments is not None:
            self._instruments.count_step(after.step, seconds=seconds, waited=data_wait_seconds)
            if due:
                fields, lines = self._instruments.interval(steps=len(self._losses), seconds=self._seconds)
                record |= fields
        if due and params_norm is not None:
            record["params_norm"] = params_norm()
        self._write(record)
        if due:
            further = self._further(result, batch_size, record.get("params_norm"))
            for line in (self._line(result, after), *further, *lines):
                self._log(line)
            self._begin_interval()

    def _write(self, record: dict[str, object]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def _line(self, result: StepResult, after: Progress) -> str:
        """Return the log line: at most 120 columns together with the time of day, even in long runs."""
        steps = len(self._losses)
        speed = self._meter.speed(seconds=self._seconds, steps=steps, tokens=self._tokens, flops=self._flops)
        loss = math.fsum(self._losses) / steps
        parts = [
            self._at(after),
            f"{short(self._meter.tokens_after(after)):>5} tok",
            f"loss {loss:.{3 if loss >= 10.0 else 4}f}",
            f"lr {_power(result.lr, 2)}",
            f"grad norm {short(result.grad_norm):<5}",
            f"{short(speed.tokens_per_second_per_rank):>5} tok/s/{'GPU' if self._device.type == 'cuda' else 'rank'}",
            *([] if speed.mfu is None else [f"MFU {100.0 * speed.mfu:.1f}%"]),
            f"ETA {time_left((self._total - after.step) * speed.ms_per_step / 1e3)}",
        ]
        return "  ".join(parts)

    def _further(self, result: StepResult, batch_size: int, params_norm: object) -> list[str]:
        """Return a second line, if needed: auxiliary losses, requested values, and anything unusual."""
        steps = len(self._losses)
        parts = [
            f"{name.replace('_', ' ')} {value:.{'4f' if value >= 1e-3 else '2e'}}"
            for name, value in result.auxiliary.items()
        ]
        speed = self._meter.speed(seconds=self._seconds, steps=steps, tokens=self._tokens, flops=self._flops)
        if speed.hardware_tflops_per_rank > speed.tflops_per_rank:
            share = "" if speed.hfu is None else f" (HFU {100.0 * speed.hfu:.1f}%)"
            again = short(speed.hardware_tflops_per_rank)
            parts.append(f"{short(speed.tflops_per_rank)} TFLOP/s, {again} with recompute{share}")
        if result.num_zeros is not None:
            parts.append(f"num zeros {result.num_zeros}")
        if result.gradient_noise_scale is not None:
            parts.append(f"noise scale {short(result.gradient_noise_scale)}")
        if isinstance(params_norm, float):
            parts.append(f"params norm {params_norm:.3f}")
        if self._is_cross_entropy and (empty := self._losses.count(0.0)):
            parts.append(f"no token to learn in {empty} of {steps} steps")
        if self._skipped:
            parts.append(f"skipped {self._skipped} of {steps} steps")
        if self._waited >= _WAIT_SHARE * self._seconds:
            parts.append(f"data wait {1e3 * self._waited / steps:.1f} ms/step")
        now = {"loss scale": result.loss_scale, "batch": batch_size}
        for name, value in now.items():
            if (old := self._known.get(name, value)) != value:
                parts.append(f"{name} {old:g} -> {value:g}")
        self._known = now
        return [f"  {'  '.join(parts)}"] if parts else []

    def _at(self, progress: Progress) -> str:
        total = str(self._total) if self._total < 1_000_000 else short(self._total)
        return f"step {progress.step:>{len(str(self._total))}}/{total}"

    def evaluation(self, loss: float, *, at: Progress, split: str = "valid") -> None:
        """Report a loss on the validation or test split."""
        name = "validation" if split == "valid" else split
        line = f"{self._at(at)}  {name} loss {loss:.4f}"
        record = {"kind": split, "step": at.step, "consumed_samples": at.samples, f"{split}_loss": loss}
        if self._is_cross_entropy:
            record[f"{split}_perplexity"] = perplexity = math.exp(min(loss, 20.0)) if math.isfinite(loss) else loss
            line += f"  perplexity {perplexity:.2f}"
        self._log(line)
        self._write(record)
        self.restart_clock()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

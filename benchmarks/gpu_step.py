"""Part 4: whole training steps of megalite, through the path that pretrain_gpt.py takes; and part 5 on the same replica.

A task builds one replica and measures it with one or several microbatches a step: tokens/s, MFU in both conventions,
peak memory.
"""

import math
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from gpu_legs import Row, Task
from gpu_profile import profile_rows

from megalite.config.flags import parse_arguments
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import flops_per_token
from megalite.optimizers.schedules import Progress, Schedules
from megalite.planner.pipeline import layout_of
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed
from megalite.training.replica import Replica, build_replica
from megalite.training.setup import open_data
from megalite.training.step import Stepper, StepResult
from megalite.training.throughput import device_peak_tflops

WARM_UP = 2
SETTINGS: dict[str, list[str]] = {
    "GPT 1.3B": ["--preset", "gpt3-1.3b", "--bf16"],
    "GPT-2 124M": ["--preset", "gpt2-124m", "--bf16"],
    "GPT 6M": [
        *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "8", "--vocab-size", "8192"),
        *("--seq-length", "256", "--lr", "1e-4"),
    ],
    "GPT dry": [
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--vocab-size", "200"),
        *("--seq-length", "16", "--lr", "1e-4"),
    ],
}
"""Model -> flags."""
MICROBATCH = {"GPT 1.3B": 8, "GPT-2 124M": 32, "GPT 6M": 4, "GPT dry": 2}


def repeats(steps: int, accumulation: int) -> int:
    """Measured steps: fewer where each is many microbatches long."""
    return max(steps // accumulation, 4) if accumulation > 1 else steps


def config_of(
    model: str, *, device: str, microbatch: int, accumulation: int, extra: list[str] | None = None
) -> RunConfig:
    """Of a run on one device: no recomputation, AdamW, clipping, made-up tokens."""
    flags = [*SETTINGS[model], "--mock-data", "--train-iters", "1000", "--device", device]
    flags += ["--micro-batch-size", str(microbatch), "--global-batch-size", str(microbatch * accumulation)]
    return validate(parse_arguments([*flags, *(extra or [])]).config, 1)


def rows(task: Task) -> Iterator[Row]:
    """A row an entry of `accumulations`, then those of the profile if it is asked for."""
    launch = Launch.from_environment()
    device = launch.device(task["device"])
    config = config_of(
        task["model"],
        device=task["device"],
        microbatch=task["microbatch"],
        accumulation=max(task["accumulations"]),
        extra=task.get("flags"),
    )
    start_distributed(launch, device, backend="auto", timeout_minutes=5.0)
    try:
        run = Run(config, launch, device)
        for accumulation in task["accumulations"]:
            yield {**_common(task), **run.measure(accumulation, steps=task["steps"])}
        if task.get("profile"):
            for row in profile_rows(run.next_step(1), device, warm_up=1):
                yield {**_common(task), "accumulation": 1, **row}
    finally:
        stop_distributed()


def _common(task: Task) -> Row:
    return {
        "part": "step",
        "who": task["who"],
        "model": task["model"],
        "precision": task["precision"],
        "microbatch": task["microbatch"],
    }


class Run:
    """A replica, its data and where it stands."""

    def __init__(self, config: RunConfig, launch: Launch, device: torch.device) -> None:
        self.config, self.device = config, device
        topology = Topology.create(layout_of(config), rank=launch.rank, device=device)
        self.replica: Replica = build_replica(config, topology)
        self._stepper = Stepper(self.replica, Schedules(config))
        loader = open_data(self.replica, None).train
        assert loader is not None
        self._loader = loader
        self._at = Progress(0, 0)

    def next_step(self, accumulation: int) -> Any:
        """Makes a step each time that it is called; the tokens of the next are read meanwhile, as in training."""
        size = accumulation * self.config.training.micro_batch_size

        def step() -> StepResult:
            batch = self._loader.load(self._at.samples, size)
            after = Progress(self._at.step + 1, self._at.samples + size)
            self._loader.prefetch(after.samples, size)
            result = self._stepper.step(batch, before=self._at, batch_size=size)
            self._at = after
            return result

        return step

    def measure(self, accumulation: int, *, steps: int) -> Row:
        """Median time of a step, and what follows from it."""
        step = self.next_step(accumulation)
        losses = [step().loss for _ in range(WARM_UP)]
        reset_peak(self.device)
        seconds = []
        for _ in range(repeats(steps, accumulation)):
            seconds.append(_timed(step, losses, self.device))
        row = speed(
            seconds,
            model=self.config.model,
            seq_length=self.config.training.seq_length,
            samples=accumulation * self.config.training.micro_batch_size,
            peak_tflops=device_peak_tflops(self.config, self.device),
        )
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"losses are not finite: {losses}")
        return {
            "accumulation": accumulation,
            **row,
            "peak_gib": peak_gib(self.device),
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "kernels": sorted(
                {f"{choice.operation}={choice.backend}" for choice in self.replica.kernels.chosen}
            ),
        }


def _timed(step: Any, losses: list[float], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    losses.append(step().loss)
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Peak memory counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Allocated at most: on the device, or by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def speed(
    seconds: list[float], *, model: ModelConfig, seq_length: int, samples: int, peak_tflops: float | None
) -> Row:
    """Tokens/s and MFU of steps over `samples` sequences; FLOPs by the planner's formulas, recomputation not counted."""
    median = statistics.median(seconds)
    tokens = samples * seq_length / median
    row: Row = {
        "ms": 1e3 * median,
        "ms_min": 1e3 * min(seconds),
        "ms_max": 1e3 * max(seconds),
        "steps": len(seconds),
        "tokens_per_second": tokens,
    }
    for name, convention in (("palm", "palm"), ("causal", "megatron")):
        tflops = tokens * flops_per_token(model, seq_length, convention) / 1e12  # type: ignore[arg-type]
        row[f"tflops_{name}"] = tflops
        row[f"mfu_{name}"] = None if peak_tflops is None else tflops / peak_tflops
    return row

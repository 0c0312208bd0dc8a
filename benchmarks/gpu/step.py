"""Part 4: whole training steps of megalite, by the code of pretrain_gpt.py, and part 5 on the same replica; peers.

A task builds one replica and measures it with one or several microbatches per step: tokens/s, MFU in both conventions, peak
memory. Peers are a GPT in plain PyTorch under torch.compile and Hugging Face's GPT-2. Both have fp32 weights, bf16 autocast,
torch's fused AdamW and clipping, and the sizes and tokens of megalite's run, without recomputation."""

import dataclasses
import importlib.util
import math
import resource
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common
from benchmarks.gpu.breakdown import profile_rows
from benchmarks.gpu.legs import Row, Task
from benchmarks.peers.case import LAYOUTS, Case, adamw
from benchmarks.peers.plain_gpt import GPT, Size
from benchmarks.peers.pytorch import Loop
from benchmarks.steps.replica import Run
from megalite.config.flags import parse_arguments
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import flops_per_token
from megalite.topology.topology import Launch, start_distributed, stop_distributed
from megalite.training.reporter import device_peak_tflops

WARM_UP = 2
SETTINGS = {
    "GPT 1.3B": "--preset gpt3-1.3b --bf16",
    "GPT-2 124M": "--preset gpt2-124m --bf16",
    "GPT dry": "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 200 --seq-length 16 --lr 1e-4",
}
"""Model -> flags."""
MICROBATCH = {"GPT 1.3B": 8, "GPT-2 124M": 32, "GPT dry": 2}


def repeats(steps: int, accumulation: int) -> int:
    """Return the number of measured steps, fewer if each has many microbatches."""
    return max(steps // accumulation, 4) if accumulation > 1 else steps


def config_of(model: str, *, device: str, microbatch: int, accumulation: int, extra: list[str] | None = None) -> RunConfig:
    """Return the config of a run on one device: no recomputation, AdamW, clipping, random tokens."""
    flags = [*SETTINGS[model].split(), "--mock-data", "--train-iters", "1000", "--device", device]
    flags += ["--micro-batch-size", str(microbatch), "--global-batch-size", str(microbatch * accumulation)]
    return validate(parse_arguments([*flags, *(extra or [])]).config, 1)


def rows(task: Task) -> Iterator[Row]:
    """Yield a row per entry of `accumulations`, then those of the profile if the task has one."""
    title: Row = {"part": "step", **{key: task[key] for key in ("who", "model", "precision", "microbatch")}}
    if task.get("peer") == "huggingface" and importlib.util.find_spec("transformers") is None:
        yield {**title, "failed": "transformers is not installed"}
        return
    launch = Launch.from_environment()
    device = launch.device(task["device"])
    shape = {"microbatch": task["microbatch"], "accumulation": max(task["accumulations"])}
    config = config_of(task["model"], device=task["device"], **shape, extra=task.get("flags"))
    start_distributed(launch, device, backend="auto", timeout_minutes=5.0)
    try:
        step, facts = (_peer if "peer" in task else _megalite)(task, config, launch.rank, device)
        for accumulation in task["accumulations"]:
            measured = measure(lambda count=accumulation: step(count), config, accumulation, task["steps"], device)
            yield {**title, "accumulation": accumulation, **measured, **facts}
        if task.get("profile"):
            for row in profile_rows(lambda: step(1), device, warm_up=1):
                yield {**title, "accumulation": 1, **row}
    finally:
        stop_distributed()


Step = Callable[[int], float]  # runs a training step of this many microbatches and returns its loss


def _megalite(task: Task, config: RunConfig, rank: int, device: torch.device) -> tuple[Step, Row]:
    run = Run(config, rank=rank, device=device)

    def step(accumulation: int) -> float:
        size = accumulation * config.training.micro_batch_size
        return run.train(run.read(size), size).loss

    chosen = {f"{choice.operation}={choice.backend}" for choice in run.replica.kernels.chosen}
    return step, {"kernels": sorted(chosen)}


def measure(step: Callable[[], float], config: RunConfig, accumulation: int, steps: int, device: torch.device) -> Row:
    """Return the median time of a step and the figures derived from it."""
    cuda = device.type == "cuda"
    losses = [step() for _ in range(WARM_UP)]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)

    def timed() -> None:
        losses.append(step())
        if cuda:
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(repeats(steps, accumulation)):
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(common.seconds_of(timed))
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"losses are not finite: {losses}")
    row = speed(
        seconds,
        model=config.model,
        seq_length=config.training.seq_length,
        samples=accumulation * config.training.micro_batch_size,
        peak_tflops=device_peak_tflops(config, device),
    )
    allocated = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else 0.0
    peak = allocated or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**row, "peak_gib": peak, "first_loss": losses[0], "last_loss": losses[-1]}


def speed(seconds: list[float], *, model: ModelConfig, seq_length: int, samples: int, peak_tflops: float | None) -> Row:
    """Return tokens/s and MFU of steps of `samples` sequences; FLOPs by the planner's formulas without recomputation."""
    median = statistics.median(seconds)
    tokens = samples * seq_length / median
    row: Row = {"ms": 1e3 * median, "ms_min": 1e3 * min(seconds), "ms_max": 1e3 * max(seconds)}
    row |= {"steps": len(seconds), "tokens_per_second": tokens}
    for name, convention in (("palm", "palm"), ("causal", "megatron")):
        tflops = tokens * flops_per_token(model, seq_length, convention) / 1e12
        row[f"tflops_{name}"] = tflops
        row[f"mfu_{name}"] = None if peak_tflops is None else tflops / peak_tflops
    return row


def _peer(task: Task, config: RunConfig, rank: int, device: torch.device) -> tuple[Step, Row]:
    torch.manual_seed(1)
    with device:
        network = hugging_face(config) if task["peer"] == "huggingface" else plain(config)
    if task["compiled"] and task["peer"] == "plain":
        compile_blocks(network)
    parameters, draws = list(network.parameters()), torch.Generator().manual_seed(1)
    optimizer = adamw(parameters)

    def forward(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=task["precision"] == "bf16"):
            return network(tokens, labels)

    def step(accumulation: int) -> float:
        micro = config.training.micro_batch_size
        size = dataclasses.replace(size_of(config), micro=micro, batch=micro * accumulation)
        tokens = torch.randint(0, config.model.vocab_size or 0, (size.batch, size.seq + 1), generator=draws)
        tokens = tokens.pin_memory() if device.type == "cuda" else tokens
        loop = Loop(Case(size=size, layout=LAYOUTS["1"]), parameters, optimizer, forward)
        return loop.step(tokens.to(device, non_blocking=True))

    return step, {}


def size_of(config: RunConfig) -> Size:
    m = config.model
    sizes = {"layers": m.num_layers, "hidden": m.hidden_size, "heads": m.num_attention_heads}
    return Size(**sizes, vocab=m.padded_vocab_size, seq=config.training.seq_length, gelu="tanh")


def plain(config: RunConfig) -> GPT:
    network = GPT(size_of(config))
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return network


def compile_blocks(network: Any) -> None:
    """Compile each block: all share the code, so it takes seconds, not minutes."""
    for block in network.blocks:
        block.compile(dynamic=False, fullgraph=True)
    network.loss = torch.compile(network.loss, dynamic=False, fullgraph=True)


def hugging_face(config: RunConfig) -> Any:
    """Return their GPT-2 of the same sizes with torch's attention: tokens and labels -> mean loss."""
    from transformers import GPT2LMHeadModel

    from benchmarks.peers.huggingface import settings_of

    class Loss(GPT2LMHeadModel):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = super().forward(input_ids=tokens).logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Loss(settings_of(size_of(config), activation="gelu_pytorch_tanh")).train()

"""SC'21 (Narayanan et al. 2021): table 1, PTD-P of table 2 and four figures, by the planner.

    python -m benchmarks.planner.sc21 [--json FILE]

Predicted for nodes of 8 A100-80GB and the software of that time: fp16, dropout 0.1, full recompute. TFLOP/s per GPU use the
paper's F, which counts recompute. The constants come from other measured steps (docs/planner.md), none from the paper. The
figures' curves are predictions too: the paper has no tables of their points."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks import common
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.pipeline import flops_per_token_with_recompute
from megalite.planner.cost.step import Prediction, predict
from megalite.planner.hardware import Cluster, SoftwareStack, load_cluster, load_stack

PEAK = 312.0
"""TFLOP/s of an A100 in fp16."""


@dataclass(frozen=True)
class Published:
    """A row of a table."""

    preset: str
    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: int  # per GPU
    micro: int | None = None


TABLE_1 = (
    Published("gpt-1.7b", 1, 1, 32, 512, 137),
    Published("gpt-3.6b", 2, 1, 64, 512, 138),
    Published("gpt-7.5b", 4, 1, 128, 512, 142),
    Published("gpt-18.4b", 8, 1, 256, 1024, 135),
    Published("gpt-39.1b", 8, 2, 512, 1536, 138),
    Published("gpt-76.1b", 8, 4, 1024, 1792, 140),
    Published("gpt-145.6b", 8, 8, 1536, 2304, 148),
    Published("gpt-310.1b", 8, 16, 1920, 2160, 155),
    Published("gpt-529.6b", 8, 35, 2520, 2520, 163),
    Published("gpt-1t", 8, 64, 3072, 3072, 163),
)
TABLE_2 = (
    *(Published("gpt3-175b", 8, 12, gpus, 1536, found, 1) for gpus, found in ((384, 153), (768, 149), (1536, 141))),
    *(Published("gpt-529.6b", 8, 35, gpus, 2240, found, 1) for gpus, found in ((560, 171), (1120, 167), (2240, 159))),
)
MICRO_BATCHES = (1, 2, 4, 8)
"""Microbatch sizes of table 1, which the paper does not give: the fastest that fits is used."""

_175B = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96"
_162B = "--num-layers 32 --hidden-size 20480 --num-attention-heads 128"
_91B = "--num-layers 72 --hidden-size 10240 --num-attention-heads 80"  # a plausible shape of that size: the paper gives none


@cache
def machine() -> tuple[Cluster, SoftwareStack]:
    return load_cluster("dgx-a100"), load_stack("unfused")


def config_of(world: int, words: str) -> RunConfig:
    """A config with the settings of all runs of the paper."""
    common_words = "--vocab-size 51200 --seq-length 2048 --fp16 --hidden-dropout 0.1 --attention-dropout 0.1"
    return validate(parse_arguments(f"{common_words} {words}".split(), world_size=world).config, world)


def tflops(config: RunConfig, found: Prediction, world: int) -> float:
    """TFLOP/s per GPU, including recompute."""
    return flops_per_token_with_recompute(config) * found.tokens_per_second / world / 1e12


def fits(found: Prediction) -> bool:
    return max(memory.total_bytes for memory in found.memory) <= machine()[0].accelerator.memory_bytes


def row(published: Published) -> dict[str, Any]:
    """The fastest microbatch size of 1F1B that fits, with its predictions."""
    found: list[dict[str, Any]] = []
    samples = published.batch * published.tp * published.pp // published.gpus
    for micro in [size for size in MICRO_BATCHES if samples % size == 0 and published.micro in (None, size)]:
        words = f"--preset {published.preset} --tp {published.tp} --pp {published.pp} --micro-batch-size {micro}"
        words += f" --global-batch-size {published.batch} --recompute-granularity full"
        config = config_of(published.gpus, words)
        prediction = predict(config, *machine())
        if fits(prediction):
            found.append({"micro_batch_size": micro, "tflops": tflops(config, prediction, published.gpus)})
    best = max(found, key=lambda each: each["tflops"])
    return {**vars(published), **best, "paper": published.tflops, "percent": 100.0 * best["tflops"] / PEAK}


def curve(world: int, words: str, name: str, values: Sequence[Any], *, samples: bool = False) -> list[list[float]]:
    """[value, TFLOP/s per GPU] (or samples per second) for each value of `name`; values that do not fit are omitted."""
    points = []
    for value in values:
        try:
            config = config_of(world, words.format(value) if "{}" in words else f"{words} --{name} {value}")
        except ConfigError:
            continue
        found = predict(config, *machine())
        if fits(found):
            speed = found.tokens_per_second / config.training.seq_length
            points.append([float(value), speed if samples else tflops(config, found, world)])
    return points


def figures() -> dict[str, dict[str, list[list[float]]]]:
    """Figure -> curve -> points."""
    full = "--recompute-granularity full"
    pipeline = f"{_175B} --tp 8 --pp 12 {full}"
    batches = range(12, 61, 12)
    interleaved = f"{pipeline} --vpp 2"
    axes = f"{_162B} {full} --tp {{}} --pp"
    of_batch = "global-batch-size"
    return {
        "interleaving (175B, 96 GPUs), by batch": {
            "interleaved": curve(96, interleaved, of_batch, batches),
            "not interleaved": curve(96, pipeline, of_batch, batches),
        },
        "scatter/gather (175B, 96 GPUs, interleaved), by batch": {
            "with": curve(96, interleaved, of_batch, batches),
            "without": curve(96, f"{interleaved} --no-scatter-gather-tensors-in-pipeline", of_batch, batches),
        },
        "tensor against pipeline (162B, 64 GPUs), by tp": {
            f"batch {batch}": [
                point
                for tp in (2, 4, 8, 16, 32)
                for point in curve(64, f"{axes} {64 // tp} --global-batch-size {batch}", "tp", (tp,))
            ]
            for batch in (32, 128)
        },
        "microbatch size (91B, 64 GPUs, tp 8, pp 8)": {
            f"batch {batch}": curve(
                64, f"{_91B} --tp 8 --pp 8 {full} --global-batch-size {batch}", "micro-batch-size", (1, 2, 4, 8)
            )
            for batch in (128, 512)
        },
        "recompute (145B, 128 GPUs, tp 8, pp 16), sequences a second by batch": {
            name: curve(128, f"--preset gpt-145.6b --tp 8 --pp 16 {words}", of_batch, [2**n for n in range(9)], samples=True)
            for name, words in (("with", full), ("without", ""))
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    arguments = parser.parse_args(words)
    rows = [row(published) for published in TABLE_1 + TABLE_2]
    for each in rows:
        print(f"{each['preset']:12} {each['gpus']:5} GPUs  {each['tflops']:6.1f} TFLOP/s per GPU, paper {each['paper']}")
    drawn = figures()
    for title, curves in drawn.items():
        print(f"\n{title}")
        for name, points in curves.items():
            print(f"  {name:16}" + "  ".join(f"{x:g}: {y:.1f}" for x, y in points))
    common.write_json(arguments.json, "planner.sc21", words, {"tables": rows, "figures": drawn})


if __name__ == "__main__":
    main()

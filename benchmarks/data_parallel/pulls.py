"""What the order in which a sharded server hands out parameters is worth, simulated: the next forward waits for each module's.

    python -m benchmarks.data_parallel.pulls [--preset gpt2-124m] [--ranks 8] [--tflops 60]

Buckets, their bytes and both orders are those of the run that the planner plans: first-needed first, as `sharded-parameter-server`
and ZeRO do it, and in the order in which gradients got ready and were pushed. A link carries one bucket after the other; a
matrix computes at the given rate once its bucket is there and the one before is done. Printed is how much longer the forward
takes than with all parameters in place.
"""

import argparse
from collections.abc import Sequence

from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.activations import ELEMENT_BYTES
from megalite.partition.buckets import PlannedBucket, local_size, planned_buckets
from megalite.partition.pipeline import plan_stages
from megalite.partition.stages import shapes_of_rank

RATES = (10e9, 25e9, 100e9, 400e9)
"""Bits a second."""


def stall(config: RunConfig, order: Sequence[PlannedBucket], *, rate: float, flops: float) -> float:
    """Seconds that the forward of a microbatch waits."""
    width, tokens = ELEMENT_BYTES[config.training.precision], config.training.micro_batch_size * config.training.seq_length
    arrivals, clock, computing = {}, 0.0, 0.0
    for bucket in order:
        clock += (bucket.replicas - 1) / bucket.replicas * bucket.elements * width * 8 / rate
        arrivals.update(dict.fromkeys((shape.name for shape in bucket.shapes), clock))
    clock = 0.0
    for shape in shapes_of_rank(config, list(plan_stages(config))):
        product = len(shape.shape) == 2 and not shape.name.startswith("embedding.")
        seconds = 2 * local_size(shape, config) * tokens / flops if product else 0.0
        clock, computing = max(clock, arrivals[shape.name]) + seconds, computing + seconds
    return clock - computing


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tflops", type=float, default=60.0)
    asked = parser.parse_args(words)
    flags = f"--preset {asked.preset} --dp-strategy sharded-parameter-server --bf16 --micro-batch-size 8 --mock-data"
    flags += f" --global-batch-size {8 * asked.ranks} --train-iters 10"
    config = validate(parse_arguments(flags.split()).config, asked.ranks)
    (plan,) = plan_stages(config)
    pushed = planned_buckets(config, plan, (plan,))
    print(f"{asked.preset} on {asked.ranks} ranks, {len(pushed)} buckets: milliseconds that a forward waits")
    for rate in RATES:
        first, plain = (1e3 * stall(config, order, rate=rate, flops=asked.tflops * 1e12) for order in (pushed[::-1], pushed))
        print(f"{rate / 1e9:4.0f} Gbit/s  first-needed first {first:7.2f}   as pushed {plain:7.2f}")


if __name__ == "__main__":
    main()

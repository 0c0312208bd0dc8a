"""Tensor-parallel ranks of one host through shared memory, compared with gloo's sockets under both scheduling policies of Linux.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu.shared_memory [--ranks 2 4] [--sizes BYTES ...] [--rounds N] [--json FILE]

Measures all-reduces and reduce-scatters of fp32, and a step with tp = ranks, without and with sequence parallelism. Ranks run
under SCHED_BATCH, as in training, and in the last variant under the default policy. The variants run in turn in the same
processes; medians over rounds, and medians of each round's ratio to shared memory."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.steps.replica import Run
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.parity.pool import RankContext, RankPool
from megalite.profiling.collectives import collective

CPU_MODEL = common.settings(
    "num_layers=4 hidden_size=256 num_attention_heads=8 vocab_size=8192 seq_length=256 micro_batch_size=4 global_batch_size=16"
)
WAYS = {"memory": True, "sockets": False, "usual policy": False}
"""Variant -> whether shared memory is used."""
SECONDS = 0.05
"""Seconds per turn."""


def take_turns(
    context: RankContext, works: Mapping[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Milliseconds per call, one value per round, in the same order on all ranks."""
    world = context.topology(dp=torch.distributed.get_world_size()).world
    found: dict[str, list[float]] = {name: [] for name in works}
    for order in common.shuffled(list(works), rounds):
        for name in order:
            common.set_policy(os.SCHED_OTHER if name == "usual policy" else os.SCHED_BATCH)
            world.all_reduce(torch.zeros(1))
            start = time.perf_counter()
            for _ in range(calls):
                works[name]()
            found[name].append(1e3 * (time.perf_counter() - start) / calls)
    common.set_policy(os.SCHED_BATCH)
    return found


def collectives(context: RankContext, operation: str, ranks: int, size: int, rounds: int) -> dict[str, list[float]]:
    shared = context.topology(tp=ranks).tp
    assert shared.memory is not None, "shared memory needs Linux on x86-64"
    groups = {name: shared if memory else dataclasses.replace(shared, memory=None) for name, memory in WAYS.items()}
    works = {name: collective(operation, group, size, torch.device("cpu"))[0] for name, group in groups.items()}
    return take_turns(context, works, rounds, max(3, min(100, int(SECONDS * 1e9 / (size * ranks)))))


def steps(
    context: RankContext, model: Mapping[str, Any], ranks: int, sequence_parallel: bool, rounds: int
) -> dict[str, list[float]]:
    works: dict[str, Callable[[], object]] = {}
    for name, memory in WAYS.items():
        layout = {"tp": ranks, "sequence_parallel": sequence_parallel, "shared_memory_collectives": memory}
        config = validate(replace(RunConfig(), **model, **layout, mock_data=True, train_iters=1000, lr=1e-4), ranks)
        run = Run(config, rank=context.rank, device=torch.device("cpu"), reuse=context.groups)
        batches = run.read(run.batch_size)
        works[name] = lambda run=run, batches=batches: run.train(batches, run.batch_size)
        works[name]()
    return take_turns(context, works, rounds, 2)


def row_of(found: dict[str, list[float]], **what: object) -> dict[str, Any]:
    times = {name: round(statistics.median(values), 3) for name, values in found.items()}
    ratios = {name: round(common.ratio(found[name], found["memory"]), 2) for name in WAYS if name != "memory"}
    return {**what, "ms": times, "over_memory": ratios}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1 << 10, 1 << 16, 1 << 20, 1 << 24], help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(words)
    rows, rounds = [], arguments.rounds
    for ranks in arguments.ranks:
        with RankPool(ranks) as pool:
            for operation in ("all-reduce", "reduce-scatter"):
                for size in arguments.sizes:
                    found = pool.run(ranks, collectives, operation, ranks, size, rounds)[0]
                    rows.append(row_of(found, ranks=ranks, what=operation, bytes=size))
            for sequence_parallel in (False, True):
                found = pool.run(ranks, steps, CPU_MODEL, ranks, sequence_parallel, rounds)[0]
                rows.append(row_of(found, ranks=ranks, what=f"step{', sequence parallel' * sequence_parallel}"))
        for row in rows[-2 - 2 * len(arguments.sizes) :]:
            name = f"{row['ranks']} ranks, {row['what']} {row.get('bytes', '')}"
            print(
                f"{name:<40}" + ", ".join(f"{way} {ms:9.3f} ms" for way, ms in row["ms"].items()), row["over_memory"], flush=True
            )
    common.write_json(arguments.json, "cpu.shared_memory", words, {"rows": rows})


if __name__ == "__main__":
    main()

"""Our executor beside torch.distributed.pipelining: the same stages of the same GPT, in turns in the same processes."""

import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import common
from benchmarks.peers.pytorch import SCHEDULES
from benchmarks.pipeline.gpt import MICRO, MODEL, SEQ, Part, System, batch_of, build_ours, build_part, loss_of
from benchmarks.pipeline.sleep import step_times, timed_steps
from megalite.parity.pool import RankContext, RankPool
from megalite.pipeline.ir.generators.registry import build_schedule
from megalite.pipeline.ir.schedule import Schedule
from megalite.topology.topology import Topology

MICROBATCHES = 8

OURS, SAME, PLAIN = "megalite", "torch, same module", "torch, F.linear"
SYSTEMS = (OURS, SAME, PLAIN)
"""In the last the linear layers are autograd's own function instead of the one that tensor parallelism needs."""


class Pair(NamedTuple):
    """A schedule and its counterpart."""

    chunks: int
    theirs: type


PAIRS = {
    "1f1b": Pair(1, SCHEDULES["1f1b"]),
    "interleaved": Pair(2, SCHEDULES["interleaved"]),
    "zb-h1": Pair(1, SCHEDULES["interleaved-zb"]),
    "zb-v": Pair(2, SCHEDULES["zb-v"]),
    "dualpipe-v": Pair(2, SCHEDULES["dualpipe-v"]),
}


def build_theirs(schedule: Schedule, topology: Topology, theirs: type, *, plain: bool) -> System:
    """torch's runtime and its own schedule over the same stages."""
    rank, count = topology.pp.rank, schedule.num_stages
    parts = {stage: build_part(stage, count, plain=plain) for stage in schedule.stages_of(rank)}
    stages = [
        PipelineStage(part, stage, count, torch.device("cpu"), group=topology.pp.process_group) for stage, part in parts.items()
    ]
    one = len(stages) == 1 and theirs is Schedule1F1B
    run = theirs(stages[0] if one else stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    tokens, labels = batch_of(MICROBATCHES)
    inputs = (tokens,) if 0 in parts else ()
    target = labels if count - 1 in parts else None

    def step() -> None:
        run.step(*inputs, target=target, losses=[] if target is not None else None, return_outputs=False)

    return System(step, parts)


class _Products(TorchDispatchMode):
    NAMES = ("mm", "addmm", "bmm", "baddbmm", "addmm_")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


def backward_products(system: System) -> int:
    """Matrix products of a step's backwards on this rank: all of the step less those of its forwards."""
    forwards = [0]

    def count(part: Part, inputs: Any) -> None:
        before[part] = products.count

    def add(part: Part, inputs: Any, output: Any) -> None:
        forwards[0] += products.count - before[part]

    before: dict[torch.nn.Module, int] = {}
    hooks = []
    for part in system.parts.values():
        hooks += [part.register_forward_pre_hook(count), part.register_forward_hook(add)]
    with _Products() as products:
        system.run()
    for hook in hooks:
        hook.remove()
    return products.count - forwards[0]


def compete(context: RankContext, name: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Times, gradients and matrix products of each system on one rank."""
    pair = PAIRS[name]
    schedule = build_schedule(name, num_ranks=ranks, num_chunks=pair.chunks, num_microbatches=MICROBATCHES)
    topology = context.topology(pp=ranks, placement=schedule.placement)
    systems = {
        OURS: build_ours(schedule, topology),
        SAME: build_theirs(schedule, topology, pair.theirs, plain=False),
        PLAIN: build_theirs(schedule, topology, pair.theirs, plain=True),
    }
    grads, products = {}, {}
    for key, system in systems.items():  # the warm-up of each as well: torch infers shapes in its first step
        system.run()
        system.zero_grad()
        products[key] = backward_products(system)
        grads[key] = system.grads()
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in systems}
    cpu: dict[str, list[float]] = {key: [] for key in systems}
    for order in common.shuffled(SYSTEMS, rounds):
        for key in order:
            systems[key].zero_grad()
            gc.collect()
            before = time.process_time()
            times[key] += timed_steps(topology.world, systems[key].run, 1)
            cpu[key].append(time.process_time() - before)
    reference = list(grads[SAME].values())
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads[OURS].values(), reference, strict=True))
    return {"times": times, "cpu": cpu, "products": products, "difference": difference}


def bench_peer(pool: RankPool, *, rounds: int, ranks: list[int], names: list[str]) -> dict[str, Any]:
    """Every schedule on each number of ranks."""
    rows = []
    for count in ranks:
        for name in names:
            found = pool.run(count, compete, name, count, rounds, timeout=600.0)
            times = {key: step_times([rank["times"][key] for rank in found]) for key in SYSTEMS}
            cpu = {key: list(map(sum, zip(*(rank["cpu"][key] for rank in found)))) for key in SYSTEMS}
            by_rank = {key: [rank["products"][key] for rank in found] for key in SYSTEMS}
            row = {"schedule": name, "theirs": PAIRS[name].theirs.__name__, "ranks": count}
            row |= {"ms": {key: 1e3 * statistics.median(times[key]) for key in SYSTEMS}}
            row |= {"ratio": _ratios(times), "cpu_ratio": _ratios(cpu)}
            row |= {"backward_products": {key: sum(products) for key, products in by_rank.items()}}
            row |= {"backward_products_by_rank": by_rank}
            row |= {"gradient_difference": max(rank["difference"] for rank in found)}
            row |= {"rounds_ms": {key: [1e3 * value for value in times[key]] for key in SYSTEMS}}
            rows.append(row)
            print(f"{name} on {count} ranks: {row['ms']} {row['ratio']}", file=sys.stderr)
    model = f"{MODEL.num_layers} layers, hidden {MODEL.hidden_size}, sequence {SEQ}, fp32"
    return {"model": model, "micro_batch_size": MICRO, "microbatches": MICROBATCHES, "rounds": rounds, "rows": rows}


def _ratios(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Ours to each of theirs: the median over rounds, in which a busy neighbour slows all alike."""
    return {key: common.ratio(values[OURS], values[key]) for key in (SAME, PLAIN)}


def peer_table(result: dict[str, Any]) -> list[list[str]]:
    header = "ranks|ours|torch's|ours, ms|torch, ms|ours / torch|the same in CPU time|ours / torch with F.linear"
    names = [f"GEMMs of the backwards: {SYSTEMS[0]}", *SYSTEMS[1:]]
    table = [[*header.split("|"), *names]]
    for row in result["rows"]:
        milliseconds = (f"{row['ms'][key]:.0f}" for key in (OURS, SAME))
        ratios = (row["ratio"][SAME], row["cpu_ratio"][SAME], row["ratio"][PLAIN])
        products = (str(row["backward_products"][key]) for key in SYSTEMS)
        ours = (str(row["ranks"]), row["schedule"], row["theirs"])
        table.append([*ours, *milliseconds, *(f"{ratio:.3f}" for ratio in ratios), *products])
    return table

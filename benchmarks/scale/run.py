"""Costs that grow with the number of ranks, counted without them: a start, the reports of a step, a save, a load, a dry run.

python -m benchmarks.scale.run [--worlds 8 64 512 4096] [--json FILE] [--svg FILE]

Single ranks of GPT-3 175B run the program's own code with tensors without contents and with a counting store and counting
process groups. Calls are of Python functions. The exponent is the slope between the last two worlds, in logarithms."""

import dataclasses
import datetime
import json
import math
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # backend "fake"

from benchmarks import common
from megalite.checkpoint.files import FileEntry
from megalite.checkpoint.folders import _merge, write_rank_part
from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import Manifest, from_pieces, in_pieces
from megalite.checkpoint.save import _rank_part
from megalite.cli.dry_run import dry_run
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.validate import validate
from megalite.partition.pipeline import layout_of
from megalite.planner.page import Line, draw_curves
from megalite.rehearsal.communication import Journal, rehearsed_topology
from megalite.rehearsal.device import Device
from megalite.rehearsal.run import rehearse
from megalite.topology.group import host_group
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology, fresh_prefix_store
from megalite.training.evaluation import read_batches
from megalite.training.instruments import Timings, units
from megalite.training.replica import Programs, Replica, build_replica
from megalite.training.resume import load_states
from megalite.training.state_tensors import state_tensors
from megalite.training.stopping import StopRequests
from megalite.training.trace import PhaseClock

MODEL = "--preset gpt3-175b --vocab-size 51200 --bf16 --mock-data --micro-batch-size 1 --train-iters 10 --sequence-parallel"
LAYOUTS = {8: (2, 2), 64: (4, 4), 512: (8, 8), 4096: (8, 16)}
"""World -> (tp, pp); the rest is data parallel, by ZeRO-1."""
CPU, FILE = torch.device("cpu"), FileEntry(1 << 40, "0" * 64)
MINUTE = datetime.timedelta(minutes=1)
Counts = dict[str, float]


class Store(dist.Store):
    """The requests of one rank to a store; repeating a request means waiting. `others` ranks have been there before."""

    def __init__(self, held: dict[str, bytes], others: int) -> None:
        super().__init__()
        self.held, self.others, self.asked = held, others, set[tuple[str, str]]()

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.asked.add(("set", keys[0]))
        self.held.update(zip(keys, map(str.encode, values), strict=True))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked.add(("get", keys[0]))
        return [self.held[key] for key in keys]

    set: Any = lambda self, key, value: self.multi_set([key], [value])
    get = lambda self, key: self.multi_get([key])[0]  # noqa: E731

    def check(self, keys: list[str]) -> bool:
        self.asked.add(("check", keys[0]))
        return all(key in self.held for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.asked.add((f"add {amount}", key))
        self.held[key] = self.held.get(key, b"") + b"+" * amount
        return len(self.held[key]) + self.others


def calls_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return the function's result, and the number of Python functions that it calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    found = work()
    sys.setprofile(None)
    return found, count


def meeting(world: int) -> Counts:
    """Results of the first and the last rank, after all others."""
    held = {f"megalite/word/{rank}": b"w" for rank in range(1, world - 1)}
    stores = {rank: Store(held, world - 2) for rank in (0, world - 1)}
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda r: fresh_prefix_store(stores[r], rank=r, world_size=world, timeout=MINUTE), stores))
    return {"store requests": max(len(store.asked) for store in stores.values())}


def start(layout: ParallelLayout) -> Counts:
    """Create the process groups of rank 0, with its state of all ranks."""
    made, new_group = list[list[int]](), dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return new_group(ranks, **{**options, "backend": "fake"})

    def everything() -> Any:
        topology = Topology.create(layout, rank=0, device=CPU, backend="fake")
        joined, trees = sum(0 in ranks for ranks in made), len(made)
        background = host_group(topology.world, "background", timeout=MINUTE)
        return topology, background, units(layout), joined, trees

    store = Store({}, 0)
    dist.init_process_group("fake", store=store, rank=0, world_size=layout.world_size)
    with mock.patch.object(dist, "new_group", counted):
        (*_, joined, trees), calls = calls_of(everything)
        tracemalloc.start()
        kept = everything()
    held = tracemalloc.get_traced_memory()[0]
    del kept
    tracemalloc.stop()
    dist.destroy_process_group()
    assert not store.asked, "a new group must not use the store"
    tree = made[trees : len(made) // 2]
    mine, every = (sum(len(ranks) - 1 for ranks in tree if 0 in ranks), sum(math.comb(len(ranks), 2) for ranks in tree))
    found = {"communicators": joined, "background connections": mine, "all background connections": every}
    return {**found, "start calls": calls, "bookkeeping bytes": held}


def reports(invocation: Invocation, layout: ParallelLayout) -> Counts:
    """Communication of a step and of a log line over the world."""
    step = rehearse(invocation.config, 0)
    journal = Journal(Device())
    topology = dataclasses.replace(rehearsed_topology(layout, 0, journal, separate_gathers=False), device=CPU)
    read_batches(None, 0, 0, topology=topology, scope=topology.world, stops=StopRequests())
    operations = [*step.journal.operations[step.second_step :], *journal.operations]
    world = [operation.nbytes for operation in operations if len(operation.ranks) == layout.world_size]
    timings, before = Timings(PhaseClock(CPU), topology, independent=False, threshold=1.5), len(journal.operations)
    _, calls = calls_of(lambda: timings.interval(steps=1, seconds=1.0))
    gathered = layout.world_size * sum(operation.nbytes for operation in journal.operations[before:])
    names = ("world operations of a step", "their bytes", "bytes of a line", "calls of a line")
    return dict(zip(names, (len(world), sum(world), gathered, calls), strict=True))


def replica_of(invocation: Invocation, layout: ParallelLayout, rank: int, programs: Programs) -> Replica:
    """The replica in the state after a step."""
    device = Device()
    with device.entered():
        topology = rehearsed_topology(layout, rank, Journal(device), separate_gathers=False)
        replica = build_replica(invocation.config, topology, programs)
        for shard in replica.strategy.shards:
            replica.optimizer.state(shard.main_param)
    return replica


class Index(Checkpoint):
    """A manifest without files; records each read."""

    def _reader(self, name: str) -> Any:
        self._open[name] = None
        return mock.Mock()


def save_and_load(invocation: Invocation, layout: ParallelLayout) -> Counts:
    """Plans and manifest of all ranks, and the reads of rank 0 when it loads them."""
    programs = Programs(invocation.config)
    entries = sent = 0
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(layout.world_size):
            replica = replica_of(invocation, layout, rank, programs)
            plan = [saved for saved, _ in state_tensors(replica)]
            part = _rank_part(plan, {name: FILE for name in {f"{one.key_group}" for one in plan}}, rank, "")
            write_rank_part(Path(folder), rank, part)
            entries, sent = max(entries, len(plan)), max(sent, Path(folder, f"part-{rank}.json").stat().st_size)
        preamble = Manifest(step=1, files={}, tensors={}, counters={}, config={}, layout={}, megalite_version="")
        manifest = _merge(Path(folder), preamble, layout.world_size)
    received = from_pieces(*json.loads(pieces := json.dumps(in_pieces(manifest))))
    index = Index(Path(), received)
    load_states(replica_of(invocation, layout, 0, programs), index, with_optimizer=True, log=lambda line: None)
    parsed = sum(not isinstance(one, str) for one in vars(received.tensors)["data"].values())
    found = {"tensors of a save plan": entries, "bytes of a save plan": sent, "manifest bytes": len(manifest.to_json())}
    found["manifest bytes sent"] = len(zlib.compress(pieces.encode(), level=1))
    return {**found, "tensors parsed": parsed, "files opened": len(index._open)}


def counts(world: int) -> Counts:
    tp, pp = LAYOUTS[world]
    words = f"{MODEL} --tp {tp} --pp {pp} --dp-strategy distributed-optimizer --global-batch-size {world // tp}"
    invocation = parse_arguments([*words.split(), "--dry-run", "--world-size", str(world)], world_size=world)
    invocation = dataclasses.replace(invocation, config=validate(invocation.config, world, invocation.explicit))
    layout = layout_of(invocation.config)
    shown, calls = calls_of(lambda: dry_run(invocation))
    found = meeting(world) | start(layout) | reports(invocation, layout) | save_and_load(invocation, layout)
    return found | {"dry run calls": calls, "dry run bytes": len(shown)}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--worlds", nargs="+", type=int, choices=LAYOUTS, default=list(LAYOUTS), metavar="N")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves there, both axes in powers of ten")
    arguments = parser.parse_args(words)
    if len(arguments.worlds) < 2:
        parser.error("--worlds: growth takes two of them at least, e.g. --worlds 8 64")
    worlds, found = arguments.worlds, [counts(world) for world in arguments.worlds]
    rows: dict[str, list[float]] = {name: [one[name] for one in found] for name in found[0]}

    far = math.log(worlds[-1] / worlds[-2])
    grown = {name: math.log(max(values[-1], 1) / max(values[-2], 1)) / far for name, values in rows.items()}
    lines = [[name, *(f"{value:,.0f}" for value in values), f"{grown[name]:.2f}"] for name, values in rows.items()]
    print(common.markdown([["of a rank", *worlds, "exponent"], *lines]))
    if arguments.svg is not None:
        points = {name: [(math.log10(x), math.log10(max(y, 1))) for x, y in zip(worlds, rows[name])] for name in rows}
        curves = [Line(name, points[name], number) for number, name in enumerate(rows)]
        arguments.svg.write_text(draw_curves(curves, x_label="log10 of ranks", y_label="log10 of the count"))
    common.write_json(arguments.json, "scale.run", words, {"worlds": worlds, "rows": rows, "exponents": grown})


if __name__ == "__main__":
    main()

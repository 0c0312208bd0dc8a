"""Describes the machine of the ranks, and measures collectives and messages inside a node and across nodes.

All groups of a kind communicate at once, as in training, because the ranks of a node share its links and adapters."""

import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.config.errors import ConfigError
from megalite.planner.cost.rates import SHARED_PASSES
from megalite.profiling.timing import Timer, Timing, products
from megalite.topology.group import Group, ProcessGroups
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology
from megalite.watchdog.processes import usable_cores


@dataclass(frozen=True, kw_only=True)
class Machine:
    device_type: str
    device_name: str
    memory_bytes: int  # per rank: of its GPU, or its equal share of the node
    multiprocessors: int  # of a GPU; 1 on a CPU
    threads: int  # torch's threads per rank
    cores: int  # usable cores of a node
    nodes: int
    ranks_per_node: int
    accelerators_per_node: int  # all GPUs of a node, even unused ones; on a CPU the ranks of a node
    torch_version: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def crowded(self) -> bool:
        """Whether the threads of all ranks outnumber the cores."""
        return self.shares_cores and self.ranks_per_node * self.threads > self.cores

    @property
    def ranks_per_core(self) -> float:
        """Threads of all ranks per core if `crowded`, else 1."""
        return self.ranks_per_node * self.threads / self.cores if self.crowded else 1.0

    @property
    def shares_cores(self) -> bool:
        """Whether the ranks of a node compete for its cores and memory bandwidth."""
        return self.device_type == "cpu" and self.ranks_per_node > 1


def describe_machine(world: Group, *, node: str | None = None) -> Machine:
    """Gather the host (`node` replaces its name) and device of every rank. Raises ConfigError on every rank if devices
    or numbers of threads differ, or if the ranks of nodes are not equal in number and consecutive.

    Collectives: a gather over the world."""
    device = world.device
    name, memory, multiprocessors = device_facts(device)
    rows = world.gather_json([platform.node() if node is None else node, name, torch.get_num_threads()])
    per_node = _ranks_per_node([row[0] for row in rows])
    for rank, row in enumerate(rows):
        for what, index in (("device", 1), ("number of threads", 2)):
            if row[index] != rows[0][index]:
                raise ConfigError(f"the {what} is {rows[0][index]} on rank 0, {row[index]} on {rank}; use equal ones")
    return Machine(
        device_type=device.type,
        device_name=name,
        memory_bytes=memory // (per_node if device.type == "cpu" else 1),
        multiprocessors=multiprocessors,
        threads=torch.get_num_threads(),
        cores=usable_cores(),
        nodes=len(rows) // per_node,
        ranks_per_node=per_node,
        accelerators_per_node=per_node if device.type == "cpu" else torch.cuda.device_count(),
        torch_version=torch.__version__,
    )


def _ranks_per_node(hosts: Sequence[str]) -> int:
    """Return the number of ranks per node, from the host of each rank. Raises ConfigError if it differs between nodes,
    or if the ranks of a node are not consecutive."""
    count = hosts.count(hosts[0])
    blocks = [hosts[start : start + count] for start in range(0, len(hosts), count)]
    if any(len(set(block)) > 1 or len(block) < count for block in blocks) or len(set(hosts)) != len(blocks):
        counts = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
        raise ConfigError(
            f"ranks are spread unevenly over nodes, or not one node after the other ({counts}); start the same number on "
            f"each, e.g. torchrun --nproc-per-node {min(hosts.count(host) for host in hosts)}"
        )
    return count


def device_facts(device: torch.device) -> tuple[str, int, int]:
    """Return (name, bytes of memory, multiprocessors)."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return facts.name, int(facts.total_memory), int(facts.multi_processor_count)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpuinfo = Path("/proc/cpuinfo")  # contains the model on Linux; elsewhere use the architecture
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    model = re.search(r"^model name[ \t]*:[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE)
    return model[1] if model else platform.machine() or "CPU", memory, 1


OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    operation: str  # one of OPERATIONS, or `p2p`
    place: str  # `inside` a node, through its `memory`, or `across` nodes
    ranks: int  # of the group
    message_bytes: int  # of the whole tensor that a rank reduces, gathers, scatters or exchanges
    timing: Timing

    @property
    def latencies(self) -> float:
        """Sequential latencies: n - 1 in a ring inside a node, the depth of a tree across nodes, 1 for a message."""
        if self.operation == "p2p" or self.place == "memory":
            return 1.0
        depth = self.ranks - 1 if self.place == "inside" else math.ceil(math.log2(self.ranks))
        return 2.0 * depth if self.operation == "all-reduce" else float(depth)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends: (n - 1)/n of the tensor in a ring, twice that for an all-reduce, all of a message.
        Through shared memory: bytes that it writes and reads."""
        if self.operation == "p2p":
            return float(self.message_bytes)
        if self.place == "memory":
            return float(SHARED_PASSES[self.operation](self.ranks) * self.message_bytes)
        part = self.message_bytes * (self.ranks - 1) / self.ranks
        return 2 * part if self.operation == "all-reduce" else part

    @property
    def bytes_per_second(self) -> float:
        return self.wire_bytes / self.timing.seconds


@dataclass(frozen=True, kw_only=True)
class MeasuredGroups:
    """This rank's groups of one place."""

    place: str
    groups: tuple[Group, ...]  # one for each size
    edges: tuple[Group, Group] | None = None  # to a neighbour and back; None: this rank has none


def make_groups(
    machine: Machine, rank: int, device: torch.device, *, reuse: ProcessGroups | None = None
) -> list[MeasuredGroups]:
    """Create groups inside a node (of 2 ranks and of all) and across nodes (one rank of each), with a pair for
    messages. If tensor-parallel ranks use shared memory, also create groups inside a node that do.

    Collectives: creates process groups (`reuse` as for `Topology.create`); every rank calls it at the same time."""
    reuse = {} if reuse is None else reuse
    local, nodes = machine.ranks_per_node, machine.nodes

    def topology(*, shared_memory: bool = False, **axes: int | str) -> Topology:
        layout = ParallelLayout(**axes)  # type: ignore[arg-type]
        return Topology.create(layout, rank=rank, device=device, reuse=reuse, shared_memory=shared_memory)

    found = []
    if local > 1:
        sizes = sorted({2, local} if local % 2 == 0 else {local})
        groups, shared = (
            tuple(topology(tp=size, dp=local * nodes // size, shared_memory=through).tp for size in sizes)
            for through in (False, True)
        )
        # With an odd number only the first two ranks of each node exchange messages.
        pair = 2 if local % 2 == 0 else local
        neighbours = topology(pp=pair, dp=local * nodes // pair, order="tp-cp-ep-pp-dp")
        found.append(MeasuredGroups(place="inside", groups=groups, edges=_first_pair(neighbours)))
        if all(group.memory is not None for group in shared):
            found.append(MeasuredGroups(place="memory", groups=shared))
    if nodes > 1:
        pair = 2 if nodes % 2 == 0 else nodes
        across = topology(tp=local, dp=nodes).dp
        neighbours = topology(tp=local, pp=pair, dp=nodes // pair, order="tp-cp-ep-pp-dp")
        found.append(MeasuredGroups(place="across", groups=(across,), edges=_first_pair(neighbours)))
    return found


def _first_pair(topology: Topology) -> tuple[Group, Group] | None:
    """Return the groups of pipeline ranks 0 -> 1 and 1 -> 0 of this rank's pipeline, None on other ranks."""
    return None if topology.pp.rank > 1 else (topology.edges[0, 1], topology.edges[1, 0])


def message_sizes(*, largest: int, count: int) -> list[int]:
    """Return `count` powers of two, in bytes, evenly spread from 1 KiB to `largest`."""
    low = 10
    high = max(low, largest.bit_length() - 1)
    steps = max(1, min(count - 1, high - low))
    return sorted({1 << (low + round((high - low) * index / steps)) for index in range(steps + 1)})


def measure_collectives(
    timer: Timer, measured: MeasuredGroups, *, sizes: Sequence[int], seconds: float
) -> Iterator[CollectiveTime]:
    """Measure every operation at every size, `seconds` in total.

    Collectives: the measured ones, and barriers and gathers over the timer's world."""
    each = seconds / max(1, len(sizes) * (1 + len(measured.groups) * len(OPERATIONS)))
    shared = measured.place == "memory"
    for size in sizes:
        for group in measured.groups:
            for operation in SHARED_PASSES if shared else OPERATIONS:
                run, whole = collective(operation, group, size, timer.device)
                timing = timer.over_ranks(timer.between_computations(run, seconds=each))
                yield CollectiveTime(
                    operation=operation, place=measured.place, ranks=group.size, message_bytes=whole, timing=timing
                )
        if not shared:
            yield _messages(timer, measured, size, each)


def collective(operation: str, group: Group, size: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a function that runs the collective, and the bytes of its tensor: `size` rounded up to equal parts."""
    part = torch.zeros(max(1, -(-size // (4 * group.size))), device=device)
    whole = torch.zeros(part.numel() * group.size, device=device)
    other = torch.zeros_like(whole)
    runs: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: group.all_reduce(whole),
        "all-gather": lambda: group.all_gather(whole, part),
        "reduce-scatter": lambda: group.reduce_scatter(part, whole),
        "all-to-all": lambda: group.all_to_all_equal(other, whole),
    }
    return runs[operation], whole.numel() * whole.element_size()


def _messages(timer: Timer, measured: MeasuredGroups, size: int, seconds: float) -> CollectiveTime:
    """Time a message to the neighbour and one back; half of it is one message."""
    tensor = torch.zeros(max(1, size // 4), device=timer.device)
    run = round_trip(measured, tensor)
    both = timer.over_ranks(timer.between_computations(run, seconds=seconds), idle=measured.edges is None)
    return CollectiveTime(
        operation="p2p",
        place=measured.place,
        ranks=2,
        message_bytes=tensor.numel() * tensor.element_size(),
        timing=Timing(seconds=both.seconds / 2, spread=both.spread, samples=both.samples),
    )


def round_trip(
    measured: MeasuredGroups, tensor: torch.Tensor, compute: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Return a function that exchanges a message to the neighbour and one back. Each rank computes before it sends; the
    second rank computes after it receives. The function does nothing on a rank without a neighbour."""
    edges = measured.edges

    def run() -> None:
        if edges is None:
            return
        there, back = edges
        if there.rank == 1:
            there.receive_async(tensor, source=0).wait()
        if compute is not None:
            compute()
        if there.rank == 0:
            there.send_async(tensor, to=1).wait()
            back.receive_async(tensor, source=0).wait()
        else:
            back.send_async(tensor, to=1).wait()

    return run


_TURN_PRODUCTS = 60  # of 256 x 256 matrices: about 20 ms on a free core, like a microbatch on a stage
_REPETITIONS = 4


@dataclass(frozen=True, kw_only=True)
class TurnTime:
    """Times of one computation: on all ranks at once, and on the two ranks of each pair in turn."""

    at_once: Timing
    in_turn: Timing  # both computations, with a message each way

    @property
    def speedup(self) -> float:
        """Speedup of a rank while every second rank waits."""
        return 2.0 * self.at_once.seconds / self.in_turn.seconds


def measure_turns(timer: Timer, measured: MeasuredGroups, *, seconds: float) -> TurnTime:
    """Measure pairs of neighbours inside a node for about `seconds`.

    Collectives: messages between them, barriers and gathers over the timer's world."""
    compute = products(_TURN_PRODUCTS, timer.device)
    in_turn = round_trip(measured, torch.zeros(1, device=timer.device), compute)
    # Alternate between the two, because the machine's speed drifts.
    each, runs = seconds / (2 * _REPETITIONS), (compute, in_turn)
    rounds = [[timer.together(run, seconds=each) for run in runs] for _ in range(_REPETITIONS)]
    columns = (sorted(timings, key=lambda timing: timing.seconds) for timings in zip(*rounds, strict=True))
    idle = measured.edges is None
    times = (timer.over_ranks(timings[_REPETITIONS // 2], idle=idle) for timings in columns)
    return TurnTime(at_once=next(times), in_turn=next(times))

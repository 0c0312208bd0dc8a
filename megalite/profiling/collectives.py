"""What the ranks run on, and what moves between them: collectives inside a node and across, messages between neighbours.

Every group of a kind works at once, as the groups of a training run do: the ranks of a node share its links and adapters.
"""

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
    memory_bytes: int  # of one rank: a GPU's, or its equal share of the node's
    multiprocessors: int  # of a GPU; 1 on a CPU
    threads: int  # that torch computes with, per rank
    cores: int  # of a node that these processes may use
    nodes: int
    ranks_per_node: int
    accelerators_per_node: int  # GPUs of a node, also those that measure nothing; on a CPU its ranks
    torch_version: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def crowded(self) -> bool:
        """Ranks and their threads outnumber the cores."""
        return self.shares_cores and self.ranks_per_node * self.threads > self.cores

    @property
    def ranks_per_core(self) -> float:
        """Where they outnumber the cores; else 1."""
        return self.ranks_per_node * self.threads / self.cores if self.crowded else 1.0

    @property
    def shares_cores(self) -> bool:
        """Ranks of a node compete for its cores and its memory's bandwidth."""
        return self.device_type == "cpu" and self.ranks_per_node > 1


def describe_machine(world: Group, *, node: str | None = None) -> Machine:
    """Asks every rank for its host (unless `node` is its name) and its device. Raises ConfigError if devices or numbers
    of threads differ, or the ranks of nodes are unequal in number or not consecutive; the same on every rank.
    Collectives: a gather over the world."""
    device = world.device
    name, memory, multiprocessors = device_facts(device)
    mine = [platform.node() if node is None else node, name, torch.get_num_threads()]
    rows = world.gather_json(mine)
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
    """Ranks of each node, from the host of each rank. Raises ConfigError: not the same number on each, or ranks of one
    are not consecutive."""
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
    """(name, bytes of memory, multiprocessors)."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return facts.name, int(facts.total_memory), int(facts.multi_processor_count)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpuinfo = Path("/proc/cpuinfo")  # where Linux says the model; elsewhere the architecture is the name
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    model = re.search(r"^model name[ \t]*:[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE)
    return model[1] if model else platform.machine() or "CPU", memory, 1


OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    operation: str  # one of OPERATIONS, or `p2p`
    place: str  # `inside` a node, through its `memory`, or `across` nodes
    ranks: int  # of the group
    message_bytes: int  # the whole tensor: what is reduced, gathered, scattered or exchanged by one rank
    timing: Timing

    @property
    def latencies(self) -> float:
        """That follow each other: n - 1 in a ring inside a node, the depth of a tree across nodes, 1 of a message."""
        if self.operation == "p2p" or self.place == "memory":
            return 1.0
        depth = self.ranks - 1 if self.place == "inside" else math.ceil(math.log2(self.ranks))
        return 2.0 * depth if self.operation == "all-reduce" else float(depth)

    @property
    def wire_bytes(self) -> float:
        """What a rank sends: (n - 1)/n of the whole with a ring, twice that for an all-reduce, all of a message; or what it
        writes to memory and reads there."""
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
class Channels:
    """The groups of one place that this rank is in."""

    place: str
    groups: tuple[Group, ...]  # one for each size
    edges: tuple[Group, Group] | None = None  # to a neighbour of that kind and back; None: this rank has none


def make_channels(
    machine: Machine, rank: int, device: torch.device, *, made: ProcessGroups | None = None
) -> list[Channels]:
    """Groups inside a node (of 2 ranks and of all), and across nodes (one rank of each), with a pair for messages; and those
    inside a node once more as tensor-parallel ranks have them, where these exchange through its memory.

    Collectives: makes process groups (`made` as for `Topology.create`); every rank calls it at the same time."""
    made = {} if made is None else made
    local, nodes = machine.ranks_per_node, machine.nodes

    def topology(*, shared_memory: bool = False, **axes: int | str) -> Topology:
        layout = ParallelLayout(**axes)  # type: ignore[arg-type]
        return Topology.create(layout, rank=rank, device=device, made=made, shared_memory=shared_memory)

    found = []
    if local > 1:
        sizes = sorted({2, local} if local % 2 == 0 else {local})
        groups, shared = (
            tuple(topology(tp=size, dp=local * nodes // size, shared_memory=through).tp for size in sizes)
            for through in (False, True)
        )
        # With an odd number the first two ranks of each node exchange messages, and the rest look on.
        pair = 2 if local % 2 == 0 else local
        neighbours = topology(pp=pair, dp=local * nodes // pair, order="tp-cp-ep-pp-dp")
        found.append(Channels(place="inside", groups=groups, edges=_first_pair(neighbours)))
        if all(group.memory is not None for group in shared):
            found.append(Channels(place="memory", groups=shared))
    if nodes > 1:
        pair = 2 if nodes % 2 == 0 else nodes
        across = topology(tp=local, dp=nodes).dp
        neighbours = topology(tp=local, pp=pair, dp=nodes // pair, order="tp-cp-ep-pp-dp")
        found.append(Channels(place="across", groups=(across,), edges=_first_pair(neighbours)))
    return found


def _first_pair(topology: Topology) -> tuple[Group, Group] | None:
    """The groups of pipeline ranks 0 -> 1 and 1 -> 0 of this rank's pipeline."""
    return None if topology.pp.rank > 1 else (topology.edges[0, 1], topology.edges[1, 0])


def message_sizes(*, smallest: int = 1 << 10, largest: int, count: int) -> list[int]:
    """Bytes, `count` powers of two from smallest to largest, evenly spread."""
    low, high = smallest.bit_length() - 1, max(smallest, largest).bit_length() - 1
    steps = max(1, min(count - 1, high - low))
    return sorted({1 << (low + round((high - low) * index / steps)) for index in range(steps + 1)})


def measure_collectives(
    timer: Timer, channels: Channels, *, sizes: Sequence[int], seconds: float
) -> Iterator[CollectiveTime]:
    """Every operation at every size, `seconds` in all.

    Collectives: those that are measured, and barriers and gathers over the timer's world."""
    each = seconds / max(1, len(sizes) * (1 + len(channels.groups) * len(OPERATIONS)))
    shared = channels.place == "memory"
    for size in sizes:
        for group in channels.groups:
            for operation in SHARED_PASSES if shared else OPERATIONS:
                run, whole = collective(operation, group, size, timer.device)
                timing = timer.over_ranks(timer.amid(run, seconds=each))
                yield CollectiveTime(
                    operation=operation, place=channels.place, ranks=group.size, message_bytes=whole, timing=timing
                )
        if not shared:
            yield _messages(timer, channels, size, each)


def collective(operation: str, group: Group, size: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """The call, and the bytes of its whole tensor: `size` rounded up to equal parts."""
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


def _messages(timer: Timer, channels: Channels, size: int, seconds: float) -> CollectiveTime:
    """There and back again between neighbours; half of it is one message."""
    tensor = torch.zeros(max(1, size // 4), device=timer.device)
    run = there_and_back(channels, tensor)
    both = timer.over_ranks(timer.amid(run, seconds=seconds), idle=channels.edges is None)
    return CollectiveTime(
        operation="p2p",
        place=channels.place,
        ranks=2,
        message_bytes=tensor.numel() * tensor.element_size(),
        timing=Timing(seconds=both.seconds / 2, spread=both.spread, samples=both.samples),
    )


def there_and_back(
    channels: Channels, tensor: torch.Tensor, compute: Callable[[], None] | None = None
) -> Callable[[], None]:
    """A message to the neighbour and one back; each sends when it has computed, the second after it has received. Nothing
    on a rank without a neighbour."""
    edges = channels.edges

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


_TURN_PRODUCTS = 60  # of 256 x 256 matrices: some 20 ms on its own core, as a microbatch takes on a stage
_LOOKS = 4


@dataclass(frozen=True, kw_only=True)
class TurnTime:
    """The same computation, by all ranks at once and by the two ranks of each pair in turn."""

    at_once: Timing
    in_turn: Timing  # of both, one after the other, with a message each way

    @property
    def speedup(self) -> float:
        """Of a rank while every second one waits."""
        return 2.0 * self.at_once.seconds / self.in_turn.seconds


def measure_turns(timer: Timer, channels: Channels, *, seconds: float) -> TurnTime:
    """Pairs of neighbours inside a node, for about `seconds`.

    Collectives: messages between them, barriers and gathers over the timer's world."""
    compute = products(_TURN_PRODUCTS, timer.device)
    in_turn = there_and_back(channels, torch.zeros(1, device=timer.device), compute)
    # The machine's speed drifts: both are looked at in turns.
    looks = [[timer.together(run, seconds=seconds / (2 * _LOOKS)) for run in (compute, in_turn)] for _ in range(_LOOKS)]
    idle = channels.edges is None
    middle = (sorted(timings, key=lambda timing: timing.seconds)[_LOOKS // 2] for timings in zip(*looks, strict=True))
    times = (timer.over_ranks(timing, idle=idle) for timing in middle)
    return TurnTime(at_once=next(times), in_turn=next(times))

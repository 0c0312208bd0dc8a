"""Process groups without peers, which record operations and send nothing; and proofs from the records of all ranks.

Operations must match and must not deadlock; lost overlap is found too. NCCL runs the operations of a communicator in the
order in which they were started, so waiting for one waits for all earlier ones too. The compute stream waits as its
program does."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.rehearsal.device import DEVICE, Device
from megalite.topology.group import CPU, DONE, Group, Work
from megalite.topology.host_memory import HostCopy
from megalite.topology.layout import ParallelLayout
from megalite.topology.sanitizer import calling_line
from megalite.topology.topology import Topology, group_sources
from megalite.watchdog.heartbeat import Heartbeat

# Parts may differ between ranks: a rank with a key/value head that several ranks use sends it to all of them.
UNEVEN = "all_to_all of uneven parts"


class Operation(NamedTuple):
    """A communication that one rank starts."""

    kind: str  # kind of group, e.g. `tp`; `edge` for a pipeline edge
    ranks: tuple[int, ...]
    queue: str  # (queue, ranks) is the communicator, which runs its operations in order
    name: str  # `all_reduce sum`, `send`, ...
    elements: int
    dtype: str
    nbytes: int
    place: str  # `file:line` of its start
    running: str  # pipeline action or phase of the step at its start

    def __str__(self) -> str:
        ranks = f"[{', '.join(map(str, self.ranks[:4]))}{', ...' if len(self.ranks) > 4 else ''}]"
        return f"{self.name} of {self.elements} {self.dtype} over {self.kind} {ranks} at {self.place} in {self.running}"


class Event(NamedTuple):
    """A rank starts, or waits for, its operation `number`."""

    number: int
    waits: bool
    kernels: int  # launched before


@dataclass
class Journal:
    """Communication of one rank, in order."""

    device: Device
    operations: list[Operation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def start(self, operation: Operation) -> "_Recorded":
        self.operations.append(operation)
        self.record(len(self.operations) - 1, waits=False)
        return _Recorded(self, len(self.operations) - 1)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the device, which cannot be sent between processes."""
        return {"operations": self.operations, "events": self.events, "device": None}

    def record(self, number: int, *, waits: bool) -> None:
        self.events.append(Event(number, waits, self.device.launched))


@dataclass(eq=False)
class _Recorded:
    """A started operation."""

    journal: Journal | None
    number: int

    def wait(self) -> None:
        journal, self.journal = self.journal, None
        if journal is not None:
            journal.record(self.number, waits=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class RehearsedGroup(Group):
    """`Group` on NCCL as seen by one rank. Known values are assumed to be equal on all ranks."""

    journal: Journal
    queue: str

    @property
    def _uses_gloo(self) -> bool:
        return False

    def _record(self, name: str, tensor: Tensor) -> Work:
        if self.size == 1:
            return DONE
        what = name, tensor.numel(), str(tensor.dtype).removeprefix("torch."), tensor.nbytes
        where = calling_line(), self.journal.device.running
        return self.journal.start(Operation(self.name, self.ranks, self.queue, *what, *where))

    def _values(self, tensor: Tensor) -> Tensor | None:
        return tensor if tensor.device.type == "cpu" else self.journal.device.values_of(tensor)

    def _give(self, tensor: Tensor, values: Tensor) -> None:
        if tensor.device.type == "cpu":
            tensor.copy_(values)
        else:
            self.journal.device.set_values(tensor, values.clone())

    def all_reduce_async(self, tensor: Tensor, *, op: str = "sum") -> Work:
        values = self._values(tensor)
        if values is not None and op == "sum" and self.size > 1:
            self._give(tensor, values * self.size)
        return self._record(f"all_reduce {op}", tensor)

    def all_gather_async(self, output: Tensor, part: Tensor) -> Work:
        values = self._values(part)
        if values is not None:
            self._give(output, values.repeat(self.size, *[1] * (values.dim() - 1)).view(output.shape))
        return self._record("all_gather", part)

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._record("reduce_scatter", tensor)

    def all_to_all_async(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Work:
        values = self._values(tensor)
        if values is not None:
            self._give(output, values)
        return self._record(UNEVEN, tensor)

    def all_to_all_equal_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._record("all_to_all", tensor)

    def rotate_async(self, tensor: Tensor) -> tuple[Tensor, Work]:
        return (tensor, DONE) if self.size == 1 else (torch.empty_like(tensor), self._record("rotate", tensor))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        self._record(f"broadcast from {source}", tensor).wait()

    def send_async(self, tensor: Tensor, *, to: int) -> Work:
        return self._record("send", tensor)

    def receive_async(self, tensor: Tensor, *, source: int) -> Work:
        return self._record("receive", tensor)

    def gather_json(self, value: Any) -> list[Any]:
        self._exchange_text("gather_json")
        return [value] * self.size

    def broadcast_json(self, value: Any) -> Any:
        self._exchange_text("broadcast_json")
        return value

    def _exchange_text(self, name: str) -> None:
        """Record an exchange of variable length, which may differ by rank; a device waits for the length and the text."""
        self._record(name, torch.empty(0, dtype=torch.uint8)).wait()
        for _ in range(2 if self.size > 1 and self.device.type == DEVICE.type else 0):
            self.journal.device.synchronise("reads text of other ranks")

    def raise_on_all_ranks(self, error: BaseException | None) -> None:
        self._exchange_text("gather_json")
        if error is not None:
            raise error

    def copy_to_host(self, tensor: Tensor) -> HostCopy:
        return HostCopy(tensor) if tensor.device.type == "cpu" else RehearsedCopy(tensor, self.journal.device)


class RehearsedCopy(HostCopy):
    """A read in the action that started the copy synchronises; a read in a later action counts as a late read."""

    def __init__(self, tensor: Tensor, device: Device) -> None:
        values = device.values_of(tensor)
        super().__init__(torch.zeros(tensor.shape, dtype=tensor.dtype) if values is None else values.clone())
        self._device: Device | None = device
        self._began = device.running, device.launched

    def read(self) -> Tensor:
        device, self._device = self._device, None
        if device is not None:
            action, launched = self._began
            if device.running == action:
                device.synchronise("copies to the host")
            else:
                device.read_later(device.launched - launched)
        return super().read()


class RehearsedHeartbeat(Heartbeat):
    """Stores the running phase or action in the device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def phase(self, name: str, *, patient: bool = False) -> None:
        self._device.running = name

    def begin_action(self, action: bytes, position: int) -> None:
        self._device.running = action.decode()


def rehearsed_topology(layout: ParallelLayout, rank: int, journal: Journal, *, separate_gathers: bool) -> Topology:
    """Return the topology of `rank`, as `Topology.create` would build it on NCCL."""
    heartbeat = RehearsedHeartbeat(journal.device)

    def group(kind: str, ranks: tuple[int, ...] | None, queue: str) -> Group | None:
        if ranks is None:
            return None
        return RehearsedGroup(
            name=kind,
            ranks=ranks,
            rank=ranks.index(rank),
            heartbeat=heartbeat,
            device=CPU if queue == "host" else DEVICE,
            journal=journal,
            queue=queue,
        )

    sources = group_sources(layout, separate_gathers=separate_gathers)
    groups = {name: group(kind, layout.group_of(kind, rank), queue) for name, (kind, queue) in sources.items()}
    groups["host"] = group("host", layout.group_of("world", rank), "host")
    pipeline = layout.group_of("pp", rank)
    assert pipeline is not None
    edges = {
        (pipeline.index(pair[0]), pipeline.index(pair[1])): group("edge", pair, "edge")
        for pair in layout.pipeline_edges()
        if rank in pair
    }
    return Topology(
        layout=layout,
        rank=rank,
        coordinate=layout.coordinate(rank),
        device=DEVICE,
        edges=edges,  # type: ignore[arg-type]
        **groups,  # type: ignore[arg-type]
    )


Communicator = tuple[str, tuple[int, ...]]  # (queue, ranks)
_PARTNER = {"send": "receive", "receive": "send"}


def _of(operation: Operation) -> Communicator:
    return operation.queue, operation.ranks


def _by_communicator(journal: Journal) -> dict[Communicator, list[Operation]]:
    found: dict[Communicator, list[Operation]] = defaultdict(list)
    for operation in journal.operations:
        found[_of(operation)].append(operation)
    return found


def _matches(left: Operation, right: Operation) -> bool:
    wanted = _PARTNER.get(left.name, left.name)
    return (wanted, left.elements, left.dtype) == (right.name, right.elements, right.dtype)


def mismatches(journals: Mapping[int, Journal]) -> Iterator[str]:
    """Yield the first operation at which two ranks of a communicator differ, per communicator."""
    first: dict[Communicator, tuple[int, list[Operation]]] = {}
    for rank, journal in journals.items():
        for communicator, operations in _by_communicator(journal).items():
            other, expected = first.setdefault(communicator, (rank, operations))
            if other == rank:
                continue
            for number, (left, right) in enumerate(zip_longest(expected, operations)):
                if left is None or right is None or not _matches(left, right):
                    yield f"operation {number} differs: rank {other} starts {_describe(left)}; rank {rank} {_describe(right)}"
                    break


def _describe(operation: Operation | None) -> str:
    return "nothing more" if operation is None else str(operation)


def asymmetries(one: tuple[int, Journal], other: tuple[int, Journal]) -> Iterator[str]:
    """Yield the first difference between two ranks of the same pipeline rank. Without one, the ranks between these two
    corners of the grid are assumed to do the same."""
    (rank, journal), (peer, other_journal) = one, other
    for left, right in zip_longest(journal.events, other_journal.events):
        own = None if left is None else (left.waits, *_signature(journal.operations[left.number]))
        expected = None if right is None else (right.waits, *_signature(other_journal.operations[right.number]))
        if own != expected:
            first, second = (
                "nothing more"
                if event is None
                else f"{'waits for' if event.waits else 'starts'} {source.operations[event.number]}"
                for event, source in ((left, journal), (right, other_journal))
            )
            yield f"ranks {rank} and {peer} are at the same place, but rank {rank} {first}; rank {peer} {second}"
            return


def _signature(operation: Operation) -> tuple[str, str, str, int, str]:
    elements = 0 if operation.name == UNEVEN else operation.elements
    return operation.kind, operation.queue, operation.name, elements, operation.dtype


def deadlock(journals: Mapping[int, Journal]) -> str | None:
    """Simulate the ranks; None if all finish, else a text on who waits for whom. `journals`: of one pipeline or a whole
    world; operations of other ranks are assumed to arrive."""
    order: dict[int, list[int]] = {}  # rank -> index of each operation within its communicator
    started: dict[Communicator, dict[int, int]] = defaultdict(dict)  # number of operations started, by rank
    for rank, journal in journals.items():
        counts: Counter[Communicator] = Counter()
        order[rank] = []
        for operation in journal.operations:
            order[rank].append(counts[_of(operation)])
            counts[_of(operation)] += 1
        for communicator in counts:
            started[communicator][rank] = 0
    at = dict.fromkeys(journals, 0)
    waiting: dict[int, Operation] = {}
    ready = set(journals)
    while ready:
        rank = ready.pop()
        journal = journals[rank]
        while at[rank] < len(journal.events):
            event = journal.events[at[rank]]
            operation, number = journal.operations[event.number], order[rank][event.number]
            communicator = _of(operation)
            if event.waits:
                if min(started[communicator].values()) <= number:
                    waiting[rank] = operation
                    break
            else:
                started[communicator][rank] += 1
                ready.update(other for other in started[communicator] if waiting.pop(other, None) is not None)
            at[rank] += 1
    if not waiting:
        return None
    rank = next(iter(waiting))
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        counts_started = started[_of(waiting[rank])]
        rank = min(counts_started, key=counts_started.__getitem__)
        if rank not in waiting:
            chain.append(rank)
            break
    lines = [f"rank {one} waits for {waiting[one]}" if one in waiting else f"rank {one} has ended" for one in chain]
    return "these ranks wait for each other and will not continue: " + "; ".join(lines)


class Covered(NamedTuple):
    """A wait that also waits for another operation, which should have overlapped with further kernels."""

    waited: str  # the operation waited for, without sizes
    covered: str
    times: int
    kernels: int  # least number of kernels of lost overlap


def covered(journal: Journal, first: int = 0) -> list[Covered]:
    """Return overlap lost to the order of operations on a communicator, without waits for operations before `first`."""
    waited_at = {event.number: event.kernels for event in journal.events if event.waits}
    open_: dict[Communicator, list[int]] = defaultdict(list)
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in journal.events:
        operation = journal.operations[event.number]
        pending = open_[_of(operation)]
        if not event.waits:
            pending.append(event.number)
            continue
        if event.number in pending:
            pending.remove(event.number)
        for number in pending:
            if number < event.number >= first and waited_at.get(number, 0) > event.kernels:
                key = _named(operation), _named(journal.operations[number])
                found[key].append(waited_at[number] - event.kernels)
    return [Covered(waited, other, len(early), min(early)) for (waited, other), early in found.items()]


def _named(operation: Operation) -> str:
    return f"{operation.name} over {operation.kind} at {operation.place}"

"""Check the journals of all ranks: operations must match and must not deadlock; and find lost overlap.

NCCL runs the operations of a communicator in the order in which they were started, so waiting for one waits for all
earlier ones too. A rank's compute stream waits as its program does.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

from megalite.rehearsal.groups import UNEVEN, Journal, Operation

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

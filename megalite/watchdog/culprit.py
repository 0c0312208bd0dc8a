"""Who stands still, and who only waits for it.

Every rank of a group begins the same operations in the same order, so their counts say who waits for whom: a rank that
waits for operation n of a group waits for those that have begun fewer. Whoever is waited for and waits for nobody is to
blame. Where all wait, one has left an operation out, or begun another one than the others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.watchdog.layout import RECENT
from megalite.watchdog.rank_state import Operation, RankState

_LOST = {
    "stopped": "its process is stopped (SIGSTOP, or a job scheduler has suspended it)",
    "gone": "its process has ended",
}


@dataclass(frozen=True)
class Wait:
    """A rank waits in an operation."""

    rank: int
    lane: str
    operation: str
    number: int
    behind: tuple[int, ...]
    """Ranks of the group that have not begun it; empty: all have."""

    def __str__(self) -> str:
        words = f"waits in {self.operation} {self.number} of {self.lane}"
        if self.behind:
            return (
                f"{words}, which {_ranks(self.behind)} {'has' if len(self.behind) == 1 else 'have'} not begun"
            )
        return f"{words}, which all that can be seen have begun"


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, and why."""

    culprits: tuple[int, ...]
    """Ascending; empty if it cannot be told."""
    reasons: Mapping[int, str]
    """By rank: of a culprit what is wrong with it, of another what it waits for."""


def find_culprits(states: Sequence[RankState]) -> Verdict:
    """Judge ranks that have not progressed, as they were last seen."""
    by_rank = {state.rank: state for state in states}
    waits = [wait for state in states for wait in _waits(state, states)]
    reasons = {wait.rank: str(wait) for wait in waits}
    lost = {
        rank: _LOST.get(state.process, "it has failed") for rank, state in by_rank.items() if state.is_lost
    }
    if lost:
        return _verdict(lost, reasons)
    left = [state.rank for state in states if state.phase == "ended"]
    waiting = {wait.rank for wait in waits}
    free = set(by_rank) - waiting
    blamed = free & {rank for wait in waits for rank in wait.behind}
    # A rank that nobody waits for may compute for long, as those that work apart do; it is named if nobody else can be.
    for rank in sorted(blamed or free - set(left) or free):
        lost[rank] = "it has ended, and others wait for it" if rank in left else "it waits for no other rank"
    if lost:
        return _verdict(lost, reasons)
    return _verdict(find_unlike(states) or _went_past(waits, by_rank), reasons)


def _waits(state: RankState, states: Sequence[RankState]) -> list[Wait]:
    if state.process == "gone":
        return []
    found = []
    for name, lane in state.lanes.items():
        if lane.waiting:
            peers = [other for other in states if name in other.lanes and other.rank != state.rank]
            behind = tuple(sorted(peer.rank for peer in peers if peer.lanes[name].begun < lane.waiting))
            operation = lane.operation(lane.waiting)
            what = "operation" if operation is None else operation.name
            found.append(Wait(state.rank, name, what, lane.waiting, behind))
    return found


def find_unlike(states: Sequence[RankState]) -> dict[int, str]:
    """Ranks that began another operation of a group than the others, under the same number."""
    wrong: dict[int, str] = {}
    for name in sorted({name for state in states for name in state.lanes}):
        lanes = {state.rank: state.lanes[name] for state in states if name in state.lanes}
        last = min(lane.begun for lane in lanes.values())
        for number in range(max(1, last - RECENT), last + 1):
            found = {rank: lane.operation(number) for rank, lane in lanes.items()}
            operations = {rank: operation for rank, operation in found.items() if operation is not None}
            # Messages are matched by their direction, not by their number.
            messages = {operation.name for operation in operations.values()} & {"send", "receive"}
            if len(operations) == len(lanes) and not messages:
                unlike = _minority(operations)
                for rank in unlike:
                    other = next(peer for peer, one in operations.items() if one[:2] != operations[rank][:2])
                    wrong[rank] = (
                        f"its operation {number} of {name} is {operations[rank]}, but {operations[other]} on rank {other}"
                    )
                if unlike:
                    break  # what comes after it is shifted
    return wrong


def _minority(operations: Mapping[int, Operation]) -> list[int]:
    """The ranks whose operation is not the common one; where there is none, those that did another one a step before."""
    kinds = Counter(operation[:2] for operation in operations.values())
    if len(kinds) == 1:
        return []
    (common, most), (_, second), *_ = kinds.most_common()
    if most > second:
        return [rank for rank, operation in operations.items() if operation[:2] != common]
    odd = [rank for rank, operation in operations.items() if operation.odd]
    return odd if 0 < len(odd) < len(operations) else list(operations)


def _went_past(waits: Sequence[Wait], by_rank: Mapping[int, RankState]) -> dict[int, str]:
    """All wait, in a ring: who is further in the program than those that still wait for it has left something out."""
    votes: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    for wait in waits:
        for rank in wait.behind:
            if by_rank[rank].place > by_rank[wait.rank].place:
                votes[rank] += 1
                begun = by_rank[rank].lanes[wait.lane].begun
                reasons[rank] = (
                    f"it has gone past {wait.operation} {wait.number} of {wait.lane} (it has begun {begun}), in which "
                    f"{_ranks([wait.rank])} waits for it"
                )
    most = max(votes.values(), default=0)
    return {rank: reasons[rank] for rank, count in votes.items() if count == most}


def _verdict(culprits: Mapping[int, str], reasons: Mapping[int, str]) -> Verdict:
    return Verdict(tuple(sorted(culprits)), {**reasons, **culprits})


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"

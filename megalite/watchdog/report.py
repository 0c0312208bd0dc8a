"""Finds the rank that caused a hang, and writes the report: text, JSON, and the error file of each rank for torchrun.

Heartbeats contain the operations that a host has queued. torch's flight recorder (at the end of this file) records
which of them a device has started and finished."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.config.errors import HUNG
from megalite.watchdog.heartbeat import RECENT, SYNCHRONISE, Operation, RankState
from megalite.watchdog.processes import in_the_kernel

_LOST = {
    "stopped": "its process is stopped (SIGSTOP, or a job scheduler has suspended it)",
    "gone": "its process has ended",
}


@dataclass(frozen=True)
class Wait:
    """An operation in which a rank waits."""

    rank: int
    lane: str
    operation: str
    number: int
    behind: tuple[int, ...]  # ranks of the group that have not begun it
    on_device: bool = False
    """The host waits for the device, on which the operation is queued. If `behind` is empty, it waits for no rank."""

    def __str__(self) -> str:
        if self.on_device and not self.behind:
            return "waits for its device, and all that can be seen have begun what is queued there"
        words = f"waits in {self.operation} {self.number} of {self.lane}"
        if self.on_device:
            words = f"waits for its device, where {self.operation} {self.number} of {self.lane} is queued"
        if self.behind:
            return f"{words}, which {_ranks(self.behind)} {'has' if len(self.behind) == 1 else 'have'} not begun"
        return f"{words}, which all that can be seen have begun"


@dataclass(frozen=True)
class Verdict:
    """The ranks that caused a hang, and a reason for each rank."""

    culprits: tuple[int, ...]  # ascending; empty if they cannot be determined
    reasons: Mapping[int, str]  # by rank: the fault of a culprit, the operation in which another rank waits


def find_culprits(states: Sequence[RankState]) -> Verdict:
    """Find the culprits from the last states of ranks that make no progress."""
    by_rank = {state.rank: state for state in states}
    waits = [wait for state in states for wait in _waits(state, states)]
    reasons = {wait.rank: str(wait) for wait in waits}
    lost = {rank: _LOST.get(state.process, "it has failed") for rank, state in by_rank.items() if state.is_lost}
    if lost:
        return _verdict(lost, reasons)
    left = [state.rank for state in states if state.phase == "ended"]
    waiting = {wait.rank for wait in waits}
    free = set(by_rank) - waiting
    awaited = {rank for wait in waits for rank in wait.behind}
    blamed = free & awaited
    if not blamed:
        on_ranks = {wait.rank for wait in waits if wait.behind or not wait.on_device}
        for rank in sorted(waiting & awaited - on_ranks):
            lost[rank] = "its device has not finished what it has to do, and waits for no other rank"
        if lost:
            return _verdict(lost, reasons)
    # A rank for which no other waits may only compute for long. It is a culprit only if there is no other candidate.
    for rank in sorted(blamed or free - set(left) or free):
        lost[rank] = "it has ended, and others wait for it" if rank in left else "it waits for no other rank"
    if lost:
        return _verdict(lost, reasons)
    return _verdict(find_mismatched_operations(states) or _ranks_ahead(waits, by_rank), reasons)


def _waits(state: RankState, states: Sequence[RankState]) -> list[Wait]:
    if state.process == "gone":
        return []
    found, device = [], state.reads_device
    for name, lane in state.lanes.items():
        # A host that waits for its device waits for the last queued operation of every group.
        number = lane.waiting or (lane.begun if device else 0)
        if number:
            peers = [other for other in states if name in other.lanes and other.rank != state.rank]
            behind = tuple(sorted(peer.rank for peer in peers if peer.lanes[name].begun < number))
            operation = lane.operation(number)
            what = "operation" if operation is None else operation.name
            queued = device and (not lane.waiting or name.startswith(SYNCHRONISE))
            found.append(Wait(state.rank, name, what, number, behind, on_device=queued))
    # An operation on the device explains the wait only if some rank has not begun it.
    return [wait for wait in found if wait.behind or not wait.on_device] or found[:1]


def find_mismatched_operations(states: Sequence[RankState]) -> dict[int, str]:
    """Return the ranks that began another operation than their group under the same number, and the reasons."""
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
                minority = _minority(operations)
                for rank in minority:
                    other = next(peer for peer, one in operations.items() if one[:2] != operations[rank][:2])
                    wrong[rank] = (
                        f"its operation {number} of {name} is {operations[rank]}, but {operations[other]} on rank {other}"
                    )
                if minority:
                    break  # the numbers of later operations no longer correspond
    return wrong


def _minority(operations: Mapping[int, Operation]) -> list[int]:
    """Return the ranks that differ from the most common operation. On a tie, return those that differ from their own
    previous step, or all ranks."""
    kinds = Counter(operation[:2] for operation in operations.values())
    if len(kinds) == 1:
        return []
    (common, most), (_, second), *_ = kinds.most_common()
    if most > second:
        return [rank for rank, operation in operations.items() if operation[:2] != common]
    odd = [rank for rank, operation in operations.items() if operation.odd]
    return odd if 0 < len(odd) < len(operations) else list(operations)


def _ranks_ahead(waits: Sequence[Wait], by_rank: Mapping[int, RankState]) -> dict[int, str]:
    """Resolve a ring of waits: a rank that is ahead, in the program, of one that waits for it skipped an operation."""
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


_MOST_FRAMES, _MOST_RANKS, _MOST_STUCK = 8, 64, 4
_BETWEEN = ("torch/nn/modules/module.py", "torch/autograd/function.py")
"""Files of torch with frames that are left out of a stack."""
_INDENT = "    "
_NO_WAIT = "waits for no other rank"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was observed about a hung run."""

    silent: float  # seconds since the newest beat of this host's ranks
    limit: float  # most seconds without a beat
    verdict: Verdict
    states: Sequence[RankState]  # of all ranks that were heard
    stacks: Mapping[int, str]  # by rank of this host, as faulthandler writes them
    flight: Mapping[int, Sequence[Mapping[str, Any]]]  # by rank of this host: entries as `condensed` returns them
    kernel: Mapping[int, str]  # by rank of this host: the kernel function in which its process sleeps
    unheard: Sequence[str]  # hosts that published no states
    world_size: int

    @property
    def headline(self) -> str:
        """Name each culprit and its fault: `rank 1 stands still: its process is stopped ...`."""
        if not self.verdict.culprits:
            all_wait = (
                "no rank can be distinguished from the others: all wait, and each has begun what the others wait for"
            )
            return "; ".join([all_wait, *stuck_operations(self.flight)[:1]])
        return "; ".join(f"rank {rank} stands still: {self.verdict.reasons[rank]}" for rank in self.verdict.culprits)

    def summary(self, written: Path | None) -> str:
        """Return the lines for stderr."""
        lines = [
            f"megalite: {self.headline}",
            f"{_INDENT}no rank of {self.world_size} has progressed for {self.silent:.1f} s (limit "
            f"{self.limit:g} s, --hang-timeout-minutes); the run is ended with status {HUNG}",
        ]
        for state in self._in_order():
            reason = self.verdict.reasons.get(state.rank, _NO_WAIT)
            is_culprit = state.rank in self.verdict.culprits
            lines.append(f"{_INDENT}rank {state.rank}{'' if is_culprit else f' {reason}'}: {state.doing()}")
        lines += self._notes()
        where = f"stacks of all ranks: {written}" if written else "the report is below, not in a file"
        lines.append(f"{_INDENT}{where}")
        return "\n".join(lines) + "\n"

    def text(self) -> str:
        """Return the whole report."""
        lines = [
            self.headline,
            "",
            f"No rank of {self.world_size} has progressed for {self.silent:.1f} s; the limit is {self.limit:g} s "
            f"(--hang-timeout-minutes). The run was ended with status {HUNG}.",
            *(line.strip() for line in self._notes()),
            "",
        ]
        for state in self._in_order():
            lines.append(f"rank {state.rank}: {self.verdict.reasons.get(state.rank, _NO_WAIT)}")
            lines.append(f"{_INDENT}{state.doing()}")
            asleep = self.kernel.get(state.rank)
            lines.append(
                f"{_INDENT}process {state.pid} on {state.host}: {state.process}, last beat {state.silent:.1f} s ago"
                f"{f', asleep in the kernel in {asleep}' if asleep else ''}"
            )
            if entry := oldest(self.flight.get(state.rank, ())):
                lines.append(
                    f"{_INDENT}flight recorder: {entry['op']} {entry['seq']} of {entry['group']}, {entry['state']}"
                )
            frames = main_thread(self.stacks.get(state.rank, ""))
            lines += [f"{_INDENT}{frame}" for frame in frames]
        for rank, stack in sorted(self.stacks.items()):
            lines += ["", f"===== all threads of rank {rank} =====", stack or "(it did not answer)"]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as JSON."""
        return {
            "format": 1,
            "culprits": list(self.verdict.culprits),
            "reasons": {str(rank): reason for rank, reason in sorted(self.verdict.reasons.items())},
            "seconds_silent": round(self.silent, 3),
            "limit_seconds": self.limit,
            "exit_status": HUNG,
            "hosts_unheard": list(self.unheard),
            "ranks": [asdict(state) for state in self.states],
            "kernel": {str(rank): name for rank, name in self.kernel.items()},
            "flight": {str(rank): list(entries) for rank, entries in self.flight.items()},
            "stacks": {str(rank): stack for rank, stack in self.stacks.items()},
        }

    def error_of(self, rank: int, now: float) -> dict[str, Any]:
        """Return the error file of a rank. torchrun reports the rank with the earliest timestamp, in whole seconds, as
        root cause. `now`: seconds since the epoch, the same for all ranks, as a second may begin between two calls."""
        state = next(state for state in self.states if state.rank == rank)
        if rank in self.verdict.culprits:
            message = f"rank {rank} stood still: {self.verdict.reasons[rank]}; {state.doing()}"
            since = now - max(1.0, state.silent)
        else:
            culprits = ", ".join(map(str, self.verdict.culprits)) or "unknown"
            reason = self.verdict.reasons.get(rank, _NO_WAIT)
            message = f"rank {rank} did not cause the hang (culprit: {culprits}): it {reason}; {state.doing()}"
            since = now
        shown = "\n".join([message, *main_thread(self.stacks.get(rank, ""))])
        extra = {"py_callstack": shown, "timestamp": str(int(since))}
        return {"message": {"message": message, "extraInfo": extra}}

    def _in_order(self) -> list[RankState]:
        """Return the states, culprits first, at most `_MOST_RANKS`."""
        culprits = self.verdict.culprits
        return sorted(self.states, key=lambda state: (state.rank not in culprits, state.rank))[:_MOST_RANKS]

    def _notes(self) -> list[str]:
        """Return lines about omitted ranks, unheard hosts and operations that devices have not finished."""
        lines = []
        if len(self.states) > _MOST_RANKS:
            lines.append(f"{_INDENT}({len(self.states) - _MOST_RANKS} further ranks: see the .json)")
        if self.unheard:
            lines.append(f"{_INDENT}nothing was heard of {', '.join(self.unheard)}: the culprit may be there")
        stuck = stuck_operations(self.flight)[:_MOST_STUCK]
        return lines + [f"{_INDENT}flight recorder: {line}" for line in stuck]


def kernel_functions(states: Sequence[RankState]) -> dict[int, str]:
    """Return the kernel function in which each rank's process sleeps, for ranks of this host."""
    found = {state.rank: in_the_kernel(state.pid) for state in states if state.process != "gone"}
    return {rank: name for rank, name in found.items() if name}


def main_thread(stacks: str) -> list[str]:
    """Return the innermost frames of a process's first thread, which faulthandler lists last."""
    frames: list[str] = []
    for line in stacks.splitlines():
        if "most recent call first" in line:
            frames = []
        elif line.startswith("  ") and not any(name in line for name in _BETWEEN):
            frames.append(line.strip())
    return frames[:_MOST_FRAMES]


def write_report(report: Report, folder: Path, name: str) -> Path:
    """Write NAME.txt and NAME.json, and return the path of the text. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    path = folder / f"{name}.txt"
    path.write_text(report.text())
    return path


Entry = Mapping[str, Any]
"""Entry of the flight recorder, as read from its JSON, which lists the ranks of NCCL groups but not of gloo groups."""

_NEWEST = 8
_FINISHED = "completed"


def condensed(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the newest entries of torch's trace, and each group's newest and oldest unfinished entry; oldest first.

    `{"group": "tp [0, 1]", "seq": 41, "op": "nccl:all_reduce", "state": "scheduled", "p2p": False, "ranks": [0, 1]}`;
    `ranks` is empty if torch does not record it."""
    recorded: Sequence[Mapping[str, Any]] = trace.get("entries", [])
    groups: Mapping[str, Mapping[str, Any]] = trace.get("pg_config", {})
    entries = [_entry(one, groups) for one in recorded]
    keep = set(range(len(entries))[-_NEWEST:])
    by_group: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        by_group[entry["group"], entry["p2p"]].append(index)
    for indices in by_group.values():
        keep |= {indices[-1], *[index for index in indices if entries[index]["state"] != _FINISHED][:1]}
    return [entry for index, entry in enumerate(entries) if index in keep]


def _entry(recorded: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    name, words = (*(recorded.get("process_group") or ["?"]), "")[:2]
    ranks = [int(rank) for rank in re.findall(r"\d+", str(groups.get(name, {}).get("ranks", "")))]
    p2p = bool(recorded.get("is_p2p"))
    return {
        # torch's description of a group without one is "undefined".
        "group": name if words in ("", "undefined") else words,
        "seq": recorded.get("p2p_seq_id" if p2p else "collective_seq_id", 0),
        "op": recorded.get("profiling_name", "?"),
        # The state of gloo's entries stays `scheduled`; `retired` means that the work has ended.
        "state": _FINISHED if recorded.get("retired") else recorded.get("state", "?"),
        "p2p": p2p,
        "ranks": ranks,
    }


def oldest(entries: Sequence[Entry]) -> Entry | None:
    """Return the oldest unfinished entry, or the newest if all have finished."""
    return next((entry for entry in entries if entry["state"] != _FINISHED), entries[-1] if entries else None)


def stuck_operations(flight: Mapping[int, Sequence[Entry]]) -> list[str]:
    """Describe each group's oldest unfinished operation, as in `nccl:all_reduce 41 of tp [0, 1] has not finished on
    rank 0; rank 1 has not joined`. Groups with a missing rank come first. `flight`: result of `condensed` by rank;
    ranks that did not answer are left out."""
    groups: defaultdict[tuple[str, bool], dict[int, list[Entry]]] = defaultdict(dict)
    for rank, entries in sorted(flight.items()):
        for entry in entries:
            groups[entry["group"], entry["p2p"]].setdefault(rank, []).append(entry)
    found = []
    for (group, p2p), by_rank in groups.items():
        waiting = {rank: one for rank, of in by_rank.items() if (one := oldest(of)) and one["state"] != _FINISHED}
        if not waiting:
            continue
        number = min(entry["seq"] for entry in waiting.values())
        joined = {rank: entry for rank, entry in waiting.items() if entry["seq"] == number}
        members = next((entry["ranks"] for entry in joined.values() if entry["ranks"]), list(by_rank))
        heard = [rank for rank in members if rank in flight]
        missing = [
            rank for rank in heard if max((entry["seq"] for entry in by_rank.get(rank, ())), default=-1) < number
        ]
        done = [rank for rank in heard if rank not in joined and rank not in missing]
        known = any(entry["ranks"] for entry in joined.values()) and len(heard) == len(members)
        found.append((not missing, _in_words(group, number, joined, missing=missing, done=done, known=known, p2p=p2p)))
    return [words for _, words in sorted(found, key=lambda one: one[0])]


def _in_words(
    group: str, number: int, joined: Mapping[int, Entry], *, missing: list[int], done: list[int], known: bool, p2p: bool
) -> str:
    by_operation: defaultdict[str, list[int]] = defaultdict(list)
    for rank, entry in joined.items():
        by_operation[entry["op"]].append(rank)
    (operation, ranks), *others = sorted(by_operation.items(), key=lambda item: -len(item[1]))
    if p2p:  # the two ranks have different operations: send and receive
        ranks, others = sorted(joined), []
    words = [f"{operation} {number} of {group} has not finished on {_ranks(ranks)}"]
    words += [f"{_ranks(of)} {'is' if len(of) == 1 else 'are'} in {other} instead" for other, of in others]
    started = [rank for rank, entry in joined.items() if entry["state"] == "started"]
    if started and len(started) < len(joined):
        waits = sorted(set(joined) - set(started))
        words.append(f"on {_ranks(waits)} its kernel has not started")
    if done:
        words.append(f"finished on {_ranks(done)}")
    if missing:
        words.append(f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not joined")
    elif not done and not others:
        words.append(
            "all have joined: a device or the network" if known else "of the ranks that have answered all have joined"
        )
    return "; ".join(words)

"""What torch's flight recorder says of operations that have not finished, and which ranks have not joined them.

Heartbeats know what a host has queued; the recorder knows what a device has done of it. It is read as JSON, in which torch
also has the ranks of each NCCL group (of gloo's it has none)."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]

_NEWEST = 8
_FINISHED = "completed"


def condensed(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of torch's trace the newest entries, and of each group the oldest unfinished one and the newest; oldest first.

    `{"group": "tp [0, 1]", "seq": 41, "op": "nccl:all_reduce", "state": "scheduled", "p2p": False, "ranks": [0, 1]}`; `ranks`
    is empty where torch does not say it."""
    recorded: Sequence[Mapping[str, Any]] = trace.get("entries", [])
    groups: Mapping[str, Mapping[str, Any]] = trace.get("pg_config", {})
    entries = [_entry(one, groups) for one in recorded]
    keep = set(range(len(entries))[-_NEWEST:])
    unfinished: set[tuple[str, bool]] = set()
    newest: dict[tuple[str, bool], int] = {}
    for index, entry in enumerate(entries):
        key = entry["group"], entry["p2p"]
        newest[key] = index
        if entry["state"] != _FINISHED and key not in unfinished:
            unfinished.add(key)
            keep.add(index)
    keep |= set(newest.values())
    return [entry for index, entry in enumerate(entries) if index in keep]


def _entry(recorded: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    name, words = (*(recorded.get("process_group") or ["?"]), "")[:2]
    ranks = [int(rank) for rank in re.findall(r"\d+", str(groups.get(name, {}).get("ranks", "")))]
    p2p = bool(recorded.get("is_p2p"))
    return {
        # torch calls a group without a description so.
        "group": name if words in ("", "undefined") else words,
        "seq": recorded.get("p2p_seq_id" if p2p else "collective_seq_id", 0),
        "op": recorded.get("profiling_name", "?"),
        # gloo's entries stay `scheduled`; `retired` is that the work has ended.
        "state": _FINISHED if recorded.get("retired") else recorded.get("state", "?"),
        "p2p": p2p,
        "ranks": ranks,
    }


def oldest(entries: Sequence[Entry]) -> Entry | None:
    """The oldest that has not finished, or the newest of all."""
    return next((entry for entry in entries if entry["state"] != _FINISHED), entries[-1] if entries else None)


def stuck_operations(flight: Mapping[int, Sequence[Entry]]) -> list[str]:
    """`nccl:all_reduce 41 of tp [0, 1] has not finished on rank 0; rank 1 has not joined`, of each group the oldest one.

    Groups of which a rank has not joined come first. Ranks that have said nothing are in no list. `flight`: by rank, as
    `condensed` gives it."""
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
        there = {rank: entry for rank, entry in waiting.items() if entry["seq"] == number}
        members = next((entry["ranks"] for entry in there.values() if entry["ranks"]), list(by_rank))
        heard = [rank for rank in members if rank in flight]
        missing = [
            rank for rank in heard if max((entry["seq"] for entry in by_rank.get(rank, ())), default=-1) < number
        ]
        done = [rank for rank in heard if rank not in there and rank not in missing]
        known = any(entry["ranks"] for entry in there.values()) and len(heard) == len(members)
        found.append((not missing, _in_words(group, number, there, missing=missing, done=done, known=known, p2p=p2p)))
    return [words for _, words in sorted(found, key=lambda one: one[0])]


def _in_words(
    group: str, number: int, there: Mapping[int, Entry], *, missing: list[int], done: list[int], known: bool, p2p: bool
) -> str:
    by_operation: defaultdict[str, list[int]] = defaultdict(list)
    for rank, entry in there.items():
        by_operation[entry["op"]].append(rank)
    (operation, ranks), *others = sorted(by_operation.items(), key=lambda item: -len(item[1]))
    if p2p:  # one sends and the other receives
        ranks, others = sorted(there), []
    words = [f"{operation} {number} of {group} has not finished on {_ranks(ranks)}"]
    words += [f"{_ranks(of)} {'is' if len(of) == 1 else 'are'} in {other} instead" for other, of in others]
    started = [rank for rank, entry in there.items() if entry["state"] == "started"]
    if started and len(started) < len(there):
        waits = sorted(set(there) - set(started))
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


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"

"""Finds the culprit of a hang from the last states of the ranks."""

from typing import Any

import pytest

from megalite.watchdog.heartbeat import LaneState, Operation, RankState
from megalite.watchdog.report import Report, Verdict, find_culprits


def lane(
    begun: int, *, waiting: bool = False, operation: str = "all_reduce", size: int = 64, odd: bool = False
) -> LaneState:
    return LaneState(begun, begun if waiting else 0, (Operation(operation, size, odd),))


def rank(number: int, lanes: dict[str, LaneState] | None = None, **more: Any) -> RankState:
    values: dict[str, Any] = {"host": "a", "pid": 100 + number, "process": "running", "silent": 3.0, "beats": 9}
    values |= {"step": 4, "phase": "step", "patient": False, "action": "0F0", "position": 0, "last_lane": ""}
    return RankState(rank=number, lanes=lanes or {}, **{**values, **more})


def reads(number: int, lanes: dict[str, LaneState], **more: Any) -> RankState:
    """Return a rank on CUDA on which only the host waits, for its device."""
    return rank(number, {**lanes, f"synchronise [{number}]": lane(9, waiting=True, operation="synchronise")}, **more)


TP, DP, WORLD = "tp [0, 1]", "dp [0, 2]", "world [0, 1]"
WAITS = {TP: lane(42, waiting=True)}


def edge(begun: int, operation: str, *, waiting: bool = False) -> dict[str, LaneState]:
    return {"pp edge 0->1 [0, 1]": lane(begun, operation=operation, waiting=waiting)}


CASES: dict[str, tuple[list[RankState], tuple[int, ...], str]] = {
    "one sleeps": ([rank(0, WAITS), rank(1, {TP: lane(41)})], (1,), "it waits for no other rank"),
    "who waits for a waiting rank is not blamed": (
        [
            rank(0, {TP: lane(42, waiting=True), DP: lane(6)}),
            rank(1, {TP: lane(41)}),
            rank(2, {DP: lane(7, waiting=True)}),
        ],
        (1,),
        "it waits for no other rank",
    ),
    "stopped inside the collective": (
        [rank(0, WAITS), rank(1, WAITS, process="stopped")],
        (1,),
        "its process is stopped (SIGSTOP, or a job scheduler has suspended it)",
    ),
    "gone": ([rank(0, WAITS), rank(1, WAITS, process="gone")], (1,), "its process has ended"),
    "ended before the others": (
        [rank(0, WAITS), rank(1, {TP: lane(41)}, process="gone", phase="ended")],
        (1,),
        "it has ended, and others wait for it",
    ),
    "the sender sleeps": (
        [rank(0, edge(4, "send")), rank(1, edge(5, "receive", waiting=True))],
        (0,),
        "it waits for no other rank",
    ),
    "a receive that was posted early is no wait": (
        [rank(0, edge(4, "send", waiting=True)), rank(1, edge(3, "receive"))],
        (1,),
        "it waits for no other rank",
    ),
    "a skipped collective": (
        [
            rank(0, {TP: lane(42, waiting=True), WORLD: lane(3)}, position=5),
            rank(1, {TP: lane(41), WORLD: lane(4, waiting=True)}, phase="update", position=-1),
        ],
        (1,),
        "it has gone past all_reduce 42 of tp [0, 1] (it has begun 41), in which rank 0 waits for it",
    ),
    "other sizes, by majority": (
        [
            rank(0, {"tp [0, 1, 2]": lane(7, waiting=True)}),
            rank(1, {"tp [0, 1, 2]": lane(7, waiting=True, size=128)}),
            rank(2, {"tp [0, 1, 2]": lane(7, waiting=True)}),
        ],
        (1,),
        "its operation 7 of tp [0, 1, 2] is all_reduce of 128 bytes, but all_reduce of 64 bytes on rank 0",
    ),
    "other sizes, by what the step before did": (
        [rank(0, WAITS), rank(1, {TP: lane(42, waiting=True, size=128, odd=True)})],
        (1,),
        "its operation 42 of tp [0, 1] is all_reduce of 128 bytes, but all_reduce of 64 bytes on rank 0",
    ),
    "one left out, and what came next was of another size": (
        [
            rank(0, {TP: LaneState(42, 42, (Operation("all_reduce", 8), Operation("all_reduce", 64)))}),
            rank(1, {TP: LaneState(43, 43, (*[Operation("all_reduce", 8)], *2 * [Operation("broadcast", 9, True)]))}),
        ],
        (1,),
        "its operation 42 of tp [0, 1] is broadcast of 9 bytes, but all_reduce of 64 bytes on rank 0",
    ),
    "two operations that do not fit": (
        [rank(0, WAITS), rank(1, {TP: lane(42, waiting=True, operation="all_gather")})],
        (0, 1),
        "its operation 42 of tp [0, 1] is all_gather of 64 bytes, but all_reduce of 64 bytes on rank 0",
    ),
    "failed": ([rank(0, WAITS), rank(1, WAITS, phase="failed")], (1,), "it has failed"),
    "one process alone": ([rank(0)], (0,), "it waits for no other rank"),
    "no one can be distinguished from the others": ([rank(0, WAITS), rank(1, WAITS)], (), ""),
    "one sleeps, the other's device waits for it": (
        [reads(0, {TP: lane(42), DP: lane(6)}), rank(1, {TP: lane(41)}), reads(2, {DP: lane(6)})],
        (1,),
        "it waits for no other rank",
    ),
    "a device stands still": (
        [rank(0, {TP: lane(42), WORLD: lane(4, waiting=True)}), reads(1, {TP: lane(42), WORLD: lane(3)})],
        (1,),
        "its device has not finished what it has to do, and waits for no other rank",
    ),
    "all wait for their devices": ([reads(0, {TP: lane(42)}), reads(1, {TP: lane(42)})], (), ""),
    "one has gone past what the other's device waits for": (
        [reads(0, {TP: lane(42), WORLD: lane(3)}), reads(1, {TP: lane(41), WORLD: lane(4)}, phase="update")],
        (1,),
        "it has gone past all_reduce 42 of tp [0, 1] (it has begun 41), in which rank 0 waits for it",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_culprits_of_hangs(case: str) -> None:
    states, culprits, reason = CASES[case]
    verdict = find_culprits(states)
    assert verdict.culprits == culprits
    assert not culprits or verdict.reasons[culprits[-1]] == reason


def test_report_of_a_waiting_rank() -> None:
    states, _, _ = CASES["one sleeps"]
    said = find_culprits(states).reasons[0]
    assert said == "waits in all_reduce 42 of tp [0, 1], which rank 1 has not begun"
    states, _, _ = CASES["stopped inside the collective"]
    said = find_culprits(states).reasons[0]
    assert said == "waits in all_reduce 42 of tp [0, 1], which all that can be seen have begun"


def test_report_of_a_rank_that_waits_for_its_device() -> None:
    states, _, _ = CASES["one sleeps, the other's device waits for it"]
    reasons = find_culprits(states).reasons
    assert reasons[0] == "waits for its device, where all_reduce 42 of tp [0, 1] is queued, which rank 1 has not begun"
    assert reasons[2] == "waits for its device, and all that can be seen have begun what is queued there"


@pytest.mark.parametrize("now", [900.0, 900.001, 900.999])
def test_torchrun_reports_the_culprit_as_first_failure(now: float) -> None:
    """torchrun compares whole seconds; a culprit that is silent for less than one still comes first."""
    known: dict[str, Any] = {"states": [rank(0, WAITS, silent=0.4), rank(1, silent=0.4)], "silent": 0.4, "limit": 0.3}
    unknown: dict[str, Any] = {"stacks": {}, "flight": {}, "kernel": {}, "unheard": []}
    report = Report(**known, **unknown, verdict=Verdict((1,), {1: "it waits for no other rank"}), world_size=2)
    first, second = (int(report.error_of(number, now)["message"]["extraInfo"]["timestamp"]) for number in (0, 1))
    assert first == 900 and second < 900

"""Reading torch's flight recorder: recorded traces of NCCL and gloo."""

from typing import Any

import pytest

from megalite.watchdog.report import Report, Verdict, condensed, oldest, stuck_operations


def entry(
    seq: int, state: str = "completed", *, group: str = "1", op: str = "all_reduce", **more: Any
) -> dict[str, Any]:
    return {
        "record_id": seq,
        "pg_id": int(group),
        "process_group": [group, f"tp [{group}]"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[4, 8]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 8]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_created_ns": 1795426445767046675 + seq,
        "time_discovered_started_ns": 0,
        "is_p2p": False,
        "time_discovered_completed_ns": 0,
        "retired": state == "completed",
        "timeout_ms": 600000,
        **more,
    }


def trace(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = {name: {"name": name, "desc": f"tp [{name}]", "ranks": "[0, 1, 2]"} for name in ("1", "2")}
    return condensed({"version": "2.10", "pg_config": ranks, "pg_status": {}, "entries": list(entries)})


def test_newest_and_oldest_unfinished_entries_per_group() -> None:
    found = trace(
        entry(1, "scheduled", group="2"),
        *(entry(number) for number in range(1, 20)),
        entry(20, "started"),
        *(entry(number, "scheduled") for number in range(21, 40)),
    )
    assert [(one["group"], one["seq"]) for one in found] == [
        ("tp [2]", 1),
        ("tp [1]", 20),
        *(("tp [1]", number) for number in range(32, 40)),
    ]
    assert found[1] == {
        "group": "tp [1]",
        "seq": 20,
        "op": "nccl:all_reduce",
        "state": "started",
        "p2p": False,
        "ranks": [0, 1, 2],
    }
    assert oldest(found) == found[0]
    assert oldest([]) is None and condensed({}) == []


def test_retired_gloo_entries_are_finished() -> None:
    recorded = {**entry(4, "scheduled", retired=True), "process_group": ["7", "undefined"]}
    (found,) = condensed({"entries": [recorded], "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}})
    assert (found["state"], found["group"], found["ranks"]) == ("completed", "7", [])


WAITS = trace(entry(40), entry(41, "scheduled"))
STUCK: dict[str, tuple[dict[int, list[dict[str, Any]]], list[str]]] = {
    "all have finished": ({0: trace(entry(41)), 1: trace(entry(41))}, []),
    "one has not joined": (
        {0: WAITS, 1: trace(entry(40)), 2: WAITS},
        ["nccl:all_reduce 41 of tp [1] has not finished on ranks 0, 2; rank 1 has not joined"],
    ),
    "one has not come to the group at all": (
        {0: WAITS, 1: [], 2: WAITS},
        ["nccl:all_reduce 41 of tp [1] has not finished on ranks 0, 2; rank 1 has not joined"],
    ),
    "of those on other hosts nothing is said": (
        {0: WAITS},
        ["nccl:all_reduce 41 of tp [1] has not finished on rank 0; of the ranks that have answered all have joined"],
    ),
    "another operation": (
        {0: WAITS, 1: trace(entry(41, "scheduled", op="all_gather")), 2: WAITS},
        ["nccl:all_reduce 41 of tp [1] has not finished on ranks 0, 2; rank 1 is in nccl:all_gather instead"],
    ),
    "finished on one": (
        {0: trace(entry(41), entry(42, "scheduled")), 1: WAITS, 2: WAITS},
        ["nccl:all_reduce 41 of tp [1] has not finished on ranks 1, 2; finished on rank 0"],
    ),
    "a kernel that has not started (TORCH_NCCL_ENABLE_TIMING=1)": (
        {0: trace(entry(41, "started")), 1: WAITS, 2: trace(entry(41, "started"))},
        [
            "nccl:all_reduce 41 of tp [1] has not finished on ranks 0, 1, 2; on rank 1 its kernel has not started; all "
            "have joined: a device or the network"
        ],
    ),
    "a group that a rank has not joined goes before others": (
        {
            0: trace(entry(5, "scheduled", group="2"), entry(41, "scheduled")),
            1: trace(entry(5, "scheduled", group="2"), entry(40)),
            2: trace(entry(5, "scheduled", group="2"), entry(41, "scheduled")),
        },
        [
            "nccl:all_reduce 41 of tp [1] has not finished on ranks 0, 2; rank 1 has not joined",
            "nccl:all_reduce 5 of tp [2] has not finished on ranks 0, 1, 2; all have joined: a device or the network",
        ],
    ),
    "a message": (
        {
            0: trace(entry(3, "scheduled", op="send 0->1", is_p2p=True, p2p_seq_id=9)),
            1: trace(entry(3, "scheduled", op="recv 1<-0", is_p2p=True, p2p_seq_id=9)),
        },
        ["nccl:send 0->1 9 of tp [1] has not finished on ranks 0, 1; of the ranks that have answered all have joined"],
    ),
}


@pytest.mark.parametrize("case", STUCK)
def test_pending_operation_and_missing_ranks(case: str) -> None:
    flight, lines = STUCK[case]
    assert stuck_operations(flight) == lines


def test_report_contains_the_pending_operation() -> None:
    """If heartbeats cannot distinguish ranks, the headline and torchrun's summary contain it."""
    report = Report(
        silent=3.0,
        limit=2.5,
        verdict=Verdict((), {}),
        states=[],
        stacks={},
        kernel={},
        flight=STUCK["one has not joined"][0],
        unheard=[],
        world_size=3,
    )
    (line,) = STUCK["one has not joined"][1]
    assert report.headline.endswith(f"; {line}")
    assert f"    flight recorder: {line}\n" in report.summary(None)
    assert f"\nflight recorder: {line}\n" in report.text()

"""Tests of collectives on gloo ranks, and findings from the reports of all ranks and hosts."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.doctor import ranks
from megalite.doctor import ranks as doctor_ranks
from megalite.doctor.host import Finding
from megalite.doctor.ranks import CHECKS, RankReport, findings, is_right, measure
from megalite.topology.group import DONE, Group
from tests.support.ranks import RankContext, forked_pools, run_ranks


def report(rank: int, host: str = "a", **changed: Any) -> RankReport:
    times = dict.fromkeys(("all-reduce", "messages"), 1e-4)
    values = {
        "device": "cpu",
        "wrong": (),
        "latency": times,
        "rate": dict.fromkeys(times, 2e9),
        "products": 1e11,
        "pairs": (),
    }
    return RankReport(rank=rank, host=host, **{**values, **changed})


def rows(*reports: RankReport) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings(reports)}


def test_ranks_without_findings() -> None:
    found = rows(report(0), report(1, latency={"all-reduce": 3e-4, "messages": 1e-4}))
    assert {row.level for row in found.values()} == {"ok"}
    assert found["ranks"].text == "2 ranks on a, gloo"
    assert found["all-reduce"].text == "300 µs for 4.00 KiB, 2 GB/s sent by a rank with 8.00 MiB"
    assert "hosts" not in found


def test_wrong_results_are_reported() -> None:
    found = rows(report(0), report(1, "b", wrong=("all-reduce", "all-to-all")))
    assert found["all-reduce"].level == found["all-to-all"].level == "error"
    assert found["all-to-all"].text == "wrong numbers on rank 1 (b)"


def test_slow_rank_is_reported() -> None:
    found = rows(*(report(rank, "a" if rank < 4 else "b") for rank in range(7)), report(7, "b", products=3e10))
    assert found["products"].level == "warning"
    assert found["products"].text.endswith("slower than the others: rank 7 on b (30%)")


def test_slow_host_is_found_by_its_pairs() -> None:
    pairs = [("a", "b", 1e9), ("b", "c", 2e8), ("c", "d", 2e8), ("d", "e", 1e9), ("e", "a", 1.1e9)]
    found = rows(*(report(rank, pair[0], pairs=(pair,)) for rank, pair in enumerate(pairs)))
    row = found["hosts"]
    assert (row.level, row.remedy) == ("warning", "look at c: adapter, cable, switch port, or leave it out")
    assert row.text.endswith("slow: b-c (20%), c-d (20%)")
    steady = rows(report(0, pairs=(("a", "b", 1e9),)), report(1, "b"))
    assert steady["hosts"].level == "ok"


def test_ranks_started_by_the_doctor() -> None:
    with forked_pools():
        found = {row.name: row for row in ranks.examine(ranks=2, device_type="cpu", host="here", seconds=0.05)}
    assert found["ranks"].text == "2 ranks on here, gloo"
    assert {row.level for name, row in found.items() if name != "products"} == {"ok"}


def test_failing_ranks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers import functions by name.
    monkeypatch.setattr(ranks, "measured", test_ranks_without_findings)
    with forked_pools():
        (row,) = ranks.examine(ranks=2, device_type="cpu", host="here", seconds=0.05)
    assert row.level == "error" and row.text.startswith("2 ranks on this host: TypeError: ")


def version(name: str, text: str) -> Finding:
    return Finding(topic="versions", name=name, text=text, data={"version": text})


def test_unequal_hosts_are_reported() -> None:
    a = [version("torch", "2.11"), version("pyarrow", "1"), version("python", "3.11")]
    b = [version("torch", "2.12"), version("pyarrow", "2"), version("python", "3.12")]
    found = {row.name: row for row in ranks.compare_hosts({"a": a, "b": a, "c": b})}
    assert {name: row.level for name, row in found.items()} == {"torch": "error", "pyarrow": "warning"}
    assert found["torch"].text == "2.11 on a, 2.12 on c"
    (row,) = ranks.compare_hosts({"a": a, "b": a})
    assert row.text == "2 hosts have the same versions and GPUs"


def at_once(context: RankContext, hosts: list[str]) -> list[tuple[str, str, str]]:
    """Return a job's findings on one rank; the second host has a full disk."""
    world = context.topology(dp=len(hosts)).world
    host = hosts[context.rank]
    own: list[Finding] = []
    if hosts.index(host) == context.rank:
        disk = Finding(topic="disk", name="folder", level="warning", text=f"full on {host}", remedy="make room")
        own = [version("torch", "2.11"), disk]
    with (
        mock.patch.dict(ranks.LARGE, cpu=1 << 16),
        mock.patch.object(ranks, "rate_of", lambda timer, dtype, *, seconds: 1e9),
    ):
        found = list(ranks.examine_job(world, own, host=host, seconds=0.02))
    return [(row.topic, row.name, row.level) for row in found]


def test_job_of_two_hosts() -> None:
    first, *others = run_ranks(4, at_once, ["a", "a", "b", "b"])
    assert others == [first] * 3
    assert ("hosts", "alike", "ok") in first
    assert ("disk", "folder of b", "warning") in first and ("disk", "folder of a", "warning") not in first
    assert ("collectives", "all-reduce", "ok") in first and ("collectives", "hosts", "ok") in first


def gone(context: RankContext) -> str:
    world = context.topology(dp=2).world

    def fail(*arguments: object) -> None:
        raise RuntimeError("Connection closed by peer")

    # The real one leaves receives pending, and this group is used again.
    with mock.patch.object(ranks, "lost_ranks", lambda group: [0]), mock.patch.object(ranks, "is_right", fail):
        try:
            list(ranks.examine_job(world, [], host="b", seconds=0.02))
        except ranks.ExchangeFailed as failure:
            return str(failure)
    return "nothing"


def test_job_with_lost_connections() -> None:
    said = run_ranks(2, gone)
    assert said[1] == "rank 1 on b: all-reduce failed after 0 s: Connection closed by peer; lost: rank 0"


CPU = torch.device("cpu")
SECONDS = 0.02


def reported(context: RankContext, ranks: int, hosts: list[str]) -> dict[str, Any]:
    world = context.topology(dp=ranks).world
    with (
        mock.patch.dict(doctor_ranks.LARGE, cpu=1 << 16),
        mock.patch.object(doctor_ranks, "rate_of", lambda timer, dtype, *, seconds: 1e9),
    ):
        return asdict(measure(world, host=hosts[context.rank], seconds=SECONDS))


@pytest.mark.parametrize(
    "hosts, pairs",
    [
        (["a", "a", "b", "b"], [[("a", "b")], [], [], []]),
        (["a", "b", "c"], [[("a", "b")], [("b", "c")], [("c", "a")]]),
        (["a", "b", "c", "d"], [[("a", "b")], [("b", "c")], [("c", "d")], [("d", "a")]]),
    ],
    ids=["two", "three", "four"],
)
def test_speed_of_messages_between_hosts(hosts: list[str], pairs: list[list[tuple[str, str]]]) -> None:
    reports = [RankReport(**data) for data in run_ranks(len(hosts), reported, len(hosts), hosts)]
    assert [[pair[:2] for pair in report.pairs] for report in reports] == pairs
    assert all(rate > 0 for report in reports for _, _, rate in report.pairs)


def checks_with_a_wrong_element(context: RankContext, name: str) -> list[str]:
    """Return the checks that fail on rank 1 if it receives one wrong element."""
    world = context.topology(dp=2).world

    def off(method: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(self: Group, *tensors: torch.Tensor, **options: Any) -> Any:
            result = method(self, *tensors, **options)
            if context.rank == 1:
                tensors[place][-1] += 1
            return result

        return call

    def off_ring(self: Group, tensor: torch.Tensor) -> Any:
        received, work = rotate(self, tensor)
        work.wait()
        received[-1] += context.rank
        return received, DONE  # gloo blocks if work is waited for twice

    rotate = Group.rotate_async
    patched = off_ring if name == "rotate_async" else off(getattr(Group, name), 0)
    with mock.patch.object(Group, name, patched):
        return [check for check in CHECKS if not is_right(check, world, 257)]


@pytest.mark.parametrize(
    "method, check",
    [
        ("all_reduce", "all-reduce"),
        ("all_gather", "all-gather"),
        ("reduce_scatter", "reduce-scatter"),
        ("all_to_all_equal", "all-to-all"),
        ("broadcast", "broadcast"),
        ("rotate_async", "messages"),
    ],
)
def test_wrong_element_of_a_collective_is_detected(method: str, check: str) -> None:
    assert run_ranks(2, checks_with_a_wrong_element, method) == [[], [check]]


def broken(context: RankContext) -> str:
    world = context.topology(dp=2).world

    def fail(*arguments: object) -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.7]:1234\nmore")

    with mock.patch.object(Group, "all_gather", fail):
        try:
            measure(world, host="a", seconds=SECONDS)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_failing_operation_is_named() -> None:
    said = run_ranks(2, broken)
    assert said == ["all-gather failed after 0 s: Connection closed by peer [10.0.0.7]:1234"] * 2

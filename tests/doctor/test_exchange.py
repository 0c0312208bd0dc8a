"""Collectives on gloo ranks: right ones pass, wrong ones and broken ones are named."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.doctor import ranks as doctor_ranks
from megalite.doctor.ranks import CHECKS, RankReport, is_right, measure
from megalite.topology.group import DONE, Group
from tests.support.ranks import RankContext, run_ranks

CPU = torch.device("cpu")
SECONDS = 0.02


def reported(context: RankContext, ranks: int, hosts: list[str]) -> dict[str, Any]:
    world = context.topology(dp=ranks).world
    with (
        mock.patch.dict(doctor_ranks.LARGE, cpu=1 << 16),
        mock.patch.object(doctor_ranks, "rate_of", lambda timer, dtype, *, seconds: 1e9),
    ):
        return measure(world, CPU, host=hosts[context.rank], seconds=SECONDS).as_data()


def test_three_ranks_on_one_host() -> None:
    reports = [RankReport.from_data(data) for data in run_ranks(3, reported, 3, ["a", "a", "a"])]
    assert [report.rank for report in reports] == [0, 1, 2]
    for report in reports:
        assert report.wrong == () and report.pairs == ()
        assert set(report.latency) == set(report.rate) == {"all-reduce", "all-gather", "reduce-scatter", "messages"}
        assert min(report.latency.values()) > 0 and min(report.rate.values()) > 0


@pytest.mark.parametrize(
    "hosts, pairs",
    [
        (["a", "a", "b", "b"], [[("a", "b")], [], [], []]),
        (["a", "b", "c"], [[("a", "b")], [("b", "c")], [("c", "a")]]),
        (["a", "b", "c", "d"], [[("a", "b")], [("b", "c")], [("c", "d")], [("d", "a")]]),
    ],
    ids=["two", "three", "four"],
)
def test_messages_between_hosts(hosts: list[str], pairs: list[list[tuple[str, str]]]) -> None:
    reports = [RankReport.from_data(data) for data in run_ranks(len(hosts), reported, len(hosts), hosts)]
    assert [[pair[:2] for pair in report.pairs] for report in reports] == pairs
    assert all(rate > 0 for report in reports for _, _, rate in report.pairs)


def spoiled(context: RankContext, name: str) -> list[str]:
    """Which checks fail on rank 1 if one element that it gets is not what was sent."""
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
        return received, DONE  # gloo waits for ever for what has been waited for

    rotate = Group.rotate_async
    patched = off_ring if name == "rotate_async" else off(getattr(Group, name), 0)
    with mock.patch.object(Group, name, patched):
        return [check for check in CHECKS if not is_right(check, world, CPU, 257)]


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
def test_a_wrong_number_is_seen(method: str, check: str) -> None:
    assert run_ranks(2, spoiled, method) == [[], [check]]


def broken(context: RankContext) -> str:
    world = context.topology(dp=2).world

    def fail(*arguments: object) -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.7]:1234\nmore")

    with mock.patch.object(Group, "all_gather", fail):
        try:
            measure(world, CPU, host="a", seconds=SECONDS)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_an_operation_that_fails_is_named() -> None:
    said = run_ranks(2, broken)
    assert said == ["all-gather failed after 0 s: Connection closed by peer [10.0.0.7]:1234"] * 2

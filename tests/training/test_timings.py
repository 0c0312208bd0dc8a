"""The phases of an interval over ranks: least and most, who is slow, and that nothing is exchanged in between."""

from typing import Any

import pytest

from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.training import instruments
from megalite.training.instruments import Timings, compare, units
from megalite.training.phases import PhaseClock
from tests.support.ranks import RankContext, run_ranks


def report(context: RankContext, axes: dict[str, int], forward: list[float], apart: bool = False) -> Any:
    """An interval of two steps in which each rank computed as long as it is told; (report, collectives)."""
    topology = context.topology(**axes)
    gathers: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instruments.platform, "node", lambda: f"host{context.rank}")
        patch.setattr(instruments, "peak_memory_bytes", lambda device: (context.rank + 1) << 20)
        clock = PhaseClock(topology.device)
        timings = Timings(clock, topology, apart=apart, threshold=1.5)
        gather = Group.all_gather

        def counted(self: Group, *arguments: Any) -> None:
            gathers.append(self.name)
            gather(self, *arguments)

        patch.setattr(Group, "all_gather", counted)
        clock.add("forward", 2 * forward[context.rank])
        clock.add("optimizer", 0.004)
        clock.add("save", 0.5)
        assert gathers == []
        found = timings.interval(steps=2, seconds=4.0)
    return *found, gathers


def test_least_and_most_over_ranks() -> None:
    results = run_ranks(2, report, {"dp": 2}, [1.0, 1.25])
    assert results[0] == results[1]
    fields, lines, gathers = results[0]
    assert gathers == ["world"], "one small gather an interval"
    assert (fields["forward_ms"], fields["forward_ms_min"]) == pytest.approx((1250.0, 1000.0))
    assert fields["optimizer_ms"] == pytest.approx(2.0)
    assert fields["other_ms"] == pytest.approx(998.0)  # two seconds a step
    assert (fields["save_seconds"], fields["evaluation_seconds"]) == (0.5, 0.0)
    assert fields["memory_bytes_max"] == 2 << 20
    assert fields["straggler_factor"] == pytest.approx(1.25)
    assert lines == [
        "  ms/step of 2 ranks, least–most: forward 1000.0–1250.0, backward 0.0, reduce 0.0, optimizer 2.0, data 0.0, "
        "other 748.0–998.0 | mem 1–2 MiB | save 0.50 s"
    ]


def test_a_straggler_is_named_with_its_host() -> None:
    _, lines, _ = run_ranks(4, report, {"dp": 4}, [1.0, 1.1, 1.8, 0.9])[0]
    assert lines[1:] == [
        "straggler: rank 2 (host host2) took 1800.0 ms a step for forward and backward, 1.80 times the median of its peers "
        "(ranks 0 1 3)"
    ]


def test_ranks_that_wait_for_each_other_are_one() -> None:
    _, lines, _ = run_ranks(4, report, {"tp": 2, "dp": 2}, [1.0, 1.0, 2.0, 1.9])[0]
    assert lines[1:] == [
        "straggler: ranks 2 3 (host host2 host3), which wait for each other in every layer, took 2000.0 ms a step for "
        "forward and backward, 2.00 times the median of their peers (ranks 0 1)"
    ]


def test_ranks_that_run_apart_exchange_nothing() -> None:
    first, second = run_ranks(2, report, {"dp": 2}, [1.0, 3.0], apart=True)
    assert first[2] == second[2] == []
    assert first[0]["forward_ms"] == first[0]["forward_ms_min"] == pytest.approx(1000.0)
    assert first[1] == [
        "  ms/step: forward 1000.0, backward 0.0, reduce 0.0, optimizer 2.0, data 0.0, other 998.0 | save 0.50 s"
    ]


def test_one_rank() -> None:
    fields, lines, gathers = report(RankContext(0), {}, [1.0])
    assert (gathers, len(lines), "straggler_factor" in fields) == ([], 1, False)


@pytest.mark.parametrize(
    "axes, expected",
    [
        ({"dp": 2, "pp": 2}, [[(0,), (1,)], [(2,), (3,)]]),
        ({"tp": 2, "dp": 2}, [[(0, 1), (2, 3)]]),
        ({"cp": 2, "dp": 2}, [[(0, 1), (2, 3)]]),
        ({"dp": 4, "ep": 2}, [[(0, 1), (2, 3)]]),
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, [[(0, 1, 2, 3)]]),
    ],
)
def test_units(axes: dict[str, int], expected: list[list[tuple[int, ...]]]) -> None:
    assert units(ParallelLayout(**axes)) == expected


def test_stages_are_not_compared_with_one_another() -> None:
    """The last stage has the head: it takes longer, and that is no one's fault."""
    places = units(ParallelLayout(dp=3, pp=2))
    assert compare([1.0, 1.0, 1.0, 5.0, 5.0, 5.1], places, 1.2) == []
    (found,) = compare([1.0, 1.0, 1.0, 5.0, 7.5, 5.0], places, 1.2)
    assert (found.ranks, found.factor, found.peers) == ((4,), 1.5, (3, 5))


def test_a_rank_is_compared_with_the_others() -> None:
    """Not with itself among them: of two, one could never take twice the median."""
    (found,) = compare([1.0, 3.0], units(ParallelLayout(dp=2)), 1.2)
    assert (found.ranks, found.factor, found.peers) == ((1,), 3.0, (0,))


def test_a_rank_without_peers_is_no_straggler() -> None:
    assert compare([1.0, 9.0], units(ParallelLayout(pp=2)), 1.2) == []

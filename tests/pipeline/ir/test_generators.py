"""Generators against published orders and closed forms."""

import re
from collections.abc import Iterator

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators import build_schedule, forward_only, gpipe, interleaved, one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule, peak_activations
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.pipeline.ir.validate import validate


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def legal(ranks: int, microbatches: int, group: int) -> bool:
    return ranks <= group <= microbatches and not 0 < microbatches % group < ranks


def interleaved_grid() -> Iterator[tuple[int, int, int, int]]:
    for ranks, chunks in ((1, 2), (2, 2), (2, 3), (3, 2), (4, 2), (4, 4), (8, 2), (8, 3)):
        for microbatches in (1, 2, 3, 4, 5, 8, 12, 17, 24, 32):
            for group in {ranks, ranks + 1, 2 * ranks, microbatches}:
                if legal(ranks, microbatches, group):
                    yield ranks, chunks, microbatches, group


def makespan(schedule: Schedule, forward: float, backward: float) -> float:
    costs = Costs.uniform(schedule.num_stages, forward=forward, backward=backward)
    return simulate(lower(schedule), costs).makespan


def test_small_orders_written_out() -> None:
    assert rows(gpipe(2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert rows(gpipe(1, 2, 2)) == ["0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"]
    assert rows(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    # Warm-up 2(p-r-1) + (v-1)N = 4 and 2, then one forward and one backward in turn.
    assert rows(interleaved(2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]
    assert rows(forward_only(2, 1, 3)) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]
    # Groups of p, the remainder joining the last.
    assert rows(forward_only(2, 2, 5))[1] == "1F0 1F1 3F0 3F1 1F2 1F3 1F4 3F2 3F3 3F4"


@pytest.mark.parametrize(
    ("microbatches", "group", "order", "chunks"),
    [(5, 3, "0120123434", "0001110011"), (4, None, "01012323", "00110011")],
)
def test_published_interleaved_tables(microbatches: int, group: int | None, order: str, chunks: str) -> None:
    """Megatron-LM's documented examples for 2 ranks with 2 chunks: forwards in table order, backwards mirrored."""
    for row in interleaved(2, 2, microbatches, group).actions:
        forwards = [action for action in row if action.kind is Kind.F]
        backwards = [action for action in row if action.kind is Kind.B]
        assert "".join(str(action.microbatch) for action in forwards) == order
        assert "".join(str(action.stage // 2) for action in forwards) == chunks
        assert "".join(str(action.microbatch) for action in backwards) == order
        assert "".join(str(1 - action.stage // 2) for action in backwards) == chunks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8, 16])
def test_gpipe_and_1f1b_formulas(ranks: int, microbatches: int) -> None:
    for forward, backward in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
        wanted = (microbatches + ranks - 1) * (forward + backward)
        assert makespan(gpipe(ranks, microbatches), forward, backward) == wanted
        assert makespan(one_f_one_b(ranks, microbatches), forward, backward) == wanted
    peaks = validate(lower(one_f_one_b(ranks, microbatches))).peak_activations
    assert peaks == tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    report = validate(lower(gpipe(ranks, microbatches)))
    assert report.peak_activations == (microbatches,) * ranks
    ends = [(rank > 0) + (rank < ranks - 1) for rank in range(ranks)]
    assert report.sends == tuple(microbatches * neighbours for neighbours in ends)


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"), [(2, 2, 2), (2, 3, 5), (4, 2, 4), (4, 2, 9), (8, 3, 12)]
)
def test_looped_breadth_first_formulas(ranks: int, chunks: int, microbatches: int) -> None:
    schedule = gpipe(ranks, microbatches, chunks)
    # Costs of one chunk; of a full rank stage they are v times these, hence bubble (p-1)(F+B)/v.
    assert makespan(schedule, 1, 2) == 3 * (microbatches * chunks + ranks - 1)
    assert validate(lower(schedule)).peak_activations == (microbatches * chunks,) * ranks


@pytest.mark.parametrize(("ranks", "chunks", "microbatches", "group"), list(interleaved_grid()))
def test_interleaved_formulas(ranks: int, chunks: int, microbatches: int, group: int) -> None:
    schedule = interleaved(ranks, chunks, microbatches, group)
    for forward, backward in ((1.0, 1.0), (1.0, 2.0)):
        wanted = (microbatches * chunks + ranks - 1) * (forward + backward)
        assert makespan(schedule, forward, backward) == wanted
    peaks = peak_activations(schedule.actions, forward_only=False)
    total = microbatches * chunks
    assert peaks == tuple(min(total, 2 * (ranks - r - 1) + (chunks - 1) * group + 1) for r in range(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_forward_only_takes_any_count_without_bubble(ranks: int, chunks: int) -> None:
    for microbatches in range(1, 14):
        schedule = forward_only(ranks, chunks, microbatches)
        assert schedule.forward_only
        report = validate(lower(schedule))
        assert report.peak_activations == (1,) * ranks
        # With fewer microbatches than ranks a chunk waits for the ring; else only the ramp is idle.
        wanted = (chunks - 1) * max(microbatches, ranks) + microbatches + ranks - 1
        if microbatches >= ranks:
            assert wanted == chunks * microbatches + ranks - 1
        assert makespan(schedule, 1, 0) == wanted


def test_build_schedule_by_name() -> None:
    assert build_schedule("auto", num_ranks=4, num_chunks=1, num_microbatches=8) == one_f_one_b(4, 8)
    assert build_schedule("auto", num_ranks=4, num_chunks=2, num_microbatches=8) == interleaved(4, 2, 8)
    assert build_schedule("1f1b", num_ranks=4, num_chunks=1, num_microbatches=3) == one_f_one_b(4, 3)
    assert build_schedule("gpipe", num_ranks=4, num_chunks=2, num_microbatches=3) == gpipe(4, 3, 2)
    built = build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=5, group=3)
    assert built == interleaved(2, 2, 5, 3)


@pytest.mark.parametrize(
    ("name", "chunks", "group", "message"),
    [
        ("zigzag", 1, None, "'zigzag'.*auto, gpipe, 1f1b, interleaved"),
        ("1f1b", 2, None, "1f1b.*vpp is 2.*vpp 1"),
        ("interleaved", 1, None, "vpp is 1.*1f1b"),
        ("1f1b", 1, 4, "is 4, but schedule 1f1b has no groups"),
        ("gpipe", 2, 4, "is 4, but schedule gpipe has no groups"),
    ],
)
def test_names_and_sizes_that_clash(name: str, chunks: int, group: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_schedule(name, num_ranks=4, num_chunks=chunks, num_microbatches=8, group=group)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(0, 1, 4), (4, 0, 4), (4, 1, 0)])
def test_sizes_below_one(ranks: int, chunks: int, microbatches: int) -> None:
    for generate in (
        lambda: gpipe(ranks, microbatches, chunks),
        lambda: forward_only(ranks, chunks, microbatches),
        lambda: interleaved(ranks, chunks, microbatches),
    ):
        with pytest.raises(ConfigError, match="is 0; it must be 1 or more"):
            generate()


def test_interleaved_refuses_exactly_the_illegal_and_names_what_works() -> None:
    """Each remedy in each message is tried: it must be accepted."""
    refused = 0
    for ranks in (1, 2, 3, 4):
        for microbatches in range(1, 11):
            for group in range(12):
                if group and legal(ranks, microbatches, group):
                    interleaved(ranks, 2, microbatches, group)
                    continue
                refused += 1
                with pytest.raises(ConfigError) as caught:
                    interleaved(ranks, 2, microbatches, group)
                message = str(caught.value)
                head = f"schedule interleaved with pp {ranks}, vpp 2 and group {group} cannot take {microbatches}"
                assert message.startswith(head)
                remedies = message.split("Works: ")[1]
                tried = 0
                for counts, with_group in re.findall(
                    r"([\d or]+) microbatches .*?with group (\d+)", remedies
                ):
                    for count in re.findall(r"\d+", counts):
                        interleaved(ranks, 2, int(count), int(with_group))
                        tried += 1
                for with_group, count in re.findall(r"stage (\d+) with (\d+) microbatches", remedies):
                    assert int(count) == microbatches
                    interleaved(ranks, 2, microbatches, int(with_group))
                    tried += 1
                assert tried or f"{ranks} or more microbatches with group {ranks}" in remedies
    assert refused > 200


def test_a_rank_holds_chunks_round_robin() -> None:
    schedule = interleaved(4, 2, 8)
    assert schedule.placement == (0, 1, 2, 3, 0, 1, 2, 3)
    assert schedule.stages_of(1) == (1, 5)
    assert schedule.num_chunks == 2
    assert schedule.actions[3][0] == Action(Kind.F, 3, 0)

"""Generators compared with published orders, forward-only schedules, recompute-ahead, and the errors of each."""

import itertools
import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.generators import (
    SCHEDULES,
    build_schedule,
    default_schedule,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    loop_placement,
    looped_bfs,
    one_f_one_b,
    smallest_group,
    v_placement,
    with_recompute_ahead,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import GRADIENTS, Action, Kind, Schedule
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.pipeline.ir.validate import validate

ONE_CHUNK = ("gpipe", "1f1b", "zb-h1", "zb-h2")


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_expected_orders() -> None:
    assert rows(gpipe(2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert rows(looped_bfs(1, 2, 2)) == ["0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"]
    assert rows(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    # 2(p-r)-1 = 3 and 1 forwards ahead.
    assert rows(one_f_one_b(2, 4, "pb")) == ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    # Warm-up 2(p-r-1) + (v-1)N = 4 and 2, then forwards and backwards in turn.
    assert rows(interleaved(2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_expected_zero_bubble_orders() -> None:
    # On rank 0 no rank waits for the input gradient, so the halves are one B.
    assert rows(zb_h1(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]
    assert rows(zb_h2(2, 4)) == ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"]
    # Stages 0 and 3 on rank 0; 1 and 2, the turn, on rank 1, where the gradient of 2 stays.
    assert rows(zb_v(2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 3F2 3I2 3W2 0B1 0B2",
        "1F0 2F0 1F1 2F1 2B0 1F2 1I0 1W0 2F2 2B1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    # Two microbatches: the same without the third.
    assert rows(zb_v(2, 2)) == ["0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1I0 1W0 2B1 1I1 1W1"]
    assert rows(dualpipe_v(2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0B2 0B3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


@pytest.mark.parametrize(
    ("microbatches", "group", "order", "chunks"),
    [(5, 3, "0120123434", "0001110011"), (4, None, "01012323", "00110011")],
)
def test_interleaved_orders_equal_published_tables(
    microbatches: int, group: int | None, order: str, chunks: str
) -> None:
    """Megatron-LM's documented examples for 2 ranks with 2 chunks: forwards in table order, backwards mirrored."""
    for row in interleaved(2, 2, microbatches, group).actions:
        forwards = [action for action in row if action.kind is Kind.F]
        backwards = [action for action in row if action.kind is Kind.B]
        assert "".join(str(action.microbatch) for action in forwards) == order
        assert "".join(str(action.stage // 2) for action in forwards) == chunks
        assert "".join(str(action.microbatch) for action in backwards) == order
        assert "".join(str(1 - action.stage // 2) for action in backwards) == chunks


def test_every_schedule_is_valid_for_any_number_of_microbatches() -> None:
    """Under both send semantics, with only the required receives posted; including p = 1 and m < p."""
    for name, ranks, ahead in itertools.product(SCHEDULES, range(1, 5), (False, True)):
        for microbatches in range(2 * ranks if name == "dualpipe-v" else 1, 11):
            sizes = {"num_ranks": ranks, "num_chunks": 1 if name in ONE_CHUNK else 2, "num_microbatches": microbatches}
            schedule = build_schedule(name, **sizes, recompute_ahead=ahead)
            assert schedule.name == name
            validate(lower(schedule, recv_prefetch=microbatches % 3))


def test_build_schedule_by_name() -> None:
    def built(name: str, chunks: int, **options: object) -> Schedule:
        arguments = {"num_ranks": 2, "num_chunks": chunks, "num_microbatches": 5} | options
        return build_schedule(name, **arguments)  # type: ignore[arg-type]

    assert built("gpipe", 1) == gpipe(2, 5)
    assert built("1f1b", 1) == one_f_one_b(2, 5)
    assert built("1f1b", 1, warm_up="pb") == one_f_one_b(2, 5, "pb") != one_f_one_b(2, 5)
    assert built("interleaved", 2, group=3) == interleaved(2, 2, 5, 3) == interleaved(2, 2, 5)
    assert built("looped-bfs", 3) == looped_bfs(2, 3, 5)
    assert built("zb-h1", 1) == zb_h1(2, 5)
    assert built("zb-h2", 1) == zb_h2(2, 5)
    assert built("zb-v", 2) == zb_v(2, 5)
    assert built("dualpipe-v", 2) == dualpipe_v(2, 5)
    assert built("zb-h1", 1, recompute_ahead=True) == with_recompute_ahead(zb_h1(2, 5)) != zb_h1(2, 5)
    assert [default_schedule(chunks) for chunks in (1, 2, 3)] == ["1f1b", "interleaved", "interleaved"]


@pytest.mark.parametrize(
    ("name", "chunks", "options", "message"),
    [
        ("zigzag", 1, {}, "'zigzag'.*gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, dualpipe-v"),
        ("gpipe", 2, {}, r"gpipe takes one stage per rank but vpp is 2: use vpp 1, or schedule looped-bfs \(vpp 2"),
        ("1f1b", 2, {}, "1f1b takes one stage per rank but vpp is 2: use vpp 1, or schedule interleaved"),
        ("zb-h1", 3, {}, "zb-h1 takes one stage per rank but vpp is 3: use vpp 1, or schedule zb-v"),
        ("zb-h2", 2, {}, "zb-h2 takes one stage per rank but vpp is 2: use vpp 1, or schedule zb-v"),
        ("zb-v", 1, {}, "zb-v takes two stages per rank but vpp is 1: use vpp 2, or schedule 1f1b"),
        ("zb-v", 3, {}, "zb-v takes two stages per rank but vpp is 3: use vpp 2, or schedule interleaved"),
        ("dualpipe-v", 3, {}, "dualpipe-v takes two stages per rank but vpp is 3: use vpp 2"),
        ("interleaved", 1, {}, "interleaved needs several chunks per rank but vpp is 1: set vpp to 2, or use 1f1b"),
        ("looped-bfs", 1, {}, "looped-bfs needs several chunks per rank but vpp is 1: set vpp to 2, or use gpipe"),
        ("1f1b", 1, {"warm_up": "pc"}, "the warm-up of schedule 1f1b is 'pc'; it must be one of pa, pb"),
    ],
)
def test_conflicting_names_sizes_and_options_are_errors(
    name: str, chunks: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_schedule(name, num_ranks=4, num_chunks=chunks, num_microbatches=8, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "message"),
    [
        (4, 7, r"pp 4 needs 8 microbatches or more but has 7: use 8, pp 3, or schedule zb-v"),
        (3, 1, r"pp 3 needs 6 microbatches or more but has 1: use 6, or schedule zb-v"),
    ],
)
def test_dualpipe_v_error_names_the_minimum(ranks: int, microbatches: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dualpipe_v(ranks, microbatches)
    dualpipe_v(ranks, 2 * ranks)
    dualpipe_v(max(microbatches // 2, 1), max(microbatches, 2))


def test_interleaved_refuses_only_invalid_sizes_with_remedies() -> None:
    """Each remedy in each message must work."""
    refused = 0
    for ranks in (1, 2, 3, 4):
        for microbatches in range(1, 11):
            legal = [group for group in range(ranks, microbatches + 1) if not 0 < microbatches % group < ranks]
            smallest = legal[0] if legal else microbatches
            assert smallest_group(ranks, microbatches) == smallest
            assert interleaved(ranks, 3, microbatches) == interleaved(ranks, 3, microbatches, smallest)
            for group in range(12):
                if group in (*legal, microbatches):
                    interleaved(ranks, 2, microbatches, group)
                    continue
                refused += 1
                with pytest.raises(ConfigError) as caught:
                    interleaved(ranks, 2, microbatches, group)
                message = str(caught.value)
                head = f"schedule interleaved with pp {ranks} and group {group} cannot take {microbatches}"
                assert message.startswith(head)
                remedies = message.split("Works: ")[1]
                for counts, with_group in re.findall(r"([\d or]+) microbatches .*?with group (\d+)", remedies):
                    for count in re.findall(r"\d+", counts):
                        interleaved(ranks, 2, int(count), int(with_group))
                (size,) = re.findall(rf"stage (\d+), the default, with {microbatches} microbatches", remedies)
                assert interleaved(ranks, 2, microbatches, int(size)) == interleaved(ranks, 2, microbatches)
    assert refused > 200


def evaluation_time(placement: tuple[int, ...], microbatches: int) -> float:
    costs = Costs.uniform(len(placement))
    return simulate(lower(forward_only(placement, microbatches)), costs).makespan


def test_expected_forward_only_orders() -> None:
    assert rows(forward_only((0, 1), 3)) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]
    # Groups of p; the remainder joins the last group.
    assert rows(forward_only((0, 1, 0, 1), 5))[1] == "1F0 1F1 3F0 3F1 1F2 1F3 1F4 3F2 3F3 3F4"
    # Slot 2i + s.
    assert rows(forward_only((0, 1, 1, 0), 3)) == ["0F0 0F1 3F0 0F2 3F1 3F2", "1F0 2F0 1F1 2F1 1F2 2F2"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_loops_have_no_bubble_for_any_number_of_microbatches(ranks: int, chunks: int) -> None:
    placement = loop_placement(ranks, chunks)
    for microbatches in range(1, 14):
        schedule = forward_only(placement, microbatches)
        assert schedule.forward_only
        report = validate(lower(schedule))
        assert report.peak_activations == (1,) * ranks
        # With fewer microbatches than ranks a chunk waits for the ring; otherwise only the ramp is idle.
        wanted = (chunks - 1) * max(microbatches, ranks) + microbatches + ranks - 1
        if microbatches >= ranks:
            assert wanted == chunks * microbatches + ranks - 1
        assert evaluation_time(placement, microbatches) == wanted


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_v_idles_only_in_the_ramps(ranks: int) -> None:
    """The last rank's 2m forwards have p-1 steps on the way down before and p-1 on the way up after them: the minimum."""
    for microbatches in (1, 2, 3, 5, 8):
        assert evaluation_time(v_placement(ranks), microbatches) == 2 * microbatches + 2 * (ranks - 1)
        report = validate(lower(forward_only(v_placement(ranks), microbatches)))
        assert max(report.peak_receives) <= 2
        assert report.peak_activations == (1,) * ranks


def test_rank_with_most_stages_never_idles() -> None:
    rng = random.Random(3)
    for _ in range(150):
        ranks = rng.randint(1, 4)
        placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 5)))]
        rng.shuffle(placement)
        validate(lower(forward_only(placement, rng.randint(1, 7))))
        most = max(placement.count(rank) for rank in range(ranks))
        short, long = (evaluation_time(tuple(placement), microbatches) for microbatches in (20, 40))
        assert long - short == 20 * most, placement


def with_r_everywhere(schedule: Schedule) -> Schedule:
    """Put an R before each backward, even if its forward has just run: the form of the published percentages."""
    rows = tuple(
        tuple(
            each
            for action in row
            for each in ((Action(Kind.R, *action[1:]), action) if action.kind in GRADIENTS else (action,))
        )
        for row in schedule.actions
    )
    return replace(schedule, actions=rows)


def makespan(schedule: Schedule, forward: float = 1.0, backward: float = 2.0) -> float:
    costs = Costs.uniform(schedule.num_stages, forward=forward, backward=backward, recompute=forward)
    return simulate(lower(schedule), costs).makespan


def test_expected_recompute_orders() -> None:
    assert rows(with_recompute_ahead(one_f_one_b(2, 3))) == [
        "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",  # each backward follows its forward: the graph is kept
    ]
    assert rows(with_recompute_ahead(zb_h1(2, 3)))[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert rows(with_recompute_ahead(gpipe(1, 2))) == ["0F0 0F1 0R0 0B0 0R1 0B1"]


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), one_f_one_b(3, 6), interleaved(2, 2, 4), zb_h1(3, 5), zb_h2(3, 5), zb_v(3, 6), dualpipe_v(3, 7)],
    ids=lambda schedule: schedule.name,
)
def test_each_backward_follows_its_forward_or_recomputation(schedule: Schedule) -> None:
    """Only R is added, and at most one graph is live per rank."""
    ahead = with_recompute_ahead(schedule)
    for row, before in zip(ahead.actions, schedule.actions, strict=True):
        assert tuple(action for action in row if action.kind is not Kind.R) == before
        for earlier, action in pairwise(row):
            if action.kind in GRADIENTS:
                assert earlier[1:] == action[1:] and earlier.kind in (Kind.F, Kind.R)
    graphs = memory_peaks(lower(ahead), Sizes.uniform(schedule.num_stages))
    assert [peak.size for peak in graphs] == [1.0] * schedule.num_ranks
    assert makespan(ahead) <= makespan(schedule)


def test_1f1b_makespan_equals_the_formula() -> None:
    for ranks in range(2, 5):
        for microbatches in range(2, 8):
            for forward, backward in ((1, 1), (1, 2), (2, 3)):
                wanted = microbatches * (2 * forward + backward) + (ranks - 1) * (forward + backward)
                schedule = one_f_one_b(ranks, microbatches)
                assert makespan(with_r_everywhere(schedule), forward, backward) == wanted
                assert makespan(with_recompute_ahead(schedule), forward, backward) == wanted - 2 * forward


def test_only_training_schedules_without_recomputation_are_accepted() -> None:
    with pytest.raises(ConfigError, match=r"forward_only has no backward.*use a training schedule"):
        with_recompute_ahead(forward_only(loop_placement(2, 1), 3))
    with pytest.raises(ConfigError, match=r"gpipe recomputes already.*without any R"):
        with_recompute_ahead(with_recompute_ahead(gpipe(2, 3)))

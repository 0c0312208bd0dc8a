"""Generators compared with published orders, and the errors of each."""

import itertools
import re

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir import generators
from megalite.pipeline.ir.generators import (
    build_schedule,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    smallest_group,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Kind, Schedule
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
    for name, ranks, ahead in itertools.product(generators.SCHEDULES, range(1, 5), (False, True)):
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
    assert built("zb-h1", 1, recompute_ahead=True) == generators.with_recompute_ahead(zb_h1(2, 5)) != zb_h1(2, 5)
    assert [generators.default_schedule(chunks) for chunks in (1, 2, 3)] == ["1f1b", "interleaved", "interleaved"]


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

"""Lowering: positions of sends, receives and reductions, and freedom from deadlock."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir import generators
from megalite.pipeline.ir.generators import gpipe, interleaved, loop_placement, looped_bfs, one_f_one_b, zb_h1, zb_v
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import COMPUTE, RECVS, SENDS, Action, Kind, Schedule, ScheduleError
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.pipeline.ir.validate import validate
from tests.pipeline.ir.random_programs import random_schedule

SAMPLES = [
    one_f_one_b(4, 6),
    gpipe(3, 4),
    looped_bfs(2, 2, 4),
    interleaved(4, 2, 8),
    interleaved(2, 3, 7, 5),
    zb_h1(4, 6),
    zb_v(3, 5),
    generators.with_recompute_ahead(zb_v(2, 4)),
]


def test_expected_program_of_1f1b_on_two_ranks() -> None:
    program = lower(one_f_one_b(2, 2))
    assert [" ".join(map(str, row)) for row in program.actions] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
    assert program.send_window == 1


def test_one_rank_has_no_messages() -> None:
    (row,) = lower(looped_bfs(1, 2, 2)).actions
    assert " ".join(map(str, row)) == "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD"


@pytest.mark.parametrize("schedule", SAMPLES, ids=lambda s: f"{s.name}-{s.num_ranks}-{s.num_stages}")
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_positions_of_messages_and_reductions(schedule: Schedule, prefetch: int) -> None:
    program = lower(schedule, recv_prefetch=prefetch)
    makers = {Kind.SEND_F: {Kind.F}, Kind.SEND_B: {Kind.B, Kind.I}}
    readers = {Kind.RECV_F: {Kind.F}, Kind.RECV_B: {Kind.B, Kind.I}}
    wire: dict[bool, dict[tuple[int, int], list[tuple[bool, int, int]]]] = {
        True: defaultdict(list),
        False: defaultdict(list),
    }
    for rank, row in enumerate(program.actions):
        assert tuple(action for action in row if action.kind in COMPUTE) == schedule.actions[rank]
        for position, (kind, stage, microbatch) in enumerate(row):
            if kind in SENDS:
                maker = row[position - 1]
                assert maker.kind in makers[kind] and maker[1:] == (stage, microbatch)
                peer = schedule.placement[stage + (1 if kind is Kind.SEND_F else -1)]
                wire[True][rank, peer].append((kind is Kind.SEND_F, stage, microbatch))
            elif kind in RECVS:
                offset = -1 if kind is Kind.RECV_F else 1
                source = schedule.placement[stage + offset]
                wire[False][source, rank].append((kind is Kind.RECV_F, stage + offset, microbatch))
                reader = next(
                    at for at, a in enumerate(row) if a.kind in readers[kind] and a[1:] == (stage, microbatch)
                )
                # At least `prefetch` computations are between, unless the list begins here.
                between = sum(action.kind in COMPUTE for action in row[position:reader])
                before = sum(action.kind in COMPUTE for action in row[:position])
                assert between >= prefetch or before == 0
            elif kind is Kind.REDUCE_GRAD:
                last = row[position - 1] if row[position - 1].kind is not Kind.SEND_B else row[position - 2]
                assert last.kind in (Kind.B, Kind.W) and last.stage == stage
                assert all(a.stage != stage or a.kind not in (Kind.B, Kind.W) for a in row[position:])
    assert wire[True] == wire[False]


def legal_sizes() -> list[tuple[int, int, int, int]]:
    sizes = [
        (ranks, chunks, microbatches, group)
        for ranks in range(1, 9)
        for chunks in range(1, 5)
        for microbatches in range(1, 33)
        for group in {ranks, ranks + 1, 2 * ranks, microbatches}
        if ranks <= group <= microbatches and not 0 < microbatches % group < ranks
    ]
    small = [size for size in sizes if size[0] <= 3 and size[1] <= 2 and size[2] <= 6]
    return small + random.Random(1).sample(sizes, 30)


def test_every_valid_size_runs_with_window_one_without_waiting() -> None:
    """Valid under both send semantics, and as fast as with sends that never block, for three ratios of B to F."""
    for ranks, chunks, microbatches, group in legal_sizes():
        schedules = [generators.forward_only(loop_placement(ranks, chunks), microbatches)]
        schedules += (
            [looped_bfs(ranks, chunks, microbatches), interleaved(ranks, chunks, microbatches, group)]
            if chunks > 1
            else [gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches)]
        )
        for schedule in schedules:
            program = lower(schedule, recv_prefetch=0)
            validate(program)
        wanted = microbatches * chunks + ranks - 1
        for backward in (0.5, 1.0, 2.0):
            costs = Costs.uniform(ranks * chunks, backward=backward)
            assert simulate(program, costs).makespan == wanted * (1 + backward), (schedule.name, ranks, chunks, group)


def test_any_order_without_deadlock_becomes_a_valid_program() -> None:
    """The docstring's theorem on random orders: what runs with unlimited sends runs with a window of one."""
    rng = random.Random(7)
    ran = 0
    for _ in range(600):
        base = rng.choice(
            [one_f_one_b(3, 3), looped_bfs(2, 2, 4), interleaved(2, 2, 4, 4), interleaved(3, 2, 3), gpipe(3, 3)]
        )
        lists = [list(row) for row in base.actions]
        for _ in range(rng.randint(1, 6)):
            row = rng.choice(lists)
            row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
        schedule = replace(base, actions=tuple(map(tuple, lists)))
        try:
            validate(lower(schedule, recv_prefetch=0, send_window=10_000))
        except ScheduleError:
            continue
        validate(lower(schedule, recv_prefetch=0, send_window=1))
        ran += 1
    assert ran > 60


def test_random_valid_schedules_become_valid_programs() -> None:
    """The docstring's theorem: any placement, any order, backwards whole and split, recomputed or not."""
    rng = random.Random(12)
    seen: Counter[Kind] = Counter()
    for _ in range(150):
        schedule = random_schedule(rng, max_stages=8, max_microbatches=6)
        seen.update({action.kind for row in schedule.actions for action in row})
        costs = Costs(
            forward=tuple(rng.choice((0.0, 1.0, 3.0)) for _ in schedule.placement),
            backward=tuple(rng.choice((0.0, 2.0, 7.0)) for _ in schedule.placement),
            p2p=rng.choice((0.0, 0.5)),
        )
        for prefetch in (0, 1, 3):
            for window in (1, 2):
                program = lower(schedule, recv_prefetch=prefetch, send_window=window)
                validate(program)
                timeline = simulate(program, costs)
                assert timeline.makespan >= max(timeline.busy)
    assert all(seen[kind] > 30 for kind in COMPUTE), seen


def test_faults_of_schedules_are_reported_by_validate() -> None:
    """A schedule with a missing or doubled action, or one that cannot start, is lowered, and validate reports the fault."""
    for text, message in (
        ("0F0,0B0,0F1\n1F0,1F1,1B0,1B1\n", "0B1 is missing on rank 0"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 .* second time"),
        ("0F0,0B0\n1F0,1B0,1I0,1W0\n", "1I0 .* full backward too"),
        ("0B0,0F0\n1F0,1B0\n", "0B0 .* needs 0F0, which comes only later"),
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1\n", "deadlocks"),
    ):
        program = lower(Schedule.from_csv(text))
        with pytest.raises(ScheduleError, match=message):
            validate(program)


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(ConfigError, match="recv_prefetch is -1"):
        lower(gpipe(2, 2), recv_prefetch=-1)
    with pytest.raises(ConfigError, match="send_window is 0"):
        lower(gpipe(2, 2), send_window=0)
    broken = replace(gpipe(2, 2), actions=((Action(Kind.F, 2, 0),), ()))
    with pytest.raises(ScheduleError, match=r"2F0 \(rank 0, position 0\): there is no stage 2"):
        lower(broken)

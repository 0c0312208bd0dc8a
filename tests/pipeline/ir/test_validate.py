"""The validator against an independent oracle, and what it says."""

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from megalite.pipeline.ir.actions import NO_MICROBATCH, Action, Kind
from megalite.pipeline.ir.errors import ScheduleError
from megalite.pipeline.ir.generators import forward_only, gpipe, interleaved, one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.ir.validate import validate
from tests.pipeline.ir.mutants import late, mutant, rebuilt, reordered
from tests.pipeline.ir.oracle import is_valid

VEE = Schedule.from_csv(
    "0F0,0F1,3F0,3B0,0F2,3F1,3B1,0B0,3F2,3B2,0B1,0B2\n1F0,2F0,1F1,2F1,1F2,2B0,1B0,2F2,2B1,1B1,2B2,1B2\n",
    name="vee",
)
SMALL = [
    one_f_one_b(1, 2),
    one_f_one_b(2, 2),
    one_f_one_b(2, 3),
    one_f_one_b(3, 3),
    gpipe(2, 3),
    gpipe(3, 2),
    gpipe(2, 2, 2),
    gpipe(2, 4, 2),
    gpipe(2, 3, 3),
    interleaved(2, 2, 4, 4),
    interleaved(2, 2, 2),
    interleaved(2, 2, 3, 3),
    interleaved(3, 2, 3),
    interleaved(2, 3, 2),
    forward_only(2, 2, 3),
    forward_only(3, 1, 3),
    VEE,
]


FAULTS = (
    "is missing",
    "second time",
    "there is no",
    "is on rank",
    "comes only later",
    "which no rank has",
    "no action on another",
    "delivers in the order",
    "deadlocks whenever",
    "deadlocks when a send",
    "the schedule is forward-only",
    "has no microbatch",
)
"""A piece of each message that a program wrong in one place can get."""


def verdict(program: Program) -> str:
    """ "" if the validator accepts, else its message."""
    try:
        validate(program)
    except ScheduleError as error:
        return str(error)
    return ""


def test_mutants_against_the_oracle() -> None:
    """No false accept, no false reject; and each kind of fault does occur among the mutants."""
    rng = random.Random(20240229)
    seen: Counter[str] = Counter()
    for round_ in range(4500):
        schedule = SMALL[round_ % len(SMALL)]
        if round_ % 3:
            name, program = mutant(lower(schedule, recv_prefetch=rng.choice((0, 0, 1, 2))), rng)
        else:
            name, program = reordered(schedule, rng)
        message = verdict(program)
        lists = "\n".join(" ".join(map(str, row)) for row in program.actions)
        assert is_valid(program, rng) == (not message), (
            f"{name}, window {program.send_window}: {message}\n{lists}"
        )
        seen["accepted" if not message else "rejected"] += 1
        for fault in FAULTS:
            seen[fault] += fault in message
    assert min(seen.values()) >= 3, seen
    assert seen["accepted"] > 400 and seen["rejected"] > 2000 and seen["deadlocks whenever"] > 100, seen


@pytest.mark.parametrize("schedule", SMALL, ids=lambda schedule: f"{schedule.name}-{schedule.num_ranks}")
def test_originals_pass_both(schedule: Schedule) -> None:
    for window in (1, 2):
        program = lower(schedule, send_window=window)
        assert not verdict(program)
        assert is_valid(program, random.Random(0))


def edited(schedule: Schedule, rank: int, text: str, *, window: int = 1) -> Program:
    lists = [list(row) for row in lower(schedule).actions]
    lists[rank] = [Action.parse(cell) for cell in text.split()]
    return rebuilt(lower(schedule), lists, window)


@pytest.mark.parametrize(
    ("rank", "text", "message"),
    [
        (0, "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0REDUCE_GRAD", r"0B1 is missing on rank 0"),
        (0, "0F0 0SEND_F0 0F0", r"0F0 \(rank 0, position 2\): it occurs a second time, first at position 0"),
        (0, "0F7", r"0F7 \(rank 0, position 0\): there is no microbatch 7: microbatches are 0 to 1"),
        (0, "0F0 5F0", r"5F0 \(rank 0, position 1\): there is no stage 5: stages are 0 to 1"),
        (0, "0F0 1F0", r"1F0 \(rank 0, position 1\): stage 1 is on rank 1"),
        (
            1,
            "1RECV_F0 1B0 1F0 1RECV_F1 1F1 1B1 1SEND_B0 1SEND_B1 1REDUCE_GRAD",
            "1B0 .* needs 1F0, which comes only later",
        ),
        (
            1,
            "1F0 1RECV_F0 1B0 1RECV_F1 1F1 1B1 1SEND_B0 1SEND_B1 1REDUCE_GRAD",
            "1F0 .* needs 1RECV_F0, .* position 1",
        ),
        (
            1,
            "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1SEND_B0 1REDUCE_GRAD",
            "0B1 .* needs 1SEND_B1, which no rank has",
        ),
        (
            1,
            "1RECV_F0 1F0 1SEND_B0 1B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
            "1SEND_B0 .* needs 1B0, which comes only",
        ),
        (
            1,
            "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD",
            "message 0 .* 1RECV_F0 must be posted here",
        ),
        (1, "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1REDUCE_GRAD 1B1 1SEND_B0 1SEND_B1", "1REDUCE_GRAD .* needs 1B1"),
    ],
)
def test_each_fault_is_named(rank: int, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(edited(one_f_one_b(2, 2), rank, text))
    assert "\nrank 0: " in str(caught.value) and "\nrank 1: " in str(caught.value)


def test_a_message_that_nobody_needs() -> None:
    # Stages 1 and 2 share rank 1, so a message between them has no reader.
    program = lower(VEE)
    lists = [list(row) for row in program.actions]
    lists[1] += [Action(Kind.SEND_F, 1, 0), Action(Kind.RECV_F, 2, 0)]
    message = verdict(rebuilt(program, lists, 1))
    assert "1SEND_F0 (rank 1" in message and "no action on another rank depends" in message


def test_deadlock_names_the_shortest_cycle() -> None:
    # Ranks 1 and 2 wait for each other: 1 wants the backward of 0 before it sends the forward of 1, 2 the reverse.
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n", name="mine")
    with pytest.raises(ScheduleError) as caught:
        validate(lower(schedule))
    first, *grid = str(caught.value).split("\n")
    assert first == (
        "schedule mine deadlocks whenever its sends complete: rank 1 waits in 1B0 for 2SEND_B0 on rank 2; "
        "rank 2 waits in 2F1 for 1SEND_F1 on rank 1"
    )
    assert len(grid) == 3 and ">1B0<" in grid[1] and ">2F1<" in grid[2]


def test_deadlock_of_the_send_window_alone() -> None:
    # Rank 0 sends four forwards before it posts a receive; rank 1 cannot finish its second send before that, and so
    # never posts the receive for which rank 0's fourth send waits. A wider window, or lower's own order, is right.
    program = lower(gpipe(2, 4, 2))
    with pytest.raises(ScheduleError) as caught:
        validate(late(program, 1))
    assert str(caught.value).split("\n")[0] == (
        "schedule gpipe deadlocks when a send completes only once its receive is posted (send window 1): "
        "rank 0 waits in 0SEND_F3 for 1RECV_F2 on rank 1; rank 1 waits in 1SEND_F1 for 2RECV_F0 on rank 0"
    )
    assert not verdict(late(program, 2))
    assert not verdict(program)


def test_program_must_agree_with_its_schedule_and_sizes() -> None:
    program = lower(one_f_one_b(2, 2))
    with pytest.raises(ScheduleError, match=r"rank 1 .* lower the schedule again"):
        validate(
            replace(program, schedule=replace(program.schedule, actions=(program.schedule.actions[0], ())))
        )
    for change, message in (
        ({"placement": (0,)}, "placement lists 1 stages but there are 2"),
        ({"placement": (0, 2)}, "names a rank beyond 0 to 1"),
        ({"num_ranks": 3}, "2 action lists for 3 ranks"),
        ({"num_microbatches": 0}, "must be 1 or more"),
    ):
        with pytest.raises(ScheduleError, match=message):
            validate(replace(program, schedule=replace(program.schedule, **change)))
    with pytest.raises(ScheduleError, match="must be 1 or more"):
        validate(replace(program, send_window=0))


def test_report() -> None:
    report = validate(lower(interleaved(2, 2, 4)))
    assert report.peak_activations == (5, 3)
    assert report.sends == (12, 12)
    # Rank 0 of GPipe with nothing prefetched holds one receive buffer; all posted in advance would be three.
    assert validate(lower(gpipe(2, 3), recv_prefetch=0)).peak_receives == (1, 1)
    assert validate(lower(gpipe(2, 3), recv_prefetch=9)).peak_receives == (3, 3)


def test_forward_only_has_no_backward() -> None:
    program = lower(forward_only(2, 1, 2))
    lists = [list(row) for row in program.actions]
    lists[1].append(Action(Kind.REDUCE_GRAD, 1, NO_MICROBATCH))
    assert "forward-only" in verdict(rebuilt(program, lists, 1))


def test_sixteen_ranks_in_well_under_a_second() -> None:
    program = lower(interleaved(16, 4, 128))
    assert sum(map(len, program.actions)) > 48_000
    spent = []
    for _ in range(3):
        start = time.process_time()
        validate(program)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.6, spent  # about 0.2 s on a slow core; the bound leaves room for a busy machine

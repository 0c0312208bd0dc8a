"""The validator compared with an independent oracle, and its messages."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from megalite.pipeline.ir import generators
from megalite.pipeline.ir.generators import (
    dualpipe_v,
    gpipe,
    interleaved,
    loop_placement,
    looped_bfs,
    one_f_one_b,
    v_placement,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.schedule import Action, Kind, Program, Schedule, ScheduleError, live_units
from megalite.pipeline.ir.validate import validate, validate_written
from tests.pipeline.ir.oracle import exhaustible, is_valid, peaks, shortest_circle
from tests.pipeline.ir.random_programs import late, mutant, random_schedule, rebuilt, reordered

VEE = Schedule.from_csv(
    "0F0,0F1,3F0,3B0,0F2,3F1,3B1,0B0,3F2,3B2,0B1,0B2\n1F0,2F0,1F1,2F1,1F2,2B0,1B0,2F2,2B1,1B1,2B2,1B2\n", name="vee"
)
MIXED = Schedule.from_csv("0F0,0F1,0R0,0I0,0F2,0R1,0W0,0B1,0B2\n1F0,1B0,1F1,1I1,1F2,1W1,1R2,1I2,1W2\n", name="mixed")
SMALL = [
    *(one_f_one_b(p, m) for p, m in ((1, 2), (2, 2), (2, 3), (4, 4))),
    one_f_one_b(3, 4, "pb"),
    *(gpipe(2, 3), gpipe(3, 2)),
    *(looped_bfs(2, v, m) for v, m in ((2, 2), (2, 4), (3, 3))),
    *(
        interleaved(2, 2, 4, 4),
        interleaved(2, 2, 2),
        interleaved(2, 2, 3, 3),
        interleaved(3, 2, 3),
        interleaved(2, 3, 2),
    ),
    *(generators.forward_only(each, 3) for each in (loop_placement(2, 2), loop_placement(3, 1), v_placement(2))),
    *(VEE, MIXED),
    *(zb_h1(2, 2), zb_h1(3, 4), zb_h2(2, 3), zb_h2(4, 3), zb_v(2, 3), zb_v(3, 2), dualpipe_v(2, 4)),
    *(generators.with_recompute_ahead(each) for each in (one_f_one_b(2, 3), interleaved(2, 2, 2), zb_v(2, 2))),
]
MUTANTS = 3_500

FAULTS = (
    "is missing",
    "(or its halves, I and W)",
    "(its W exists)",
    "(its I exists)",
    "has a full backward too",
    "second time",
    "there is no",
    "is on rank",
    "comes only later",
    "which does not exist",
    "no action on another",
    "delivers in the order",
    "deadlocks whenever",
    "deadlocks when a send",
    "the schedule is forward-only",
    "has no microbatch",
)
"""Part of the message about a program with one fault."""


def verdict(program: Program) -> str:
    try:
        validate(program)
    except ScheduleError as error:
        return str(error)
    return ""


def test_verdicts_on_mutants_equal_the_oracle() -> None:
    """The validator accepts and refuses the same mutants; every kind of fault occurs among them."""
    rng = random.Random(20240229)
    schedules = SMALL + [random_schedule(rng) for _ in range(len(SMALL))]
    originals = [lower(schedule, recv_prefetch=prefetch) for schedule in schedules for prefetch in (0, 0, 1, 2)]
    seen: Counter[str] = Counter(dict.fromkeys((*FAULTS, "accepted"), 0))
    for _ in range(MUTANTS):
        if rng.random() < 0.67:
            name, program = mutant(rng.choice(originals), rng)
        else:
            name, program = reordered(rng.choice(schedules), rng)
        message = verdict(program)
        assert is_valid(program, rng) == (not message), f"{name}: {message}\n{listed(program)}"
        seen["accepted" if not message else "rejected"] += 1
        seen["in every interleaving"] += exhaustible(program)
        seen.update(fault for fault in FAULTS if fault in message)
        if not message:
            sizes = random_sizes(rng, program.schedule.num_stages)
            report = validate(program, sizes=sizes)
            assert report.peak_bytes == tuple((size, -at) for size, at in peaks(program, sizes)), listed(program)
            if not program.schedule.forward_only:
                most = (max((units.activations for units in live_units(row)), default=0) for row in program.actions)
                assert report.peak_activations == tuple(most), listed(program)
    assert min(seen.values()) >= 3, seen
    assert seen["accepted"] > 500 and seen["rejected"] > 1950, seen
    assert seen["in every interleaving"] > 1300 and seen["deadlocks whenever"] > 60, seen


def listed(program: Program) -> str:
    lists = "\n".join(" ".join(map(str, row)) for row in program.actions)
    return f"placement {program.schedule.placement}, send window {program.send_window}\n{lists}"


def random_sizes(rng: random.Random, num_stages: int) -> Sizes:
    def column() -> tuple[float, ...]:
        return tuple(float(rng.randint(0, 9)) for _ in range(num_stages))

    return Sizes(activation=column(), deferred=column(), kept_input=column(), message=float(rng.randint(0, 3)))


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
        (1, "1F0 1RECV_F0 1B0 1RECV_F1 1F1 1B1 1SEND_B0 1SEND_B1 1REDUCE_GRAD", "1F0 .* needs 1RECV_F0, .* position 1"),
        (1, "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1SEND_B0 1REDUCE_GRAD", "0B1 .* needs 1SEND_B1, which does not exist"),
        (
            1,
            "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD",
            "message 0 .* 1RECV_F0 must be posted here",
        ),
        (1, "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1REDUCE_GRAD 1B1 1SEND_B0 1SEND_B1", "1REDUCE_GRAD .* needs 1B1"),
        (1, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", "1REDUCE_GRAD is missing on rank 1"),
    ],
)
def test_each_fault_is_named(rank: int, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(edited(one_f_one_b(2, 2), rank, text))
    assert "\nrank 0: " in str(caught.value) and "\nrank 1: " in str(caught.value)


@pytest.mark.parametrize(
    ("computations", "message"),
    [
        ("0F0 0I0", r"0W0 is missing on rank 0 \(its I exists\)\nrank 0: .*>0I0<"),
        ("0F0 0W0", r"0I0 is missing on rank 0 \(its W exists\)\nrank 0: .*>0W0<"),
        ("0F0 0F1 0B0", r"0B1 is missing on rank 0 \(or its halves, I and W\)\nrank 0: .*>0F1<"),
        ("0F0 0B0 0W0", r"0W0 \(rank 0, position .* full backward too, 0B0 at position .* either B or I and W"),
        ("0F0 0I0 0W0 0B0", r"0I0 \(rank 0, position .* full backward too, 0B0 at position"),
        ("0F0 0W0 0I0", r"0W0 \(rank 0, position .* needs 0I0, which comes only later"),
        ("0R0 0F0 0B0", r"0R0 \(rank 0, position .* needs 0F0, which comes only later"),
        ("0F0 0B0 0R0", r"0B0 \(rank 0, position .* needs 0R0, which comes only later"),
        ("0F0 0R0 0R0 0B0", r"0R0 \(rank 0, position 2\): it occurs a second time, first at position 1"),
    ],
)
def test_faults_of_halves_and_recomputation_are_named(computations: str, message: str) -> None:
    schedule = Schedule.from_csv(computations.replace(" ", ",") + "\n", name="mine")
    with pytest.raises(ScheduleError, match=message):
        validate(lower(schedule))


def test_reduction_before_a_weight_gradient_is_an_error() -> None:
    program = lower(Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n"))
    (row,) = program.actions
    early = [*row[:-2], row[-1], row[-2]]
    assert "0REDUCE_GRAD (rank 0, position 5): it needs 0W1, which comes only later" in verdict(
        rebuilt(program, [early], 1)
    )


def test_huge_ids_are_refused_quickly() -> None:
    for text, message in (
        ("0F99999999999,0B99999999999", "0F0 is missing on rank 0"),
        ("0F0,0B0,0F123456789012345678", "0F1 is missing on rank 0"),
    ):
        actions = tuple(Action.parse(cell) for cell in text.split(","))
        schedule = Schedule("made", max(action.microbatch for action in actions) + 1, (0,), (actions,))
        with pytest.raises(ScheduleError, match=message):
            lower(schedule)
        with pytest.raises(ScheduleError, match="but no microbatch"):
            Schedule.from_csv(text)
    with pytest.raises(ScheduleError, match="it has stage 99999999999 but no stage 0"):
        Schedule.from_csv("99999999999F0,99999999999B0")


def test_message_without_a_reader_is_an_error() -> None:
    # Stages 1 and 2 share rank 1, so a message between them has no reader.
    program = lower(VEE)
    lists = [list(row) for row in program.actions]
    lists[1] += [Action(Kind.SEND_F, 1, 0), Action(Kind.RECV_F, 2, 0)]
    message = verdict(rebuilt(program, lists, 1))
    assert "1SEND_F0 (rank 1" in message and "no action on another rank depends" in message


def test_deadlock_names_the_shortest_cycle() -> None:
    # Ranks 1 and 2 wait for each other: 1 needs the backward of 0 before it sends the forward of 1, 2 the reverse.
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n", name="mine")
    with pytest.raises(ScheduleError) as caught:
        validate(lower(schedule))
    first, *grid = str(caught.value).split("\n")
    assert first.startswith(
        "schedule mine deadlocks whenever its sends complete: 1B0 on rank 1 -> 2SEND_B0 on rank 2; 2F1 on rank 2 -> "
        "1SEND_F1 on rank 1 (-> waits for;"
    )
    assert len(grid) == 3 and ">1B0<" in grid[1] and ">2F1<" in grid[2]


def test_cycles_are_as_short_as_by_exhaustive_search() -> None:
    rng = random.Random(11)
    lengths: Counter[int] = Counter()
    while lengths.total() < 80:
        schedule = random_schedule(rng) if rng.random() < 0.5 else rng.choice(SMALL)
        _, program = reordered(schedule, rng)
        message = verdict(program)
        if "deadlocks" not in message:
            continue
        assert message.count(" -> ") == shortest_circle(program), f"{message}\n{listed(program)}"
        lengths[shortest_circle(program)] += 1
    assert lengths[2] > 10 and lengths[3] > 1, lengths


def test_deadlock_caused_only_by_the_send_window() -> None:
    # Rank 0 sends four forwards before it posts a receive; rank 1 cannot complete its second send before that, and so
    # never posts the receive for which rank 0's fourth send waits. A wider window, or the order by `lower`, is valid.
    program = lower(looped_bfs(2, 2, 4))
    with pytest.raises(ScheduleError) as caught:
        validate(late(program, 1))
    assert str(caught.value).startswith(
        "schedule looped-bfs deadlocks when a send completes only once its receive is posted (send window 1): "
        "0SEND_F3 on rank 0 -> 1RECV_F2 on rank 1; 1SEND_F1 on rank 1 -> 2RECV_F0 on rank 0 (-> waits for;"
    )
    assert not verdict(late(program, 2))
    assert not verdict(program)


def test_program_must_match_its_schedule_and_sizes() -> None:
    program = lower(one_f_one_b(2, 2))
    with pytest.raises(ScheduleError, match=r"rank 1 .* lower the schedule again"):
        validate(replace(program, schedule=replace(program.schedule, actions=(program.schedule.actions[0], ()))))
    swapped = tuple(reversed(program.schedule.actions[1]))
    with pytest.raises(ScheduleError, match=r"see 1F0 at position 1; lower the schedule again\n(.*\n)*.*>1F0<"):
        validate(replace(program, schedule=replace(program.schedule, actions=(program.schedule.actions[0], swapped))))
    for change, message in (
        ({"placement": (0,)}, "there is no stage 1: stages are 0 to 0"),
        ({"placement": (0, 2)}, "names ranks beyond 0 to 1"),
        ({"actions": (*program.schedule.actions, ())}, "2 action lists for 3 ranks"),
        ({"num_microbatches": 0}, "must be 1 or more"),
    ):
        with pytest.raises(ScheduleError, match=message):
            validate(replace(program, schedule=replace(program.schedule, **change)))
    with pytest.raises(ScheduleError, match="must be 1 or more"):
        validate(replace(program, send_window=0))


def test_report_of_memory() -> None:
    report = validate(lower(interleaved(2, 2, 4)))
    assert report.peak_activations == (5, 3)
    assert report.sends == (12, 12)
    # Rank 0 holds three graphs after 0F2; deferred weight gradients are not among them.
    report = validate(lower(zb_h1(3, 4)))
    assert report.peak_activations == (3, 2, 1)
    assert report.sends == (4, 8, 4)
    # Rank 0 of GPipe without prefetch has one receive buffer; with all receives posted it would have three.
    assert validate(lower(gpipe(2, 3), recv_prefetch=0)).peak_receives == (1, 1)
    assert validate(lower(gpipe(2, 3), recv_prefetch=9)).peak_receives == (3, 3)


def test_memory_limit() -> None:
    """The error names the most loaded rank and a limit that works; exactly that limit passes."""
    program = lower(one_f_one_b(3, 4))
    gib = 2.0**30
    sizes = Sizes.uniform(3, activation=1.5 * gib)
    peaks = validate(program, sizes=sizes, limit=4.5 * gib).peak_bytes
    assert peaks is not None and [peak.size / gib for peak in peaks] == [4.5, 3.0, 1.5]
    with pytest.raises(ScheduleError) as caught:
        validate(program, sizes=sizes, limit=2.5 * gib)
    first, *lists = str(caught.value).split("\n")
    place = program.actions[0].index(Action(Kind.F, 0, 2))
    assert first == (
        f"schedule 1f1b: 0F2 (rank 0, position {place}): here the rank holds 4.50 GiB (4831838208), above the limit of "
        f"2.50 GiB (2684354560); 2 of 3 ranks need more than the limit; a limit of 4831838208B works"
    )
    assert len(lists) == 3 and ">0F2<" in lists[0]
    with pytest.raises(ScheduleError, match=r"the rank holds 3, above the limit of 2\.5; 1 of|; a limit of 3 works"):
        validate(program, sizes=Sizes.uniform(3), limit=2.5)


def test_memory_limit_tolerates_rounding() -> None:
    program = lower(looped_bfs(3, 3, 11))
    sizes = Sizes.uniform(9, activation=1 / 3)
    validate(program, sizes=sizes, limit=11.0)
    with pytest.raises(ScheduleError, match=r"above the limit of 10\.9; .*a limit of 11 works"):
        validate(program, sizes=sizes, limit=10.9)
    bytes_of = Sizes.uniform(9, activation=1000 / 3)
    with pytest.raises(ScheduleError, match=r"a limit of 11000B works|a limit of 11001B works"):
        validate(program, sizes=bytes_of, limit=5000.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0F1,0B0,0B1,0B1\n1F0,1B0,1F1,1B1\n", "0B1 (rank 0, position 4): it occurs a second time"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n", "1B1 (rank 1, position 2): it needs 1F1, which comes only later"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "0B1 is missing on rank 0"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F2,1B1\n",
            "0F2 is missing on rank 0; microbatch 2 has only 1F2 at position 2 of rank 1",
        ),
    ],
)
def test_errors_name_positions_in_the_file(text: str, says: str) -> None:
    """Positions are those in the file, without the messages that lowering adds."""
    with pytest.raises(ScheduleError) as caught:
        validate_written(Schedule.from_csv(text))
    message = str(caught.value)
    assert says in message and "SEND" not in message
    assert message.endswith("(rank 0 is the first line; positions count the actions of a line from 0)")


def test_faults_of_messages_are_found_after_lowering() -> None:
    circle = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    validate_written(circle)
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate(lower(circle))

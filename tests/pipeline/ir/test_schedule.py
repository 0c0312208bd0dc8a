"""Text form of actions; CSV form and memory count of schedules."""

import pytest

from megalite.pipeline.ir import generators
from megalite.pipeline.ir.generators import interleaved, loop_placement, looped_bfs, one_f_one_b, zb_h1, zb_v
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import NO_MICROBATCH, Action, Kind, LiveUnits, Schedule, ScheduleError, live_units
from megalite.pipeline.ir.validate import validate


def test_text_form_of_each_kind() -> None:
    texts = {
        "2F0": Action(Kind.F, 2, 0),
        "10B31": Action(Kind.B, 10, 31),
        "4I5": Action(Kind.I, 4, 5),
        "4W15": Action(Kind.W, 4, 15),
        "0R3": Action(Kind.R, 0, 3),
        "2SEND_F0": Action(Kind.SEND_F, 2, 0),
        "3RECV_F1": Action(Kind.RECV_F, 3, 1),
        "0SEND_B7": Action(Kind.SEND_B, 0, 7),
        "1RECV_B12": Action(Kind.RECV_B, 1, 12),
        "2REDUCE_GRAD": Action(Kind.REDUCE_GRAD, 2, NO_MICROBATCH),
    }
    assert {action.kind for action in texts.values()} == set(Kind)
    for text, action in texts.items():
        assert str(action) == text == f"{action}"
        assert Action.parse(text) == action
        assert Action.parse(f"  {text}\n") == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2f0", "2G0", "-1F0", "2F-1", "2F0x", "2REDUCE_GRAD3", "2IW3", "2R", "2SEND_F", "²F0"]
)
def test_invalid_actions_are_errors(text: str) -> None:
    with pytest.raises(ScheduleError, match="2F0"):
        Action.parse(text)


@pytest.mark.parametrize(
    "schedule",
    [
        looped_bfs(3, 2, 4),
        one_f_one_b(4, 6),
        interleaved(2, 3, 5, 3),
        generators.forward_only(loop_placement(2, 2), 5),
        one_f_one_b(1, 1),
        zb_v(3, 4),
        generators.with_recompute_ahead(zb_h1(3, 4)),
    ],
)
def test_csv_round_trip(schedule: Schedule) -> None:
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule


def test_csv_written_by_a_user() -> None:
    # A V placement (rank 0 has stages 0 and 3), with empty cells as bubbles and extra blanks.
    schedule = Schedule.from_csv(" 0F0,,, 3F0,3B0,,,0B0 \n\n,1F0,2F0,,,2B0,1B0,\n", name="vee")
    assert schedule.placement == (0, 1, 1, 0)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 4, 1)
    assert schedule.stages_of(0) == (0, 3) and schedule.stages_of(1) == (1, 2)
    assert not schedule.forward_only
    program = lower(schedule)
    validate(program)
    # 1 -> 2 and the forward -> backward of 3 stay on their rank: each direction has only two messages.
    assert " ".join(map(str, program.actions[1])) == (
        "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 2REDUCE_GRAD 1B0 1SEND_B0 1REDUCE_GRAD"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "line 1, cell 2.*0X0"),
        ("0F0,0SEND_F0\n1F0\n", "0SEND_F0 is communication"),
        ("0F0\n0B0\n", "stage 0 is on line 1 and on line 2 with 0B0"),
        ("0F0\n2F0\n", "stage 2 but no stage 1"),
        ("0F0,1F0,0B0\n1F1,1B1,1B0\n", "stage 1 is on line 1 and on line 2 with 1F1"),
        (" \n", "no action"),
        ("0F0,0B0\n,,\n", "line 2 has no action; expected one line per rank"),
        ("# mine\n0F0,0B0\n\n1F0,1X0\n", "line 4, cell 2: not a pipeline action: '1X0'"),
        ("0F" + "9" * 5000 + "\n", "line 1, cell 1: not a pipeline action"),
    ],
)
def test_invalid_csv_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_split_and_recomputed_actions() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0R1,0I0,0W0,0B1\n")
    assert schedule.split == {(0, 0)} and schedule.recomputed == {(0, 1)}
    assert schedule.input_gradient(0, 0) == Action(Kind.I, 0, 0)
    assert schedule.input_gradient(0, 1) == Action(Kind.B, 0, 1)


def test_live_units_after_each_action() -> None:
    (row,) = Schedule.from_csv("0F0,0F1,0R1,0I0,0B1,0W0\n").actions
    assert live_units(row) == [
        LiveUnits(activations=1, inputs=0, deferred=0),
        LiveUnits(activations=1, inputs=1, deferred=0),
        LiveUnits(activations=2, inputs=1, deferred=0),
        LiveUnits(activations=1, inputs=1, deferred=1),
        LiveUnits(activations=0, inputs=0, deferred=1),
        LiveUnits(activations=0, inputs=0, deferred=0),
    ]


def test_csv_formats_of_spreadsheets_and_users() -> None:
    text = '# two stages\r\n"0F0", 0F1,,"0B0",0B1\r\n\r\n1F0,1B0,1F1,1B1\r\n'
    assert Schedule.from_csv(text).actions == Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").actions

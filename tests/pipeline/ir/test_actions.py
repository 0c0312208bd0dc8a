"""Text form of actions."""

import pytest

from megalite.pipeline.ir.actions import NO_MICROBATCH, Action, Kind, ScheduleError


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
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="2F0"):
        Action.parse(text)

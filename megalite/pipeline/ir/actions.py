"""Actions, the elements of every schedule, and the error of a schedule that cannot run."""

import re
from enum import StrEnum
from typing import NamedTuple

from megalite.config.errors import ConfigError


class ScheduleError(ConfigError):
    """Raised for a schedule that cannot run. The message's first line names the rank, the position and the action."""


class Kind(StrEnum):
    """What an action does. F, B, I, W and R compute; `lower` adds the others."""

    # A string enum, because tens of thousands of actions are dictionary keys, and a plain Enum hashes in Python code.

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """Full backward of one microbatch through one stage: input and weight gradients."""
    I = "I"  # noqa: E741
    """The half of a backward that other stages wait for: the gradient of the stage's input."""
    W = "W"
    """The other half: the gradients of the stage's weight matrices. Only REDUCE_GRAD waits for it."""
    R = "R"
    """Activation recomputation as a separate action, which can run before the backward's gradient arrives."""
    SEND_F = "SEND_F"
    """Send the stage's output to the rank of the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the rank of the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the rank of the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the rank of the next stage."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """The stage's gradients are final for this step: data-parallel reduction may start. Has no microbatch."""


MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "forward again",
}
"""The kinds that compute, in words."""
COMPUTE = frozenset(MEANINGS)
GRADIENTS = frozenset({Kind.B, Kind.I})
"""The kinds that produce the gradient of a stage's input."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECVS = frozenset({Kind.RECV_F, Kind.RECV_B})

NO_MICROBATCH = -1
"""The `microbatch` of a REDUCE_GRAD."""

_TEXT = re.compile(rf"(\d{{1,18}})({'|'.join(sorted(Kind, key=len, reverse=True))})(\d{{0,18}})", re.ASCII)


class Action(NamedTuple):
    """One action of one rank. `stage` is the global virtual stage. Text form: stage, kind, microbatch, e.g. `2F0`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind is Kind.REDUCE_GRAD else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse the text form. Raise ScheduleError if the text is malformed."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or (match[2] == Kind.REDUCE_GRAD) != (match[3] == ""):
            raise ScheduleError(
                f"not a pipeline action: {text.strip()!r}; expected stage, kind, microbatch as in 2F0, with one of the "
                f"kinds {', '.join(Kind)}"
            )
        return cls(Kind(match[2]), int(match[1]), int(match[3]) if match[3] else NO_MICROBATCH)

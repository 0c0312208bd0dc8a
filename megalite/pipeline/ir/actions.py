"""The atoms of every schedule: what one pipeline rank can do, and the error of a schedule that cannot run."""

import re
from enum import StrEnum
from typing import NamedTuple

from megalite.config.errors import ConfigError


class ScheduleError(ConfigError):
    """A schedule that cannot run; the first line of the message names the rank, the position and the action."""


class Kind(StrEnum):
    """What an action does. F, B, I, W and R compute; the rest is added by `lower`."""

    # A string enum, because actions are dictionary keys by the ten thousand: a plain Enum hashes in Python code.

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """Full backward of one microbatch through one stage: input and weight gradients."""
    I = "I"  # noqa: E741
    """The half of a backward that others wait for: the gradient of the stage's input."""
    W = "W"
    """The other half: the gradients of the stage's weight matrices. Nothing waits for it but REDUCE_GRAD."""
    R = "R"
    """Forward once more, with its activations kept: the backward then need not recompute, and the R can run early."""
    SEND_F = "SEND_F"
    """Send the stage's output to the rank of the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the rank of the stage before."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the rank of the stage before."""
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
"""What computes, in words."""
COMPUTE = frozenset(MEANINGS)
GRADIENTS = frozenset({Kind.B, Kind.I})
"""Each gives the gradient of a stage's input."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECVS = frozenset({Kind.RECV_F, Kind.RECV_B})

NO_MICROBATCH = -1
"""The `microbatch` of a REDUCE_GRAD."""

_TEXT = re.compile(rf"(\d{{1,18}})({'|'.join(sorted(Kind, key=len, reverse=True))})(\d{{0,18}})", re.ASCII)


class Action(NamedTuple):
    """One step of one rank. `stage` is the global virtual stage. Text form: stage, kind, microbatch, e.g. `2F0`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind is Kind.REDUCE_GRAD else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action of this text form, or a ScheduleError."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or (match[2] == Kind.REDUCE_GRAD) != (match[3] == ""):
            raise ScheduleError(
                f"not a pipeline action: {text.strip()!r}; expected stage, kind, microbatch as in 2F0, with one of the "
                f"kinds {', '.join(Kind)}"
            )
        return cls(Kind(match[2]), int(match[1]), int(match[3]) if match[3] else NO_MICROBATCH)

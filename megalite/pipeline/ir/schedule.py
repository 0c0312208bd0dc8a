"""Pipeline schedules: actions, schedules (what each rank computes), programs (with communication) and dependencies.

`NEEDS` is the one table of dependencies. Lowering, validation, simulation and drawing read it, through `dependencies`
for one action or `table.Table` for all at once."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import count
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


ActionLists = tuple[tuple[Action, ...], ...]  # per rank, its actions in order


@dataclass(frozen=True)
class Schedule:
    """The order of forwards and backwards on each pipeline rank; communication follows from it (`lower`)."""

    name: str
    num_microbatches: int
    placement: tuple[int, ...]  # per virtual stage, its rank
    actions: ActionLists  # per rank, F and B, or I and W instead of B, and R for recomputation
    forward_only: bool = False  # no backward: evaluation

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a rank, ascending: its chunks 0, 1, ..."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on any rank."""
        return max(len(self.stages_of(rank)) for rank in range(self.num_ranks))

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) pairs with a split backward, I and W."""
        return frozenset(action[1:] for row in self.actions for action in row if action.kind is Kind.I)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) pairs with an R."""
        return frozenset(action[1:] for row in self.actions for action in row if action.kind is Kind.R)

    def input_gradient(self, stage: int, microbatch: int) -> Action:
        """Return the action that produces the gradient of the stage's input: I if the backward is split, else B."""
        return Action(Kind.I if (stage, microbatch) in self.split else Kind.B, stage, microbatch)

    def to_csv(self) -> str:
        """Write one line per rank, with its actions separated by commas."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> "Schedule":
        """Parse a schedule from `to_csv` or a user, one line per rank.

        Sizes and placement are inferred: a stage is on the rank of the line that contains it. Empty cells (bubbles) and
        lines that start with # are skipped. Legality is not checked here: lower it and `validate` the program."""
        lines = [
            (number, tuple(_parse_cells(line, f"schedule {name}, line {number}")))
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        empty = next((number for number, row in lines if not row), None)
        if empty is not None or not lines:
            where = "there is" if empty is None else f"line {empty} has"
            raise ScheduleError(f"schedule {name}: {where} no action; expected one line per rank such as 0F0,0B0")
        owners: dict[int, int] = {}
        for rank, (number, row) in enumerate(lines):
            for action in row:
                if (owner := owners.setdefault(action.stage, rank)) != rank:
                    raise ScheduleError(
                        f"schedule {name}: stage {action.stage} is on line {lines[owner][0]} and on line {number} with {action}; "
                        "each stage belongs on the line of one rank"
                    )
        microbatches = {action.microbatch for _, row in lines for action in row}
        # Checked before anything of the size of the largest number in the file is allocated.
        for what, numbers in (("stage", set(owners)), ("microbatch", microbatches)):
            missing = next(number for number in count() if number not in numbers)
            if missing < len(numbers):
                raise ScheduleError(f"schedule {name}: it has {what} {max(numbers)} but no {what} {missing}")
        return cls(
            name,
            len(microbatches),
            tuple(owners[stage] for stage in range(len(owners))),
            tuple(row for _, row in lines),
            forward_only=all(action.kind is Kind.F for _, row in lines for action in row),
        )


@dataclass(frozen=True)
class Program:
    """A schedule with its communication: exactly the actions that the executor runs on each rank.

    RECV posts a receive and returns; the F or B that needs it waits. SEND posts a send and returns, unless
    `send_window` sends are pending on its channel (ordered pair of ranks): then it first waits for the oldest of them.
    After its last action each rank waits for all its sends. REDUCE_GRAD does not block."""

    schedule: Schedule
    actions: ActionLists  # per rank, the schedule's actions with SEND, RECV and REDUCE_GRAD between them
    send_window: int = 1  # sends that may be pending on one channel; each keeps an output tensor alive


class LiveUnits(NamedTuple):
    """Live memory of a rank, in (stage, microbatch) pairs."""

    activations: int  # autograd graphs: from F (or R) to B or I
    inputs: int  # stage inputs kept for an R: from F to B or I
    deferred: int  # inputs and output gradients of linear layers, kept for a W: from I to W


def live_units(row: Sequence[Action]) -> list[LiveUnits]:
    """Return the live memory after each action of a rank's list, for a training schedule."""
    recomputed = {action[1:] for action in row if action.kind is Kind.R}
    activations = inputs = deferred = 0
    found = []
    for action in row:
        kind, again = action.kind, action[1:] in recomputed
        if kind is Kind.F:
            activations += not again
            inputs += again
        elif kind is Kind.R:
            activations += 1
        elif kind in GRADIENTS:
            activations -= 1
            inputs -= again
            deferred += kind is Kind.I
        elif kind is Kind.W:
            deferred -= 1
        found.append(LiveUnits(activations, inputs, deferred))
    return found


def _parse_cells(line: str, where: str) -> Iterator[Action]:
    for column, cell in enumerate(line.split(","), start=1):
        if not cell.strip():
            continue
        try:
            # Spreadsheets may quote any cell.
            action = Action.parse(cell.strip().strip('"'))
        except ScheduleError as error:
            raise ScheduleError(f"{where}, cell {column}: {error}") from None
        if action.kind not in COMPUTE:
            raise ScheduleError(
                f"{where}, cell {column}: {action} is communication, which lowering adds; only F, B, I, W and R belong here"
            )
        yield action


class Need(NamedTuple):
    """An action of the same microbatch that must come before an action of some kind."""

    kinds: tuple[Kind, ...]
    """Alternatives: the first of these kinds that the schedule contains, or the last if it contains none."""
    offset: int = 0  # its stage, relative to the dependent action's; no dependency if that stage does not exist


# With recomputation, the backward uses the activations of R; in a split backward, I computes the input's gradient.
_BACKWARD = (Need((Kind.R, Kind.F)), Need((Kind.I, Kind.B), 1))

NEEDS: dict[Kind, tuple[Need, ...]] = {
    Kind.F: (Need((Kind.F,), -1),),
    Kind.B: _BACKWARD,
    Kind.I: _BACKWARD,
    Kind.W: (Need((Kind.I,)),),
    Kind.R: (Need((Kind.F,)),),
    Kind.SEND_F: (Need((Kind.F,)),),
    Kind.RECV_F: (Need((Kind.SEND_F,), -1),),
    Kind.SEND_B: (Need((Kind.I, Kind.B)),),
    Kind.RECV_B: (Need((Kind.SEND_B,), 1),),
    Kind.REDUCE_GRAD: (Need((Kind.W, Kind.B)),),  # of every microbatch
}
"""Dependencies of each kind. A computation depends on at most one action of another stage."""

SEND_OF = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
"""The send of each computation's result."""
RECEIVE_OF = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
"""The receive that matches each kind of send, and its stage relative to the send's."""


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the producers of what this action reads (`NEEDS`). They end before it starts, except a receive's send.

    A backward on the last stage starts from the loss, so it depends on its F (or R) alone. REDUCE_GRAD depends on every
    B or W of its stage."""
    kind, stage, microbatch = action
    indices = range(schedule.num_microbatches) if kind is Kind.REDUCE_GRAD else (microbatch,)
    return tuple(
        Action(_chosen(need.kinds, stage + need.offset, index, schedule), stage + need.offset, index)
        for index in indices
        for need in NEEDS[kind]
        if 0 <= stage + need.offset < schedule.num_stages
    )


def _chosen(kinds: tuple[Kind, ...], stage: int, microbatch: int, schedule: Schedule) -> Kind:
    has_first = schedule.recomputed if kinds[0] is Kind.R else schedule.split
    return kinds[0] if (stage, microbatch) in has_first else kinds[-1]

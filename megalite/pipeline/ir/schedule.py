"""`Schedule` (what each rank computes, in order), `Program` (the same with communication) and their one relation.

`NEEDS` is the table of what must happen before what. Lowering, validation, simulation and rendering ask it, through
`dependencies` for one action or `table.Table` for all at once, and have no rule beside it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple

from megalite.pipeline.ir.actions import COMPUTE, GRADIENTS, NO_MICROBATCH, SENDS, Action, Kind, ScheduleError

ActionLists = tuple[tuple[Action, ...], ...]
"""Per rank, its actions in order."""


@dataclass(frozen=True)
class Schedule:
    """The order of forwards and backwards on each pipeline rank; communication follows from it (`lower`)."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    """Per virtual stage, the rank that holds it."""
    actions: ActionLists
    """Per rank, F and B, or I and W instead of B, and R where something is recomputed ahead."""
    forward_only: bool = False
    """No backward: evaluation."""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages on a rank, ascending: its chunks 0, 1, ..."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def num_chunks(self) -> int:
        """The most stages on any rank."""
        return max(len(self.stages_of(rank)) for rank in range(self.num_ranks))

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) whose backward comes in halves: I and W."""
        return self._with(Kind.I)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) with an R."""
        return self._with(Kind.R)

    def _with(self, kind: Kind) -> frozenset[tuple[int, int]]:
        return frozenset(
            (action.stage, action.microbatch) for row in self.actions for action in row if action.kind is kind
        )

    def input_gradient(self, stage: int, microbatch: int) -> Action:
        """The action that gives the gradient of the stage's input: I where the backward is split, else B."""
        return Action(Kind.I if (stage, microbatch) in self.split else Kind.B, stage, microbatch)

    def objection(self, rank: int, action: Action) -> str | None:
        """Why the action cannot be on that rank at all, whatever surrounds it: an id out of range, another's stage."""
        if not 0 <= action.stage < self.num_stages:
            return f"there is no stage {action.stage}: stages are 0 to {self.num_stages - 1}"
        if action.kind is Kind.REDUCE_GRAD:
            if action.microbatch != NO_MICROBATCH:
                return f"REDUCE_GRAD has no microbatch, but this has {action.microbatch}"
        elif not 0 <= action.microbatch < self.num_microbatches:
            return f"there is no microbatch {action.microbatch}: microbatches are 0 to {self.num_microbatches - 1}"
        if self.placement[action.stage] != rank:
            return f"stage {action.stage} is on rank {self.placement[action.stage]}"
        return None

    def to_csv(self) -> str:
        """One line a rank, its actions separated by commas."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> "Schedule":
        """The schedule that `to_csv` wrote, or that a user did: one line a rank.

        Sizes and placement are inferred: a stage is on the rank in whose line it occurs. Empty cells are skipped, so
        tables with bubbles in them load as well, and so are lines that start with #. Legality is not checked here: lower it and `validate` the program.

        Raises:
            ScheduleError: a cell is no action or communication, a stage occurs in two lines, or a stage is missing.
        """
        lines = [
            (number, line)
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        lists = tuple(tuple(_parse_cells(line, name=name, number=number)) for number, line in lines)
        actions = [(rank, action) for rank, row in enumerate(lists) for action in row]
        if not actions:
            raise ScheduleError(f"schedule {name}: there is no action in it; expected one line a rank such as 0F0,0B0")
        for (number, _), row in zip(lines, lists, strict=True):
            if not row:
                raise ScheduleError(
                    f"schedule {name}: line {number} has no action; each line is a rank, and each rank needs a stage"
                )
        owners: dict[int, int] = {}
        for rank, action in actions:
            if owners.setdefault(action.stage, rank) != rank:
                numbers = [number for number, _ in lines]
                raise ScheduleError(_on_two_lines(lists, action.stage, numbers, name=name))
        # Looked for before anything is made in the size of the largest number in the file.
        microbatches = {action.microbatch for _, action in actions}
        for what, there in (("stage", set(owners)), ("microbatch", microbatches)):
            missing = next(number for number in count() if number not in there)
            if missing < len(there):
                raise ScheduleError(f"schedule {name}: it has {what} {max(there)} but no {what} {missing}")
        num_stages = len(owners)
        return cls(
            name=name,
            num_ranks=len(lists),
            num_stages=num_stages,
            num_microbatches=len(microbatches),
            placement=tuple(owners[stage] for stage in range(num_stages)),
            actions=lists,
            forward_only=all(action.kind is Kind.F for _, action in actions),
        )


@dataclass(frozen=True)
class Program:
    """A schedule with its communication: exactly what the executor does, rank by rank.

    RECV posts a receive and returns; the F or B that needs it waits. SEND posts a send and returns, unless
    `send_window` sends are pending on its channel (ordered pair of ranks): then it first waits for the oldest of
    them. After its last action a rank waits for all its sends. REDUCE_GRAD does not block.
    """

    schedule: Schedule
    actions: ActionLists
    """Per rank, the schedule's actions with SEND, RECV and REDUCE_GRAD between them."""
    send_window: int = 1
    """Sends that may be pending on one channel; each keeps an output tensor alive."""


def peak_activations(actions: Sequence[Iterable[Action]], *, forward_only: bool) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs whose activations are alive at once.

    A pair's activations live from its F, or from its R if it has one, to its B or I. What W still needs is not counted
    (`live_units`). Forward-only runs keep nothing beyond the F itself, so their peak is 1. The order on the rank alone
    decides: the result holds whatever the actions cost.
    """
    peaks = []
    for row in map(tuple, actions):
        if forward_only:
            peaks.append(int(any(action.kind is Kind.F for action in row)))
            continue
        peaks.append(max((units.activations for units in live_units(row)), default=0))
    return tuple(peaks)


class LiveUnits(NamedTuple):
    """What is alive on a rank, in (stage, microbatch) pairs."""

    activations: int
    """Graphs: from F (or R) to B or I."""
    inputs: int
    """Stage inputs kept for an R: from F to B or I."""
    deferred: int
    """Inputs and output gradients of linear layers, kept for a W: from I to W."""


def live_units(row: Sequence[Action]) -> list[LiveUnits]:
    """After each action of a rank's list what is alive, in a training schedule."""
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


def _on_two_lines(lists: ActionLists, stage: int, numbers: list[int], *, name: str) -> str:
    """What is wrong if a stage occurs on several lines: most likely the cell on the line that has least of it."""
    holders = {rank: [a for a in row if a.stage == stage] for rank, row in enumerate(lists)}
    few, *_, most = sorted((rank for rank in holders if holders[rank]), key=lambda rank: len(holders[rank]))
    odd = holders[few][0]
    return (
        f"schedule {name}: stage {stage} is on line {numbers[few]} with {odd}, action {lists[few].index(odd) + 1} there, and on "
        f"line {numbers[most]} with {holders[most][0]}; each stage belongs on the line of one rank"
    )


def _parse_cells(line: str, *, name: str, number: int) -> Iterable[Action]:
    for column, cell in enumerate(line.split(",")):
        if not cell.strip():
            continue
        where = f"schedule {name}, line {number}, cell {column + 1}"
        try:
            # Spreadsheets put quotes around what they like.
            action = Action.parse(cell.strip().strip('"'))
        except ScheduleError:
            raise ScheduleError(
                f"{where}: not a pipeline action: {cell.strip()!r}; expected stage, kind, microbatch as in 2F0, with one of "
                f"the kinds F, B, I, W, R"
            ) from None
        if action.kind not in COMPUTE:
            raise ScheduleError(
                f"{where}: {action} is communication, which lowering adds; only F, B, I, W and R belong here"
            )
        yield action


class Need(NamedTuple):
    """What a kind of action must be preceded by."""

    kinds: tuple[Kind, ...]
    """Of the same microbatch: the first of these that the schedule has there, the last if it has none."""
    offset: int = 0
    """Of the stage so many further; there is no need where that stage does not exist."""


# Where a pair is recomputed the backward uses R's activations; where it is split I gives the input's gradient.
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
"""The rules. A computation has at most one need of another stage."""

SEND_OF = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
"""Which send carries what a computation makes."""

# The other end of a message, as (kind, offset of the stage): the k-th message's two names.
_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must have ended before this one's effect: producers of what it reads.

    F(s,i) needs F(s-1,i). B(s,i) and I(s,i) need F(s,i), or R(s,i) if the schedule recomputes there, and B or I(s+1,i);
    on the last stage the loss stands for the latter. R(s,i) needs F(s,i), W(s,i) needs I(s,i). A send needs the action
    whose result it sends, a receive the send at the other end, REDUCE_GRAD(s) every B or W of s.
    """
    kind, stage, microbatch = action
    indices = range(schedule.num_microbatches) if kind is Kind.REDUCE_GRAD else (microbatch,)
    return tuple(
        Action(_chosen(need.kinds, stage + need.offset, index, schedule), stage + need.offset, index)
        for index in indices
        for need in NEEDS[kind]
        if 0 <= stage + need.offset < schedule.num_stages
    )


def _chosen(kinds: tuple[Kind, ...], stage: int, microbatch: int, schedule: Schedule) -> Kind:
    if len(kinds) == 1:
        return kinds[0]
    has_first = schedule.recomputed if kinds[0] is Kind.R else schedule.split
    return kinds[0] if (stage, microbatch) in has_first else kinds[1]


def other_end_of(kind: Kind) -> Kind:
    """The kind of receive that matches a kind of send, and the reverse."""
    return _OTHER_END[kind][0]


def other_end(action: Action) -> Action:
    """The receive that matches a send, the send that matches a receive."""
    kind, offset = _OTHER_END[action.kind]
    return Action(kind, action.stage + offset, action.microbatch)


def channel(action: Action, schedule: Schedule) -> tuple[int, int]:
    """The (source rank, destination rank) of a send or receive. Messages of a channel arrive in order, untagged."""
    here = schedule.placement[action.stage]
    there = schedule.placement[action.stage + _OTHER_END[action.kind][1]]
    return (here, there) if action.kind in SENDS else (there, here)

"""Action lists as integer arrays, for the checks, the simulation, lowering and the memory replay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from megalite.config.run import IdentityKey, cache_by_object
from megalite.pipeline.ir.schedule import (
    COMPUTE,
    NEEDS,
    NO_MICROBATCH,
    RECEIVE_OF,
    SEND_OF,
    Action,
    ActionLists,
    Kind,
    Need,
    Schedule,
    ScheduleError,
)

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

CODES = {kind: code for code, kind in enumerate(Kind)}
"""Kind -> its number in a table."""
_FORWARD_KINDS = (Kind.F, Kind.SEND_F, Kind.RECV_F)
_HUGE = 2**62
CUT = "…"  # stands for what is left out
NOWHERE = -1  # the index of an action that does not exist


class Fault(ScheduleError):
    """A ScheduleError with the positions of the faulty actions."""

    def __init__(self, message: str, marks: dict[int, int]) -> None:
        super().__init__(message)
        self.marks = marks  # rank -> position


class StageMessage(NamedTuple):
    """A dependency that needs a message, because producer and reader are on different ranks."""

    reader: Kind
    need: Need
    send: Kind
    receive: Kind
    stages: IntArray  # the readers' stages with a producer on another rank
    sources: IntArray  # the producers' stages
    channels: IntArray  # source rank * ranks + destination


@dataclass(frozen=True)
class Table:
    """Actions by index: rank 0's list, then rank 1's, and so on."""

    schedule: Schedule
    rows: ActionLists
    first: tuple[int, ...]  # per rank the index of its first action; the last entry is the number of actions
    rank: IntArray
    kind: IntArray
    stage: IntArray
    microbatch: IntArray

    @classmethod
    def of(cls, rows: ActionLists, schedule: Schedule) -> "Table":
        """Build the table of `rows`: the schedule's lists, or those of a program of this schedule."""
        return _table(rows, IdentityKey(schedule))

    @cached_property
    def computes(self) -> BoolArray:
        """Per action, whether it computes rather than communicates."""
        return self.is_kind(*COMPUTE)

    @cached_property
    def place(self) -> IntArray:
        """[kind, stage, microbatch] -> index of the first such action, or NOWHERE. REDUCE_GRAD has microbatch 0 here.

        The lists must have passed `refuse_illegal`. Raises Fault, before allocating the array, if there are far fewer
        actions than (stage, microbatch) pairs."""
        stages, microbatches = self.schedule.num_stages, self.schedule.num_microbatches
        if stages * microbatches > 8 * len(self.kind) + 1024:
            forwards = {action[1:] for row in self.rows for action in row if action.kind is Kind.F}
            cells = ((stage, i) for stage in range(stages) for i in range(microbatches))
            self.fail_missing(Action(Kind.F, *next(cell for cell in cells if cell not in forwards)), "")
        place = np.full((len(CODES), stages, microbatches), NOWHERE)
        # In reverse order: of two equal actions the last assignment wins, which must be the first action.
        place.reshape(-1)[self._cells[::-1]] = np.arange(len(self.kind))[::-1]
        return place

    @cached_property
    def _cells(self) -> IntArray:
        """Per action, its flat index into `place`."""
        of_stage = (self.kind * self.schedule.num_stages + self.stage) * self.schedule.num_microbatches
        return of_stage + np.maximum(self.microbatch, 0)

    def needed(self, need: Need) -> IntArray:
        """Return [stage, microbatch] -> index of the required action, on the stage plus `need.offset`.

        NOWHERE if that stage or action does not exist."""
        found = self.place[CODES[need.kinds[0]]]
        for kind in need.kinds[1:]:
            found = np.where(found == NOWHERE, self.place[CODES[kind]], found)
        if need.offset:
            found = np.roll(found, -need.offset, axis=0)
            found[0 if need.offset < 0 else -1] = NOWHERE
        return found

    @cached_property
    def crossings(self) -> tuple[StageMessage, ...]:
        """The dependencies of computations that need messages."""
        found: list[StageMessage] = []
        placement, stages = np.array(self.schedule.placement), np.arange(self.schedule.num_stages)
        for kind in (kind for kind in Kind if kind in COMPUTE):
            for need in NEEDS[kind]:
                if need.offset:
                    inner = stages[(stages + need.offset >= 0) & (stages + need.offset < len(stages))]
                    crossed = inner[placement[inner] != placement[inner + need.offset]]
                    sources, send = crossed + need.offset, SEND_OF[need.kinds[-1]]
                    channels = placement[sources] * self.schedule.num_ranks + placement[crossed]
                    found.append(StageMessage(kind, need, send, RECEIVE_OF[send][0], crossed, sources, channels))
        return tuple(found)

    @cached_property
    def receives(self) -> BoolArray:
        """Per action, whether it is a computation that reads a message."""
        remote = np.zeros((len(CODES), self.schedule.num_stages), dtype=bool)
        for crossing in self.crossings:
            remote[CODES[crossing.reader], crossing.stages] = True
        return remote[self.kind, self.stage]

    @cached_property
    def producers(self) -> tuple[list[int], list[int]]:
        """By index, the action of the same stage and that of a neighbouring stage which each computation needs.

        The number of actions stands for a missing action, that number plus one for no dependency."""
        num_actions = len(self.kind)
        found = np.full((2, num_actions), num_actions + 1)
        stages = np.arange(self.schedule.num_stages)
        for kind in COMPUTE:
            consumers = self.place[CODES[kind]]
            for need in NEEDS[kind]:
                neighbour = stages + need.offset
                exists = (consumers != NOWHERE) & ((neighbour >= 0) & (neighbour < len(stages)))[:, None]
                needed = self.needed(need)[exists]
                found[int(need.offset != 0), consumers[exists]] = np.where(needed == NOWHERE, num_actions, needed)
        return found[0].tolist(), found[1].tolist()

    def is_kind(self, *kinds: Kind) -> BoolArray:
        """Return, per action, whether it is of one of these kinds."""
        wanted = np.zeros(len(CODES), dtype=bool)
        wanted[[CODES[kind] for kind in kinds]] = True
        return wanted[self.kind]

    def action(self, index: int) -> Action:
        rank, position = self.where(index)
        return self.rows[rank][position]

    def where(self, index: int) -> tuple[int, int]:
        rank = int(self.rank[index])
        return rank, int(index) - self.first[rank]

    def at(self, index: int) -> str:
        rank, position = self.where(index)
        return f"at position {position} of rank {rank}"

    def refuse_illegal(self) -> None:
        """Check each action by itself: valid ids, the rank of its stage, and no backward in a forward-only schedule."""
        schedule = self.schedule
        known = (self.stage >= 0) & (self.stage < schedule.num_stages)
        placed = np.array(schedule.placement)[np.where(known, self.stage, 0)] == self.rank
        reductions = self.kind == CODES[Kind.REDUCE_GRAD]
        counted = (self.microbatch >= 0) & (self.microbatch < schedule.num_microbatches)
        counted = np.where(reductions, self.microbatch == NO_MICROBATCH, counted)
        allowed = self.is_kind(*(_FORWARD_KINDS if schedule.forward_only else Kind))
        legal = known & placed & counted & allowed
        if legal.all():
            return
        index = int(np.argmin(legal))
        kind, stage, microbatch = self.action(index)
        if not known[index]:
            self.fail(index, f"there is no stage {stage}: stages are 0 to {schedule.num_stages - 1}")
        if not counted[index] and kind is Kind.REDUCE_GRAD:
            self.fail(index, f"REDUCE_GRAD has no microbatch, but this has {microbatch}")
        if not counted[index]:
            most = schedule.num_microbatches - 1
            self.fail(index, f"there is no microbatch {microbatch}: microbatches are 0 to {most}")
        if not placed[index]:
            self.fail(index, f"stage {stage} is on rank {schedule.placement[stage]}")
        self.fail(index, "the schedule is forward-only: only F and its messages are allowed")

    def refuse_doubled(self) -> None:
        """Check that no action occurs twice."""
        originals = self.place.reshape(-1)[self._cells]
        doubled = originals != np.arange(len(originals))
        if doubled.any():
            index = int(np.argmax(doubled))
            _, position = self.where(int(originals[index]))
            self.fail(index, f"it occurs a second time, first at position {position}")

    def fail(self, index: int, reason: str) -> NoReturn:
        """Raise the Fault of one action."""
        rank, position = self.where(index)
        raise Fault(
            f"schedule {self.schedule.name}: {self.action(index)} (rank {rank}, position {position}): {reason}",
            {rank: position},
        )

    def fail_missing(self, action: Action, remark: str, near: int = NOWHERE) -> NoReturn:
        """Raise the Fault of a missing action; `near`: the index of an action to mark in the message."""
        rank = self.schedule.placement[action.stage]
        marks = {} if near == NOWHERE else dict([self.where(near)])
        raise Fault(f"schedule {self.schedule.name}: {action} is missing on rank {rank}{remark}", marks)


def _integers(actions: list[Action], field: int) -> IntArray:
    values = map(itemgetter(field), actions)
    try:
        return np.fromiter(values, np.int64, len(actions))
    except OverflowError:
        # Clipped values are still out of range, so `refuse_illegal` rejects them.
        return np.array([max(-_HUGE, min(action[field], _HUGE)) for action in actions])


@cache_by_object(maxsize=4)
def _table(rows: ActionLists, schedule: IdentityKey[Schedule]) -> Table:
    # Cached, because simulations with other costs and the memory replay use the same table.
    flat = list(chain.from_iterable(rows))
    lengths = [len(row) for row in rows]
    return Table(
        schedule=schedule.value,
        rows=rows,
        first=(0, *np.cumsum(lengths, dtype=np.int64).tolist()),
        rank=np.repeat(np.arange(len(rows)), lengths),
        kind=np.fromiter(map(CODES.__getitem__, map(itemgetter(0), flat)), np.int64, len(flat)),
        stage=_integers(flat, 1),
        microbatch=_integers(flat, 2),
    )


def render_lists(
    actions: Sequence[Sequence[Action]], marks: Mapping[int, int], *, width: int = 120, max_ranks: int = 16
) -> str:
    """Draw the plain action lists, a row per rank, for programs that cannot be simulated.

    `marks` (rank -> position) are shown as `>2F3<`. Long rows are cut around their mark, or around the position of the
    first mark. With more than `max_ranks` ranks, those without a mark are left out first."""
    around = next(iter(marks.values()), 0)
    ranks = sorted(range(len(actions)), key=lambda rank: (rank not in marks, rank))[:max_ranks]
    label = len(f"rank {len(actions) - 1}: ")
    lines = []
    for rank in sorted(ranks):
        cells = [f">{action}<" if marks.get(rank) == i else str(action) for i, action in enumerate(actions[rank])]
        lines.append(f"rank {rank}: ".ljust(label) + _window(cells, marks.get(rank, around), width - label))
    if len(ranks) < len(actions):
        lines.append(f"{CUT} {len(actions) - len(ranks)} ranks are left out")
    return "\n".join(lines)


def _window(cells: list[str], centre: int, width: int) -> str:
    """Join as many cells around the centre as fit, with … at a cut."""
    if not cells:
        return "(nothing)"
    low = high = min(centre, len(cells) - 1)
    used = len(cells[low])
    room = width - 2 * len(f" {CUT}")
    while True:
        left = len(cells[low - 1]) + 1 if low > 0 else None
        right = len(cells[high + 1]) + 1 if high + 1 < len(cells) else None
        # Grow on the shorter side, to show cells both before and after the centre.
        if left is not None and used + left <= room and (right is None or centre - low <= high - centre):
            low, used = low - 1, used + left
        elif right is not None and used + right <= room:
            high, used = high + 1, used + right
        else:
            break
    before = [CUT] if low > 0 else []
    after = [CUT] if high + 1 < len(cells) else []
    return " ".join([*before, *cells[low : high + 1], *after])

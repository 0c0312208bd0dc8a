"""The one relation between actions: what must happen before what, and which message carries it.

Lowering, validation, simulation and rendering all ask here and know no rule of their own: `NEEDS` is the table of rules,
which `dependencies` applies to one action and `table.Table` to all at once.
"""

from typing import NamedTuple

from megalite.pipeline.ir.actions import SENDS, Action, Kind
from megalite.pipeline.ir.schedule import Schedule


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

"""Backwards in halves, where halves gain nothing: put together again."""

from collections.abc import Iterable, Sequence

from megalite.pipeline.ir.actions import Action, Kind


def merge_halves(row: Iterable[Action], placement: Sequence[int]) -> tuple[Action, ...]:
    """The list with each adjacent I(s,i), W(s,i) as one B(s,i), if no other rank waits for that I.

    On stage 0 nobody reads the gradient, at the turn of a V the same rank does, after the W in any case: there a B
    ends when the W would have, and spares the bookkeeping between the halves. Elsewhere a B would send its gradient
    later by W.
    """
    merged: list[Action] = []
    for action in row:
        kind, stage, microbatch = action
        half = Action(Kind.I, stage, microbatch)
        awaited = stage > 0 and placement[stage - 1] != placement[stage]
        if kind is Kind.W and merged and merged[-1] == half and not awaited:
            merged[-1] = Action(Kind.B, stage, microbatch)
        else:
            merged.append(action)
    return tuple(merged)

"""The one relation between actions: what must happen before what, and which message carries it.

Lowering, validation, simulation and rendering all ask here and know no rule of their own.
"""

from megalite.pipeline.ir.actions import COMPUTE, SENDS, Action, Kind
from megalite.pipeline.ir.schedule import ActionLists, Schedule

# The other end of a message, as (kind, offset of the stage): the k-th message's two names.
_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_SEND_OF = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must have ended before this one's effect: producers of what it reads.

    F(s,i) needs F(s-1,i). B(s,i) needs F(s,i) and B(s+1,i); on the last stage the loss stands for the latter. A send
    needs the action whose result it sends, a receive the send at the other end, REDUCE_GRAD(s) every B of s.
    """
    kind, stage, microbatch = action
    if kind is Kind.F:
        return (Action(Kind.F, stage - 1, microbatch),) if stage > 0 else ()
    if kind is Kind.B:
        forward = Action(Kind.F, stage, microbatch)
        if stage == schedule.num_stages - 1:
            return (forward,)
        return (forward, Action(Kind.B, stage + 1, microbatch))
    if kind is Kind.SEND_F:
        return (Action(Kind.F, stage, microbatch),)
    if kind is Kind.SEND_B:
        return (Action(Kind.B, stage, microbatch),)
    if kind is Kind.REDUCE_GRAD:
        return tuple(Action(Kind.B, stage, index) for index in range(schedule.num_microbatches))
    return (other_end(action),)


def other_end(action: Action) -> Action:
    """The receive that matches a send, the send that matches a receive."""
    kind, offset = _OTHER_END[action.kind]
    return Action(kind, action.stage + offset, action.microbatch)


def send_between(producer: Action, consumer: Action, schedule: Schedule) -> Action | None:
    """The send that carries `producer`'s result to `consumer`, which depends on it; None if both share a rank."""
    if schedule.placement[producer.stage] == schedule.placement[consumer.stage]:
        return None
    return Action(_SEND_OF[producer.kind], producer.stage, producer.microbatch)


def channel(action: Action, schedule: Schedule) -> tuple[int, int]:
    """The (source rank, destination rank) of a send or receive. Messages of a channel arrive in order, untagged."""
    here = schedule.placement[action.stage]
    there = schedule.placement[action.stage + _OTHER_END[action.kind][1]]
    return (here, there) if action.kind in SENDS else (there, here)


def inputs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What an F or B waits for: the producer on its own rank, or the receive there and the send elsewhere."""
    events: list[Action] = []
    for producer in dependencies(action, schedule):
        send = send_between(producer, action, schedule)
        events += (producer,) if send is None else (other_end(send), send)
    return tuple(events)


def all_inputs(actions: ActionLists, schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """`inputs` of each F and B in the lists."""
    return {action: inputs(action, schedule) for row in actions for action in row if action.kind in COMPUTE}

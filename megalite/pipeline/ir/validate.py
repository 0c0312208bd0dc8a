"""The proof that a program is complete, correctly wired and cannot deadlock."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NoReturn

from megalite.pipeline.ir.actions import COMPUTE, NO_MICROBATCH, RECVS, SENDS, Action, Kind
from megalite.pipeline.ir.dependencies import all_inputs, channel, dependencies, other_end
from megalite.pipeline.ir.engine import describe, execute, shortest_cycle
from megalite.pipeline.ir.errors import ScheduleError
from megalite.pipeline.ir.render import render_lists
from megalite.pipeline.ir.schedule import Program, peak_activations


@dataclass(frozen=True)
class ValidationReport:
    """What a valid program needs, per rank. Exact: order alone decides it, not time."""

    peak_activations: tuple[int, ...]
    """The most (stage, microbatch) pairs whose activations are alive at once."""
    peak_receives: tuple[int, ...]
    """The most receive buffers posted and not yet consumed."""
    sends: tuple[int, ...]
    """Messages sent in a step."""


_Places = Mapping[Action, tuple[int, int]]
"""Action -> (rank, position)."""
_Inputs = Mapping[Action, tuple[Action, ...]]


def validate(program: Program) -> ValidationReport:
    """Proves that the program runs to its end and computes what it should, in time linear in its length.

    Checked: each (stage, microbatch) has one F and, unless forward-only, one B; ids are in range, each action is on the
    rank of its stage and occurs once; what an action reads is produced before it; each dependency between ranks has
    one send after the producer and one receive before the consumer, and nothing else is sent; both ends of a channel
    agree on the order; no rank waits for ever, whether a send completes at once or only when its receive has been
    posted; REDUCE_GRAD comes once a stage, after its backwards.

    Raises:
        ScheduleError: the first fault found. The message names rank, position and action and shows the lists there.
    """
    _check_sizes(program)
    places = _index(program)
    _check_complete(program, places)
    inputs = all_inputs(program.actions, program.schedule)
    peak_receives = _check_order(program, places, inputs)
    _check_channels(program, places)
    _check_deadlock(program, inputs)
    _check_same_computation(program)
    return ValidationReport(
        peak_activations=peak_activations(program.actions, forward_only=program.schedule.forward_only),
        peak_receives=peak_receives,
        sends=tuple(sum(action.kind in SENDS for action in row) for row in program.actions),
    )


def _fail(program: Program, rank: int, position: int, reason: str) -> NoReturn:
    action = program.actions[rank][position]
    raise ScheduleError(
        f"schedule {program.schedule.name}: {action} (rank {rank}, position {position}): {reason}\n"
        + render_lists(program.actions, {rank: position})
    )


def _check_sizes(program: Program) -> None:
    schedule = program.schedule
    sizes = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, program.send_window)
    wrong = None
    if min(sizes) < 1:
        wrong = (
            "ranks, stages, microbatches and send window are {}, {}, {}, {}; each must be 1 or more".format(
                *sizes
            )
        )
    elif len(schedule.placement) != schedule.num_stages:
        wrong = f"placement lists {len(schedule.placement)} stages but there are {schedule.num_stages}"
    elif not set(schedule.placement) <= set(range(schedule.num_ranks)):
        wrong = f"placement {schedule.placement} names a rank beyond 0 to {schedule.num_ranks - 1}"
    elif len(program.actions) != schedule.num_ranks:
        wrong = f"there are {len(program.actions)} action lists for {schedule.num_ranks} ranks"
    if wrong:
        raise ScheduleError(f"schedule {schedule.name}: {wrong}")


def _index(program: Program) -> _Places:
    """Where each action is; each is legal on its rank and occurs once."""
    schedule = program.schedule
    places: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(program.actions):
        for position, action in enumerate(row):
            objection = schedule.objection(rank, action)
            if objection:
                _fail(program, rank, position, objection)
            if schedule.forward_only and action.kind in (Kind.B, Kind.REDUCE_GRAD):
                _fail(program, rank, position, "the schedule is forward-only")
            if action in places:
                _fail(
                    program, rank, position, f"it occurs a second time, first at position {places[action][1]}"
                )
            places[action] = (rank, position)
    return places


def _check_complete(program: Program, places: _Places) -> None:
    schedule = program.schedule
    kinds = (Kind.F,) if schedule.forward_only else (Kind.F, Kind.B)
    wanted = len(kinds) * schedule.num_stages * schedule.num_microbatches
    # All that is there is legal and unique, so the right number of them is all of them.
    if sum(action.kind in COMPUTE for action in places) < wanted:
        cells = product(kinds, range(schedule.num_stages), range(schedule.num_microbatches))
        _fail_missing(program, next(Action(*cell) for cell in cells if Action(*cell) not in places))
    for stage in range(schedule.num_stages):
        reduction = Action(Kind.REDUCE_GRAD, stage, NO_MICROBATCH)
        if not schedule.forward_only and reduction not in places:
            _fail_missing(program, reduction)


def _fail_missing(program: Program, action: Action) -> NoReturn:
    raise ScheduleError(
        f"schedule {program.schedule.name}: {action} is missing on rank {program.schedule.placement[action.stage]}\n"
        + render_lists(program.actions, {})
    )


def _check_order(program: Program, places: _Places, inputs: _Inputs) -> tuple[int, ...]:
    """Producers before consumers, on one rank directly and across ranks through one message; no other messages.

    Returns the peak of posted and unconsumed receives per rank.
    """
    schedule = program.schedule
    used: set[Action] = set()
    peaks = []
    for rank, row in enumerate(program.actions):
        posted = peak = 0
        for position, action in enumerate(row):
            if action.kind in RECVS:
                posted += 1
                if posted > peak:
                    peak = posted
                continue
            for event in inputs[action] if action.kind in COMPUTE else dependencies(action, schedule):
                if event not in places:
                    _fail(program, rank, position, f"it needs {event}, which no rank has")
                if event.kind in SENDS:
                    used.add(event)
                    posted -= 1
                elif places[event][1] > position:
                    _fail(
                        program,
                        rank,
                        position,
                        f"it needs {event}, which comes only later, {_at(event, places)}",
                    )
        peaks.append(peak)
    # Both ends of each used message are there, so further messages show in the number of ends.
    if sum(action.kind in SENDS or action.kind in RECVS for action in places) > 2 * len(used):
        _fail_unused(program, places, used)
    return tuple(peaks)


def _fail_unused(program: Program, places: _Places, used: set[Action]) -> NoReturn:
    ends = used | {other_end(send) for send in used}
    unused = next(a for a in places if (a.kind in SENDS or a.kind in RECVS) and a not in ends)
    _fail(program, *places[unused], "no action on another rank depends on this message")


def _at(action: Action, places: _Places) -> str:
    rank, position = places[action]
    return f"at position {position} of rank {rank}"


def _check_channels(program: Program, places: _Places) -> None:
    """The k-th receive of each channel matches its k-th send."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for row in program.actions:
        for action in row:
            if action.kind in SENDS:
                sent[channel(action, program.schedule)].append(action)
            elif action.kind in RECVS:
                received[channel(action, program.schedule)].append(action)
    for (source, destination), sends in sent.items():
        for index, (send, receive) in enumerate(zip(sends, received[source, destination], strict=True)):
            if other_end(send) != receive:
                _fail(
                    program,
                    *places[receive],
                    f"message {index} from rank {source} to rank {destination} is {send}, {_at(send, places)}, so "
                    f"{other_end(send)} must be posted here: a channel delivers in the order of the sends",
                )


def _check_deadlock(program: Program, inputs: _Inputs) -> None:
    # A rendezvous run waits for all that an eager run waits for and more: passing it covers both.
    stuck = execute(program, lambda action: 0.0, inputs)
    if not stuck.waits:
        return
    schedule = program.schedule
    eager = execute(program, lambda action: 0.0, inputs, rendezvous=False)
    waits = shortest_cycle((eager if eager.waits else stuck).waits, schedule.placement)
    when = (
        "whenever its sends complete"
        if eager.waits
        else f"when a send completes only once its receive is posted (send window {program.send_window})"
    )
    raise ScheduleError(
        f"schedule {schedule.name} deadlocks {when}: {describe(waits, schedule.placement)}\n"
        + render_lists(program.actions, {wait.rank: wait.position for wait in waits})
    )


def _check_same_computation(program: Program) -> None:
    for rank, (row, planned) in enumerate(zip(program.actions, program.schedule.actions, strict=True)):
        computed = tuple(action for action in row if action.kind in COMPUTE)
        if computed != planned:
            raise ScheduleError(
                f"schedule {program.schedule.name}: the forwards and backwards of rank {rank} in the program are not "
                f"those of its schedule, in their order; lower the schedule again"
            )

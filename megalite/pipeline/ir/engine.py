"""The core loop that runs a program on a clock: the same one proves it free of deadlock and predicts its time."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megalite.pipeline.ir.actions import COMPUTE, SENDS, Action
from megalite.pipeline.ir.dependencies import channel, other_end
from megalite.pipeline.ir.schedule import Program


class Wait(NamedTuple):
    """A rank that cannot go on: the action it is at, and the one that it waits for."""

    rank: int
    position: int
    action: Action
    awaited: Action


@dataclass(frozen=True)
class Execution:
    """What happened. `waits` is empty unless the program got stuck; the times then end there."""

    starts: list[list[float]]
    """Per rank, when each action starts, in order. Waiting is not part of an action, but lies before its start."""
    ends: list[list[float]]
    """Per rank, when each action ends."""
    waits: tuple[Wait, ...]


def execute(
    program: Program,
    cost: Callable[[Action], float],
    inputs: Mapping[Action, tuple[Action, ...]],
    *,
    p2p: float = 0.0,
    rendezvous: bool = True,
) -> Execution:
    """Runs the lists to the end or until no rank can go on, in time linear in the number of actions.

    A message is there `p2p` seconds after both its send and its receive have been posted; messages do not slow each
    other down. A computation starts when its rank is free and its inputs are there. A send that finds the window full
    waits for the oldest pending send of its channel: with `rendezvous` until that message is there (gloo; NCCL with
    large messages), else not at all, sends completing at once. `inputs` is what `all_inputs` says of the program.

    Sends and receives are matched by name; that this is also their order on each channel is `validate`'s business.
    """
    run = _Run(program, cost, inputs, p2p, rendezvous)
    ready = deque(range(program.schedule.num_ranks))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    return Execution(run.starts, run.ends, tuple(run.waits[rank] for rank in sorted(run.waits)))


class _Run:
    """Where each rank is, and who waits for what."""

    def __init__(
        self,
        program: Program,
        cost: Callable[[Action], float],
        inputs: Mapping[Action, tuple[Action, ...]],
        p2p: float,
        rendezvous: bool,
    ) -> None:
        self.program = program
        self.cost = cost
        self.inputs = inputs
        self.p2p = p2p
        self.rendezvous = rendezvous
        num_ranks = program.schedule.num_ranks
        self.starts: list[list[float]] = [[] for _ in range(num_ranks)]
        self.ends: list[list[float]] = [[] for _ in range(num_ranks)]
        self.ended: dict[Action, float] = {}
        self.sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self.waiting: dict[Action, list[int]] = defaultdict(list)
        self.waits: dict[int, Wait] = {}

    def advance(self, rank: int) -> list[int]:
        """Runs one rank as far as it can go. Returns the ranks that its actions have set free."""
        row, starts, ends = self.program.actions[rank], self.starts[rank], self.ends[rank]
        clock = ends[-1] if ends else 0.0
        freed: list[int] = []
        self.waits.pop(rank, None)
        for position in range(len(ends), len(row)):
            action = row[position]
            events: tuple[Action, ...] = ()
            if action.kind in COMPUTE:
                events = self.inputs[action]
            elif action.kind in SENDS:
                sent = self.sent[channel(action, self.program.schedule)]
                events = self._oldest_pending(sent)
            start = clock
            for event in events:
                ended = self.ended.get(event)
                if ended is None:
                    self.waiting[event].append(rank)
                    self.waits[rank] = Wait(rank, position, action, event)
                    return freed
                arrival = ended if event.kind in COMPUTE else ended + self.p2p
                if arrival > start:
                    start = arrival
            clock = start
            if action.kind in COMPUTE:
                clock += self.cost(action)
            elif action.kind in SENDS:
                sent.append(action)
            starts.append(start)
            ends.append(clock)
            self.ended[action] = clock
            if action in self.waiting:
                freed += self.waiting.pop(action)
        return freed

    def _oldest_pending(self, sent: list[Action]) -> tuple[Action, ...]:
        """Both ends of the message that a send must wait for, after the sends so far on its channel."""
        if not self.rendezvous or len(sent) < self.program.send_window:
            return ()
        oldest = sent[-self.program.send_window]
        return (oldest, other_end(oldest))


def shortest_cycle(waits: tuple[Wait, ...], placement: tuple[int, ...]) -> tuple[Wait, ...]:
    """The shortest circle of ranks each waiting for the next; all waits, if none closes (an awaited action is missing)."""
    by_rank = {wait.rank: wait for wait in waits}
    best: tuple[Wait, ...] = ()
    for first in waits:
        path = [first]
        # A rank waits for one action at a time, so its successor is unique and the walk ends within len(waits) steps.
        for _ in waits:
            following = by_rank.get(placement[path[-1].awaited.stage])
            if following is None or following is first:
                break
            path.append(following)
        else:
            continue
        if following is first and (not best or len(path) < len(best)):
            best = tuple(path)
    return best or waits


def describe(waits: tuple[Wait, ...], placement: tuple[int, ...]) -> str:
    """The waits in words: `rank 1 waits in 2F3 for 1SEND_F3 on rank 0; rank 0 ...`."""
    return "; ".join(
        f"rank {wait.rank} waits in {wait.action} for {wait.awaited} on rank {placement[wait.awaited.stage]}"
        for wait in waits
    )

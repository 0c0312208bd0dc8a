"""An independent validator, written from the definition of the actions, without code of the validator under test."""

import random
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from math import prod

from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.schedule import Action, Kind, Program

EXHAUSTIBLE = 700
"""Programs with at most so many combinations of positions are run in every interleaving of their ranks."""

Positions = tuple[int, ...]
"""Number of completed actions per rank. This is the whole state: sent and posted messages follow from it."""


class Wrong(Exception):
    """Raised if a rank does something illegal, such as reading a missing tensor."""


def is_valid(program: Program, rng: random.Random) -> bool:
    """Return whether the program has exactly the right actions and, run step by step under both send semantics, gives every
    reader the right value: in all interleavings of the ranks if there are few, else in random ones."""
    if not has_right_actions(program):
        return False
    verdicts = []
    for rendezvous in (False, True):
        machine = _Machine(program, rendezvous)
        try:
            ends = machine.all_ends() if exhaustible(program) else {machine.one_end(rng) for _ in range(2)}
        except Wrong:
            verdicts.append(False)
            continue
        finished = {end == machine.lengths for end in ends}
        assert len(finished) == 1, "the result depends on the interleaving"
        verdicts.append(finished.pop())
    return all(verdicts)


def exhaustible(program: Program) -> bool:
    return prod(len(row) + 1 for row in program.actions) <= EXHAUSTIBLE


def has_right_actions(program: Program) -> bool:
    """Check that each pair has F and either B or I and W, possibly R, each message two ends, and no action occurs twice."""
    schedule = program.schedule
    have = Counter((rank, action) for rank, row in enumerate(program.actions) for action in row)
    wanted: list[tuple[int, Action]] = []
    for stage, rank in enumerate(schedule.placement):
        if not schedule.forward_only:
            wanted.append((rank, Action(Kind.REDUCE_GRAD, stage, -1)))
        for index in range(schedule.num_microbatches):
            kinds = {
                kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R) if (rank, Action(kind, stage, index)) in have
            }
            if schedule.forward_only:
                if kinds != {Kind.F}:
                    return False
            elif kinds - {Kind.R} not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}):
                return False
            wanted += [(rank, Action(kind, stage, index)) for kind in kinds]
            following = stage + 1
            if following == schedule.num_stages or schedule.placement[following] == rank:
                continue
            there = schedule.placement[following]
            wanted += [(rank, Action(Kind.SEND_F, stage, index)), (there, Action(Kind.RECV_F, following, index))]
            if not schedule.forward_only:
                wanted += [(there, Action(Kind.SEND_B, following, index)), (rank, Action(Kind.RECV_B, stage, index))]
    return have == Counter(wanted)


class _Machine:
    """Ranks that have run a prefix of their lists, and channels that pair the k-th send with the k-th receive."""

    def __init__(self, program: Program, rendezvous: bool) -> None:
        self.program = program
        self.rendezvous = rendezvous
        self.placement = program.schedule.placement
        self.last = program.schedule.num_stages - 1
        self.lengths = tuple(len(row) for row in program.actions)
        self.place = {action: (rank, at) for rank, row in enumerate(program.actions) for at, action in enumerate(row)}
        self.sends: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, row in enumerate(program.actions):
            for at, (kind, stage, _) in enumerate(row):
                if kind in (Kind.SEND_F, Kind.SEND_B):
                    self.sends[rank, self.peer(kind, stage)].append(at)
                elif kind in (Kind.RECV_F, Kind.RECV_B):
                    self.receives[self.peer(kind, stage), rank].append(at)

    def peer(self, kind: Kind, stage: int) -> int:
        return self.placement[stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)]

    def one_end(self, rng: random.Random) -> Positions:
        """Return the states that a random interleaving reaches."""
        at = [0] * len(self.lengths)
        while True:
            ranks = [rank for rank, length in enumerate(self.lengths) if at[rank] < length]
            rng.shuffle(ranks)
            moved = next((rank for rank in ranks if self.may_go_on(rank, tuple(at))), None)
            if moved is None:
                return tuple(at)
            at[moved] += 1

    def all_ends(self) -> set[Positions]:
        """Return the states that any interleaving reaches."""
        ends, seen = set(), {(0,) * len(self.lengths)}
        open_ = list(seen)
        while open_:
            at = open_.pop()
            following = [
                (*at[:rank], at[rank] + 1, *at[rank + 1 :])
                for rank, length in enumerate(self.lengths)
                if at[rank] < length and self.may_go_on(rank, at)
            ]
            if not following:
                ends.add(at)
            for state in following:
                if state not in seen:
                    seen.add(state)
                    open_.append(state)
        return ends

    def may_go_on(self, rank: int, at: Positions) -> bool:
        """Return whether the rank's next action can run now."""
        kind, stage, index = self.program.actions[rank][at[rank]]
        if kind is Kind.F and stage > 0:
            return self.reads(Action(Kind.RECV_F, stage, index), stage - 1, at)
        if kind in (Kind.B, Kind.I):
            self.need((Kind.F,), stage, index, at)
            if Action(Kind.R, stage, index) in self.place:
                self.need((Kind.R,), stage, index, at)
            if stage < self.last:
                return self.reads(Action(Kind.RECV_B, stage, index), stage + 1, at)
        elif kind is Kind.R:
            self.need((Kind.F,), stage, index, at)
        elif kind is Kind.W:
            self.need((Kind.I,), stage, index, at)
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            self.need((Kind.F,) if kind is Kind.SEND_F else (Kind.B, Kind.I), stage, index, at)
            return self.may_send(rank, self.peer(kind, stage), at)
        elif kind is Kind.REDUCE_GRAD:
            for microbatch in range(self.program.schedule.num_microbatches):
                self.need((Kind.B, Kind.W), stage, microbatch, at)
        return True

    def done(self, action: Action, at: Positions) -> bool:
        if action not in self.place:
            return False
        rank, position = self.place[action]
        return position < at[rank]

    def need(self, kinds: tuple[Kind, ...], stage: int, index: int, at: Positions) -> None:
        if not any(self.done(Action(kind, stage, index), at) for kind in kinds):
            raise Wrong(f"{kinds} of {stage}, {index} has not been computed")

    def reads(self, receive: Action, neighbour: int, at: Positions) -> bool:
        """Read a neighbour's value; False while its message is in flight."""
        rank, source = self.placement[receive.stage], self.placement[neighbour]
        forward = receive.kind is Kind.RECV_F
        if source == rank:
            self.need((Kind.F,) if forward else (Kind.B, Kind.I), neighbour, receive.microbatch, at)
            return True
        if not self.done(receive, at):
            raise Wrong(f"{receive} has not been posted")
        number = self.receives[source, rank].index(self.place[receive][1])
        sends = self.sends[source, rank]
        if number >= len(sends) or sends[number] >= at[source]:
            return False
        wanted = Action(Kind.SEND_F if forward else Kind.SEND_B, neighbour, receive.microbatch)
        if self.program.actions[source][sends[number]] != wanted:
            raise Wrong(f"{receive} gets another message")
        return True

    def may_send(self, rank: int, to: int, at: Positions) -> bool:
        if not self.rendezvous:
            return True
        sent = bisect_left(self.sends[rank, to], at[rank])
        posted = bisect_left(self.receives[rank, to], at[to])
        return sent - posted < self.program.send_window


def shortest_circle(program: Program) -> int:
    """Return the number of waits for another rank in the shortest cycle of waits; 0 without a cycle.

    The program must be correct except for deadlocks. Cycles with sends that complete late count only if there are no
    others."""
    machine = _Machine(program, True)
    for windows in (False, True):
        edges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for (source, target), sends in machine.sends.items():
            receives = machine.receives[source, target]
            for number, (sent, posted) in enumerate(zip(sends, receives, strict=True)):
                edges[target, _reader(program, target, posted)].append((source, sent))
                if windows and number >= program.send_window:
                    edges[source, sent].append((target, receives[number - program.send_window]))
        lengths = [length for start in edges if (length := _circle_from(start, edges))]
        if lengths:
            return min(lengths)
    return 0


def _reader(program: Program, rank: int, posted: int) -> int:
    kind, stage, index = program.actions[rank][posted]
    kinds = (Kind.F,) if kind is Kind.RECV_F else (Kind.B, Kind.I)
    return next(
        at for at, action in enumerate(program.actions[rank]) if action[1:] == (stage, index) and action.kind in kinds
    )


def _circle_from(start: tuple[int, int], edges: dict[tuple[int, int], list[tuple[int, int]]]) -> int:
    """Return the cost of the cheapest cycle: a step back on a rank costs 0, a step to another rank 1; 0 without a cycle."""
    queue = deque([(start, 0, True)])
    seen: set[tuple[int, int]] = set()
    while queue:
        node, cost, first = queue.popleft()
        if node == start and not first:
            return cost
        if node in seen:
            continue
        if not first:
            seen.add(node)
        rank, at = node
        if at > 0 and not first:
            queue.appendleft(((rank, at - 1), cost, False))
        queue.extend((following, cost + 1, False) for following in edges.get(node, ()))
    return 0


def peaks(program: Program, sizes: Sizes) -> list[tuple[float, int]]:
    """Per rank, the maximum memory and the first position with it, from a ledger of every tensor by name."""
    return [
        max(((size, -at) for at, size in enumerate(_held(program, rank, sizes))), default=(0.0, 0))
        for rank in range(program.schedule.num_ranks)
    ]


def _held(program: Program, rank: int, sizes: Sizes) -> Iterator[float]:
    """Memory after each action, before the action frees anything."""
    again = {action[1:] for action in program.actions[rank] if action.kind is Kind.R}
    ledger: dict[tuple[str, int, int], float] = {}
    outbox: dict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
    placement = program.schedule.placement
    workspace = sizes.workspace or (0.0,) * len(placement)

    def handed(to: int) -> bool:
        return 0 <= to < len(placement) and placement[to] == rank

    for kind, stage, index in program.actions[rank]:
        gone: tuple[str, ...] = ()
        left: dict[tuple[str, int, int], float] = {}
        if kind is Kind.F:
            ledger.pop(("received output", stage, index), None)
            name, size = ("input", sizes.kept_input) if (stage, index) in again else ("graph", sizes.activation)
            ledger[name, stage, index] = size[stage]
            gone = (name,) if program.schedule.forward_only else ()
            if handed(stage + 1):
                left["received output", stage + 1, index] = sizes.message
        elif kind is Kind.R:
            ledger["graph", stage, index] = sizes.activation[stage]
        elif kind in (Kind.B, Kind.I):
            ledger["workspace", stage, index] = workspace[stage]
            if kind is Kind.I:
                # The state for W grows as the graph is freed.
                ledger["graph", stage, index] = max(sizes.activation[stage], sizes.deferred[stage])
                left["deferred", stage, index] = sizes.deferred[stage]
            if handed(stage - 1):
                left["received gradient", stage - 1, index] = sizes.message
            gone = ("graph", "input", "received gradient", "workspace")
        elif kind is Kind.W:
            gone = ("deferred",)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            ledger[f"received {'output' if kind is Kind.RECV_F else 'gradient'}", stage, index] = sizes.message
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            step = 1 if kind is Kind.SEND_F else -1
            pending = outbox[rank, program.schedule.placement[stage + step]]
            if len(pending) == program.send_window:
                del ledger[pending.popleft()]
            pending.append((kind.value, stage, index))
            ledger[pending[-1]] = sizes.message
        yield sum(ledger.values())
        for name in gone:
            ledger.pop((name, stage, index), None)
        ledger |= left

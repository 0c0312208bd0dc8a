"""A second opinion on programs, written from the meaning of the actions and sharing no code with the validator."""

import random
from collections import Counter, defaultdict

from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.schedule import Program


class Wrong(Exception):
    """A rank does something that can never be right, e.g. reads what is not there."""


def is_valid(program: Program, rng: random.Random) -> bool:
    """The program has exactly the right actions, and running it step by step, in random interleavings of the ranks and
    with labelled payloads, ends with every reader having read the right thing, under both send semantics."""
    if Counter(_have(program)) != Counter(_want(program)):
        return False
    verdicts = []
    for rendezvous in (False, True):
        for _ in range(2):
            try:
                verdicts.append((rendezvous, _Machine(program, rendezvous).run(rng)))
            except Wrong:
                verdicts.append((rendezvous, False))
    by_mode = {mode: {verdict for m, verdict in verdicts if m is mode} for mode in (False, True)}
    assert all(len(found) == 1 for found in by_mode.values()), (
        "the interleaving decided: the semantics are broken"
    )
    return all(verdict for _, verdict in verdicts)


def _have(program: Program) -> list[tuple[int, Action]]:
    return [(rank, action) for rank, row in enumerate(program.actions) for action in row]


def _want(program: Program) -> list[tuple[int, Action]]:
    schedule = program.schedule
    wanted = []
    for stage, rank in enumerate(schedule.placement):
        if not schedule.forward_only:
            wanted.append((rank, Action(Kind.REDUCE_GRAD, stage, -1)))
        for index in range(schedule.num_microbatches):
            wanted.append((rank, Action(Kind.F, stage, index)))
            if not schedule.forward_only:
                wanted.append((rank, Action(Kind.B, stage, index)))
            following = stage + 1
            if following == schedule.num_stages or schedule.placement[following] == rank:
                continue
            there = schedule.placement[following]
            wanted.append((rank, Action(Kind.SEND_F, stage, index)))
            wanted.append((there, Action(Kind.RECV_F, following, index)))
            if not schedule.forward_only:
                wanted.append((there, Action(Kind.SEND_B, following, index)))
                wanted.append((rank, Action(Kind.RECV_B, stage, index)))
    return wanted


class _Machine:
    """Ranks with a memory of values, and channels that pair the k-th send with the k-th receive."""

    def __init__(self, program: Program, rendezvous: bool) -> None:
        self.program = program
        self.rendezvous = rendezvous
        self.placement = program.schedule.placement
        self.last = program.schedule.num_stages - 1
        self.at = [0] * program.schedule.num_ranks
        self.done: set[Action] = set()
        self.payloads: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self.posted: dict[tuple[int, int], list[Action]] = defaultdict(list)

    def run(self, rng: random.Random) -> bool:
        while True:
            ranks = [rank for rank, row in enumerate(self.program.actions) if self.at[rank] < len(row)]
            rng.shuffle(ranks)
            moved = next((rank for rank in ranks if self.step(rank)), None)
            if moved is None:
                return not ranks
            self.at[moved] += 1

    def step(self, rank: int) -> bool:
        """Does the rank's next action and returns True, or returns False if it has to wait."""
        action = self.program.actions[rank][self.at[rank]]
        kind, stage, index = action
        able = True
        if kind is Kind.F and stage > 0:
            able = self.read(Action(Kind.RECV_F, stage, index), Action(Kind.F, stage - 1, index))
        elif kind is Kind.B:
            self.need(Action(Kind.F, stage, index))
            if stage < self.last:
                able = self.read(Action(Kind.RECV_B, stage, index), Action(Kind.B, stage + 1, index))
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            value = Action(Kind.F if kind is Kind.SEND_F else Kind.B, stage, index)
            self.need(value)
            able = self.send((rank, self.placement[stage + (1 if kind is Kind.SEND_F else -1)]), value)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            source = self.placement[stage + (-1 if kind is Kind.RECV_F else 1)]
            self.posted[source, rank].append(action)
        elif kind is Kind.REDUCE_GRAD:
            for microbatch in range(self.program.schedule.num_microbatches):
                self.need(Action(Kind.B, stage, microbatch))
        if able:
            self.done.add(action)
        return able

    def need(self, value: Action) -> None:
        if value not in self.done:
            raise Wrong(f"{value} has not been computed")

    def read(self, receive: Action, value: Action) -> bool:
        """Reads a neighbour's value; False while its message is under way."""
        source, rank = self.placement[value.stage], self.placement[receive.stage]
        if source == rank:
            self.need(value)
            return True
        if receive not in self.posted[source, rank]:
            raise Wrong(f"{receive} has not been posted")
        place = self.posted[source, rank].index(receive)
        if place >= len(self.payloads[source, rank]):
            return False
        if self.payloads[source, rank][place] != value:
            raise Wrong(f"{receive} got {self.payloads[source, rank][place]}")
        return True

    def send(self, channel: tuple[int, int], value: Action) -> bool:
        unfinished = len(self.payloads[channel]) - len(self.posted[channel]) if self.rendezvous else 0
        if unfinished >= self.program.send_window:
            return False
        self.payloads[channel].append(value)
        return True

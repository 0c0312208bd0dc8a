"""Build a schedule with a list scheduler: simulate the pipeline, and let each free rank choose its next action."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.schedule import Action, ActionLists, Kind
from megalite.pipeline.ir.simulate import Costs, Link

_NO_MESSAGE = Link(0.0)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Input of the list scheduler. Costs and sizes are per virtual stage, for one microbatch."""

    placement: tuple[int, ...]
    num_microbatches: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    again: tuple[float, ...]  # the R before an I or B; 0 without recomputation ahead
    forward_links: tuple[Link, ...]  # link of a stage's output to the next stage
    backward_links: tuple[Link, ...]  # link of the gradient of a stage's input to the previous stage
    hold: tuple[float, ...]  # memory from F to I or B
    burst: tuple[float, ...]  # additional memory during an I or B: the graph of its R
    deferred: tuple[float, ...]  # memory from I to W
    surplus: tuple[float, ...]  # by how much `deferred` exceeds the graph that I frees
    room: tuple[float, ...]  # per rank, the available memory

    @classmethod
    def of(
        cls,
        placement: tuple[int, ...],
        num_microbatches: int,
        costs: Costs,
        sizes: Sizes,
        room: tuple[float, ...],
        *,
        ahead: bool,
    ) -> "Problem":
        """Build a problem from the simulator's costs and the replay's sizes. `ahead`: add an R before each I or B."""
        seconds = costs.of_actions(ahead=ahead)
        nothing = (0.0,) * len(placement)
        hops = list(pairwise(placement))
        forth = [_NO_MESSAGE if here == there else costs.link(here, there) for here, there in hops]
        back = [_NO_MESSAGE if here == there else costs.link(there, here) for here, there in hops]
        return cls(
            placement=placement,
            num_microbatches=num_microbatches,
            forward=seconds[Kind.F],
            input_grad=seconds[Kind.I],
            weight_grad=seconds[Kind.W],
            again=seconds[Kind.R] if ahead else nothing,
            forward_links=(*forth, _NO_MESSAGE),
            backward_links=(_NO_MESSAGE, *back),
            hold=sizes.kept_input if ahead else sizes.activation,
            burst=sizes.activation if ahead else nothing,
            deferred=sizes.deferred,
            surplus=tuple(max(0.0, d - a) for d, a in zip(sizes.deferred, sizes.activation, strict=True)),
            room=room,
        )

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, its virtual stages, ascending."""
        return tuple(
            tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)
            for rank in range(max(self.placement) + 1)
        )

    @cached_property
    def limits(self) -> list[float]:
        """The room of each rank, followed by the room of each rank minus its largest burst."""
        room = [limit * (1.0 + ROUNDING) for limit in self.room]
        return room + [limit - max(self.burst[stage] for stage in own) for limit, own in zip(room, self.stages)]

    @cached_property
    def least(self) -> tuple[float, ...]:
        """Per rank, the memory of a single microbatch in the pipeline, without messages.

        Without recomputation this is a lower bound for all schedules: all F of a microbatch come before its first I."""
        return tuple(
            sum(self.hold[stage] for stage in own) + max(self.burst[stage] for stage in own) for own in self.stages
        )


ROUNDING = 1e-12  # relative: largest difference between sums of the same floats in another order

Order = Literal["backward", "alternate", "forward"]


class Rules(NamedTuple):
    """How ranks choose their next action."""

    lead: tuple[int, ...]  # per stage, the maximum number of microbatches between their F and their I
    order: tuple[Order, ...]
    """Per rank, the kind that goes first if an F and an I can start; "alternate": the other kind than last time."""
    fill: tuple[float, ...]
    """Per rank, the fraction of a W that must fit before the next F or I can start, for the W to start.

    At 0 a rank with a pending W never idles; at 1 no W delays an F or I with a known arrival."""
    forward_deepest: bool = True
    """Of several F that can start, the one of the rank's last stage goes first, else that of its first stage."""
    backward_deepest: bool = True
    """The same for I and B."""


class Outcome(NamedTuple):
    """The resulting lists and their predicted time and memory."""

    lists: tuple[tuple[tuple[Kind, int], ...], ...]
    """Per rank, kind and stage in order. Each stage takes its microbatches in order."""
    makespan: float
    memory: float  # sum of the ranks' peaks
    holds: tuple[tuple[float, ...], tuple[float, ...]]
    """Range of `Problem.limits` and of the rules' `lead` with the same outcome: at least the largest size (or number of
    microbatches) that fitted, and below the smallest that did not."""

    def actions(self) -> ActionLists:
        return tuple(tuple(_with_microbatches(row)) for row in self.lists)


def _with_microbatches(row: Iterable[tuple[Kind, int]]) -> Iterator[Action]:
    done: Counter[tuple[Kind, int]] = Counter()
    for kind, stage in row:
        # A stage's k-th gradient is microbatch k's, be it an I or a B.
        counted = Kind.I if kind is Kind.B else kind
        yield Action(kind, stage, done[counted, stage])
        done[counted, stage] += 1
        done[Kind.W, stage] += kind is Kind.B


def list_schedule(problem: Problem, rules: Rules) -> Outcome:
    """Let each free rank start an F, I or W by the rules, until all microbatches are done.

    Memory is allocated by the banker's algorithm: an F starts only if the microbatches could then still be finished one
    by one, oldest first. Only activations matter for this, since a rank can always free deferred memory by running its
    W. So the scheduler never gets stuck if the room is at least `problem.least`. A B replaces I and W if there is no
    room for the deferred memory.

    Time: linear in the number of actions."""
    run = _Run(problem, rules)
    while run.events:
        now, rank = heappop(run.events)
        if now >= run.free[rank]:
            run.decide(rank, now)
    holds = tuple(run.fitted), tuple(run.refused)
    return Outcome(tuple(map(tuple, run.lists)), max(run.free), sum(run.peak), holds)


class _Run:
    def __init__(self, problem: Problem, rules: Rules) -> None:
        self.problem, self.rules = problem, rules
        num_stages, num_ranks = len(problem.placement), len(problem.stages)
        # Per stage, the known arrival times of the inputs of the next F and I.
        self.inputs: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.inputs[0].extend([0.0] * problem.num_microbatches)
        # Per stage, the number of actions started.
        self.forwards = [0] * num_stages
        self.backwards = [0] * num_stages
        self.weights = [0] * num_stages
        # Per rank.
        self.forward_order = [own[::-1] if rules.forward_deepest else own for own in problem.stages]
        self.backward_order = [own[::-1] if rules.backward_deepest else own for own in problem.stages]
        self.limits = [*problem.limits, *rules.lead]
        self.leads = len(problem.limits)  # index of the first stage's lead in `limits`
        self.fitted, self.refused = [0.0] * len(self.limits), [inf] * len(self.limits)
        self.activations = [0.0] * num_ranks
        self.deferred = [0.0] * num_ranks
        self.peak = [0.0] * num_ranks
        self.lists: list[list[tuple[Kind, int]]] = [[] for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self.last_was_forward = [False] * num_ranks
        self.link_free: dict[tuple[int, int], float] = {}
        self.idle = [False] * num_ranks
        self.events = [(0.0, rank) for rank in range(num_ranks)]
        """(time, rank) of decisions: the rank becomes free, or a message arrives after that."""

    def decide(self, rank: int, now: float) -> None:
        forward = gradient = -1
        known, order = inf, self.rules.order[rank]
        backward_first = order == "backward" or (order == "alternate" and self.last_was_forward[rank])
        # Candidates are looked up only if they can matter, because a search runs this a million times.
        if not backward_first:
            forward, known = self._next(rank, self.forward_order[rank], self.inputs, now)
        if forward < 0:
            gradient, arrival = self._next(rank, self.backward_order[rank], self.gradients, now)
            if arrival < known:
                known = arrival
        if backward_first and gradient < 0:
            forward, arrival = self._next(rank, self.forward_order[rank], self.inputs, now)
            if arrival < known:
                known = arrival
        used = self.activations[rank] + self.deferred[rank]
        if forward >= 0:
            if self._within(rank, used + self.problem.hold[forward]) or (weight := self._next_weight(rank)) < 0:
                self._start_forward(rank, forward, now)
            else:
                # The F is safe, so only deferred memory can be in its way.
                self._start_weight(rank, weight, now)
        elif gradient >= 0:
            if self._within(rank, used + (self.problem.burst[gradient] + self.problem.surplus[gradient])):
                self._start_gradient(rank, gradient, now, Kind.I)
            elif (weight := self._next_weight(rank)) >= 0:
                self._start_weight(rank, weight, now)
            else:
                self._start_gradient(rank, gradient, now, Kind.B)
        else:
            weight = self._next_weight(rank)
            if weight >= 0 and known - now >= self.rules.fill[rank] * self.problem.weight_grad[weight]:
                self._start_weight(rank, weight, now)
            else:
                self.idle[rank] = True
                if known < inf:  # an input that is needed ahead of time may wake the rank before it
                    heappush(self.events, (known, rank))

    def _next(
        self, rank: int, stages: Iterable[int], arrivals: Sequence[deque[float]], now: float
    ) -> tuple[int, float]:
        """Return the stage of the F (or I, B) to start now, or -1 and the next known arrival."""
        known = inf
        for stage in stages:
            if not (queue := arrivals[stage]) or (first := queue[0]) >= known:
                continue
            if arrivals is self.gradients or (
                self._within(self.leads + stage, self.forwards[stage] - self.backwards[stage] + 1)
                and self._safe(rank, stage)
            ):
                if first <= now:
                    return stage, now
                known = first
        return -1, known

    def _next_weight(self, rank: int) -> int:
        """Return the stage with the oldest pending W, or -1."""
        best, oldest = -1, self.problem.num_microbatches
        for stage in self.problem.stages[rank]:
            if (done := self.weights[stage]) < oldest and done < self.backwards[stage]:
                best, oldest = stage, done
        return best

    def _within(self, limit: int, size: float) -> bool:
        if size <= self.limits[limit]:
            if size > self.fitted[limit]:
                self.fitted[limit] = size
            return True
        if size < self.refused[limit]:
            self.refused[limit] = size
        return False

    def _safe(self, rank: int, stage: int) -> bool:
        """Return whether the rank can still finish its microbatches, oldest first, after one more F of the stage."""
        hold, own = self.problem.hold, self.problem.stages[rank]
        limit = len(self.problem.stages) + rank
        if len(own) == 1:
            return self._within(limit, self.activations[rank] + hold[stage])
        done = [self.forwards[each] + (each == stage) for each in own]
        # Microbatches with equally many F done need equal memory; the oldest of them has the most others beside it.
        for count, following in enumerate([*done[1:], min(self.backwards[each] for each in own)], start=1):
            if following >= done[count - 1]:
                continue
            others = 0.0
            for each, forwards in zip(own, done, strict=True):
                others += hold[each] * max(0, forwards - max(following, self.backwards[each]))
            if not self._within(limit, others + sum(hold[each] for each in own[count:])):
                return False
        return True

    def _start_forward(self, rank: int, stage: int, now: float) -> None:
        problem = self.problem
        end = now + problem.forward[stage]
        self.inputs[stage].popleft()
        self.forwards[stage] += 1
        self.activations[rank] += problem.hold[stage]
        self.last_was_forward[rank] = True
        if stage + 1 == len(problem.placement):
            self.gradients[stage].append(end)
        else:
            self._send(self.inputs, rank, stage + 1, end, problem.forward_links[stage])
        self._note(rank, Kind.F, stage, end)

    def _start_gradient(self, rank: int, stage: int, now: float, kind: Kind) -> None:
        problem = self.problem
        # Right after its own F a microbatch still has its graph, so no R runs.
        has_graph = self.lists[rank][-1] == (Kind.F, stage) and self.forwards[stage] - self.backwards[stage] == 1
        end = now + problem.input_grad[stage] + (0.0 if has_graph else problem.again[stage])
        self.gradients[stage].popleft()
        self.backwards[stage] += 1
        self.last_was_forward[rank] = False
        during = self.activations[rank] + self.deferred[rank] + problem.burst[stage]
        if kind is Kind.B:
            end += problem.weight_grad[stage]
            self.weights[stage] += 1
        else:
            during += problem.surplus[stage]
            self.deferred[rank] += problem.deferred[stage]
        if during > self.peak[rank]:
            self.peak[rank] = during
        self.activations[rank] -= problem.hold[stage]
        if stage > 0:
            # The R of the next I runs while the gradient is in transit.
            self._send(self.gradients, rank, stage - 1, end, problem.backward_links[stage], problem.again[stage - 1])
        self._note(rank, kind, stage, end)

    def _start_weight(self, rank: int, stage: int, now: float) -> None:
        self.weights[stage] += 1
        self.deferred[rank] -= self.problem.deferred[stage]
        self._note(rank, Kind.W, stage, now + self.problem.weight_grad[stage])

    def _note(self, rank: int, kind: Kind, stage: int, end: float) -> None:
        if (used := self.activations[rank] + self.deferred[rank]) > self.peak[rank]:
            self.peak[rank] = used
        self.lists[rank].append((kind, stage))
        self.free[rank], self.idle[rank] = end, False
        heappush(self.events, (end, rank))

    def _send(
        self, arrivals: list[deque[float]], rank: int, stage: int, end: float, link: Link, ahead: float = 0.0
    ) -> None:
        target = self.problem.placement[stage]
        if link.seconds_per_message > 0.0:
            edge = rank, target
            self.link_free[edge] = end = max(self.link_free.get(edge, 0.0), end) + link.seconds_per_message
        arrival = end + link.latency - ahead
        arrivals[stage].append(arrival)
        if self.idle[target] or arrival > self.free[target]:
            heappush(self.events, (max(arrival, self.free[target]), target))

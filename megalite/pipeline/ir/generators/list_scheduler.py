"""A list scheduler: runs the pipeline on a clock and lets each free rank choose what to do next."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.schedule import ActionLists
from megalite.pipeline.ir.simulate import Costs, Link

_NO_MESSAGE = Link(0.0)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Costs and sizes are of one microbatch, per virtual stage."""

    placement: tuple[int, ...]
    num_microbatches: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    again: tuple[float, ...]  # the R before an I or B; 0 where nothing is recomputed ahead
    forward_links: tuple[Link, ...]  # how a stage's output travels to the next stage
    backward_links: tuple[Link, ...]  # how the gradient of a stage's input travels to the stage before
    hold: tuple[float, ...]  # memory from F to I or B
    burst: tuple[float, ...]  # memory that an I or B needs on top: the graph of its R
    deferred: tuple[float, ...]  # memory from I to W
    surplus: tuple[float, ...]  # by how much that is more than the graph which I frees in exchange
    room: tuple[float, ...]  # per rank, the memory that may be used

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
        """The same for the simulator's costs and the replay's sizes; `ahead`: with an R before each I or B."""
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
        """Per rank its room, and then per rank what of it an I or B leaves: all that a scheduler asks of room."""
        room = [limit * (1.0 + ROUNDING) for limit in self.room]
        return room + [limit - max(self.burst[stage] for stage in own) for limit, own in zip(room, self.stages)]

    @cached_property
    def least(self) -> tuple[float, ...]:
        """Per rank, what a microbatch needs that is alone in the pipeline, its messages not counted.

        Without recomputation no schedule needs less: all of a microbatch's F come before its first I."""
        return tuple(
            sum(self.hold[stage] for stage in own) + max(self.burst[stage] for stage in own) for own in self.stages
        )


ROUNDING = 1e-12  # relative: sums of floats in another order may differ by this much, and no more

Order = Literal["backward", "alternate", "forward"]


class Rules(NamedTuple):
    """How ranks choose."""

    lead: tuple[int, ...]  # per stage, how many microbatches may at most be between their F and their I
    order: tuple[Order, ...]
    """Per rank, what goes first where both an F and an I could start; "alternate": the other one than last time."""
    fill: tuple[float, ...]
    """Per rank, the share of a W that must be done before the next F or I could start, for the W to start.

    At 0 no rank waits that has a W to do; at 1 no W delays an F or I that is known to come."""
    forward_deepest: bool = True
    """Among the F that could start, the one of the last stage goes first, not that of the first; below among the I."""
    backward_deepest: bool = True


class Outcome(NamedTuple):
    """The lists that came out, and the time and memory that they should take."""

    lists: tuple[tuple[tuple[Kind, int], ...], ...]
    """Per rank, kind and stage in order. Each stage takes its microbatches in order."""
    makespan: float
    memory: float  # the ranks' peaks, summed
    holds: tuple[tuple[float, ...], tuple[float, ...]]
    """Of `Problem.limits`, from which on and below which the outcome is this one: at least what was found to fit, and less
    than what was not."""

    def actions(self) -> ActionLists:
        """Per rank, the actions."""
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
    """Lets each rank, when it is free, start an F, I or W by the rules, until all is done.

    Memory is given out by the banker's algorithm: an F starts only if the microbatches could then still be finished one
    by one, oldest first. For each rank that is a matter of its activations, since what W needs can always be freed by
    running the W. So no limit of `problem.least` or more leads into a dead end. A B takes the place of I and W where
    there is no room to keep what the W needs.

    Time: linear in the number of actions."""
    run = _Run(problem, rules)
    while run.events:
        now, rank = heappop(run.events)
        if now >= run.free[rank]:
            run.decide(rank, now)
    holds = tuple(run.fitted), tuple(run.refused)
    return Outcome(tuple(map(tuple, run.lists)), max(run.free), sum(run.peak), holds)


class _Run:
    """The clock and where everything stands."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        self.problem, self.rules = problem, rules
        num_stages, num_ranks = len(problem.placement), len(problem.stages)
        # Per stage, when the inputs of the next F and I arrive, as far as that is known.
        self.inputs: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.inputs[0].extend([0.0] * problem.num_microbatches)
        # Per stage, how many have been started.
        self.forwards = [0] * num_stages
        self.backwards = [0] * num_stages
        self.weights = [0] * num_stages
        # Per rank.
        self.forward_order = [own[::-1] if rules.forward_deepest else own for own in problem.stages]
        self.backward_order = [own[::-1] if rules.backward_deepest else own for own in problem.stages]
        self.limits = problem.limits
        self.fitted, self.refused = [0.0] * len(self.limits), [inf] * len(self.limits)
        self.held = [0.0] * num_ranks
        self.deferred = [0.0] * num_ranks
        self.peak = [0.0] * num_ranks
        self.lists: list[list[tuple[Kind, int]]] = [[] for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self.last_was_forward = [False] * num_ranks
        self.link_free: dict[tuple[int, int], float] = {}
        self.events = [(0.0, rank) for rank in range(num_ranks)]
        """When a rank has something to decide: it becomes free, or something arrives."""

    def decide(self, rank: int, now: float) -> None:
        forward = gradient = -1
        known, order = inf, self.rules.order[rank]
        backward_first = order == "backward" or (order == "alternate" and self.last_was_forward[rank])
        # Each is looked for only where the answer depends on it: this runs a million times in a search.
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
        there = self.held[rank] + self.deferred[rank]
        if forward >= 0:
            if self._within(rank, there + self.problem.hold[forward]) or (weight := self._next_weight(rank)) < 0:
                self._start_forward(rank, forward, now)
            else:
                # The F is safe to start, so all that can be in its way is what the Ws keep.
                self._start_weight(rank, weight, now)
        elif gradient >= 0:
            if self._within(rank, there + (self.problem.burst[gradient] + self.problem.surplus[gradient])):
                self._start_gradient(rank, gradient, now, Kind.I)
            elif (weight := self._next_weight(rank)) >= 0:
                self._start_weight(rank, weight, now)
            else:
                self._start_gradient(rank, gradient, now, Kind.B)
        else:
            weight = self._next_weight(rank)
            if weight >= 0 and known - now >= self.rules.fill[rank] * self.problem.weight_grad[weight]:
                self._start_weight(rank, weight, now)
            elif known < inf:
                heappush(self.events, (known, rank))

    def _next(
        self, rank: int, stages: Iterable[int], arrivals: Sequence[deque[float]], now: float
    ) -> tuple[int, float]:
        """The stage of the F (or I, B) that should start now, or -1 and when one will have arrived, as far as known."""
        known = inf
        for stage in stages:
            if not (queue := arrivals[stage]) or (first := queue[0]) >= known:
                continue
            if arrivals is self.gradients or (
                self.forwards[stage] - self.backwards[stage] < self.rules.lead[stage] and self._safe(rank, stage)
            ):
                if first <= now:
                    return stage, now
                known = first
        return -1, known

    def _next_weight(self, rank: int) -> int:
        """The stage with the oldest W to do, or -1."""
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
        """Whether after one more F of the stage the rank can still see its microbatches through, oldest first."""
        hold, own = self.problem.hold, self.problem.stages[rank]
        limit = len(self.problem.stages) + rank
        if len(own) == 1:
            return self._within(limit, self.held[rank] + hold[stage])
        done = [self.forwards[each] + (each == stage) for each in own]
        # Microbatches with as many F done need the same; the oldest of them has the most others around it.
        for count, following in enumerate([*done[1:], min(self.backwards[each] for each in own)], start=1):
            if following >= done[count - 1]:
                continue
            held = 0.0
            for each, forwards in zip(own, done, strict=True):
                held += hold[each] * max(0, forwards - max(following, self.backwards[each]))
            if not self._within(limit, held + sum(hold[each] for each in own[count:])):
                return False
        return True

    def _start_forward(self, rank: int, stage: int, now: float) -> None:
        problem = self.problem
        end = now + problem.forward[stage]
        self.inputs[stage].popleft()
        self.forwards[stage] += 1
        self.held[rank] += problem.hold[stage]
        self.last_was_forward[rank] = True
        if stage + 1 == len(problem.placement):
            self.gradients[stage].append(end)
        else:
            self._send(self.inputs, rank, stage + 1, end, problem.forward_links[stage])
        self._note(rank, Kind.F, stage, end)

    def _start_gradient(self, rank: int, stage: int, now: float, kind: Kind) -> None:
        problem = self.problem
        # Straight after its own F a microbatch still has its graph: there is nothing to run again.
        behind = self.lists[rank][-1] == (Kind.F, stage) and self.forwards[stage] - self.backwards[stage] == 1
        end = now + problem.input_grad[stage] + (0.0 if behind else problem.again[stage])
        self.gradients[stage].popleft()
        self.backwards[stage] += 1
        self.last_was_forward[rank] = False
        during = self.held[rank] + self.deferred[rank] + problem.burst[stage]
        if kind is Kind.B:
            end += problem.weight_grad[stage]
            self.weights[stage] += 1
        else:
            during += problem.surplus[stage]
            self.deferred[rank] += problem.deferred[stage]
        if during > self.peak[rank]:
            self.peak[rank] = during
        self.held[rank] -= problem.hold[stage]
        if stage > 0:
            # The R of the next I runs while the gradient is on its way.
            self._send(self.gradients, rank, stage - 1, end, problem.backward_links[stage], problem.again[stage - 1])
        self._note(rank, kind, stage, end)

    def _start_weight(self, rank: int, stage: int, now: float) -> None:
        self.weights[stage] += 1
        self.deferred[rank] -= self.problem.deferred[stage]
        self._note(rank, Kind.W, stage, now + self.problem.weight_grad[stage])

    def _note(self, rank: int, kind: Kind, stage: int, end: float) -> None:
        if (there := self.held[rank] + self.deferred[rank]) > self.peak[rank]:
            self.peak[rank] = there
        self.lists[rank].append((kind, stage))
        self.free[rank] = end
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
        heappush(self.events, (max(arrival, self.free[target]), target))

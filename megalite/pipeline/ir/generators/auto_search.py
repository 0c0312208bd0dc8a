"""Search for the rules of the list scheduler that give the best schedule (`auto`)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

from megalite.pipeline.ir.generators.list_scheduler import ROUNDING, Order, Outcome, Problem, Rules, list_schedule

_ORDERS: tuple[Order, ...] = ("backward", "alternate", "forward")
_FILLS = (0.0, 0.25, 0.5, 0.75, 1.0)

REHEARSAL = 4  # microbatches per rank, enough to compare rules


def search(problem: Problem, work: int, attempts: tuple[int, int], keep: int) -> list[Outcome]:
    """Return the best `keep` schedules found, the fastest first, then those with less memory.

    The search schedules `work` actions, but stays within the minimum and maximum of `attempts`.

    It tries a grid of rules, then changes the best ones step by step and keeps each change that helps. Rules do not
    depend on the number of microbatches, so most attempts use few of them.
    """
    starts = list(_grid(problem))
    rehearsal = REHEARSAL * len(problem.stages)
    if problem.num_microbatches > 1.5 * rehearsal:
        short = _Attempts(replace(problem, num_microbatches=rehearsal), work // 2, attempts, keep)
        short.climb(starts)
        starts = short.best_rules(8) + starts[:8]
        work //= 2
    full = _Attempts(problem, work, attempts, keep)
    full.climb(starts)
    return full.found()


Value = tuple[float, float]  # time and memory; smaller is better
Room = tuple[tuple[float, ...], tuple[float, ...]]  # `Outcome.holds`


@lru_cache(maxsize=16)
def _known(problem: Problem) -> dict[Rules, list[tuple[Room, Value]]]:
    """Return the cache of a problem without room: rules -> values, each with the range of room in which it applies."""
    return {}


class _Attempts:
    """Evaluates rules within a budget of attempts, and keeps the best."""

    def __init__(self, problem: Problem, work: int, attempts: tuple[int, int], keep: int) -> None:
        self.problem = problem
        self.keep = keep
        actions = 3 * len(problem.placement) * problem.num_microbatches
        least, most = attempts
        self.budget = min(most, max(least, work // actions))
        self.values: dict[Rules, Value] = {}
        self.best: dict[Value, Rules] = {}
        self.known = _known(replace(problem, room=()))

    def value(self, rules: Rules) -> Value:
        if rules not in self.values:
            self.values[rules] = value = self._evaluate(rules)
            self.best.setdefault(value, rules)
            if len(self.best) > self.keep:
                del self.best[max(self.best)]
        return self.values[rules]

    def _evaluate(self, rules: Rules) -> Value:
        known, limits = self.known.setdefault(rules, []), self.problem.limits
        for (least, beyond), value in known:
            if all(low <= limit < high for low, limit, high in zip(least, limits, beyond)):
                return value
        outcome = list_schedule(self.problem, rules)
        known.append((outcome.holds, (outcome.makespan, outcome.memory)))
        return known[-1][1]

    def found(self) -> list[Outcome]:
        return [list_schedule(self.problem, self.best[value]) for value in sorted(self.best)]

    def climb(self, starts: list[Rules]) -> None:
        """Try the starts, on at most half of the budget, and change the best three as long as that helps."""
        for rules in starts[: self.budget // 2]:
            self.value(rules)
        for rules in self.best_rules(3):
            self._climb_from(rules)

    def _climb_from(self, rules: Rules) -> None:
        value = self.value(rules)
        improved = True
        while improved:
            improved = False
            for change in _changes(self.problem):
                if len(self.values) >= self.budget:
                    return
                changed = change(rules)
                found = self.value(changed)
                if _better(found, value):
                    rules, value, improved = changed, found, True

    def best_rules(self, keep: int) -> list[Rules]:
        return sorted(self.values, key=self.values.__getitem__)[:keep]


def _better(value: Value, than: Value) -> bool:
    margin = than[0] * ROUNDING
    return value[0] < than[0] - margin or (value[0] <= than[0] + margin and value[1] < than[1])


def _grid(problem: Problem) -> Iterator[Rules]:
    """Yield rules to start from, the most promising first."""
    num_ranks = len(problem.stages)
    several = max(map(len, problem.stages)) > 1
    directions = ((True, False), (True, True), (False, False), (False, True)) if several else ((True, True),)
    for deepest, fill, order, lead in product(directions, (0.0, 0.5, 1.0), _ORDERS, _leads(problem)):
        yield Rules(lead, (order,) * num_ranks, (fill,) * num_ranks, *deepest)


def _leads(problem: Problem) -> list[tuple[int, ...]]:
    """Return leads that cover the time until a microbatch's gradient returns, at a steady or a forward-only pace."""
    most = problem.num_microbatches
    steady = max(
        sum(problem.forward[stage] + problem.input_grad[stage] + problem.weight_grad[stage] for stage in own)
        for own in problem.stages
    )
    ramp = [sum(problem.forward[stage] for stage in own) for own in problem.stages]
    trips: list[float] = []
    trip = 0.0
    for stage in reversed(range(len(problem.placement))):
        trip += problem.forward[stage] + sum(problem.forward_links[stage]) + problem.input_grad[stage]
        trips.insert(0, trip)
        trip += sum(problem.backward_links[stage])

    def lead(pace: list[float], share: float) -> tuple[int, ...]:
        paces = [pace[rank] for rank in problem.placement]
        return tuple(
            int(min(most, 1.0 + share * time / each)) if each else most for time, each in zip(trips, paces, strict=True)
        )

    level = [steady] * len(ramp)
    shapes = [lead(ramp, 1.0), lead(level, 1.0), lead(level, 1.5), (most,) * len(trips), lead(level, 2.5)]
    return list(dict.fromkeys(shapes))


Change = Callable[[Rules], Rules]


def _changes(problem: Problem) -> Iterator[Change]:
    """Yield small changes of rules, those with a large effect first."""
    num_stages, num_ranks, most = len(problem.placement), len(problem.stages), problem.num_microbatches
    ranks = range(num_ranks)
    yield from (partial(_reordered, ranks=ranks, order=order) for order in _ORDERS)
    yield from (partial(_refilled, ranks=ranks, fill=fill) for fill in _FILLS)
    if num_stages > num_ranks:
        yield lambda rules: rules._replace(forward_deepest=not rules.forward_deepest)
        yield lambda rules: rules._replace(backward_deepest=not rules.backward_deepest)
    groups = [range(num_stages)]
    groups += [range(first, min(first + num_ranks, num_stages)) for first in range(0, num_stages, num_ranks)]
    groups += [range(stage, stage + 1) for stage in range(num_stages)]
    groups += [range(stage + 1) for stage in range(num_stages)]
    for stages in dict.fromkeys(groups):
        yield from (partial(_shifted, stages=stages, step=step, most=most) for step in (1, -1, 3, -3))
    for one in (range(rank, rank + 1) for rank in ranks):
        yield from (partial(_reordered, ranks=one, order=order) for order in _ORDERS)
        yield from (partial(_refilled, ranks=one, fill=fill) for fill in _FILLS)


def _reordered(rules: Rules, *, ranks: range, order: Order) -> Rules:
    return rules._replace(order=tuple(order if rank in ranks else own for rank, own in enumerate(rules.order)))


def _refilled(rules: Rules, *, ranks: range, fill: float) -> Rules:
    return rules._replace(fill=tuple(fill if rank in ranks else own for rank, own in enumerate(rules.fill)))


def _shifted(rules: Rules, *, stages: range, step: int, most: int) -> Rules:
    lead = tuple(min(most, max(1, own + step)) if stage in stages else own for stage, own in enumerate(rules.lead))
    return rules._replace(lead=lead)

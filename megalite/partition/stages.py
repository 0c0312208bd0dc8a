"""Split the model into virtual stages, distribute layers over them, and count FLOPs of a stage. No torch.

Training, dry run and planner all split it with `cut_stages`."""

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, pairwise, permutations
from operator import ge
from typing import Any

from megalite.config.run import RunConfig, cache_by_reading, stage_layers
from megalite.models.shapes import (
    ParameterShape,
    StageLayers,
    end_forward_flops,
    layer_kinds,
    layers_forward_flops,
    stage_shapes,
)


@dataclass(frozen=True, kw_only=True)
class StagePlan(StageLayers):
    """One virtual stage, on pipeline rank `rank`."""

    stage: int
    rank: int

    @property
    def num_layers(self) -> int:
        """Transformer blocks of the stage."""
        return self.last_layer - self.first_layer


def message_parts(config: RunConfig) -> int:
    """Return the parts of a message between stages, one per tensor-parallel rank; 1: each sends the whole message."""
    p = config.parallel
    return int(
        parts_of_message(p.scatter_gather_tensors_in_pipeline, p.sequence_parallel, config.model.hidden_size, p.tp)
    )


def parts_of_message(scattered: Any, sequence_parallel: Any, hidden_size: Any, tp: Any) -> Any:
    """Return `message_parts` for settings that may be arrays."""
    return 1 + (tp - 1) * (scattered * (1 - sequence_parallel) * (hidden_size % tp == 0))


@cache_by_reading
def shapes_of(config: RunConfig, plan: StagePlan) -> tuple[ParameterShape, ...]:
    """Return the full shapes of a stage's parameters, in forward order."""
    return tuple(stage_shapes(config.model, plan.first_layer, plan.last_layer, plan.has_embedding, plan.has_head))


def cut_stages(config: RunConfig, placement: Sequence[int]) -> tuple[StagePlan, ...]:
    """Split a validated config with a known vocabulary into stages on these ranks, in stage order.

    The split is pipeline_layers or pipeline_layout if they are set. Otherwise it minimizes the FLOPs of the slowest
    pipeline rank, including the head; the embedding is a lookup and counts as 0."""
    placement = tuple(placement)
    layers = stage_layers(config)
    if layers:
        return _plans(tuple(layers), placement)
    costs = layers_forward_flops(config.model, range(config.model.num_layers), config.training.seq_length)
    return _plans(
        _partition(tuple(costs), placement, end_forward_flops(config.model, config.training.seq_length)), placement
    )


@lru_cache(maxsize=256)
def _partition(layer_cost: tuple[int, ...], placement: tuple[int, ...], last_cost: int) -> tuple[int, ...]:
    # Every function that needs the stages splits the config again.
    return partition_layers(len(layer_cost), placement, layer_cost=layer_cost, last_cost=last_cost)


@lru_cache(maxsize=256)
def _plans(layers: tuple[int, ...], placement: tuple[int, ...]) -> tuple[StagePlan, ...]:
    last = len(placement) - 1
    return tuple(
        StagePlan(
            stage=stage,
            rank=rank,
            first_layer=end - count,
            last_layer=end,
            has_embedding=stage == 0,
            has_head=stage == last,
        )
        for stage, (rank, count, end) in enumerate(zip(placement, layers, accumulate(layers), strict=True))
    )


def shapes_of_rank(config: RunConfig, stages: list[StagePlan]) -> list[ParameterShape]:
    """Return the full shapes of the parameters on a pipeline rank with these stages, a tied embedding once."""
    return list({shape.name: shape for plan in stages for shape in shapes_of(config, plan)}.values())


def shares_embedding(stages: Sequence[StagePlan]) -> bool:
    """Return whether the first and last stage share a rank, so that a tied embedding needs no second copy."""
    return stages[0].rank == stages[-1].rank


def stage_forward_flops(config: RunConfig, plan: StagePlan) -> int:
    """Return the FLOPs of one token's forward through the stage."""
    layers = range(plan.first_layer, plan.last_layer)
    total = sum(layers_forward_flops(config.model, layers, config.training.seq_length))
    return total + (end_forward_flops(config.model, config.training.seq_length) if plan.has_head else 0)


def kind_of_stage(config: RunConfig, plan: StagePlan) -> Hashable:
    """Return a key that is equal for stages that differ only in their position and layer names; fp8 and lr_multipliers
    depend on these."""
    layers, last = range(plan.first_layer, plan.last_layer), config.model.num_layers - 1
    ends = [index for index in (0, last) if index in layers] if config.compute.fp8 else []
    places = [*ends, plan.first_layer] if config.optimizer.lr_multipliers else ends
    kinds = layer_kinds(config.model)[plan.first_layer : plan.last_layer]
    return plan.has_embedding, plan.has_head, kinds, tuple(places)


def partition_layers(
    num_layers: int,
    placement: Sequence[int],
    *,
    layer_cost: float | Sequence[float] = 1.0,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage; stage s is on rank `placement[s]`.

    Each stage gets at least one layer, except that the last may get none if `last_cost` is not 0 (a heavy head).

    The cost of a stage is the sum over its layers of `layer_cost` (one number, or one for each layer), plus
    `first_cost` (embedding) on stage 0 and `last_cost` (head, loss) on the last. Minimised, in this order: the largest
    total per rank, which limits the steady state; the largest stage, which limits the ramp; and the sum of squared
    stage costs, which favours an even cut. Ties give earlier stages more layers.

    With equal layers the result is exact, since only the counts matter. The bound on ranks is found by bisection over
    its possible values. Within it each layer goes to the cheapest stage with room on its rank: for nested capacities this
    greedy rule minimises every sum of one convex function of the stages' costs, hence both their largest and their
    squares. With unequal layers and one stage per rank it is exact too (`cut_unequal`); with several it is exact for
    small models and approximate for large ones."""
    num_stages, num_ranks = len(placement), max(placement) + 1
    assert num_layers >= num_stages, "the rules refuse stages without a layer"
    costs = list(layer_cost) if isinstance(layer_cost, Sequence) else [layer_cost] * num_layers
    assert len(costs) == num_layers, (len(costs), num_layers)
    assert min(costs) > 0 and first_cost >= 0 and last_cost >= 0, (min(costs), first_cost, last_cost)
    # In units of a layer, converted from the decimal form, so that costs with equal decimals tie exactly.
    unit = Fraction(repr(float(costs[0])))
    extra = [Fraction(0)] * num_stages
    extra[0] += Fraction(repr(float(first_cost))) / unit
    extra[-1] += Fraction(repr(float(last_cost))) / unit
    least = [1] * num_stages
    if num_stages > 1 and extra[-1] > 0:
        least[-1] = 0
    if len(set(costs)) > 1:
        units = [Fraction(repr(float(cost))) / unit for cost in costs]
        return cut_unequal(units, extra, placement, least)
    # As integers, because they are compared thousands of times; a layer costs `each`.
    each = math.lcm(*(cost.denominator for cost in extra))
    whole = [int(cost * each) for cost in extra]
    rank_extra, floors = [0] * num_ranks, [0] * num_ranks
    for rank, cost, count in zip(placement, whole, least, strict=True):
        rank_extra[rank] += cost
        floors[rank] += count
    room = _smallest_room(num_layers, each, rank_extra, floors)
    rank_left = [most - floor for most, floor in zip(room, floors, strict=True)]
    return _fill(num_layers, each, whole, placement, rank_left, least)


def _smallest_room(num_layers: int, each: int, extra: list[int], floors: list[int]) -> list[int]:
    """Return how many layers fit on each rank, beside its extra cost, under the smallest feasible bound on ranks'
    costs. A bound is feasible if each rank gets its floor and all layers fit. A layer costs `each`."""

    def room(bound: int) -> list[int]:
        return [(bound - cost) // each for cost in extra]

    def feasible(bound: int) -> bool:
        rooms = room(bound)
        return all(map(ge, rooms, floors)) and sum(rooms) >= num_layers

    # All possible values of the largest cost. Feasibility is monotone in them and holds for the last.
    bounds = sorted({cost + each * layers for cost in set(extra) for layers in range(num_layers + 1)})
    return room(bounds[bisect_left(bounds, True, key=feasible)])


def _fill(
    num_layers: int, each: int, extra: list[int], placement: Sequence[int], rank_left: list[int], least: list[int]
) -> tuple[int, ...]:
    """Give each stage its minimum, then each further layer to the cheapest, then earliest stage with room on its rank."""
    layers = list(least)
    heap = [(cost + each * layers[stage], stage) for stage, cost in enumerate(extra)]
    heapify(heap)
    left = num_layers - sum(least)
    while left:
        cost, stage = heappop(heap)
        # A full rank never has room again, so its stages are not pushed back.
        if rank_left[placement[stage]] > 0:
            layers[stage] += 1
            rank_left[placement[stage]] -= 1
            left -= 1
            heappush(heap, (cost + each, stage))
    return tuple(layers)


TRIED_CUTS = 5_000  # up to this number all cuts are tried (about 0.1 s)


def cut_unequal(
    costs: Sequence[Fraction], extra: Sequence[Fraction], placement: Sequence[int], least: Sequence[int]
) -> tuple[int, ...]:
    """Return the number of layers of each stage, for `costs` of each layer and `extra` of each stage.

    Stage s is on rank `placement[s]` and has at least `least[s]` layers. The objective is that of `partition_layers`.
    With one stage per rank the result minimises the largest stage, then the sum of squares. With several, a small
    problem is solved by trying all cuts; a large one starts from the result for one stage per rank and repeatedly moves
    one layer's worth from one stage to another (shifting the layers of the stages between) while that improves it."""
    # Integers in a common unit: exact, and much faster than fractions.
    unit = math.lcm(*(value.denominator for value in (*costs, *extra)))
    layers, extras = [int(cost * unit) for cost in costs], [int(cost * unit) for cost in extra]
    sums = [0, *accumulate(layers)]
    stages = len(extras)
    if stages == len(set(placement)):
        return _even_cut(sums, extras, least)
    spare = len(layers) - sum(least)
    if math.comb(spare + stages - 1, stages - 1) <= TRIED_CUTS:
        every = (_cut_at(bars, spare, least) for bars in combinations(range(spare + stages - 1), stages - 1))
        return min(every, key=lambda cut: _score(cut, sums, extras, placement))
    return _improved(_even_cut(sums, extras, least), sums, extras, placement, least)


def _cut_at(bars: tuple[int, ...], spare: int, least: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of each stage; `bars` separate the spare layers of neighbouring stages (stars and bars)."""
    ends = (-1, *bars, spare + len(bars))
    return tuple(low + b - a - 1 for low, (a, b) in zip(least, pairwise(ends), strict=True))


def _even_cut(sums: list[int], extra: list[int], least: Sequence[int]) -> tuple[int, ...]:
    """Minimise the largest stage, then the sum of squares, by dynamic programming from the last stage."""
    bound = _smallest_bound(sums, extra, least)
    last = len(sums) - 1
    # best[i]: (sum of squares, negative counts) of the best cut of layers i and later into the stages so far.
    best: dict[int, tuple[int, tuple[int, ...]]] = {last: (0, ())}
    for stage in reversed(range(len(extra))):
        before: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end, (squares, counts) in best.items():
            for start in range(end - least[stage], -1, -1):
                cost = sums[end] - sums[start] + extra[stage]
                if cost > bound:
                    break
                # Negative counts, so that more layers early sort first.
                found = (squares + cost * cost, (start - end, *counts))
                if start not in before or found < before[start]:
                    before[start] = found
        best = before
    return tuple(-count for count in best[0][1])


def _smallest_bound(sums: list[int], extra: list[int], least: Sequence[int]) -> int:
    """Return the smallest possible cost of the largest stage."""
    largest = {len(sums) - 1: 0}
    for stage in reversed(range(len(extra))):
        before: dict[int, int] = {}
        for end, so_far in largest.items():
            for start in range(end - least[stage], -1, -1):
                cost = max(so_far, sums[end] - sums[start] + extra[stage])
                if start not in before or cost < before[start]:
                    before[start] = cost
        largest = before
    return largest[0]


Score = tuple[int, int, int, tuple[int, ...]]


def _score(cut: tuple[int, ...], sums: list[int], extra: list[int], placement: Sequence[int]) -> Score:
    ends = list(accumulate(cut))
    stages = [sums[end] - sums[end - count] + more for end, count, more in zip(ends, cut, extra, strict=True)]
    ranks = [0] * (max(placement) + 1)
    for rank, cost in zip(placement, stages, strict=True):
        ranks[rank] += cost
    squares = sum(cost * cost for cost in stages)
    return max(ranks), max(stages), squares, tuple(-count for count in cut)


def _improved(
    cut: tuple[int, ...], sums: list[int], extra: list[int], placement: Sequence[int], least: Sequence[int]
) -> tuple[int, ...]:
    """Move single layers between two stages, the best move first, until no move helps."""
    best = _score(cut, sums, extra, placement)
    while True:
        moves = [
            tuple(count + (stage == taker) - (stage == giver) for stage, count in enumerate(cut))
            for giver, taker in permutations(range(len(cut)), 2)
            if cut[giver] > least[giver]
        ]
        scored = min((_score(move, sums, extra, placement), move) for move in moves) if moves else (best, cut)
        if scored[0] >= best:
            return cut
        best, cut = scored

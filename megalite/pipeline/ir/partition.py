"""How many layers each virtual stage gets."""

from collections.abc import Callable
from fractions import Fraction
from heapq import heappop, heappush

from megalite.config.errors import ConfigError


def partition_layers(
    num_layers: int,
    num_stages: int,
    num_ranks: int,
    *,
    layer_cost: float = 1.0,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
) -> tuple[int, ...]:
    """Layers per virtual stage, in order; stage s is on rank s mod num_ranks and has at least one layer.

    The cost of a stage is layers x layer_cost, plus `first_cost` (embedding) on stage 0 and `last_cost` (head, loss) on
    the last. Minimised, in this order: the largest total of a rank, which sets the pace of the steady state; the
    largest stage, which sets the ramp; the sum of squared stage costs, the even cut; and equals lean to early stages.

    The result is exact. Layers are alike, so only the counts matter: the bounds on ranks and on stages are found by
    bisection over the values they can take (a bound is feasible if the stages' room, capped by their rank's, holds
    all layers), and inside them handing each layer to the cheapest stage with room is optimal, because a sum of convex
    functions over nested capacities is what the greedy rule minimises.

    Raises:
        ConfigError: fewer layers than stages, stages that the ranks do not divide, or a negative cost.
    """
    if num_ranks < 1 or num_stages < 1 or num_stages % num_ranks:
        raise ConfigError(
            f"{num_stages} pipeline stages do not divide over {num_ranks} ranks: the number of stages is pp x vpp, "
            f"e.g. {max(num_ranks, 1)} or {2 * max(num_ranks, 1)}"
        )
    if num_layers < num_stages:
        raise ConfigError(
            f"num_layers is {num_layers}, fewer than the {num_stages} pipeline stages (pp {num_ranks} x vpp "
            f"{num_stages // num_ranks}), and each needs a layer: use {num_stages} layers or more, or pp x vpp of at "
            f"most {num_layers}"
        )
    if layer_cost <= 0 or first_cost < 0 or last_cost < 0:
        raise ConfigError(
            f"costs of the layer cut are layer {layer_cost}, first {first_cost}, last {last_cost}; the layer's must "
            f"be above 0, e.g. 1.0, and the others 0 or more"
        )
    # In units of a layer; through the decimal form, so that costs that are equal on paper tie exactly.
    unit = Fraction(repr(float(layer_cost)))
    extra = [Fraction(0)] * num_stages
    extra[0] += Fraction(repr(float(first_cost))) / unit
    extra[-1] += Fraction(repr(float(last_cost))) / unit
    rank_extra = [sum(extra[rank::num_ranks], Fraction(0)) for rank in range(num_ranks)]

    chunks = num_stages // num_ranks
    rank_room = _smallest_room(num_layers, rank_extra, floor=chunks)
    stage_room = _smallest_stage_room(num_layers, extra, rank_room)
    return _fill(num_layers, extra, rank_room, stage_room)


def _room(bound: Fraction, extra: list[Fraction]) -> list[int]:
    """Layers that fit beside each extra cost under the bound."""
    return [int((bound - cost) // 1) for cost in extra]


def _bounds(num_layers: int, extra: list[Fraction]) -> list[Fraction]:
    """The values that the largest cost can take, ascending."""
    return sorted({cost + layers for cost in set(extra) for layers in range(1, num_layers + 1)})


def _smallest_room(num_layers: int, extra: list[Fraction], *, floor: int) -> list[int]:
    """Room of each rank under the smallest bound that gives each its `floor` and all layers a place."""

    def feasible(bound: Fraction) -> bool:
        room = _room(bound, extra)
        return min(room) >= floor and sum(room) >= num_layers

    bounds = _bounds(num_layers, extra)
    return _room(bounds[_first(bounds, feasible)], extra)


def _smallest_stage_room(num_layers: int, extra: list[Fraction], rank_room: list[int]) -> list[int]:
    """Room of each stage under the smallest bound with which, inside the ranks' room, all layers have a place."""
    num_ranks = len(rank_room)

    def feasible(bound: Fraction) -> bool:
        room = _room(bound, extra)
        held = (min(rank_room[rank], sum(room[rank::num_ranks])) for rank in range(num_ranks))
        return min(room) >= 1 and sum(held) >= num_layers

    bounds = _bounds(num_layers, extra)
    return _room(bounds[_first(bounds, feasible)], extra)


def _first(bounds: list[Fraction], feasible: Callable[[Fraction], bool]) -> int:
    """Index of the first feasible bound; feasibility is monotone and holds for the last."""
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if feasible(bounds[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _fill(
    num_layers: int, extra: list[Fraction], rank_room: list[int], stage_room: list[int]
) -> tuple[int, ...]:
    """One layer each, then each further layer to the cheapest stage that it fits, the earliest of equals."""
    num_stages, num_ranks = len(extra), len(rank_room)
    layers = [1] * num_stages
    rank_left = [room - num_stages // num_ranks for room in rank_room]
    heap: list[tuple[Fraction, int]] = []
    for stage in range(num_stages):
        heappush(heap, (extra[stage] + 1, stage))
    left = num_layers - num_stages
    while left:
        cost, stage = heappop(heap)
        # No room, on the stage or on its rank, never comes back: the stage is dropped for good.
        if layers[stage] < stage_room[stage] and rank_left[stage % num_ranks] > 0:
            layers[stage] += 1
            rank_left[stage % num_ranks] -= 1
            left -= 1
            heappush(heap, (cost + 1, stage))
    return tuple(layers)

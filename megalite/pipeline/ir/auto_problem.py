"""What `auto` has to schedule, in the terms of its search: per stage, what takes how long and holds how much."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megalite.pipeline.ir.actions import Kind
from megalite.pipeline.ir.memory import Sizes
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
    again: tuple[float, ...]
    """The R before an I or B; 0 where nothing is recomputed ahead."""
    forward_links: tuple[Link, ...]
    """How a stage's output travels to the next stage."""
    backward_links: tuple[Link, ...]
    """How the gradient of a stage's input travels to the stage before."""
    hold: tuple[float, ...]
    """Memory from F to I or B."""
    burst: tuple[float, ...]
    """Memory that an I or B needs on top: the graph of its R."""
    deferred: tuple[float, ...]
    """Memory from I to W."""
    surplus: tuple[float, ...]
    """By how much that is more than the graph which I frees in exchange."""
    room: tuple[float, ...]
    """Per rank, the memory that may be used."""

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
    def least(self) -> tuple[float, ...]:
        """Per rank, what a microbatch needs that is alone in the pipeline, its messages not counted.

        Without recomputation no schedule needs less: all of a microbatch's F come before its first I.
        """
        return tuple(
            sum(self.hold[stage] for stage in own) + max(self.burst[stage] for stage in own)
            for own in self.stages
        )

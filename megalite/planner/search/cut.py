"""What the ranks of each pipeline hold of the model: layers by kind, embedding, head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megalite.config.rules.pipeline import stage_layers
from megalite.config.run import RunConfig
from megalite.models.shapes import head_forward_flops, layer_forward_flops
from megalite.pipeline.ir.generators.placements import loop_placement, v_placement
from megalite.pipeline.ir.partition import partition_layers
from megalite.planner.search.space import VEE, Pipeline

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """The stages of a pipeline, by rank and chunk: [p, v]."""

    dense: Integers
    """Layers with a dense MLP."""
    experts: Integers
    """Layers with experts."""
    first: tuple[int, int]
    """Rank and chunk of the first stage, which has the embedding."""
    last: tuple[int, int]
    """Of the last stage, which has the head."""

    @cached_property
    def ranks(self) -> Integers:
        """Of ranks that hold the same, the first and the last: one of them needs most memory in any schedule."""
        marks = np.zeros_like(self.dense)
        marks[self.first] += 1
        marks[self.last] += 2
        rows = np.concatenate((self.dense, self.experts, marks), axis=1)
        _, kind = np.unique(rows, axis=0, return_inverse=True)
        kind = kind.reshape(-1)
        firsts = {int(np.flatnonzero(kind == one)[0]) for one in np.unique(kind)}
        lasts = {int(np.flatnonzero(kind == one)[-1]) for one in np.unique(kind)}
        return np.array(sorted(firsts | lasts), dtype=np.int64)


class Cutter:
    """Cuts a model as `planner.stages.cut_stages` does; each cut is made once.

    Where layers differ in cost and a rank has several chunks, the cut is estimated as if they did not: the exact one
    takes a search of its own, which the layouts that are refined get.
    """

    def __init__(self, config: RunConfig) -> None:
        model, s = config.model, config.training.seq_length
        self._given = stage_layers(config)
        self._costs = [layer_forward_flops(model, index, s) for index in range(model.num_layers)]
        self._head = head_forward_flops(model)
        self._is_moe = np.array([model.is_moe_layer(index) for index in range(model.num_layers)])
        self._known: dict[tuple[int, int, bool], Cut] = {}

    def __call__(self, pipeline: Pipeline) -> Cut:
        """The cut of a pipeline."""
        key = (pipeline.pp, pipeline.vpp, pipeline.schedule in VEE)
        if key not in self._known:
            self._known[key] = self._cut(*key)
        return self._known[key]

    def _cut(self, pp: int, vpp: int, vee: bool) -> Cut:
        placement = v_placement(pp) if vee else loop_placement(pp, vpp)
        costs: float | Sequence[float] = self._costs
        if vpp > 1 and len(set(self._costs)) > 1:
            costs = sum(self._costs) / len(self._costs)
        counts = self._given or partition_layers(
            len(self._is_moe), placement, layer_cost=costs, last_cost=self._head
        )
        ends = np.concatenate(([0], np.cumsum(counts)))
        experts = np.concatenate(([0], np.cumsum(self._is_moe)))[ends]
        by_stage = np.stack((np.diff(ends) - np.diff(experts), np.diff(experts)))
        held = np.zeros((2, pp, vpp), dtype=np.int64)
        chunk = np.zeros(pp, dtype=np.int64)
        places = []
        for stage, rank in enumerate(placement):
            held[:, rank, chunk[rank]] = by_stage[:, stage]
            places.append((rank, int(chunk[rank])))
            chunk[rank] += 1
        return Cut(held[0], held[1], places[0], places[-1])

"""What pipeline ranks hold, counted: the half of a layout's memory that its pipeline decides."""

from enum import IntEnum, auto

import numpy as np
import numpy.typing as npt

from megalite.config.run import RunConfig
from megalite.pipeline.ir.generators.interleaved import smallest_group
from megalite.planner.search.cut import Cut, Cutter
from megalite.planner.search.inflight import in_flight, steady
from megalite.planner.search.space import Pipeline

Floats = npt.NDArray[np.float64]


class Feature(IntEnum):
    """Of a rank at a moment; and row of a share's coefficients."""

    DENSE = 0
    """Layers held, with a dense MLP; and so on."""
    EXPERTS = auto()
    EMBEDDING = auto()
    HEAD = auto()
    COPY = auto()
    """Of a tied embedding that is on another rank too."""
    DENSE_ACTIVE = auto()
    """Layers times microbatches whose graphs are alive."""
    EXPERTS_ACTIVE = auto()
    EMBEDDING_ACTIVE = auto()
    HEAD_ACTIVE = auto()
    DENSE_DEFERRED = auto()
    """The same that wait for a W."""
    EXPERTS_DEFERRED = auto()
    HEAD_DEFERRED = auto()
    ONLY_DENSE = auto()
    """The workspace of recomputation, by the kinds of layers on the rank."""
    ONLY_EXPERTS = auto()
    BOTH_KINDS = auto()
    PLAIN = auto()
    """What is whole for a while of sharded tensors, by what the stages have beside layers."""
    WITH_EMBEDDING = auto()
    WITH_HEAD = auto()
    BOTH_ENDS = auto()


_ALIVE = np.array([Feature.DENSE_ACTIVE <= feature <= Feature.HEAD_ACTIVE for feature in Feature])


_HEADS = (0, 1, 3, 10, 100)
"""Layers that a head may weigh in activations."""


class Counter:
    """Counts the features of pipelines, each that differs once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        self._cut = Cutter(config)
        self._held: dict[int, Floats] = {}
        self._known: dict[tuple[Pipeline, int], Floats] = {}

    def cut(self, pipeline: Pipeline) -> Cut:
        """The stages of a pipeline."""
        return self._cut(pipeline)

    def __call__(self, pipeline: Pipeline) -> Floats:
        """[rows, features]: ranks and moments of which one is the fullest, whatever the share."""
        if pipeline.schedule in ("gpipe", "looped-bfs"):
            # All microbatches are alive at once.
            return self._of(pipeline._replace(microbatches=1)) * np.where(_ALIVE, pipeline.microbatches, 1)
        return self._of(pipeline)

    def _of(self, pipeline: Pipeline) -> Floats:
        few = steady(pipeline, self._group)
        group = self._group
        if pipeline.schedule == "interleaved":
            group = group or smallest_group(pipeline.pp, pipeline.microbatches)
        key = (few, group or 0)
        if key not in self._known:
            self._known[key] = self._features(few, group)
        return self._known[key]

    def _features(self, pipeline: Pipeline, group: int | None) -> Floats:
        cut = self._cut(pipeline)
        ranks = cut.ranks
        warm_up = self._config.parallel.pipeline_warmup
        graphs, deferred = in_flight(pipeline, ranks, warm_up=warm_up, group=group)
        dense, experts = cut.dense[ranks], cut.experts[ranks]
        if pipeline.schedule == "interleaved":
            # Nothing waits for a W here: the moment with most alive decides, whatever the head weighs.
            layers = (graphs * (dense + experts)).sum(2)
            heads = graphs[:, :, cut.last[1]] * (ranks == cut.last[0])
            moments = [(layers + weight * heads).argmax(0) for weight in _HEADS]
            graphs = np.stack([graphs[moment, np.arange(len(ranks))] for moment in moments])
            deferred = np.zeros_like(graphs)
        if id(cut) not in self._held:
            self._held[id(cut)] = self._static(cut)
        rows = np.repeat(self._held[id(cut)][None], len(graphs), axis=0)
        last = ranks == cut.last[0]
        for counts, of_dense, of_experts, of_head in (
            (graphs, Feature.DENSE_ACTIVE, Feature.EXPERTS_ACTIVE, Feature.HEAD_ACTIVE),
            (deferred, Feature.DENSE_DEFERRED, Feature.EXPERTS_DEFERRED, Feature.HEAD_DEFERRED),
        ):
            rows[:, :, of_dense] = (counts * dense).sum(2)
            rows[:, :, of_experts] = (counts * experts).sum(2)
            rows[:, :, of_head] = counts[:, :, cut.last[1]] * last
        rows[:, :, Feature.EMBEDDING_ACTIVE] = graphs[:, :, cut.first[1]] * (ranks == cut.first[0])
        return rows.reshape(-1, len(Feature))

    def _static(self, cut: Cut) -> Floats:
        """[ranks, features] without what is in flight."""
        ranks = cut.ranks
        rows = np.zeros((len(ranks), len(Feature)))
        dense, experts = cut.dense[ranks].sum(1), cut.experts[ranks].sum(1)
        first, last = ((ranks == rank) for rank, _ in (cut.first, cut.last))
        columns = {
            Feature.DENSE: dense,
            Feature.EXPERTS: experts,
            Feature.EMBEDDING: first,
            Feature.HEAD: last,
            Feature.COPY: last & ~first & self._config.model.tie_embeddings,
            Feature.ONLY_DENSE: (dense > 0) & (experts == 0),
            Feature.ONLY_EXPERTS: (experts > 0) & (dense == 0),
            Feature.BOTH_KINDS: (dense > 0) & (experts > 0),
            Feature.PLAIN: ~first & ~last,
            Feature.WITH_EMBEDDING: first & ~last,
            Feature.WITH_HEAD: last & ~first,
            Feature.BOTH_ENDS: first & last,
        }
        for feature, column in columns.items():
            rows[:, feature] = column
        return rows

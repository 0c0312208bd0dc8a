"""Count what pipeline ranks store: the part of a layout's memory that its pipeline determines.

Closed forms give the number of microbatches in flight per chunk that a replay of the schedule would count. A rank's
memory peaks at one of a few moments. Each moment is a row of counts per chunk: graphs (from F to B or I) and inputs
stored for a W (from I to W). Memory is linear in the counts, so the largest row decides, whatever the size of a
microbatch. The counts are exact for one-chunk schedules and looped-bfs, and for interleaved unless its last group has
another size; for V schedules, the moments that are largest by several weightings are kept."""

from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.run import RunConfig, stage_layers
from megalite.models.shapes import end_forward_flops, layer_forward_flops, needs_copy
from megalite.partition.stages import partition_layers
from megalite.pipeline.ir.generators import dualpipe_v_row, loop_placement, smallest_group, v_placement, zb_v_row
from megalite.pipeline.ir.schedule import Kind
from megalite.planner.search.space import VEE, Pipeline

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class InFlight(NamedTuple):
    """Microbatches in flight; arrays of shape [moments, ranks, chunks]."""

    graphs: Counts
    deferred: Counts


def steady(pipeline: Pipeline, group: int | None = None) -> Pipeline:
    """Return the pipeline with the smallest number of microbatches that gives the same counts."""
    schedule, p, v, m, _ = pipeline
    if schedule == "interleaved":
        size = group or smallest_group(p, m)
        # Warm-up and one round of the chunks lie in whole groups.
        enough = size * (3 + 2 * p // (v * size))
        return pipeline._replace(microbatches=min(m, enough))
    enough = {"1f1b": 2 * p, "zb-h1": 4 * p, "zb-h2": 4 * p, "zb-v": 2 * p + 2, "dualpipe-v": 2 * p + 2}.get(
        schedule, m
    )
    return pipeline._replace(microbatches=min(m, enough))


def in_flight(pipeline: Pipeline, ranks: Counts, *, warm_up: str = "pa", group: int | None = None) -> InFlight:
    """Return the moments at which one of `ranks` may need most memory. `warm_up`: of 1f1b; `group`: of interleaved
    (default: the smallest)."""
    schedule, p, v, m, _ = pipeline
    left = p - ranks
    if schedule in ("zb-h1", "zb-h2"):
        return _zero_bubble(p, m, 1 if schedule == "zb-h1" else 2, ranks)
    if schedule in VEE:
        few = min(m, 2 * p + 2)  # more microbatches give the same counts
        stored = np.stack([_vee(schedule, p, few, rank) for rank in ranks.tolist()], axis=1)
        return InFlight(stored[:, :, :2], stored[:, :, 2:])
    if schedule == "1f1b":
        graphs = np.minimum(m, left if warm_up == "pa" else 2 * left - 1)[None, :, None]
    elif schedule == "interleaved":
        graphs = _interleaved(p, v, m, group or smallest_group(p, m), ranks)
    else:
        graphs = np.full((1, len(ranks), v), m)
    return InFlight(graphs, np.zeros_like(graphs))


def _interleaved(p: int, v: int, m: int, group: int, ranks: Counts) -> Counts:
    """Count graphs before each backward at which a forward or backward group changes chunk, over one round of chunks."""
    ahead = 2 * (p - ranks - 1) + (v - 1) * group
    turns = np.arange(v) * group
    moments = np.concatenate((turns[:, None] + 0 * ahead, (turns[:, None] - ahead - 1) % (v * group)))
    moments = np.minimum(moments, np.maximum(v * m - ahead - 1, 0))
    forwards = np.minimum(moments + ahead + 1, v * m)
    started, ended = _visited(np.stack((forwards, moments)), v, m, group)
    return np.asarray(started - ended[:, :, ::-1])


def _visited(steps: Counts, v: int, m: int, group: int) -> Counts:
    """Return how often each chunk was visited after `steps` steps, by groups of microbatches: [..., chunks]."""
    rounds = np.minimum(steps // (v * group), m // group)
    rest = steps - rounds * v * group
    size = np.where(rounds < m // group, group, m % group)[..., None]
    return rounds[..., None] * group + np.minimum(np.maximum(rest[..., None] - np.arange(v) * size, 0), size)


def _zero_bubble(p: int, m: int, depth: int, ranks: Counts) -> InFlight:
    """Count after the last forward, and after the first I with the largest number of postponed W."""
    ahead = np.minimum(m, depth * (p - ranks) - (depth - 1))
    behind = depth * ranks
    last = InFlight(ahead, np.minimum(behind, m - ahead))
    # Rank 0 postpones nothing: it runs B instead of I and W.
    put_off = np.where(behind == 0, 0, np.minimum(behind + 1, m))
    done = np.minimum(behind, m - 1)
    stored = np.where(behind == 0, 0, np.minimum(m, ahead + done) - (done + 1))
    graphs = np.stack((last.graphs, stored))[:, :, None]
    return InFlight(graphs, np.stack((last.deferred, put_off))[:, :, None])


# Weights of graphs and of deferred inputs, by chunk: the moment that is largest by each is kept. If a rank's second chunk
# has the head, it may need much more memory than the first.
_WEIGHTS = np.array(
    [
        *([1.0, 2.0, 0.7, 1.0], [1.0, 5.0, 0.7, 2.0], [1.0, 20.0, 0.7, 5.0]),
        *([1.0, 1.01, 0.0, 0.0], [1.01, 1.0, 0.0, 0.0]),
        *([1.0, 1.01, 0.5, 0.5], [1.01, 1.0, 0.5, 0.5]),
        *([1.0, 1.01, 1.0, 1.01], [1.01, 1.0, 1.01, 1.0]),
        *([0.45, 0.46, 1.0, 1.01], [0.46, 0.45, 1.01, 1.0]),
        *([0.1, 0.1, 1.0, 1.01], [0.1, 0.1, 1.01, 1.0]),
    ]
)


_CHANGES = {Kind.F: (1, 0), Kind.I: (-1, 1), Kind.W: (0, -1), Kind.B: (-1, 0)}  # of (graphs, deferred inputs)


@lru_cache(maxsize=4096)
def _vee(schedule: str, p: int, m: int, rank: int) -> Counts:
    """Return a rank's graphs and deferred inputs of both chunks at the fullest moment by each weighting: [weights, 4]."""
    row = (dualpipe_v_row if schedule == "dualpipe-v" else zb_v_row)(rank, p, m)
    changes = np.zeros((len(row), 2, 2), dtype=np.int64)
    for change, action in zip(changes, row, strict=True):
        change[:, int(action.stage >= p)] = _CHANGES[action.kind]
    stored = changes.reshape(-1, 4).cumsum(axis=0)
    return stored[np.argmax(stored @ _WEIGHTS.T, axis=0)]


@dataclass(frozen=True)
class Cut:
    """Stages of a pipeline as arrays by rank and chunk: [p, v]."""

    dense: Counts  # layers with a dense MLP
    experts: Counts  # layers with experts
    starts: Counts  # index of the first layer
    first: tuple[int, int]  # (rank, chunk) of the first stage, with the embedding
    last: tuple[int, int]  # (rank, chunk) of the last stage, with the head
    has_copy: bool  # a tied embedding has a copy with the head

    @cached_property
    def ranks(self) -> Counts:
        """First and last rank among those with equal contents: one of these needs most memory in any schedule."""
        marks = np.zeros_like(self.dense)
        marks[self.first] += 1
        marks[self.last] += 2
        rows = list(map(tuple, np.concatenate((self.dense, self.experts, marks), axis=1).tolist()))
        lasts = {row: rank for rank, row in enumerate(rows)}
        firsts = {row: rank for rank, row in reversed(list(enumerate(rows)))}
        return np.array(sorted({*firsts.values(), *lasts.values()}), dtype=np.int64)

    @cached_property
    def contents(self) -> Floats:
        """The features of `ranks` that do not depend on microbatches in flight: [ranks, features]."""
        counts = self.stages[self.ranks].sum(1)
        dense, experts, first, last = (counts > 0).T
        rows = np.zeros((len(counts), len(Feature)))
        rows[:, : Feature.COPY] = counts
        columns = {
            Feature.COPY: last & ~first & self.has_copy,
            Feature.ONLY_DENSE: dense & ~experts,
            Feature.ONLY_EXPERTS: experts & ~dense,
            Feature.BOTH_KINDS: dense & experts,
            Feature.PLAIN: ~first & ~last,
            Feature.WITH_EMBEDDING: first & ~last,
            Feature.WITH_HEAD: last & ~first,
            Feature.BOTH_ENDS: first & last,
        }
        for feature, column in columns.items():
            rows[:, feature] = column
        return rows

    @cached_property
    def stages(self) -> Floats:
        """Number of dense layers, expert layers, embeddings and heads per stage: [p, v, 4]."""
        counts = np.zeros((*self.dense.shape, 4))
        counts[..., 0], counts[..., 1] = self.dense, self.experts
        counts[*self.first, 2] = counts[*self.last, 3] = 1.0
        return counts

    @cached_property
    def different_chunks(self) -> tuple[Floats, Floats]:
        """How many chunks have the same stages, [kinds], and their different `stages`, [kinds, contents, 4]."""
        chunks = Tally(frozenset(map(tuple, chunk)) for chunk in self.stages.swapaxes(0, 1).tolist())
        most = max(map(len, chunks))
        # The last one is repeated, so that all have equally many.
        contents = [(every + every[-1:] * most)[:most] for every in map(sorted, chunks)]
        return np.array(list(chunks.values()), dtype=np.float64), np.array(contents)


class Feature(IntEnum):
    DENSE = 0  # number of layers with a dense MLP; others likewise
    EXPERTS = auto()
    EMBEDDING = auto()
    HEAD = auto()
    COPY = auto()  # of a tied embedding on another rank
    DENSE_ACTIVE = auto()  # layers times microbatches with live graphs
    EXPERTS_ACTIVE = auto()
    EMBEDDING_ACTIVE = auto()
    HEAD_ACTIVE = auto()
    INPUT_ACTIVE = auto()  # stage inputs kept beside offloaded layers
    DENSE_DEFERRED = auto()  # the same, waiting for a W
    EXPERTS_DEFERRED = auto()
    HEAD_DEFERRED = auto()
    ONLY_DENSE = auto()  # workspace of recomputation, by kinds of layers on the rank
    ONLY_EXPERTS = auto()
    BOTH_KINDS = auto()
    RESTORED = auto()  # offloaded layers back at once, beyond those never offloaded
    PLAIN = auto()  # unsharded copies of sharded tensors, by the ends on the rank
    WITH_EMBEDDING = auto()
    WITH_HEAD = auto()
    BOTH_ENDS = auto()


_ALIVE = np.array([Feature.DENSE_ACTIVE <= feature <= Feature.INPUT_ACTIVE for feature in Feature])
# Weights, in layers, of dense layers, expert layers, embedding, head and stage input, for several sizes of the head.
_BY_HEAD = np.array([(1.0, 1.0, 0.0, head, 1e-3) for head in (0.0, 1.0, 3.0, 10.0, 100.0)]).T


class Counter:
    """Counts the features of pipelines, once per cut and steady pipeline."""

    def __init__(self, config: RunConfig) -> None:
        model, s = config.model, config.training.seq_length
        self._config = config
        self._group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        self._given = stage_layers(config)
        self._costs = [layer_forward_flops(model, index, s) for index in range(model.num_layers)]
        self._is_moe = np.array([model.is_moe_layer(index) for index in range(model.num_layers)])
        self._cuts: dict[tuple[int, int, bool], Cut] = {}
        self._experts_before = np.concatenate(([0], np.cumsum(self._is_moe)))
        self._contents: dict[tuple[int, int, bool, int], tuple[Floats, Floats]] = {}
        self._flights: dict[tuple[Pipeline, int], list[Floats]] = {}
        self._known: dict[tuple[Pipeline, int], Floats] = {}

    def cut(self, pipeline: Pipeline) -> Cut:
        """Return a pipeline's stages, as `partition.stages.cut_stages` cuts them. If layers differ in cost and ranks have
        several chunks, equal costs are assumed: the exact cut takes a search, which refined layouts get."""
        key = (pipeline.pp, pipeline.vpp, pipeline.schedule in VEE)
        if key not in self._cuts:
            self._cuts[key] = self._make_cut(*key)
        return self._cuts[key]

    def _make_cut(self, pp: int, vpp: int, vee: bool) -> Cut:
        placement = v_placement(pp) if vee else loop_placement(pp, vpp)
        costs: float | Sequence[float] = self._costs
        if vpp > 1 and len(set(self._costs)) > 1:
            costs = sum(self._costs) / len(self._costs)
        head = end_forward_flops(self._config.model, self._config.training.seq_length)
        counts = self._given or partition_layers(len(self._is_moe), placement, layer_cost=costs, last_cost=head)
        ends = np.concatenate(([0], np.cumsum(counts)))
        experts = np.diff(self._experts_before[ends])
        stored = np.zeros((3, pp, vpp), dtype=np.int64)
        chunk = np.zeros(pp, dtype=np.int64)
        places = []
        for stage, rank in enumerate(placement):
            stored[:, rank, chunk[rank]] = counts[stage] - experts[stage], experts[stage], ends[stage]
            places.append((rank, int(chunk[rank])))
            chunk[rank] += 1
        return Cut(stored[0], stored[1], stored[2], places[0], places[-1], needs_copy(self._config.model))

    def __call__(self, pipeline: Pipeline) -> Floats:
        """Return [rows, features]: the ranks and moments of which one needs most memory, whatever the share."""
        m, group = pipeline.microbatches, self._group
        if pipeline.schedule in ("gpipe", "looped-bfs"):
            # All microbatches are in flight at the same time.
            return self._steady(pipeline._replace(microbatches=1), group) * np.where(_ALIVE, m, 1)
        if pipeline.schedule == "interleaved":
            group = group or smallest_group(pipeline.pp, m)
        return self._steady(steady(pipeline, group), group)

    def _steady(self, pipeline: Pipeline, group: int | None) -> Floats:
        key = (pipeline, group or 0)
        if key not in self._known:
            self._known[key] = self._features(pipeline, group)
        return self._known[key]

    def _features(self, pipeline: Pipeline, group: int | None) -> Floats:
        cut, key = self.cut(pipeline), (pipeline._replace(offloaded=0), group or 0)
        if key not in self._flights:
            warm_up = self._config.parallel.pipeline_warmup
            flights = in_flight(pipeline, cut.ranks, warm_up=warm_up, group=group)
            self._flights[key] = [each.swapaxes(0, 1).astype(np.float64) for each in flights]
        graphs, deferred = self._flights[key]
        stored, restored = self._stored(pipeline)
        active = graphs @ stored  # times microbatches: [ranks, moments, contents]
        at = np.divmod(np.arange(active[..., 0].size), active.shape[1])
        if pipeline.schedule == "interleaved":
            # No W is deferred: the moment with most graphs decides, on the last rank for each weight of the head.
            number = np.arange(len(active) - 1 + _BY_HEAD.shape[1])
            rank = np.minimum(number, len(active) - 1)
            at = rank, (active @ _BY_HEAD).argmax(1)[rank, number - rank]
        rows = cut.contents[at[0]]
        rows[:, Feature.DENSE_ACTIVE : Feature.INPUT_ACTIVE + 1] = active[at]
        if deferred.any():
            stored, _ = self._stored(pipeline._replace(offloaded=0))
            rows[:, Feature.DENSE_DEFERRED : Feature.HEAD_DEFERRED + 1] = (deferred @ stored[:, :, [0, 1, 3]])[at]
        rows[:, Feature.RESTORED] = restored[at[0]]
        return rows

    def _stored(self, pipeline: Pipeline) -> tuple[Floats, Floats]:
        """Return what each microbatch in flight stores on the device, [ranks, chunks, contents]: dense layers, expert
        layers, embedding, head and stage input; and per rank the offloaded layers that are back at once."""
        cut, key = self.cut(pipeline), (pipeline.pp, pipeline.vpp, pipeline.schedule in VEE, pipeline.offloaded)
        if key not in self._contents:
            ranks, starts = cut.ranks, cut.starts[cut.ranks]
            dense, experts = cut.dense[ranks], cut.experts[ranks]
            layers = dense + experts
            gone = np.minimum(layers, pipeline.offloaded)
            gone_experts = self._experts_before[starts + gone] - self._experts_before[starts]
            inputs = gone > 0
            inputs[ranks == cut.first[0], cut.first[1]] = False
            kept = dense - (gone - gone_experts), experts - gone_experts, *cut.stages[ranks, :, 2:].transpose(2, 0, 1)
            restored = np.where(gone > 0, np.minimum(layers, 2) - (layers - gone), 0).max(1).clip(0)
            self._contents[key] = np.stack((*kept, inputs), axis=2, dtype=np.float64), restored
        return self._contents[key]

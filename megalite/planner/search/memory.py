"""Compute the memory of all layouts at once, by the formulas of `partition.memory`.

A rank's bytes are bilinear: counts of layers, embeddings and microbatches in flight (the pipeline's `features`, one row
per rank and moment that may need most memory) times the bytes of each (the share's coefficients). The code that sizes a
single config computes both, once per distinct case; a product of two small matrices gives all layouts.

The result is exact if all stages of a rank are equal. Otherwise these may differ: the moment of the peak, rounding, the
cut of unequal layers over chunks; the places of layers with linear attention; with zero-2 and fully-sharded, bucket
padding and the stage with the largest buckets; with soap, the rank with most matrices; with offload, visiting states and
layers that are back together with a head. The best layouts are sized again exactly."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config.optimizer import HOST_PIECE, HOST_SLOTS
from megalite.config.run import RunConfig
from megalite.models.shapes import (
    ParameterShape,
    embedding_shapes,
    head_shapes,
    is_hidden_matrix,
    layer_shapes,
    needs_copy,
)
from megalite.partition.activations import (
    deferred_bytes,
    layer_activation_bytes,
    recompute_workspace_bytes,
    stage_activation_bytes,
)
from megalite.partition.buckets import all_replicas, element_bytes, local_size, moment_widths, square_bytes
from megalite.partition.memory import fp8_layer_bytes, whole_gradient_bytes, whole_parameter_bytes
from megalite.partition.stages import StagePlan
from megalite.planner.search.features import Feature, Floats
from megalite.planner.search.space import RECOMPUTE, STRATEGIES, Shares, kinds


def of_largest_rank(rows: Sequence[Floats], coefficients: Floats) -> Floats:
    """Return features times coefficients (bytes or seconds), [pipelines, shares], of the rank with the largest result."""
    return np.stack([(each @ coefficients).max(0) for each in rows])


@dataclass(frozen=True)
class Sizer:
    """Computes the bytes per feature for shares of a config."""

    config: RunConfig  # the request's config, with the settings that are not searched
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layers(self) -> tuple[int, int]:
        """Numbers of layers with a dense MLP and with experts."""
        model = self.config.model
        moe = sum(map(model.is_moe_layer, range(model.num_layers)))
        return model.num_layers - moe, moe

    def coefficients(self, shares: Shares, pp: int) -> Floats:
        """Return the coefficients, [features, shares], for pipelines of pp ranks."""
        found = np.zeros((len(Feature), len(shares)))
        if len(shares):
            found[Feature.DENSE : Feature.COPY + 1] = self.states(shares, persistent_bytes)
            self._activations(shares, found)
            self._whole(shares, pp, found)
            if self.config.compute.fp8 and self.config.model.num_layers > 1:
                found[Feature.DENSE : Feature.HEAD + 1] += self._kept_in_fp8(shares)
            if shares.offload.any():
                found -= shares.offload * self.relief(self.states(shares, offloadable_bytes), pp)
        return found

    def relief(self, moved: Floats, pp: int) -> Floats:
        """Return the bytes, [features, shares], that leave the device if the optimizer states `moved` are in host memory;
        negative for the buffers of states that return temporarily."""
        found = np.zeros((len(Feature), moved.shape[1]))
        found[Feature.DENSE : Feature.COPY + 1] = moved
        most = max(element_bytes(self.config, shape, 1).offloadable for shape in self._classes[1])
        visiting = np.minimum(HOST_PIECE * most, self.on_rank(moved, pp))
        found[Feature.PLAIN : Feature.BOTH_ENDS + 1] = -HOST_SLOTS * visiting
        return found

    def on_rank(self, sizes: Floats, pp: int) -> Floats:
        """Sum `sizes` of layers, embedding, head and copy on the pipeline rank with the largest end."""
        dense, moe = self.layers
        ends = sizes[2] + sizes[3] if pp == 1 else np.maximum(sizes[2], sizes[3] + sizes[4])
        return np.asarray((sizes[0] * dense + sizes[1] * moe) / pp + ends)

    def states(self, shares: Shares, value: Callable[[RunConfig, ParameterShape, int], float]) -> Floats:
        """Return the bytes, [5, shares], of parameters, gradients and optimizer states of a dense layer, an expert layer,
        the embedding, the head and the embedding's copy: local elements per tensor class times bytes per element."""
        expert_replicas, replicas = self._expert_replicas(shares), shares.dp * shares.cp // shares.dp_instances

        def widths(place: int) -> list[float]:
            config = self.of_share(shares, place)
            counts = int(replicas[place]), int(expert_replicas[place])
            return [value(config, shape, counts[shape.expert]) for shape in self._classes[1]]

        each = self.by_kind(value, (shares.strategy, replicas, expert_replicas, shares.dp_instances), widths)
        return np.asarray((self._local(shares) * each[:, None, :]).sum(2).T)

    def _kept_in_fp8(self, shares: Shares) -> Floats:
        """Return fp8 bytes, [4, shares]: dense layer, expert layer, and the first and last (negative: not in fp8)."""

        def sizes(place: int) -> list[float]:
            config = self.of_share(shares, place)
            kept = [
                sum(share * fp8_layer_bytes(config, index) for index, share in examples)
                for examples in self._examples()
            ]
            return [*kept, *(-fp8_layer_bytes(config, index) for index in (0, config.model.num_layers - 1))]

        parts = shares.dp * shares.cp // shares.dp_instances
        return self.by_kind("fp8", (shares.tp, shares.strategy, parts), sizes).T

    def elements(self, shares: Shares) -> Floats:
        """Return the local elements, [shares, 2, 5], of the same five parts: dense tensors, then expert tensors."""
        local = self._local(shares)
        expert = np.array([shape.expert for shape in self._classes[1]])
        return np.stack((local[:, :, ~expert].sum(2), local[:, :, expert].sum(2)), axis=1)

    def by_kind(self, what: Hashable, keys: Sequence[npt.NDArray[Any]], value: Callable[[int], Any]) -> Floats:
        """Return `value` of each share, [shares, ...]; it takes a share's index and runs once per combination of keys."""
        index, of_kind = kinds(*keys)
        found = []
        for place in index.tolist():
            key = (what, *(column[place].item() for column in keys))
            if key not in self._known:
                self._known[key] = value(place)
            found.append(self._known[key])
        return np.array(found, dtype=np.float64)[of_kind]

    @cached_property
    def _classes(self) -> tuple[list[list[tuple[int, ParameterShape, float]]], list[ParameterShape]]:
        """List the tensors of dense layer, expert layer, embedding, head and copy with their class and share; one of each
        class."""
        model = self.config.model
        layers = [
            [(shape, share) for index, share in each for shape in layer_shapes(model, index)]
            for each in self._examples()
        ]
        embedding = embedding_shapes(model)
        copy = embedding[:1] if needs_copy(model) else []
        classes: dict[tuple[object, ...], int] = {}
        examples: list[ParameterShape] = []
        parts: list[list[tuple[int, ParameterShape, float]]] = []
        ends = ([(shape, 1.0) for shape in shapes] for shapes in (embedding, head_shapes(model), copy))
        for tensors in (*layers, *ends):
            parts.append([])
            for shape, share in tensors:
                key = shape.expert, moment_widths(self.config, shape), square_width(self.config, shape)
                if key not in classes:
                    classes[key] = len(classes)
                    examples.append(shape)
                parts[-1].append((classes[key], shape, share))
        return parts, examples

    def _local(self, shares: Shares) -> Floats:
        """Return the local elements, [shares, parts, classes]."""
        parts, classes = self._classes

        def sizes(place: int) -> Floats:
            config = self.of_share(shares, place)
            local = np.zeros((len(parts), len(classes)))
            for part, tensors in enumerate(parts):
                for column, shape, share in tensors:
                    local[part, column] += share * local_size(shape, config)
            return local

        return self.by_kind("local", (shares.tp, shares.ep), sizes)

    def _activations(self, shares: Shares, found: Floats) -> None:
        """Fill in the activations of a microbatch, computed from one sequence; cp splits each sequence."""
        p, model = self.config.parallel, self.config.model
        # Either the keys of all ranks are kept, or those of a head that several ranks share.
        whole = model.attention_dropout or p.cp_comm_type not in ("p2p", "allgather")
        cut = shares.cp if whole else np.minimum(shares.cp, 2)
        exchange = shares.ep * (shares.tp if p.etp is None else p.etp) > 1
        keys = (shares.tp, cut, exchange, shares.recompute, shares.sequence_parallel)
        rows = slice(Feature.DENSE_ACTIVE, Feature.RESTORED + 1)
        each = self.by_kind("active", keys, lambda place: self._one_sequence(shares, place, int(cut[place])))
        times = shares.micro_batch_size * cut / shares.cp
        found[rows] = np.rint(each.T * times)

    def _one_sequence(self, shares: Shares, place: int, cp: int) -> list[float]:
        config = self.of_share(shares, place, micro_batch_size=1, cp=cp)
        embedding, head = _plan(0, layers=0, embedding=True), _plan(0, layers=0, head=True)
        layers = self._examples()
        active = [sum(share * layer_activation_bytes(config, index) for index, share in each) for each in layers]
        deferred = [sum(share * deferred_bytes(config, _plan(index)) for index, share in each) for each in layers]
        workspaces = ((recompute_workspace_bytes(config, _plan(index)) for index, _ in each) for each in layers)
        workspace = [max(each, default=0) for each in workspaces]
        ends = [stage_activation_bytes(config, plan) for plan in (embedding, head)]
        entering = layer_activation_bytes(config, granularity="full")
        waiting = [*deferred, deferred_bytes(config, head)]
        return [*active, *ends, entering, *waiting, *workspace, max(workspace), max(active)]

    def _whole(self, shares: Shares, pp: int, found: Floats) -> None:
        """Fill in unsharded gradients and parameters of sharded strategies, for stages of which more layers add none."""
        sharded = shares.strategy >= STRATEGIES.index("zero-2")
        experts = self._expert_replicas(shares) > 1
        dense = shares.dp * shares.cp > shares.dp_instances
        places = np.flatnonzero(sharded & (dense | experts))
        if not len(places):
            return
        some, model = shares.take(places), self.config.model
        present = [kind for kind, examples in enumerate(self._examples()) if examples]
        per_layer = self._local(some)[:, present].sum(2).min(1)
        # Three kinds of buckets are open at once; a quarter more is in flight.
        several = 3 + 3 * self.config.parallel.ddp_bucket_size // per_layer
        shown = model.moe_first_dense_layers + model.moe_layer_freq + several
        layers = np.minimum(-(-model.num_layers // pp), shown).astype(np.int64)
        single = np.full_like(layers, pp == 1)
        keys = (some.tp, some.ep, dense[places], experts[places], some.strategy, some.sequence_parallel, layers, single)
        each = self.by_kind("whole", keys, lambda place: self._whole_of(some, place, int(layers[place]), pp))
        found[Feature.PLAIN : Feature.BOTH_ENDS + 1, places] = each.T

    def _whole_of(self, shares: Shares, place: int, layers: int, pp: int) -> list[float]:
        """Compute them for a stage with layers only, with the embedding, with the head, and with both."""
        config = self.of_share(shares, place)
        config = replace(config, model=replace(config.model, num_layers=layers))
        if pp == 1:
            single = _plan(0, layers=layers, embedding=True, head=True)
            return [0.0, 0.0, 0.0, _whole_bytes(config, single, (single,))]
        plain, first, last = (
            _plan(0, layers=layers, embedding=embedding, head=head, rank=rank)
            for embedding, head, rank in ((False, False, 1), (True, False, 0), (False, True, pp - 1))
        )
        found = [_whole_bytes(config, plan, (first, last)) for plan in (plain, first, last)]
        return [*found, max(found)]

    def _expert_replicas(self, shares: Shares) -> npt.NDArray[np.int64]:
        """Number of ranks per instance with the same experts."""
        etp = self.config.parallel.etp
        over = shares.tp if etp is None else np.full_like(shares.tp, etp)
        return shares.tp * shares.cp * shares.dp // (over * shares.ep * shares.dp_instances)

    def _examples(self) -> list[list[tuple[int, float]]]:
        """Return the layers that stand for those without and for those with experts: one of each kind (with softmax or linear
        attention, with or without an MLP) and the kind's share."""
        model, found = self.config.model, []
        for moe in (False, True):
            layers = [index for index in range(model.num_layers) if model.is_moe_layer(index) == moe]
            kinds = [(model.is_linear_layer(index), not model.has_mlp(index)) for index in layers]
            found.append([(layers[kinds.index(kind)], kinds.count(kind) / len(layers)) for kind in sorted(set(kinds))])
        return found

    def of_share(self, shares: Shares, place: int, **changed: int) -> RunConfig:
        """Return the config of a share; callers pass the stages, so pipeline settings do not matter."""
        strategy = STRATEGIES[shares.strategy[place]]
        config = self.config
        return replace(
            config,
            parallel=replace(
                config.parallel,
                tp=int(shares.tp[place]),
                cp=changed.get("cp", int(shares.cp[place])),
                ep=int(shares.ep[place]),
                dp=int(shares.dp[place]),
                dp_instances=int(shares.dp_instances[place]),
                sequence_parallel=bool(shares.sequence_parallel[place]),
                dp_strategy="distributed-optimizer" if strategy == "zero-2" else strategy,
            ),
            data_parallel=replace(config.data_parallel, shard_gradients=strategy == "zero-2"),
            training=replace(
                config.training,
                micro_batch_size=changed.get("micro_batch_size", int(shares.micro_batch_size[place])),
                recompute_granularity=RECOMPUTE[shares.recompute[place]],
            ),
        )


def persistent_bytes(config: RunConfig, shape: ParameterShape, replicas: int) -> float:
    """Return the bytes per element of parameters, gradients and optimizer states, on the device or in host memory."""
    return sum(element_bytes(config, shape, replicas)[:3]) + square_share(config, shape)


def square_width(config: RunConfig, shape: ParameterShape) -> float:
    """Return the bytes of whole-matrix states, per element of the matrix."""
    *_, rows, columns = (1, *shape.shape)
    hidden = is_hidden_matrix(shape.name, shape.shape, decay=shape.decay)
    return square_bytes(config, rows, columns) / (rows * columns) if hidden else 0.0


def square_share(config: RunConfig, shape: ParameterShape) -> float:
    """Return the same per local element, as if the ranks that update matrices had equal parts."""
    equal = config.parallel.strategy.weights == "equal"
    return square_width(config, shape) / (all_replicas(config)[shape.expert] if equal else 1)


def offloadable_bytes(config: RunConfig, shape: ParameterShape, replicas: int) -> float:
    """Return the bytes per element that offload moves to host memory, as if it split each bucket."""
    part = config.optimizer.optimizer_offload_fraction * element_bytes(config, shape, replicas).offloadable
    return part + square_share(config, shape)


def _whole_bytes(config: RunConfig, plan: StagePlan, stages: tuple[StagePlan, ...]) -> float:
    return float(whole_parameter_bytes(config, [plan], stages) + whole_gradient_bytes(config, [plan], stages))


def _plan(first: int, *, layers: int = 1, embedding: bool = False, head: bool = False, rank: int = 0) -> StagePlan:
    return StagePlan(
        stage=0, rank=rank, first_layer=first, last_layer=first + layers, has_embedding=embedding, has_head=head
    )

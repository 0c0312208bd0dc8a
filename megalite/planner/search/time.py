"""Seconds of every layout at once: a closed form over the cost model's own prices of layers, embedding and head.

step = m·S + ramp + messages + exchange + optimizer + constants, where S is what the busiest pipeline rank takes for a
microbatch. The ramp is the schedule's bubble (`_ramp`); messages that nothing hides lengthen each microbatch of 1f1b by
2c·(p-1)/p, of interleaved v times that, and of the zero-bubble schedules only by what exceeds a W. Where ranks share cores
these move the messages, as work of both ends. It ranks layouts; the best are simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megalite.config.run import RunConfig
from megalite.partition.activations import ELEMENT_BYTES
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import collective_seconds, data_stride, message_seconds, pipeline_stride, sharing_ranks
from megalite.planner.cost.stage import StageCost, layer_seconds, stage_cost
from megalite.planner.cost.workload import Workload, workload_of
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search.features import Cut
from megalite.planner.search.memory import Sizer
from megalite.planner.search.request import RECOMPUTE, STRATEGIES
from megalite.planner.search.space import Pipeline, Shares

Floats = npt.NDArray[np.float64]
_FORWARD, _INPUT, _WEIGHT, _AGAIN = range(4)


@dataclass(frozen=True)
class Prices:
    """What shares take, one entry a share; of a microbatch unless it says otherwise."""

    layers: Floats
    """[4, 4, shares]: forward, input gradient, weight gradient, recompute of a dense layer, one with experts, embedding, head."""
    message: Floats  # seconds from one stage to the next, mean over the hops
    after: Floats
    """Of a step: what is left of exchanges of gradients and parameters if nothing hides them, by [2, shares]."""
    each: Floats  # exchanges that come with each microbatch (zero-2, fully-sharded)
    pieces: Floats  # collectives that the gradients of a rank come in
    optimizer: Floats  # of a step
    sharing: Floats  # ranks a core, of which some may wait while others compute

    def take(self, which: slice | npt.NDArray[np.intp]) -> "Prices":
        """Those of some shares."""
        return Prices(**{name: value[..., which] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Clock:
    """A config on a cluster with a software stack."""

    config: RunConfig
    cluster: Cluster
    stack: SoftwareStack

    def prices(self, shares: Shares, pp: int) -> Prices:
        """Of shares of pipelines of pp ranks."""
        work = self._workload(shares, pp)
        zero = np.zeros(len(shares))
        kinds = [zero] * 4, [zero] * 4
        model = self.config.model
        for moe in {model.is_moe_layer(index) for index in range(model.num_layers)}:
            layer = layer_seconds(work, self.cluster, self.stack, moe=moe)
            kinds[moe][:] = _parts(layer, 0.0, len(shares))
        price = Pricing.of(work, self.cluster, self.stack)
        constant = self.stack.microbatch_seconds
        ends = [_parts(stage_cost(price, **{end: 1.0}), constant, len(shares)) for end in ("has_embedding", "has_head")]
        layers = np.array([[part[kind] for part in (*kinds, *ends)] for kind in range(4)])
        reduce, gather, pieces, each = self._exchanges(work, shares, pp)
        return Prices(
            layers=layers,
            message=self._message(work, pp),
            after=np.stack((reduce, gather)),
            each=each,
            pieces=pieces,
            optimizer=self._optimizer(shares, pp),
            sharing=np.broadcast_to(sharing_ranks(pipeline_stride(work), pp, self.cluster), (len(shares),)),
        )

    def seconds(self, pipelines: Sequence[Pipeline], cuts: Sequence[Cut], prices: Prices) -> Floats:
        """[pipelines, shares] seconds of a step; all pipelines have the same pp and number of microbatches."""
        p, m = pipelines[0].pp, pipelines[0].microbatches
        rows = [_rows(cut) for cut in cuts]
        starts = np.cumsum([0, *(len(each) for each in rows[:-1])])
        chunks = np.array([[float(pipeline.vpp)] for pipeline in pipelines])
        constant = self.stack.microbatch_seconds
        busiest = np.maximum.reduceat(np.concatenate(rows) @ prices.layers.sum(0), starts, axis=0)
        busiest = busiest + 2.0 * chunks * constant
        model = rows[0].sum(0) if p == 1 else _whole(cuts[0])
        forward, inputs, weights, again = (model @ prices.layers[kind] for kind in range(4))
        stages = p * chunks * constant
        totals = (forward + stages, inputs + again + stages, weights + 0.0 * stages)
        shape = _Shapes.of(pipelines)
        ramp = shape.ramp(p, m, busiest, totals)
        step = m * busiest + ramp
        if p > 1:
            share = (p - 1.0) / p
            steady = shape.messages * prices.message * share - shape.slack * weights / p
            step = step + m * np.maximum(steady, 0.0) + shape.hops * prices.message
            if np.any(prices.sharing > 1.0):
                busy = np.stack([_all_rows(cut) for cut in cuts]) @ prices.layers.sum(0)
                busy = busy + 2.0 * chunks[..., None] * constant + _ends(chunks, p) * prices.message
                cycle = _cycle(busy, prices.sharing)
                shared = m * cycle + ramp * _ramp_left(p, prices.sharing) + shape.hops * prices.message
                step = np.where(prices.sharing > 1.0, shared, step)
        return step + self._after(prices, forward / p, busiest, m, shape.chunks)

    def _after(self, prices: Prices, first_forward: Floats, busiest: Floats, m: int, chunks: Floats) -> Floats:
        """Exchanges that no computation hides, optimizer, constants."""
        p, stack = self.config.parallel, self.stack
        reduce, gather = prices.after
        overlapped = stack.overlap_gradients and p.overlap_grad_reduce
        hidden = first_forward if stack.overlap_gradients and p.overlap_param_gather else 0.0
        # The last backward of a stage covers all but the first piece.
        cover = (busiest - first_forward) / chunks if overlapped else 0.0
        end = np.maximum(reduce - cover, reduce / prices.pieces)
        each = np.maximum(m * (prices.each - (busiest if overlapped else 0.0)), 0.0)
        return np.maximum(end, each) + np.maximum(gather - hidden, 0.0) + prices.optimizer + stack.step_seconds

    def _workload(self, shares: Shares, pp: int) -> Workload:
        p = self.config.parallel
        tp = shares.tp.astype(float)
        recompute, modules = shares.recompute, self.config.training.recompute_modules
        selective = (recompute == RECOMPUTE.index("selective")).astype(float)

        def of(module: str) -> Floats:
            return selective * (module in modules)

        return replace(
            workload_of(replace(self.config, parallel=replace(p, dp=1))),
            batch=shares.micro_batch_size.astype(float),
            tp=tp,
            cp=shares.cp.astype(float),
            ep=shares.ep.astype(float),
            expert_tp=tp if p.etp is None else np.full_like(tp, p.etp),
            dp=shares.dp.astype(float),
            pp=float(pp),
            sequence_parallel=shares.sequence_parallel.astype(float),
            recompute_full=(recompute == RECOMPUTE.index("full")).astype(float),
            recompute_core=of("core_attn"),
            recompute_activation=of("mlp_act"),
            recompute_norm=of("layernorm"),
            recompute_mlp=of("mlp"),
            recompute_moe=of("moe"),
        )

    def _message(self, work: Workload, pp: int) -> Floats:
        volume, stride = work.activation_bytes / work.split, pipeline_stride(work)
        inside = sum(message_seconds(volume, 0.0, self.cluster))
        outside = sum(message_seconds(volume, 1.0, self.cluster))
        crossing = np.minimum(stride / self.cluster.node.accelerators, 1.0)
        if pp > 1:
            # Whole pipelines inside a node cross nothing.
            crossing = np.where(stride * pp <= self.cluster.node.accelerators, 0.0, crossing)
        return inside + crossing * (outside - inside)

    def _exchanges(self, work: Workload, shares: Shares, pp: int) -> tuple[Floats, Floats, Floats, Floats]:
        """(gradients, parameters, collectives of gradients) after the last backward, and what comes with each microbatch."""
        config, stride = self.config, data_stride(work)
        element = ELEMENT_BYTES[config.training.precision]
        wire = 2 if config.data_parallel.wire_dtype == "bf16" else max(4, element)
        sizes = self._elements(shares, pp)
        replicas = (work.dp * work.cp, work.tp * work.cp * work.dp / (work.expert_tp * work.ep))
        reduce = gather = summed = np.zeros(len(shares))
        for count, group in zip(sizes, replicas, strict=True):
            summed = summed + collective_seconds("all-reduce", count * wire, group, stride, self.cluster)
            reduce = reduce + collective_seconds("reduce-scatter", count * wire, group, stride, self.cluster)
            gather = gather + collective_seconds("all-gather", count * element, group, stride, self.cluster)
        strategy = [shares.strategy == index for index in range(len(STRATEGIES))]
        pieces = np.maximum(sizes.sum(0) / config.parallel.ddp_bucket_size, 1.0)
        once = np.select(strategy, [summed, reduce, reduce, reduce])
        gathered = np.select(strategy, [0.0 * gather, gather, gather, 0.0 * gather])
        each = np.select(strategy, [0.0 * reduce, 0.0 * reduce, reduce, reduce + 2.0 * gather])
        return once, gathered, pieces, each

    def _elements(self, shares: Shares, pp: int) -> Floats:
        """[2, shares] parameters on a pipeline rank that has the embedding: with all replicas, and with experts'."""
        model = self.config.model
        dense, experts, embedding, *_ = np.moveaxis(Sizer(self.config).elements(shares, pp), 2, 0)
        moe = sum(model.is_moe_layer(index) for index in range(model.num_layers))
        found: Floats = (dense * (model.num_layers - moe) + experts * moe) / pp + embedding
        return found.T

    def _optimizer(self, shares: Shares, pp: int) -> Floats:
        """States are read and written, gradients read, parameters written: about twice all that is held."""
        rate = self.cluster.accelerator.memory_bandwidth * self.cluster.efficiency.memory
        states = Sizer(self.config).states(shares, pp)
        model = self.config.model
        moe = sum(model.is_moe_layer(index) for index in range(model.num_layers))
        held = (states[0] * (model.num_layers - moe) + states[1] * moe) / pp + states[2]
        return 2.0 * held / rate


@dataclass(frozen=True)
class _Shapes:
    """[pipelines, 1] each: what of the schedules the closed form knows."""

    schedules: tuple[str, ...]
    chunks: Floats
    messages: Floats  # c·(p-1)/p that a microbatch takes longer for
    slack: Floats  # whether a W fills the wait
    hops: Floats  # messages on the way in and out

    @classmethod
    def of(cls, pipelines: Sequence[Pipeline]) -> "_Shapes":
        def column(values: Sequence[float]) -> Floats:
            return np.array(values, dtype=np.float64)[:, None]

        messages = {"1f1b": 2.0, "interleaved": 2.0, "zb-h1": 2.0}
        return cls(
            schedules=tuple(each.schedule for each in pipelines),
            chunks=column([each.vpp for each in pipelines]),
            messages=column([messages.get(each.schedule, 0.0) * each.vpp for each in pipelines]),
            slack=column([float(each.schedule == "zb-h1") for each in pipelines]),
            hops=column([2.0 * (each.pp - 1) for each in pipelines]),
        )

    def ramp(self, p: int, m: int, busiest: Floats, totals: tuple[Floats, Floats, Floats]) -> Floats:
        """What the step takes beside m times the busiest rank."""
        forward, inputs, weights = totals
        rest = np.maximum(forward + inputs + weights - busiest, 0.0)
        share = (p - 1.0) / p
        found = np.zeros_like(busiest)
        for row, schedule in enumerate(self.schedules):
            v = float(self.chunks[row, 0])
            if schedule in ("1f1b", "gpipe"):
                found[row] = rest[row]
            elif schedule in ("interleaved", "looped-bfs"):
                waits = (v - 1.0) * max(p - m, 0) / p
                found[row] = (rest[row] + waits * (forward + inputs + weights)[row]) / v
            elif schedule == "zb-h1":
                found[row] = share * np.maximum(forward + inputs - weights, forward)[row]
            else:
                found[row] = share * forward[row] / v
        # Whatever the schedule, the first microbatch goes down and up again before the last weight gradient.
        least = forward + inputs + weights / p - busiest
        return np.maximum(found, least - (m - 1) * busiest)


def _parts(cost: StageCost, constant: float, count: int) -> list[Floats]:
    parts = (cost.forward - constant, cost.input_gradient - constant, cost.weight_gradient, cost.recompute)
    return [np.broadcast_to(np.asarray(part, dtype=np.float64), (count,)) for part in parts]


def _ends(chunks: Floats, p: int) -> Floats:
    """[pipelines, ranks, 1] messages of a microbatch that a rank sends or receives, on cores that move them: both ways on
    either side of its chunks, of which the first and the last of all are outermost."""
    outermost = np.zeros((1, p, 1))
    outermost[:, [0, -1]] = 1.0
    found: Floats = 2.0 * (2.0 * chunks[..., None] - outermost)
    return found


def _cycle(busy: Floats, sharing: Floats) -> Floats:
    """[pipelines, shares] seconds in which all ranks do a microbatch if they begin together and share cores: each that is
    done leaves its share to the others, until these have a core each.

    Args:
        busy: [pipelines, ranks, shares], what a microbatch takes while all compute.
    """
    p = busy.shape[1]
    steps = np.diff(np.sort(busy, axis=1), axis=1, prepend=0.0)
    speeds = np.minimum(sharing[None], p / np.arange(p, 0, -1.0)[:, None])
    found: Floats = (steps / speeds).sum(axis=1)
    return found


def _ramp_left(p: int, sharing: Floats) -> Floats:
    """Share of a ramp in which cores have nothing to do, where it has 1, 2, ... p - 1 ranks computing."""
    computing = np.arange(1.0, p)[:, None] / p
    idle = np.maximum(1.0 / sharing - computing, 0.0).sum(axis=0)
    found: Floats = idle / (1.0 - computing).sum(axis=0)
    return found


def _all_rows(cut: Cut) -> Floats:
    """[ranks, 4]: layers of both kinds, embedding, head."""
    return _rows(cut, np.arange(len(cut.dense)))


def _rows(cut: Cut, ranks: npt.NDArray[np.int64] | None = None) -> Floats:
    """[ranks that differ, 4]: layers of both kinds, embedding, head."""
    ranks = cut.ranks if ranks is None else ranks
    columns = (cut.dense[ranks].sum(1), cut.experts[ranks].sum(1), ranks == cut.first[0], ranks == cut.last[0])
    return np.stack(columns, axis=1).astype(np.float64)


def _whole(cut: Cut) -> Floats:
    """The same of the whole model."""
    return np.array([cut.dense.sum(), cut.experts.sum(), 1.0, 1.0])

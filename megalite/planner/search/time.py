"""Estimate the seconds of a step for all layouts at once, in closed form from the cost model's prices per layer.

step = m·S + ramp + messages + exchange + optimizer + constants, where S is the time of a microbatch on the busiest
pipeline rank. The ramp is the schedule's bubble (`_ramp`). Messages that are not hidden lengthen each microbatch
(`_waits`) and the ramp (`_hops`); these forms were found with the simulator on equal stages. If ranks share CPU cores,
messages count as work of both ends. The estimate ranks layouts; the best ones are simulated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megalite.config.optimizer import OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.data_parallel.facts import wire_width
from megalite.partition.activations import ELEMENT_BYTES, rows_per_choice
from megalite.partition.stages import StagePlan
from megalite.planner.cost import rates
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.stage import StageCost, layer_seconds, stage_cost, unread
from megalite.planner.cost.step import matrix_seconds
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search.features import Cut, Feature, Floats
from megalite.planner.search.memory import Sizer, of_largest_rank
from megalite.planner.search.space import RECOMPUTE, STRATEGIES, VEE, Integers, Pipeline, Shares, kinds


@dataclass(frozen=True)
class Prices:
    """Prices of shares: each array has one entry per share, in seconds per microbatch unless noted otherwise."""

    # [4, 4, shares]: (forward, input gradient, weight gradient, recompute) of (dense layer, expert layer, embedding,
    # head).
    layers: Floats
    message: Floats  # from one stage to the next, mean over the hops
    reduce: Floats  # one reduction of the gradients per rank
    pieces: Floats  # number of its collectives
    embedding: Floats  # fraction of the parameters of the rank with the first stage
    last: Floats  # per step: sums that start when all reductions have finished
    tied: Floats  # per step: sum of a tied embedding's gradients over the ends of a pipeline
    gather: Floats  # one gather of the parameters per rank
    sharded: Floats  # gradients are reduced in each microbatch (1) or once per step (0)
    fully: Floats  # parameters are gathered in each microbatch (1) or once per step (0)
    optimizer: Floats  # per step
    offloaded: Floats  # added time per step with optimizer states in host memory
    activation: Floats  # bytes of a layer, from `Sizer`
    sharing: Floats  # ranks per core; idle ranks leave their cores to others
    slowest: Floats  # extra time of the slowest device, as a fraction

    def take(self, which: slice | npt.NDArray[np.intp]) -> "Prices":
        return Prices(**{name: value[..., which] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Clock:
    """Prices and times the layouts of a config on a cluster with a software stack."""

    config: RunConfig
    cluster: Cluster
    stack: SoftwareStack

    @cached_property
    def sizer(self) -> Sizer:
        return Sizer(self.config)

    @property
    def _expert_share(self) -> float:
        """Fraction of layers with experts."""
        return self.sizer.layers[1] / self.config.model.num_layers

    def layers(self, shares: Shares, pp: Integers) -> Floats:
        """Return `Prices.layers` of shares with pipelines of `pp` ranks each, which matter only to weights in 8 bits."""
        sizes = (shares.tp, shares.cp, shares.ep, shares.micro_batch_size)
        eight = (pp,) if self.stack.float8_rate else ()
        some, of_kind = kinds(*sizes, shares.recompute, shares.sequence_parallel, *eight)
        work, count = replace(self._workload(shares.take(some), 1), **unread(self.stack)), len(some)
        price, constant = Pricing.of(work, self.cluster, self.stack), self.stack.microbatch_seconds
        layers = np.zeros((4, 4, count))
        for row, number in enumerate(self.sizer.layers):
            if number:
                layers[:, row] = _parts(layer_seconds(work, self.cluster, self.stack, moe=row == 1), 0.0, count)
        for row, end in ((2, "has_embedding"), (3, "has_head")):
            layers[:, row] = _parts(stage_cost(price, **{end: 1.0}), constant, count)
        return layers[..., of_kind]

    def prices(self, shares: Shares, pp: int, layers: Floats, coefficients: Floats, moved: Floats) -> Prices:
        """Price shares with pipelines of pp ranks; `moved`: bytes of the states that may move to host memory."""
        some, of_kind = kinds(shares.tp, shares.cp, shares.ep, shares.micro_batch_size, shares.sequence_parallel)
        work, count = self._workload(shares.take(some), pp), len(some)
        exchanges = self._exchanges(shares, pp)
        rate = self.cluster.accelerator.memory_bandwidth * self.cluster.efficiency.memory
        moved = self.sizer.on_rank(moved, pp)
        stored = self.sizer.on_rank(coefficients, pp) + shares.offload * moved
        # States are read and written, gradients read, parameters written: about twice all state bytes.
        update = 2.0 * stored / rate * self.stack.optimizer_slowdown
        slower = rates.with_copies(update, moved, self.config, self.cluster) - update
        share = self._expert_share
        dense, experts = coefficients[Feature.DENSE_ACTIVE], coefficients[Feature.EXPERTS_ACTIVE]
        return Prices(
            layers=layers,
            message=self._message(work, pp)[of_kind],
            **exchanges,
            optimizer=update + shares.offload * slower + self._matrices(shares, pp),
            offloaded=slower,
            activation=dense * (1.0 - share) + experts * share,
            sharing=np.broadcast_to(rates.sharing_ranks(rates.pipeline_stride(work), pp, self.cluster), count)[of_kind],
            slowest=np.full(len(shares), rates.slowest_share(int((work.tp * work.cp * work.dp)[0]) * pp, self.cluster)),
        )

    def seconds(self, pipelines: Sequence[Pipeline], cuts: Sequence[Cut], prices: Prices) -> Floats:
        """[pipelines, shares] seconds of a step; all pipelines have the same pp and number of microbatches."""
        p, m = pipelines[0].pp, pipelines[0].microbatches
        chunks = np.array([[float(pipeline.vpp)] for pipeline in pipelines])
        constant = self.stack.microbatch_seconds
        layers = prices.layers.sum(0)
        busiest = of_largest_rank([cut.contents[:, : Feature.COPY] for cut in cuts], layers)
        for row, (pipeline, cut) in enumerate(zip(pipelines, cuts)):
            if pipeline.schedule == "looped-bfs":
                # All ranks run one chunk before the next, so each chunk takes as long as its largest stage.
                counts, contents = cut.different_chunks
                busiest[row] = counts @ (contents @ layers).max(1)
        busiest = busiest + 2.0 * chunks * constant
        model = cuts[0].stages.sum((0, 1))
        forward, inputs, weights, again = (model @ prices.layers[kind] for kind in range(4))
        fixed = p * chunks * constant
        totals = (forward + fixed, inputs + again + fixed, weights + 0.0 * fixed)
        ramp = _ramp(pipelines, busiest, totals, prices.message)
        step = m * busiest + ramp
        if p > 1:
            hops = np.array([[_hops(each)] for each in pipelines])
            step = step + m * _waits(pipelines, busiest, totals, prices.message) + hops * prices.message
            if np.any(prices.sharing > 1.0):
                every = np.stack([cut.stages.sum(1) for cut in cuts])
                busy = every @ prices.layers.sum(0)
                busy = busy + 2.0 * chunks[..., None] * constant + _ends(chunks, p) * prices.message
                cycle = _cycle(busy, prices.sharing)
                shared = m * cycle + ramp * _ramp_left(p, prices.sharing) + 2.0 * (p - 1) * prices.message
                step = np.where(prices.sharing > 1.0, shared, step)
        step = step + self._after(pipelines, prices, forward / p, busiest)
        gone = np.array([[float(pipeline.offloaded)] for pipeline in pipelines])
        return step + self.late(pipelines, gone, prices) if gone.any() else step

    def least(self, pipeline: Pipeline, prices: Prices) -> Floats:
        """Return a lower bound, [shares], for the seconds of any step with this pp and number of microbatches."""
        (dense, moe), layers = self.sizer.layers, prices.layers.sum(0)
        return np.asarray(pipeline.microbatches * (dense * layers[0] + moe * layers[1]) / pipeline.pp)

    def late(self, pipelines: Sequence[Pipeline], gone: Floats, prices: Prices) -> Floats:
        """Return seconds per step, [pipelines, shares], of waiting until activations of `gone` layers are off or back."""
        share = self._expert_share
        mean = prices.layers[:, 0] * (1.0 - share) + prices.layers[:, 1] * share
        p, m = pipelines[0].pp, pipelines[0].microbatches
        chunks = np.array([[float(pipeline.vpp)] for pipeline in pipelines])
        layers = self.config.model.num_layers / (p * chunks)
        copies = np.minimum(gone, layers) * prices.activation / self.cluster.host_share
        hidden = float(self.cluster.accelerator.asynchronous)
        waits = (np.maximum(copies - hidden * layers * cover, 0.0) for cover in (mean[0], mean[1] + mean[2]))
        return np.asarray((m * chunks + p - 1) * sum(waits))

    def _after(self, pipelines: Sequence[Pipeline], prices: Prices, first_forward: Floats, busiest: Floats) -> Floats:
        """Add exchanges that no computation hides, the optimizer and constants."""
        p, stack, pp, m = self.config.parallel, self.stack, pipelines[0].pp, pipelines[0].microbatches
        chunks = np.array([[float(each.vpp)] for each in pipelines])
        overlapped = float(stack.overlap_gradients and p.overlap_grad_reduce)
        # Of earlier chunks, pp (or all) microbatches run before the last chunk starts or ends.
        many = np.array([[float(m if each.schedule == "looped-bfs" else min(pp, m))] for each in pipelines])
        straight = np.array([[float(each.schedule not in VEE)] for each in pipelines])
        one = first_forward / chunks * (stack.overlap_gradients and p.overlap_param_gather)
        once = prices.gather * (1.0 - prices.fully)
        # Parameters of the rank's other chunks.
        others = (1.0 - prices.embedding) * (1.0 - 1.0 / chunks)
        late = np.maximum(np.maximum(once * (1.0 - others) - one, once - ((chunks - 1.0) * many + 1.0) * one), 0.0)
        # The ends of a V are on one rank.
        tied = prices.tied * straight * (pp > 1)
        reduce, last = prices.reduce + tied * (1.0 - prices.sharded), prices.last + tied * prices.sharded
        # A stage's last backward hides all pieces but the last, after its first part has made the first one.
        one = overlapped * (busiest - first_forward) / chunks * (1.0 - 1.0 / prices.pieces)
        end = np.maximum(reduce - ((chunks - 1.0) * many * straight + 1.0) * one, reduce / prices.pieces)
        end = np.maximum(end, reduce - prices.reduce * others - one)
        total = reduce * np.where(prices.sharded > 0, m, 1.0) + prices.fully * 2.0 * m * prices.gather
        exposed: Floats = np.maximum(end, prices.sharded * (total - overlapped * m * busiest)) + last + late
        slowdown = stack.overlap_cost * np.maximum(total + once + last - exposed, 0.0)
        waiting = prices.slowest * m * busiest
        return exposed + slowdown + waiting + prices.optimizer + stack.step_seconds

    def _workload(self, shares: Shares, pp: int) -> rates.Workload:
        p = self.config.parallel
        tp, batch = shares.tp.astype(float), self.config.training.global_batch_size
        fully = shares.strategy == STRATEGIES.index("fully-sharded")
        assert batch is not None, "the request has one"
        recompute, modules = shares.recompute, self.config.training.recompute_modules
        parts, place = np.unique(shares.tp * shares.cp, return_inverse=True)
        kept = np.array([rows_per_choice(self.config, each) for each in parts.tolist()])[place]
        selective = (recompute == RECOMPUTE.index("selective")).astype(float)

        def of(module: str) -> Floats:
            return selective * (module in modules)

        return replace(
            rates.workload_of(replace(self.config, parallel=replace(p, dp=1))),
            batch=shares.micro_batch_size.astype(float),
            tp=tp,
            cp=shares.cp.astype(float),
            topk=self.config.model.moe_router_topk * kept,
            ep=shares.ep.astype(float),
            expert_tp=tp if p.etp is None else np.full_like(tp, p.etp),
            dp=shares.dp.astype(float),
            pp=float(pp),
            weight_uses=np.where(fully, 1.0, batch / (shares.dp * shares.micro_batch_size)),
            sequence_parallel=shares.sequence_parallel.astype(float),
            recompute_full=(recompute == RECOMPUTE.index("full")).astype(float),
            recompute_core=of("core_attn"),
            recompute_up=of("mla_up_proj"),
            recompute_shared=of("shared_experts"),
            recompute_activation=of("mlp_act"),
            recompute_norm=of("layernorm"),
            recompute_mlp=of("mlp"),
            recompute_moe=of("moe"),
        )

    def _message(self, work: rates.Workload, pp: int) -> Floats:
        stride, cluster = rates.pipeline_stride(work), self.cluster
        ways = (0.0, 1.0, rates.spine_crosses(stride, pp, cluster))
        inside, outside, beyond = (sum(rates.activation_message_seconds(work, way, cluster)) for way in ways)
        seconds: Floats = np.asarray(inside)
        for size, longer in ((cluster.node.accelerators, outside - inside), (cluster.pod, beyond - outside)):
            # Pipelines that lie within a node, or a pod, do not leave it.
            leaving = np.where((pp > 1) & (stride * pp <= size), 0.0, np.minimum(stride / size, 1.0))
            seconds = seconds + leaving * longer
        return seconds

    def _matrices(self, shares: Shares, pp: int) -> Floats:
        """Return the seconds per step of whole-matrix updates, for the last stage with the largest number of layers. A
        stage's matrices are distributed over all its ranks, whatever their sharding."""
        config, layers = self.config, self.config.model.num_layers
        if not OPTIMIZERS.facts(config.optimizer.optimizer).separate_matrices:
            return np.zeros(len(shares))
        first = layers - -(-layers // pp)
        last = StagePlan(stage=0, rank=0, first_layer=first, last_layer=layers, has_embedding=pp == 1, has_head=True)
        keys = (shares.tp, shares.ep, shares.dp * shares.cp, shares.strategy, shares.dp_instances)
        return self.sizer.by_kind(
            ("matrices", pp),
            keys,
            lambda place: matrix_seconds(self.sizer.of_share(shares, place), [last], self.cluster),
        )

    def _exchanges(self, shares: Shares, pp: int) -> dict[str, Floats]:
        """Return the fields of `Prices` from `reduce` to `fully`."""
        some, of_kind = kinds(shares.tp, shares.cp, shares.ep, shares.dp_instances)
        few = shares.take(some)
        work, config, cluster = self._workload(few, pp), self.config, self.cluster
        stride = rates.data_stride(work)
        element = ELEMENT_BYTES[config.training.precision]
        wire = element if self.stack.half_gradients else wire_width(config)
        # Sizes and group sizes of dense tensors, then of expert tensors.
        parts = np.moveaxis(self.sizer.elements(few), 2, 0)
        sizes = self.sizer.on_rank(parts, pp).T
        replicas = (work.dp * work.cp, work.tp * work.cp * work.dp / (work.expert_tp * work.ep))
        instances = few.dp_instances.astype(float)
        # Inner layers' weights, except experts', may be gathered in 8 bits.
        dense, moe = self.sizer.layers
        inner = (parts[0, :, 0] * dense + parts[1, :, 0] * moe) * max(0.0, 1.0 - 2.0 / (dense + moe)) / pp
        saved = (config.parallel.fp8_param_gather * (element - 1.0) * inner, 0.0)
        reduce = gather = summed = across = np.zeros(len(few))
        for count, everywhere, less in zip(sizes, replicas, saved, strict=True):
            group = everywhere / instances
            own, hop = count * wire / group, stride * group
            across = across + rates.collective_seconds("all-reduce", own, instances, hop, cluster)
            summed = summed + rates.collective_seconds("all-reduce", count * wire, group, stride, cluster)
            reduce = reduce + rates.collective_seconds("reduce-scatter", count * wire, group, stride, cluster)
            gather = gather + rates.collective_seconds("all-gather", count * element - less, group, stride, cluster)
        pieces = np.maximum(sizes.sum(0) / config.parallel.ddp_bucket_size, 1.0)
        copy = parts[4].sum(1) * wire
        hop, share = rates.pipeline_ends(rates.pipeline_stride(work), pp, cluster)
        tied = rates.collective_seconds("all-reduce", copy, 2.0, hop, cluster, taking_part=share)
        first, group = parts[2].sum(1) / sizes.sum(0), replicas[0] / instances
        found = np.stack(np.broadcast_arrays(reduce, summed, across, gather, pieces, first, tied, group))
        reduce, summed, across, gather, pieces, first, tied, group = found[:, of_kind]
        plain, states, _, fully = (shares.strategy == index for index in range(len(STRATEGIES)))
        sharded = ~(plain | states)
        return {
            "reduce": np.where(plain, summed, reduce) + across * ~sharded,
            "pieces": pieces,
            "embedding": first,
            "last": across * sharded,
            "tied": tied / np.where(sharded, group, 1.0),
            "gather": gather * ~plain,
            "sharded": sharded.astype(float),
            "fully": fully.astype(float),
        }


def _hops(pipeline: Pipeline) -> float:
    """Return the number of messages that lengthen the step once, with those that the schedule waits for in its ramp."""
    schedule, p, v, m, _ = pipeline
    if schedule == "interleaved":
        return 2.0 * (v * p - 1)
    if schedule == "1f1b":
        return 2.0 * max(p - 2, 0)
    trips = 4.0 if schedule in VEE or (schedule == "zb-h1" and m > p) else 1.0 if schedule == "zb-h2" else 2.0
    return trips * (p - 1)


def _waits(pipelines: Sequence[Pipeline], busiest: Floats, totals: tuple[Floats, ...], message: Floats) -> Floats:
    """Return the seconds by which messages lengthen each microbatch. Ranks of 1f1b wait for a microbatch's whole way
    there and back, while the others of its p microbatches compute; zb-h1 also has a W to run."""
    p = pipelines[0].pp
    around = (sum(totals) + 2.0 * (p - 1) * message) / p - busiest
    found = np.zeros_like(busiest)
    for row, (schedule, *_) in enumerate(pipelines):
        if schedule in ("1f1b", "zb-h1"):
            found[row] = around[row] - (totals[2][row] / p if schedule == "zb-h1" else 0.0)
    return np.maximum(found, 0.0)


def _ramp(pipelines: Sequence[Pipeline], busiest: Floats, totals: tuple[Floats, ...], message: Floats) -> Floats:
    """Return the time of a step beyond that of its microbatches on the busiest rank. In looped-bfs, chunks after the
    first wait until a microbatch has passed all ranks."""
    p, m = pipelines[0].pp, pipelines[0].microbatches
    forward, inputs, weights = totals
    whole = forward + inputs + weights
    rest = np.maximum(whole - busiest, 0.0)
    # The first microbatch passes all stages twice before its last weight gradient.
    least = forward + inputs + weights / p - busiest
    # With deferred weight gradients, the other microbatches take the busiest rank's time less that of weight gradients; in
    # a V, less the shorter of forward and input gradient.
    each = (m - 1) * busiest / whole
    found = np.zeros_like(busiest)
    for row, (schedule, _, v, *_) in enumerate(pipelines):
        if schedule in ("1f1b", "gpipe"):
            found[row] = rest[row]
        elif schedule in ("interleaved", "looped-bfs"):
            messages = 2.0 * p * v * message if schedule == "looped-bfs" else 0.0
            waits = np.maximum((1.0 - m / p) * whole[row] + messages, 0.0)
            found[row] = (rest[row] + (v - 1.0) * waits) / v
        else:
            f, i, w = forward[row], inputs[row], weights[row]
            early = each[row] * (np.minimum(f, i) if v == 2 else w)
            hop = np.maximum(f, f + i - w) if schedule == "zb-h1" else f
            found[row] = np.maximum(hop * (p - 1.0) / (p * v), least[row] - early)
    return np.maximum(found, least - (m - 1) * busiest)


def _parts(cost: StageCost, constant: float, count: int) -> Floats:
    """Return the parts of a stage's cost without the constant, [4, count]."""
    parts = (cost.forward - constant, cost.input_gradient - constant, cost.weight_gradient, cost.recompute)
    return np.array([np.broadcast_to(part, (count,)) for part in parts], dtype=np.float64)


def _ends(chunks: Floats, p: int) -> Floats:
    """Return the number of messages, [pipelines, ranks, 1], that a rank sends or receives per microbatch on shared cores:
    two directions on both sides of each chunk, except outside the model's first and last stage."""
    outermost = np.zeros((1, p, 1))
    outermost[:, [0, -1]] = 1.0
    return np.asarray(2.0 * (2.0 * chunks[..., None] - outermost))


def _cycle(busy: Floats, sharing: Floats) -> Floats:
    """Return the seconds, [pipelines, shares], in which all ranks finish a microbatch that they start together on shared
    cores; finished ranks leave theirs to the others. `busy`: [pipelines, ranks, shares] while all compute."""
    p = busy.shape[1]
    steps = np.diff(np.sort(busy, axis=1), axis=1, prepend=0.0)
    speeds = np.minimum(sharing[None], p / np.arange(p, 0, -1.0)[:, None])
    return np.asarray((steps / speeds).sum(axis=1))


def _ramp_left(p: int, sharing: Floats) -> Floats:
    """Return the idle fraction of the cores during a ramp, in which 1, 2, ... p - 1 ranks compute."""
    computing = np.arange(1.0, p)[:, None] / p
    idle = np.maximum(1.0 / sharing - computing, 0.0).sum(axis=0)
    return np.asarray(idle / (1.0 - computing).sum(axis=0))

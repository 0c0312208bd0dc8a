"""Compute the bytes that collectives of a training step move, by process group, with the formulas of docs/parallelism.md.

The volume of a collective on a rank is the tensor of an all-reduce, the whole tensor of an all-gather or
reduce-scatter, the input of an all-to-all, or a message. Per byte of volume, ring algorithms over n ranks send
2·(n-1)/n for an all-reduce, (n-1)/n for the next three and 1 for a message (`wire_factor`).

Symbols: b micro batch size, s sequence length, h hidden size, e bytes of an activation, w bytes of an fp32 (fp64) number,
T = b·s/cp tokens per rank, A = T·h·e bytes of the whole activations between two layers."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megalite.config.model import INDEX_ROWS
from megalite.config.optimizer import ONEBIT_OPTIMIZERS, OPTIMIZERS
from megalite.config.parallel import message_bytes
from megalite.config.run import RunConfig
from megalite.config.strategies import BucketTraffic
from megalite.config.training import LOSSES
from megalite.data_parallel.facts import low_rank_pays, wire_width
from megalite.models.shapes import ParameterShape
from megalite.partition.activations import ELEMENT_BYTES, rows_per_choice
from megalite.partition.buckets import (
    PlannedBucket,
    all_replicas,
    local_shape,
    local_size,
    matrices_of_ranks,
    matrix_ranks,
    moment_widths,
    planned_buckets,
)
from megalite.partition.memory import gather_counts
from megalite.partition.pipeline import placement_of, plan_stages
from megalite.partition.stages import StagePlan, message_parts, shares_embedding

Volume = tuple[str, str, int]  # group, operation, bytes


def norm_terms(config: RunConfig) -> int:
    """Return how many numbers of the gradient norm the all-reduce over all ranks sums."""
    if config.parallel.strategy.weights == "local":
        assert config.parallel.distinct_replicas is not None
        return config.parallel.distinct_replicas
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        return 2 + config.optimizer.deepspeed_onebit * (config.parallel.dp or 1)
    return config.parallel.strategy.norm_terms


def time_basis(config: RunConfig) -> str:
    """Return the steps that the replicas' volumes apply to, if steps differ; else an empty string."""
    p, d = config.parallel, config.data_parallel
    if p.strategy.has("sync_interval"):
        return f"mean over {d.sync_interval} steps"
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        return "once frozen"
    if d.grad_compression != "none" and d.compression_warmup_steps:
        return f"after {d.compression_warmup_steps} steps"
    t = config.training
    several = t.recompute_granularity == "full" and t.recompute_method == "uniform" and t.recompute_num_layers > 1
    if p.strategy.shards_parameters and several:
        return "approximate: layers recomputed together are gathered once more"
    return ""


def gradient_volumes(
    config: RunConfig, plan: StagePlan, stages: tuple[StagePlan, ...], num_microbatches: int
) -> Iterator[Volume]:
    width = max(4, ELEMENT_BYTES[config.training.precision])
    buckets = planned_buckets(config, plan, stages)
    whole = config.parallel.strategy.shards_parameters
    gathers = [1] * len(buckets)
    if whole:
        gathers = list(gather_counts(config, plan.rank, stages, num_microbatches)[plan.stage])
    for bucket, count in zip(buckets, gathers, strict=True):
        # If gradients are sharded, gradients that several ranks have in parts are summed shard by shard.
        parts = bucket.replicas if whole or config.data_parallel.shard_gradients else 1
        if bucket.partial:
            yield "tp", "all-reduce", bucket.elements // parts * width
        if bucket.tied:
            yield "embedding", "all-reduce", bucket.elements // parts * width
        if config.parallel.instances > 1 and config.parallel.strategy.weights == "local":
            for group, operation, volume in _hierarchical(config, bucket):
                yield group, operation, round(volume)
            continue
        if bucket.replicas > 1:
            # The two uses of a tied embedding on one rank complete at different times.
            pushes = num_microbatches * (2 if bucket.tied and shares_embedding(stages) else 1)
            for operation, size in _exchanges(config, bucket, pushes, count):
                yield bucket.group, operation, round(size)
            if bucket.fp8:  # the largest element of each tensor
                yield bucket.group, "all-reduce", 4 * len(bucket.shapes)
        if config.parallel.instances > 1:
            size = bucket.elements // bucket.replicas * wire_width(config)
            across = bucket.group.replace("intra", "inter")
            if _sums_in_parts(config):
                yield across, "all-to-all", size
                yield across, "all-gather", size
            else:
                yield across, "all-reduce", size


def _hierarchical(config: RunConfig, bucket: PlannedBucket) -> Iterator[tuple[str, str, float]]:
    """Sum gradients within an instance, exchange each rank's part between instances, and gather the parts within it."""
    p, whole = config.parallel, bucket.elements
    for operation in ("all-to-all", "all-gather") if _sums_in_parts(config) else ("all-reduce",):
        yield bucket.group, operation, whole * wire_width(config)
    part = dataclasses.replace(bucket, elements=whole // bucket.replicas, replicas=p.instances)
    across = list(_exchanges(config, part, 1, 1))
    for operation, size in across:
        yield bucket.group.replace("intra", "inter"), operation, size
    yield bucket.group, "all-gather", across[-1][1] * bucket.replicas


def _sums_in_parts(config: RunConfig) -> bool:
    d = config.data_parallel
    return d.narrow_wire or d.reduction_order == "rank"


def _exchanges(
    config: RunConfig, bucket: PlannedBucket, num_microbatches: int, gathers: int
) -> Iterable[tuple[str, float]]:
    """Return (operation, bytes) over the replicas of a bucket that is gathered `gathers` times."""
    d, shape = config.data_parallel, bucket.shapes[0]
    # Norms and biases alone are not compressed.
    lossy = d.grad_compression != "none" and any(each.multiplies for each in bucket.shapes)
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS or lossy:
        return _compressed(config, bucket)
    wire, states = wire_width(config), moment_widths(config, shape)
    return config.parallel.strategy.traffic(
        BucketTraffic(
            config=config,
            elements=bucket.elements,
            replicas=bucket.replicas,
            parameter=1 if bucket.fp8 else ELEMENT_BYTES[config.training.precision],
            wire=wire,
            in_parts=_sums_in_parts(config),
            gathers=gathers,
            microbatches=num_microbatches,
            state_bytes=len(states) * wire if d.narrow_wire else sum(states),
        )
    )


def _compressed(config: RunConfig, bucket: PlannedBucket) -> Iterable[tuple[str, float]]:
    """Return (operation, bytes) without the scales, one number per tensor or block."""
    d, n, count = config.data_parallel, bucket.elements, bucket.replicas
    kind = d.grad_compression if d.grad_compression != "none" else "onebit"
    if kind in ("onebit", "uint8"):
        size = n / 8 if kind == "onebit" else n
        return [("all-to-all", size), ("all-gather", size)]
    if kind == "topk":
        return [("all-gather", (4 + wire_width(config)) * d.topk_density * n * count)]
    numbers = sum(_low_rank(config, shape) for shape in bucket.shapes)
    size = numbers * max(4, ELEMENT_BYTES[config.training.precision])  # whatever the wire format
    return [("all-to-all", size), ("all-gather", size)]


def _low_rank(config: RunConfig, shape: ParameterShape) -> int:
    """Return the numbers that powersgd sends for a tensor's gradient; all numbers if compression does not pay."""
    size = local_size(shape, config)
    if len(shape.shape) < 2:
        return size
    rank, (rows, columns) = config.data_parallel.powersgd_rank, local_shape(shape, config)[-2:]
    matrices = size // (rows * columns)
    return matrices * rank * (rows + columns) if low_rank_pays(rank, rows, columns) else size


def matrix_volumes(config: RunConfig, plans: Sequence[StagePlan]) -> list[tuple[float, float]]:
    """Return (bytes received, bytes returned) of whole matrices of these stages per rank that updates them. Exact, except
    with sharded states or experts: then each rank is assumed to have an equal part of each matrix."""
    p, main = config.parallel, max(4, ELEMENT_BYTES[config.training.precision])
    sends, returns = OPTIMIZERS.facts(config.optimizer.optimizer).exchanged
    dense, expert = (count // p.instances for count in all_replicas(config))
    owned = matrices_of_ranks(config, plans)
    found = []
    for own in owned:
        gathered = returned = 0.0
        for shape in own:
            parts = 1 if shape.shard_dim is None else p.expert_tp if shape.expert else p.tp
            parts *= p.ep if shape.expert else 1
            parts *= (expert if shape.expert else dense) if p.strategy.shards_states else 1
            copies = max(1.0, len(owned) / parts)  # ranks with each element
            size, local = main * math.prod(shape.shape[-2:]), copies / len(owned)
            gathered += sends * size * (1.0 - local)
            returned += returns * size * (copies - local)
        found.append((gathered, returned))
    return found


def wire_factor(operation: str, size: int) -> float:
    """Return the bytes that a rank sends per byte of volume, with ring algorithms over `size` ranks."""
    if operation == "send":
        return 1.0
    return (2.0 if operation == "all-reduce" else 1.0) * (size - 1) / size


def step_volumes(config: RunConfig, pipeline_rank: int, num_microbatches: int) -> Mapping[tuple[str, str], int]:
    """Return (group, operation) -> bytes per step on a rank of a pipeline rank, without groups of one rank. Tokens per
    expert are known only at run time: rows are the mean over the expert grid, which is exact if no token is dropped."""
    stages = plan_stages(config)
    own = [plan for plan in stages if plan.rank == pipeline_rank]
    found: Counter[tuple[str, str]] = Counter()
    microbatch = _Microbatch(config)
    for plan in own:
        for group, operation, size in microbatch.through(plan, stages):
            found[group, operation] += num_microbatches * size
        for group, operation, size in gradient_volumes(config, plan, stages, num_microbatches):
            found[group, operation] += size
    exchanged = matrix_volumes(config, own)  # mean of the bytes that each rank sends
    found[matrix_ranks(config), "all-to-all"] += round(sum(map(sum, exchanged)) / len(exchanged))
    model = config.model
    terms = sum(bool(model.num_experts and c) for c in (model.moe_aux_loss_coeff, model.moe_z_loss_coeff))
    terms += (model.mtp_num_layers > 0) + model.is_sparse
    if model.moe_router_enable_expert_bias:  # tokens per expert
        terms += (model.num_experts or 0) * sum(map(model.is_moe_layer, range(model.mtp_layers.stop)))
    if config.optimizer.qk_clip:  # largest logits
        terms += model.mtp_layers.stop * model.num_attention_heads
    terms += config.logging.log_num_zeros_in_grad + config.logging.log_gradient_noise_scale
    found["world", "all-reduce"] += 8 * (1 + norm_terms(config) + terms)
    if any(plan.has_head for plan in own):
        found["dp-cp", "all-reduce"] += 8 * (1 + model.mtp_num_layers)  # numbers of unmasked tokens
    sizes = group_sizes(config)
    return {key: size for key, size in found.items() if size and sizes[key[0]] > 1}


def group_sizes(config: RunConfig) -> dict[str, int]:
    """Return the number of ranks per kind of process group."""
    p, placement = config.parallel, placement_of(config)
    dense, expert = all_replicas(config)
    return {
        "tp": p.tp,
        "cp": p.cp,
        "cp-heads": p.cp_heads,
        "cp-keys": p.cp // p.cp_heads,
        "tp-cp": p.tp * p.cp,
        "tp-dp-cp": p.tp * dense,
        "dp-cp": dense,
        "intra-dp-cp": dense // p.instances,
        "inter-dp-cp": p.instances,
        "ep": p.ep,
        "expert-tp": p.expert_tp,
        "expert-dp": expert,
        "intra-expert-dp": expert // p.instances,
        "inter-expert-dp": p.instances,
        "pp": p.pp,
        "embedding": len({placement[0], placement[-1]}),
        "world": p.tp * dense * p.pp,
    }


class _Microbatch:
    """Collectives of one microbatch's forward and backward, with the symbols of the module docstring.

    In the forward, sequence parallelism gathers a column-parallel layer's input (`_enter`); the output of a row-parallel
    layer or the embedding is summed (`_leave`). In the backward, a column-parallel layer gathers its input again for the
    weight gradient and sums the input gradient; a row-parallel layer gathers the output gradient."""

    def __init__(self, config: RunConfig) -> None:
        p, training = config.parallel, config.training
        self._config = config
        self._e = ELEMENT_BYTES[training.precision]
        self._w = max(4, self._e)
        self._tokens = training.micro_batch_size * training.seq_length // p.cp
        self._activations = self._tokens * config.model.hidden_size * self._e
        self._enter: list[Volume] = [("tp", "all-gather", self._activations)] if p.sequence_parallel else []
        operation = "reduce-scatter" if p.sequence_parallel else "all-reduce"
        self._leave: list[Volume] = [("tp", operation, self._activations)]
        self._share: list[Volume] = []
        model = config.model
        # Attention's input projections: the backward gathers the inputs again and sums their gradients.
        widths, shared = [model.hidden_size], []
        if model.multi_latent_attention:
            widths, shared = [model.q_lora_rank or model.hidden_size, model.kv_lora_rank], [model.qk_pos_emb_head_dim]
        entering: list[list[Volume]] = [
            [("tp", what, self._tokens * width * self._e) for width in each]
            for what, each in (("all-gather", widths), ("all-gather", shared), (operation, widths + shared))
        ]
        gathered, shared_gathered, self._attention_gradients = entering
        self._attention_inputs = gathered + shared_gathered if p.sequence_parallel else []
        self._attention_again = gathered if p.sequence_parallel else []
        if model.query_groups < p.tp:  # received by ranks that share a key/value head; also sent, in the mean
            heads = model.num_attention_heads // p.tp * (1 + model.attention_output_gate) + 2
            self._share = [("tp", "all-to-all", self._tokens * heads * model.head_size * self._e)]
        self._index: list[Volume] = []  # outputs of the indexer
        if model.is_sparse and p.sequence_parallel:
            heads, size = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
            self._index = [("tp", "all-gather", self._tokens * (heads * size + size + heads) * self._e)]
        self._exchange = [] if p.sequence_parallel else [("tp", "all-gather", self._activations)]  # after experts

    def through(self, plan: StagePlan, stages: tuple[StagePlan, ...]) -> Iterator[Volume]:
        p = self._config.parallel
        if plan.has_embedding:
            yield from self._embedding()
        layers = range(plan.first_layer, plan.last_layer)
        for index in layers:
            yield from self._layer(index)
        yield from self._recomputed(layers)
        if plan.has_head:
            yield from self._head()
            for index in self._config.model.mtp_layers:
                yield from (*self._leave, *self._enter)  # embedding lookup
                yield from (*self._layer(index), *self._head())
                yield from self._recomputed(range(index, index + 1), single=True)
        for neighbour in (plan.stage - 1, plan.stage + 1):
            if 0 <= neighbour < len(stages) and stages[neighbour].rank != plan.rank:
                parts = p.tp if p.sequence_parallel else message_parts(self._config)
                elements = self._activations // self._e // parts
                yield "pp", "send", message_bytes(p.pipeline_compression, elements, self._e)
                if not p.sequence_parallel and parts > 1:  # of the received tensor
                    yield "tp", "all-gather", self._activations

    def _layer(self, index: int) -> Iterator[Volume]:
        yield from self._attention_forward(index)
        yield from self._feed_forward(index)
        yield from self._enter
        if self._config.model.is_linear_layer(index):
            yield from (*self._linear_core(), *self._enter, *self._leave)
        else:
            yield from (*self._attention_core(backward=True), *self._head_norms(), *self._share)
            yield from (*self._attention_again, *self._attention_gradients)
        yield from self._feed_forward_backward(index)

    def _head(self) -> Iterator[Volume]:
        yield from (*self._enter, *self._enter, *self._leave)
        # Cross-entropy: maximum, sum of exponentials and the label's logit of each token. Another loss: all logits.
        if self._config.training.loss in LOSSES.builtin:
            yield "tp", "all-gather", self._config.parallel.tp * 3 * self._tokens * self._w
        else:
            yield "tp", "all-gather", self._config.model.padded_vocab_size * self._tokens * self._e

    def _embedding(self) -> Iterator[Volume]:
        yield from (*self._leave, *self._enter)
        config = self._config
        if config.parallel.sequence_parallel and config.model.position_embedding_type == "learned_absolute":
            # If positions restart with documents, each sample has its own.
            restart = config.data.reset_position_ids or config.data.packs_documents
            samples = config.training.micro_batch_size if restart else 1
            rows = config.training.seq_length // config.parallel.cp * samples
            yield "tp", "all-gather", rows * config.model.hidden_size * self._e

    def _attention_core(self, *, backward: bool) -> Iterator[Volume]:
        """Yield the exchanges between the ranks of a sequence."""
        model, p = self._config.model, self._config.parallel
        groups = max(model.query_groups, p.tp)
        keys = self._tokens * groups // p.tp * model.head_size * self._e
        values = self._tokens * groups // p.tp * model.value_size * self._e
        queries = self._tokens * model.num_attention_heads // p.tp * model.head_size * self._e
        # Keys are repeated until each rank that exchanges heads has one.
        keys = max(keys, self._tokens * p.cp_heads * model.head_size * self._e)
        values = max(values, self._tokens * p.cp_heads * model.value_size * self._e)
        yield "cp-heads", "all-to-all", queries + keys + values
        yield from self._key_exchange(2 * keys, backward=backward)
        yield "cp-heads", "all-to-all", queries // model.head_size * model.value_size
        if model.is_sparse:  # the target of the indexer, which the backward computes again
            yield "tp", "all-reduce", self._tokens * self._config.training.seq_length * self._w

    def _key_exchange(self, own: int, *, backward: bool) -> Iterator[Volume]:
        """Yield the exchange of keys and values; `own`: bytes of a rank's."""
        p = self._config.parallel
        count = p.cp // p.cp_heads
        if self._config.optimizer.qk_clip and not backward:
            yield "cp-keys", "all-gather", own // 2 * count
        if self._config.model.is_sparse:
            own += self._tokens * self._config.model.dsa_indexer_head_dim * self._e
        if self._config.model.attention_dropout or self._config.model.is_sparse:
            yield "cp-keys", "reduce-scatter" if backward else "all-gather", own * count
            return
        gathers = p.cp_comm_type == "allgather"
        passed = own * (count if gathers else count - 1)
        yield "cp-keys", "all-gather" if gathers else "send", passed
        if backward:  # gradients of keys and values, in fp32
            yield "cp-keys", "reduce-scatter" if gathers else "send", passed // self._e * self._w

    def _linear_core(self) -> list[Volume]:
        """Return the exchanges of heads of linear attention, in each direction."""
        model, p = self._config.model, self._config.parallel
        values = model.linear_num_value_heads * model.linear_value_head_dim
        return [
            ("cp", "all-to-all", self._tokens * width // p.tp * self._e) for width in (model.linear_channels[1], values)
        ]

    def _attention_forward(self, index: int) -> list[Volume]:
        if self._config.model.is_linear_layer(index):
            return [*self._enter, *self._linear_core(), *self._leave]
        core = self._attention_core(backward=False)
        return [*self._attention_inputs, *self._index, *self._share, *self._head_norms(), *core, *self._leave]

    def _head_norms(self) -> list[Volume]:
        """Return the sums of query and key norms over the heads of all ranks, in each direction: one number per token."""
        return [("tp", "all-reduce", self._tokens * self._w)] * (2 * self._config.model.qk_norm_all_heads)

    def _feed_forward(self, layer: int, *, again: bool = False) -> list[Volume]:
        """Return the forward's collectives in order; `again`: a recomputed forward, which reuses the row counts."""
        model, dense = self._config.model, [*self._enter, *self._leave]
        if not model.has_mlp(layer):
            return []
        if not model.is_moe_layer(layer):
            return dense
        shared = dense if model.moe_shared_expert_intermediate_size else []
        return [*self._routing(again), *shared, *self._expert_rows(), *self._exchange]

    def _feed_forward_backward(self, layer: int) -> Iterator[Volume]:
        model = self._config.model
        moe = model.is_moe_layer(layer)
        if model.has_dense_mlp(layer) or (moe and model.moe_shared_expert_intermediate_size):
            yield from (*self._enter, *self._enter, *self._leave)
        if moe:
            yield from (*self._expert_rows(), *self._exchange)

    def _routing(self, again: bool) -> Iterator[Volume]:
        """Yield the exchanges of counts and choices that come before those of tokens."""
        model, p, training = self._config.model, self._config.parallel, self._config.training
        assert model.num_experts is not None
        if model.moe_aux_loss_coeff:
            counts = training.micro_batch_size * model.num_experts // training.moe_aux_loss_sequences
            yield "tp-cp", "all-reduce", counts * self._w
        if model.moe_router_sinkhorn:
            numbers = training.micro_batch_size * model.num_experts
            yield "tp-cp", "all-gather", training.seq_length * numbers * self._w
        if model.moe_expert_capacity_factor is not None:
            numbers = 2 * training.micro_batch_size * model.moe_router_topk + 1
            yield "tp-cp", "all-gather", training.seq_length * numbers * self._w
        if not again and not model.moe_pad_expert_input_to_capacity:
            yield "ep", "all-to-all", 8 * model.num_experts
            yield "expert-tp", "all-gather", 8 * model.num_experts * p.expert_tp

    def _expert_rows(self) -> list[Volume]:
        """Return the exchange of rows to the experts and back; the backward's is the same."""
        model, p = self._config.model, self._config.parallel
        rows = self._activations // p.tp * model.moe_router_topk
        if model.moe_pad_expert_input_to_capacity:
            rows = round(rows * rows_per_choice(self._config))
        return 2 * [("ep", "all-to-all", rows), ("expert-tp", "all-to-all", rows * p.expert_tp)]

    def _recomputed(self, layers: range, *, single: bool = False) -> Iterator[Volume]:
        """Yield the collectives of forwards that the backward repeats; `single`: full recompute of each layer.

        A recomputed region ends with the last tensor that the backward needs, so its final collective, usually the sum
        over tp, is not repeated, unless dropout or a norm after it needs its result."""
        training = self._config.training
        if training.recompute_granularity == "full":
            whole = single or training.recompute_method == "uniform"
            unit = training.recompute_num_layers if whole else 1
            stop = layers.stop if whole else min(layers.start + training.recompute_num_layers, layers.stop)
            for first in range(layers.start, stop, unit):
                again: list[Volume] = []
                for index in range(first, min(first + unit, stop)):
                    again += [*self._attention_forward(index), *self._feed_forward(index, again=True)]
                exit_kept = self._config.model.hidden_dropout or self._config.model.post_norms
                yield from again if exit_kept else _without_exit(again)
        elif training.recompute_granularity == "selective":
            for index in layers:
                moe = self._config.model.is_moe_layer(index)
                softmax = not self._config.model.is_linear_layer(index)
                if softmax and "mla_up_proj" in training.recompute_modules:
                    yield from self._attention_inputs
                    yield from self._core_up_recomputed()
                if softmax and "core_attn" in training.recompute_modules and not self._config.model.is_sparse:
                    yield from (each for each in self._attention_core(backward=False) if each[0] == "cp-keys")
                if moe and "shared_experts" in training.recompute_modules:
                    yield from _without_exit([*self._enter, *self._leave])
                if ("moe" if moe else "mlp") in training.recompute_modules:
                    yield from _without_exit(self._feed_forward(index, again=True))

    def _core_up_recomputed(self) -> Iterator[Volume]:
        """Yield the core's collectives in the recompute of the heads: the exchange of heads; sparse attention runs again up
        to its last queries, which the backward then recomputes."""
        core, config = self._attention_core(backward=False), self._config
        if not config.model.is_sparse:
            yield next(core)
            return
        rows = config.training.seq_length // config.parallel.cp
        for group, operation, size in core:
            yield group, operation, size if group != "tp" else size // rows * ((rows - 1) // INDEX_ROWS * INDEX_ROWS)


def _without_exit(volumes: list[Volume]) -> list[Volume]:
    return volumes[:-1] if volumes and volumes[-1][0] == "tp" else volumes

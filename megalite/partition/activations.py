"""Bytes of activations that one rank keeps for the backward, with any activation recomputation.

Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), term by term, so that other
widths, gates, grouped queries, experts and no dropout are counted correctly. With GPT's shape and dropout the sum is
the paper's s·b·h·(10 + 24/t + 5·a·s/(h·t)). Tensors without a width, such as norm statistics and token ids, are left
out. A test compares this with the tensors of the real model."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

from megalite.config.describe import replace
from megalite.config.model import INDEX_ROWS, LINEAR_CHUNK, ModelConfig
from megalite.config.run import RunConfig, cache_by_reading
from megalite.config.training import LOSSES
from megalite.models.shapes import map_by_kind, map_layers
from megalite.partition.stages import StagePlan, kind_of_stage
from megalite.pipeline.ir.memory import Sizes

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_INDEX_BYTES = 8


class _Kept(NamedTuple):
    """One tensor that a layer keeps for the backward."""

    bytes: float  # per token of this rank's part of the sequence, s/cp
    freed_by: frozenset[str] = frozenset()  # selective recompute of any of these modules frees it
    # Offload modules that save it, separated by spaces; it is offloaded only if all are selected, never if empty.
    saved_by: str = ""


def _sizes(config: RunConfig) -> tuple[int, int, int]:
    """Return the bytes of an element and of a value kept in fp32 or wider, and the parts of sequence parallelism."""
    e, p = ELEMENT_BYTES[config.training.precision], config.parallel
    return e, max(4, e), p.tp if p.sequence_parallel else 1


def _attention_widths(config: RunConfig) -> tuple[int, int]:
    """Return the channels of queries, and of keys and values, over all tp ranks; shared heads count for each rank."""
    model = config.model
    groups = max(model.query_groups, config.parallel.tp)
    return model.num_attention_heads * model.head_size, 2 * groups * model.head_size


def rows_per_choice(config: RunConfig, parts: int | None = None) -> float:
    """Return the rows sent to experts per choice of a token: those within the capacity, or with padding all slots.

    `parts`: ranks that share a sequence, instead of the config's."""
    model, p, s = config.model, config.parallel, config.training.seq_length
    if not model.moe_pad_expert_input_to_capacity or model.num_experts is None:
        return min(1.0, model.moe_expert_capacity_factor or 1.0)
    own = max(1, s // (parts or p.tp * p.cp))
    return min(model.expert_capacity(s), own) * model.num_experts / (own * model.moe_router_topk)


def _attention(config: RunConfig, layer_index: int) -> Iterator[_Kept]:
    model, p = config.model, config.parallel
    e, exact, whole = _sizes(config)
    if model.is_linear_layer(layer_index):
        yield from _linear_attention(config)
        return
    queries, keys_and_values = _attention_widths(config)
    exchanged = p.cp_heads > 1
    core, training = frozenset({"core_attn"}), config.training
    up = training.recompute_granularity == "selective" and "mla_up_proj" in training.recompute_modules
    # The layer's input, which the norm keeps.
    yield _Kept(e * model.hidden_size / whole, saved_by="attn_norm" if model.pre_norms else "qkv_linear")
    if model.pre_norms:  # its output, which the projection keeps, or the recompute of queries
        freed_by = frozenset() if up and model.q_lora_rank is None else frozenset({"layernorm"})
        yield _Kept(e * model.hidden_size / whole, freed_by, "qkv_linear")
    if exchanged:  # keys are repeated until each cp rank has one
        keys_and_values = max(keys_and_values, 2 * p.tp * p.cp_heads * model.head_size)
    of_latents = frozenset({"mla_up_proj"}) if model.multi_latent_attention else frozenset[str]()
    # With gathered keys and values, this rank's own are kept only if they are a view of the queries' memory.
    gathered = (model.attention_dropout > 0.0 or model.is_sparse) and p.cp > p.cp_heads
    apart = exchanged or model.has_rope(layer_index) or model.qk_norm or keys_and_values < 2 * queries
    again = training.recompute_granularity == "selective" and "core_attn" in training.recompute_modules
    again &= not model.is_sparse
    own = 0 if gathered and not again and (apart or model.multi_latent_attention) else keys_and_values
    # Values inside the tensor that the norms of queries and keys keep, if no queries share a key.
    joint = model.qk_norm and not (exchanged or model.qk_norm_all_heads or model.multi_latent_attention)
    joint_values = own // 2 if joint and keys_and_values == 2 * queries else 0
    yield _Kept(e * (queries + own - joint_values) / p.tp, of_latents, "core_attn")
    padded = model.value_size < model.head_size  # to the width of the keys
    if model.multi_latent_attention:
        yield _Kept(e * _latents(model) / whole, saved_by="qkv_linear")
        if up and not model.qk_norm:  # the shared key, in the projection's output
            yield _Kept(e * (model.kv_lora_rank + model.qk_pos_emb_head_dim) / whole, saved_by="qkv_linear")
    elif model.qk_norm:
        # These norms keep their input, the projection's output; it contains the values too if no queries share a key.
        projected = _attention_widths(config)[1]
        without = not exchanged or projected < 2 * queries or model.qk_norm_all_heads
        both = "qkv_linear core_attn" if joint_values else "qkv_linear"
        yield _Kept(e * (queries + projected // (1 + without) + joint_values) / p.tp, saved_by=both)
        if not model.qk_norm_all_heads:
            # Statistics of each head; tensors of at most one value per token are not offloaded.
            of_head = exact
            if model.normalization == "LayerNorm":  # two values, on a CPU in the input's format
                of_head = 2 * (e if training.device == "cpu" else exact)
            for heads in (queries // model.head_size, keys_and_values // (2 * model.head_size)):
                few = heads * whole <= p.tp
                yield _Kept(of_head * heads / p.tp, saved_by="" if few else "qkv_linear")
    if model.is_sparse:
        by = "qkv_linear" if up else "core_attn"
        sizes = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        yield _Kept(e * sizes[1] / whole, saved_by="qkv_linear")  # the input of the key's norm
        yield _Kept(e * (sizes[0] * (sizes[1] + 1) + sizes[1] * (1 if up else p.cp)), saved_by=by)
        if gathered:
            yield _Kept(e * keys_and_values * p.cp / p.tp, of_latents, by)
    elif model.attention_dropout:
        # The softmax, its mask and the product; and the gathered keys and values of ranks that do not exchange heads.
        sinks = exact if model.softmax_type != "vanilla" else 0  # the probability of the sink
        row = (2 * e + 1) * config.training.seq_length + sinks
        yield _Kept(row * model.num_attention_heads / p.tp, core, "core_attn")
        if gathered:
            yield _Kept(e * keys_and_values * (p.cp // p.cp_heads) / p.tp, core, "core_attn")
    else:
        # The log-sum-exp of the scores; tensors of at most one value per token are not offloaded.
        few = model.num_attention_heads * whole <= p.tp
        yield _Kept(exact * model.num_attention_heads / p.tp, core, "" if few else "core_attn")
        if exchanged or padded:  # the core's output before the heads are exchanged back or the padding is removed
            yield _Kept(e * queries / p.tp, core, "core_attn")
        if _repeats_keys(config, layer_index):
            yield _Kept(e * (2 * queries - keys_and_values) / p.tp, core, "core_attn")
    alone = exchanged or padded or model.attention_dropout or again or model.is_sparse
    by = "attn_proj" if alone else "attn_proj core_attn"
    yield _Kept(e * model.num_attention_heads * model.value_size / p.tp, saved_by=by)
    if model.attention_output_gate:  # the gates and the product with them
        yield _Kept(2 * e * queries / p.tp, saved_by="attn_proj")
    yield from _attention_end(config)


def _attention_end(config: RunConfig) -> Iterator[_Kept]:
    """Yield what the norm and the dropout after attention keep."""
    model, (e, _, whole) = config.model, _sizes(config)
    if model.post_norms:
        yield _Kept(e * model.hidden_size / whole, saved_by="attn_norm")
    if model.hidden_dropout:
        yield _Kept(model.hidden_size / whole, saved_by="mlp_norm" if model.pre_norms else "")


def _linear_attention(config: RunConfig) -> Iterator[_Kept]:
    """Yield the inputs of the norm and of both projections. Everything between the projections is recomputed from the output of
    the first (`_linear_core`)."""
    model, p = config.model, config.parallel
    e, _, whole = _sizes(config)
    yield _Kept(e * model.hidden_size / whole, saved_by="attn_norm" if model.pre_norms else "qkv_linear")
    if model.pre_norms:
        yield _Kept(e * model.hidden_size / whole, frozenset({"layernorm"}), "qkv_linear")
    yield _Kept(e * model.linear_channels[1] / p.tp, saved_by="core_attn")
    yield _Kept(e * model.linear_num_value_heads * model.linear_value_head_dim / p.tp, saved_by="attn_proj")
    yield from _attention_end(config)


def _linear_core(config: RunConfig) -> float:
    """Return the bytes per token that the backward of a layer with linear attention recomputes at once."""
    model, p = config.model, config.parallel
    e, exact, _ = _sizes(config)
    chunk = min(LINEAR_CHUNK, config.training.seq_length)
    keys, dk = model.linear_num_key_heads, model.linear_key_head_dim
    values, dv = model.linear_num_value_heads, model.linear_value_head_dim
    # Tables of decays and products in a chunk; queries, keys and values in several forms, or the corrections; the norm.
    if model.linear_corrects:
        elements = (5 * values + 2 * keys) * chunk + values * (6 * dk + (4 + 2 * e / exact) * dv + 7) + 4 * keys
    else:
        elements = (2 * values + keys) * chunk + values * (2 * dk + 7 * dv + 4) + keys
    # Convolved channels, queries and keys; the state of each chunk.
    elements += 3 * model.linear_channels[0] + 2 * keys * dk + values * dk * dv / chunk
    return exact * elements / p.tp


def _sparse_core(config: RunConfig) -> float:
    """Return the bytes that the backward of sparse attention recomputes at once: per key and query of `INDEX_ROWS` the products
    and scores of the indexer, attention's probabilities and masks; and the indexer's queries and keys in fp32."""
    model, p, training = config.model, config.parallel, config.training
    e, exact, _ = _sizes(config)
    rows, s = min(INDEX_ROWS, training.seq_length // p.cp), training.seq_length
    index, heads, half = model.dsa_indexer_n_heads, model.num_attention_heads / p.tp, e < exact
    row = s * (exact * (index + heads + 2) + half * e * heads + 3)
    wide = half * exact * (rows * index * (model.dsa_indexer_head_dim + 1) + s * model.dsa_indexer_head_dim)
    return training.micro_batch_size * (rows * row + wide)


def _latents(model: ModelConfig) -> int:
    """Return the channels of the latents of multi-latent attention that norms and up-projections keep."""
    queries, keys = model.q_lora_rank or 0, model.kv_lora_rank
    # The norm of the key latent keeps the whole output of the down-projection.
    return 2 * queries + 2 * keys + model.qk_pos_emb_head_dim if model.qk_norm else queries + keys


def _repeats_keys(config: RunConfig, layer_index: int) -> bool:
    """Return whether grouped keys and values are kept once per query head: the CPU's fused kernel and CUDA's for 32
    bits have no grouped form. Tiled attention repeats them for one tile at a time."""
    model, training, data, p = config.model, config.training, config.data, config.parallel
    if max(model.query_groups, p.tp * p.cp_heads) == model.num_attention_heads:
        return False
    window = model.has_window(layer_index) and (model.sliding_window or 0) < training.seq_length
    window |= model.attn_logit_softcapping is not None or model.softmax_type != "vanilla"
    documents = data.reset_attention_mask or data.packs_documents
    ring = p.cp > p.cp_heads
    grouped_kernel = ELEMENT_BYTES[training.precision] == 2 and training.device != "cpu"
    return not (window or documents or ring or grouped_kernel)


def _feed_forward(config: RunConfig, layer_index: int) -> Iterator[_Kept]:
    model, p = config.model, config.parallel
    e, _, whole = _sizes(config)
    if not model.has_mlp(layer_index):
        return
    yield _Kept(e * model.hidden_size / whole, saved_by="mlp_norm" if model.pre_norms else "")
    if model.pre_norms:
        yield _Kept(e * model.hidden_size / whole, frozenset({"layernorm"}))
    if model.is_moe_layer(layer_index):
        yield from _experts(config)
    else:
        yield from _inner(config, model.ffn_size / p.tp, "mlp")
    if model.post_norms:
        yield _Kept(e * model.hidden_size / whole, saved_by="mlp_norm")
    if model.hidden_dropout:
        yield _Kept(model.hidden_size / whole)


def _inner(config: RunConfig, width: float, *modules: str) -> Iterator[_Kept]:
    """Yield input and output of a nonlinearity of `width` elements per token, freed by recompute of any of
    `modules`."""
    e = ELEMENT_BYTES[config.training.precision]
    yield _Kept((2 if config.model.is_gated else 1) * e * width, frozenset(modules), "mlp_act")
    yield _Kept(e * width, frozenset({*modules, "mlp_act"}))


def _experts(config: RunConfig) -> Iterator[_Kept]:
    """Yield the tensors of a MoE layer besides its input, if every expert gets the same number of tokens."""
    model, p = config.model, config.parallel
    e, exact, whole = _sizes(config)
    moe = frozenset({"moe"})
    assert model.num_experts is not None
    choices = model.moe_router_topk / p.tp  # per token, on each rank that shares it
    rows = choices * rows_per_choice(config)
    yield _Kept(choices * (exact + _INDEX_BYTES) + rows * _INDEX_BYTES, moe)  # weights, experts, order
    tables = model.score_table + bool(model.moe_z_loss_coeff)
    if model.moe_router_score_function == "sigmoid":
        tables += bool(model.moe_aux_loss_coeff)  # scores divided by their sum
        yield _Kept(choices * exact * (model.moe_router_topk > 1), moe)  # scores of the chosen experts
    yield _Kept(exact * tables * model.num_experts / p.tp, moe)
    yield _Kept(e * model.hidden_size * rows * p.expert_tp, moe, "expert_fc1")  # rows that the experts process
    if p.ep * p.expert_tp > 1:
        yield _Kept(_INDEX_BYTES * rows * p.expert_tp, moe)
    yield from _inner(config, model.expert_ffn_size * rows, "moe")
    yield _Kept(e * model.hidden_size * rows, moe)  # expert outputs, for the gradient of the router weights
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _inner(config, model.moe_shared_expert_intermediate_size / p.tp, "moe", "shared_experts")
        if model.moe_shared_expert_gate:
            yield _Kept(e * (model.hidden_size + 1) / whole, moe)


def _tokens(config: RunConfig) -> int:
    return config.training.seq_length // config.parallel.cp * config.training.micro_batch_size


def _unit_input_bytes(config: RunConfig) -> int:
    """Return the bytes of a stage's input on one rank: a message, and all that full recompute keeps per unit."""
    e, _, whole = _sizes(config)
    return _tokens(config) * config.model.hidden_size * e // whole


def layer_activation_bytes(
    config: RunConfig, layer_index: int = 0, *, granularity: str | None = None, saved_by: frozenset[str] | None = None
) -> int:
    """Return the bytes that one layer keeps for the backward of one microbatch, on one rank; with full recompute, of a
    unit of one layer.

    `granularity`: used instead of the config's. `saved_by`: count only what these modules save; None: everything."""
    granularity = granularity or config.training.recompute_granularity
    if granularity == "full":
        return _unit_input_bytes(config)
    modules = set(config.training.recompute_modules) if granularity == "selective" else set()
    kept = sum(
        kept.bytes
        for kept in chain(_attention(config, layer_index), _feed_forward(config, layer_index))
        if not kept.freed_by & modules
        and (saved_by is None or (kept.saved_by and saved_by.issuperset(kept.saved_by.split())))
    )
    return round(_tokens(config) * kept)


def recompute_units(config: RunConfig, plan: StagePlan) -> list[range]:
    """Return the recompute units of a stage: layer ranges; empty without full recompute."""
    training = config.training
    first, last = plan.first_layer, plan.last_layer
    if training.recompute_granularity != "full":
        return []
    if training.recompute_method == "block":
        return [range(i, i + 1) for i in range(first, min(first + training.recompute_num_layers, last))]
    step = training.recompute_num_layers
    return [range(i, min(i + step, last)) for i in range(first, last, step)]


def _layer_bytes(
    config: RunConfig, layers: range, granularity: str | None, saved_by: frozenset[str] | None = None
) -> list[int]:
    what = partial(layer_activation_bytes, config, granularity=granularity, saved_by=saved_by)
    return map_layers(config.model, layers, what)


def _layers(config: RunConfig, plan: StagePlan) -> list[tuple[int, int]]:
    """Return for each layer of a stage the bytes kept for one microbatch's backward, and the offloaded part of them."""
    training = config.training
    modules = training.offloaded_modules
    again = {index: index == unit.start for unit in recompute_units(config, plan) for index in unit}
    granularity = "none" if training.recompute_granularity == "full" else None
    layers, found = range(plan.first_layer, plan.last_layer), []
    saved = _layer_bytes(config, layers, granularity, modules) if training.offloaded_layers else [0] * len(layers)
    for index, kept, gone in zip(layers, _layer_bytes(config, layers, granularity), saved, strict=True):
        offloaded = index - plan.first_layer < training.offloaded_layers
        if index in again:
            kept = _unit_input_bytes(config) if again[index] else 0
            gone = kept if modules is None or "attn_norm" in modules else 0
            offloads_input = gone > 0
        else:
            offloads_input = modules is None or ("attn_norm" if config.model.pre_norms else "qkv_linear") in modules
        if index == plan.first_layer and not plan.has_embedding and offloads_input:
            gone -= _unit_input_bytes(config)  # the stage's input stays until its gradient is computed
        found.append((kept, gone if offloaded else 0))
    return found


def stage_activation_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the device bytes that a stage keeps for the backward of one microbatch, embedding and head included."""
    model = config.model
    total = sum(kept - gone for kept, gone in _layers(config, plan))
    _, _, whole = _sizes(config)
    if plan.has_embedding and model.hidden_dropout:
        total += _tokens(config) * model.hidden_size // whole
    if plan.has_head:
        total += _tokens(config) * round(_head(config))
        total += sum(_mtp_bytes(config, index) for index in model.mtp_layers)
    return total


def offloaded_activation_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the offloaded activation bytes of one microbatch."""
    # Most configs offload nothing, and this is called often.
    return sum(gone for _, gone in _layers(_graph_config(config), plan)) if config.training.offloaded_layers else 0


def _head(config: RunConfig) -> float:
    """Return the bytes per token of the inputs of final norm and head, and of the logits or what the loss keeps; a
    registered loss is counted with its backward."""
    model, (e, exact, whole) = config.model, _sizes(config)
    vocabulary, name = model.padded_vocab_size, config.training.loss
    own = e * vocabulary / config.parallel.tp
    losses = own if name in LOSSES.builtin else LOSSES.facts(name).logits * exact * (model.vocab_size or 0)
    capped = own * (model.final_logit_softcapping is not None)
    return 2 * e * model.hidden_size / whole + capped + losses


def _mtp_bytes(config: RunConfig, index: int) -> int:
    """Return the bytes of an MTP layer: the layer, its part of the head, and without recompute the embedding and both
    norms' outputs concatenated. Its hidden state is counted as the head's input, unless that is scaled."""
    e, _, whole = _sizes(config)
    full = config.training.recompute_granularity == "full"
    own = e * config.model.hidden_size / whole * ((1 if full else 3) + (config.model.logit_scale != 1.0))
    layer = 0 if full else layer_activation_bytes(config, index)
    return layer + round(_tokens(config) * (own + _head(config)))


def _restored_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the workspace for restored activations: those of two consecutive layers at a time, minus the kept
    activations of later layers and the head, which are freed by then."""
    most = here = before = 0
    left = stage_activation_bytes(config, plan)
    for kept, gone in _layers(config, plan):
        left, before, here = left - (kept - gone), here, gone
        most = max(most, before + here - left)
    return most


@cache_by_reading
def recompute_workspace_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the most bytes that recomputation or offloading brings back at once, beside what is kept throughout.

    With full recompute these are a unit's activations without its input, with selective all that one module frees in a
    layer. Linear and sparse attention always recompute what is between their projections."""
    training, layers = config.training, range(plan.first_layer, plan.last_layer)
    mtp = config.model.mtp_layers if plan.has_head else range(0)
    if training.recompute_ahead:
        return recompute_workspace_bytes(_graph_config(config), plan)  # what an R restores counts as activations
    restored = _restored_bytes(config, plan) if training.offloaded_layers else 0
    linear = any(map(config.model.is_linear_layer, (*layers, *mtp)))
    core = round(_tokens(config) * _linear_core(config)) if linear else 0
    core = round(_sparse_core(config)) if config.model.is_sparse else core
    if training.recompute_granularity == "full":
        units = (sum(_layer_bytes(config, unit, "none")) for unit in recompute_units(config, plan))
        again = [unit - _unit_input_bytes(config) for unit in units]
        # An MTP layer also restores both norms' outputs; its own input is among its kept tensors.
        again += [2 * _unit_input_bytes(config) + layer for layer in _layer_bytes(config, mtp, "none")]
        return max(again, default=0) + restored + core
    if training.recompute_granularity == "none":
        return restored + core

    def most(index: int) -> float:
        kept = [*_attention(config, index), *_feed_forward(config, index)]
        freed = (sum(each.bytes for each in kept if name in each.freed_by) for name in training.recompute_modules)
        return max(freed, default=0.0)

    freed = round(_tokens(config) * max(map_layers(config.model, (*layers, *mtp), most), default=0.0))
    return max(freed, core) + restored


def _graph_config(config: RunConfig) -> RunConfig:
    """Return the config of the forward that records a graph: with recompute_ahead that of R, which keeps everything."""
    if not config.training.recompute_ahead:
        return config
    return replace(config, recompute_granularity="none", recompute_ahead=False)


@cache_by_reading
def stage_sizes(config: RunConfig, stages: tuple[StagePlan, ...]) -> Sizes:
    """Return the bytes of all stages: activations, tensors deferred for W, inputs kept for R, message, workspace."""
    kept = _graph_config(config)
    message = float(_unit_input_bytes(config))

    def of_stages(size: Callable[[RunConfig, StagePlan], int], of: RunConfig = config) -> tuple[float, ...]:
        return tuple(map_by_kind(stages, partial(kind_of_stage, config), lambda plan: float(size(of, plan))))

    return Sizes(
        activation=of_stages(stage_activation_bytes, kept),
        deferred=of_stages(deferred_bytes),
        kept_input=tuple(0.0 if plan.has_embedding else message for plan in stages),
        message=message,
        workspace=of_stages(recompute_workspace_bytes),
    )


def deferred_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes deferred for the W of one microbatch: input and output gradient of each product with a weight.

    With sequence parallelism this rank's part of an input is kept, and W gathers it again."""
    layers = range(plan.first_layer, plan.last_layer)
    elements = sum(map_layers(config.model, layers, lambda index: sum(_deferred_of_layer(config, index))))
    if plan.has_head:
        p, model = config.parallel, config.model
        h, whole = model.hidden_size, p.tp if p.sequence_parallel else 1
        elements += h / whole + model.padded_vocab_size / p.tp
        for index in model.mtp_layers:  # embedding, projection, layer, head
            elements += sum(_deferred_of_layer(config, index))
            elements += h + 3 * h / whole + h / whole + model.padded_vocab_size / p.tp
    return round(_tokens(config) * elements * ELEMENT_BYTES[config.training.precision])


def _deferred_of_layer(config: RunConfig, index: int) -> Iterator[float]:
    """Yield the elements per token of each product."""
    model, p = config.model, config.parallel
    e, exact, whole = _sizes(config)
    h = model.hidden_size
    queries, values = model.num_attention_heads * model.head_size, model.num_attention_heads * model.value_size
    if model.is_linear_layer(index):
        values = model.linear_num_value_heads * model.linear_value_head_dim
        yield h / whole + model.linear_channels[1] / p.tp
    elif model.multi_latent_attention:
        latent, q = model.kv_lora_rank, model.q_lora_rank
        # Both down-projections share one input.
        yield (h + latent + model.qk_pos_emb_head_dim + latent + (0 if q is None else q + q)) / whole
        yield (queries + model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)) / p.tp
        if model.is_sparse:  # gradients of the whole sequence, of which the queries' and weights' are views
            yield model.dsa_indexer_n_heads * (model.dsa_indexer_head_dim + 1) + model.dsa_indexer_head_dim / whole
    else:
        yield h / whole + model.query_groups * model.group_heads * model.head_size / p.tp
    yield values / p.tp + h
    if not model.has_mlp(index):
        return
    if not model.is_moe_layer(index):
        yield from _deferred_of_mlp(config, model.ffn_size / p.tp)
        return
    assert model.num_experts is not None
    shared = model.moe_shared_expert_intermediate_size
    # Shared experts keep the same input. The router computes in fp32 (fp64) on this rank's tokens.
    yield (0.0 if shared else h / p.tp) + exact / e * model.num_experts / p.tp
    rows = model.moe_router_topk / p.tp * rows_per_choice(config)
    yield rows * (h * p.expert_tp + (2 if model.is_gated else 1) * model.expert_ffn_size)
    yield rows * (model.expert_ffn_size + h * p.expert_tp)
    if shared is not None:
        yield from _deferred_of_mlp(config, shared / p.tp)


def _deferred_of_mlp(config: RunConfig, width: float) -> Iterator[float]:
    """Yield the elements of an MLP's two products, with `width` local channels."""
    h, p = config.model.hidden_size, config.parallel
    yield h / (p.tp if p.sequence_parallel else 1) + (2 if config.model.is_gated else 1) * width
    yield width + h

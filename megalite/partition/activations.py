"""Bytes of activations that one rank keeps for the backward, however much of them is computed again.

Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), term by term, so that other
widths, gates, grouped queries, experts and absent dropout count right: with GPT's shape and dropout the sum is the
paper's s·b·h·(10 + 24/t + 5·a·s/(h·t)). Left out is what has no factor of width: a norm's statistics, token numbers. A
test measures the model's own tensors against this."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

from megalite.config.describe import replace
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig, once_per_reading
from megalite.models.shapes import of_layers, once_per_kind
from megalite.partition.stages import StagePlan, kind_of_stage
from megalite.pipeline.ir.memory import Sizes

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_INDEX_BYTES = 8


class _Kept(NamedTuple):
    """One tensor of a layer."""

    bytes: float  # for each token of this rank's part of the sequence, s/cp
    freed_by: frozenset[str] = frozenset()  # modules of selective recompute any of which makes it again instead
    # Modules of fine-grained offloading that save it, one or several; it stays if others keep it too, or none of these.
    saved_by: str = ""


def _sizes(config: RunConfig) -> tuple[int, int, int]:
    """Bytes of an element and of a number that is kept exact; parts that sequence parallelism splits a tensor in."""
    e, p = ELEMENT_BYTES[config.training.precision], config.parallel
    return e, max(4, e), p.tp if p.sequence_parallel else 1


def _attention_widths(config: RunConfig) -> tuple[int, int]:
    """Channels of the queries, and of keys and values together, over all tp ranks: a head that ranks share counts for each."""
    model = config.model
    groups = max(model.query_groups, config.parallel.tp)
    return model.num_attention_heads * model.head_size, 2 * groups * model.head_size


def kept_share(config: RunConfig, parts: int | None = None) -> float:
    """Rows that go to experts for each choice of a token: those within the capacity, or with padding all places.

    `parts`: ranks that share a sequence, instead of the config's."""
    model, p, s = config.model, config.parallel, config.training.seq_length
    if not model.moe_pad_expert_input_to_capacity or model.num_experts is None:
        return min(1.0, model.moe_expert_capacity_factor or 1.0)
    own = max(1, s // (parts or p.tp * p.cp))
    return min(model.expert_capacity(s), own) * model.num_experts / (own * model.moe_router_topk)


def _attention(config: RunConfig, layer_index: int) -> Iterator[_Kept]:
    model, p = config.model, config.parallel
    e, exact, whole = _sizes(config)
    queries, keys_and_values = _attention_widths(config)
    exchanged = p.cp_heads > 1
    core, training = frozenset({"core_attn"}), config.training
    up = training.recompute_granularity == "selective" and "mla_up_proj" in training.recompute_modules
    # The layer's input, kept by the norm.
    yield _Kept(e * model.hidden_size / whole, saved_by="attn_norm" if model.pre_norms else "qkv_linear")
    if model.pre_norms:  # its output, by the projection, or for queries to be made again
        freed_by = frozenset() if up and model.q_lora_rank is None else frozenset({"layernorm"})
        yield _Kept(e * model.hidden_size / whole, freed_by, "qkv_linear")
    if exchanged:  # keys are repeated until each cp rank gets one
        keys_and_values = max(keys_and_values, 2 * p.tp * p.cp_heads * model.head_size)
    of_latents = frozenset({"mla_up_proj"}) if model.multi_latent_attention else frozenset[str]()
    # Those gathered for scores are kept instead, if what this rank has is no part of the queries' memory.
    gathered = model.attention_dropout > 0.0 and p.cp > p.cp_heads
    apart = exchanged or model.has_rope(layer_index) or model.qk_norm or keys_and_values < 2 * queries
    again = training.recompute_granularity == "selective" and "core_attn" in training.recompute_modules
    own = 0 if gathered and not again and (apart or model.multi_latent_attention) else keys_and_values
    # Values that lie in what norms of queries and keys keep, where queries share no key.
    joint = model.qk_norm and not (exchanged or model.qk_norm_all_heads or model.multi_latent_attention)
    joint_values = own // 2 if joint and keys_and_values == 2 * queries else 0
    yield _Kept(e * (queries + own - joint_values) / p.tp, of_latents, "core_attn")
    padded = model.value_size < model.head_size  # to the width of the keys
    if model.multi_latent_attention:
        yield _Kept(e * _latents(model) / whole, saved_by="qkv_linear")
        if up and not model.qk_norm:  # the shared key, in what it came with
            yield _Kept(e * (model.kv_lora_rank + model.qk_pos_emb_head_dim) / whole, saved_by="qkv_linear")
    elif model.qk_norm:
        # These norms keep their input: the projection's output, in which the values lie as well where queries share none.
        projected = _attention_widths(config)[1]
        without = not exchanged or projected < 2 * queries or model.qk_norm_all_heads
        both = "qkv_linear core_attn" if joint_values else "qkv_linear"
        yield _Kept(e * (queries + projected // (1 + without) + joint_values) / p.tp, saved_by=both)
        if not model.qk_norm_all_heads:
            # The statistics of each head; a number a token or less is not worth a copy.
            of_head = exact
            if model.normalization == "LayerNorm":  # which has two, on a CPU in the type of its input
                of_head = 2 * (e if training.device == "cpu" else exact)
            for heads in (queries // model.head_size, keys_and_values // (2 * model.head_size)):
                few = heads * whole <= p.tp
                yield _Kept(of_head * heads / p.tp, saved_by="" if few else "qkv_linear")
    if model.attention_dropout:
        # The softmax, its mask and what is left of it; and keys and values of the ranks that do not exchange heads.
        sinks = exact if model.softmax_type != "vanilla" else 0  # their share
        row = (2 * e + 1) * config.training.seq_length + sinks
        yield _Kept(row * model.num_attention_heads / p.tp, core, "core_attn")
        if gathered:
            yield _Kept(e * keys_and_values * (p.cp // p.cp_heads) / p.tp, core, "core_attn")
    else:
        # The logsumexp of the scores; a number a token or less is not worth a copy.
        few = model.num_attention_heads * whole <= p.tp
        yield _Kept(exact * model.num_attention_heads / p.tp, core, "" if few else "core_attn")
        if exchanged or padded:  # the core's own output, before heads go home or padding comes off
            yield _Kept(e * queries / p.tp, core, "core_attn")
        if _repeats_keys(config, layer_index):
            yield _Kept(e * (2 * queries - keys_and_values) / p.tp, core, "core_attn")
    alone = exchanged or padded or model.attention_dropout or again
    by = "attn_proj" if alone else "attn_proj core_attn"
    yield _Kept(e * model.num_attention_heads * model.value_size / p.tp, saved_by=by)
    if model.post_norms:
        yield _Kept(e * model.hidden_size / whole, saved_by="attn_norm")
    if model.hidden_dropout:
        yield _Kept(model.hidden_size / whole, saved_by="mlp_norm" if model.pre_norms else "")


def _latents(model: ModelConfig) -> int:
    """Channels of the latents of multi-latent attention that norms and the projections behind them keep."""
    queries, keys = model.q_lora_rank or 0, model.kv_lora_rank
    # A norm of the keys' latent keeps all that comes with it.
    return 2 * queries + 2 * keys + model.qk_pos_emb_head_dim if model.qk_norm else queries + keys


def _repeats_keys(config: RunConfig, layer_index: int) -> bool:
    """Grouped keys and values are kept once for each query head: neither the CPU's fused kernel nor CUDA's for 32 bits has
    a grouped form. Where attention is cut into tiles they are repeated for a tile at a time."""
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
    """Input and output of a nonlinearity of `width` local elements per token, which recompute of any of `modules` frees."""
    e = ELEMENT_BYTES[config.training.precision]
    yield _Kept((2 if config.model.is_gated else 1) * e * width, frozenset(modules), "mlp_act")
    yield _Kept(e * width, frozenset({*modules, "mlp_act"}))


def _experts(config: RunConfig) -> Iterator[_Kept]:
    """What a MoE layer keeps beside its input if every expert gets the same number of tokens."""
    model, p = config.model, config.parallel
    e, exact, whole = _sizes(config)
    moe = frozenset({"moe"})
    assert model.num_experts is not None
    choices = model.moe_router_topk / p.tp  # of one token, on each rank that shares it
    rows = choices * kept_share(config)
    yield _Kept(choices * (exact + _INDEX_BYTES) + rows * _INDEX_BYTES, moe)  # weights, experts, order
    tables = model.score_table + bool(model.moe_z_loss_coeff)
    if model.moe_router_score_function == "sigmoid":
        tables += bool(model.moe_aux_loss_coeff)  # scores over their sum
        yield _Kept(choices * exact * (model.moe_router_topk > 1), moe)  # scores of the chosen
    yield _Kept(exact * tables * model.num_experts / p.tp, moe)
    yield _Kept(e * model.hidden_size * rows * p.expert_tp, moe, "expert_fc1")  # the rows that experts work on
    if p.ep * p.expert_tp > 1:
        yield _Kept(_INDEX_BYTES * rows * p.expert_tp, moe)
    yield from _inner(config, model.expert_ffn_size * rows, "moe")
    yield _Kept(e * model.hidden_size * rows, moe)  # their outputs, for the gradient of the router's weights
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _inner(config, model.moe_shared_expert_intermediate_size / p.tp, "moe", "shared_experts")
        if model.moe_shared_expert_gate:
            yield _Kept(e * (model.hidden_size + 1) / whole, moe)


def _tokens(config: RunConfig) -> int:
    return config.training.seq_length // config.parallel.cp * config.training.micro_batch_size


def _unit_input_bytes(config: RunConfig) -> int:
    """A stage's input on one rank: the message between stages, and all that full recompute keeps of a unit."""
    e, _, whole = _sizes(config)
    return _tokens(config) * config.model.hidden_size * e // whole


def layer_activation_bytes(
    config: RunConfig, layer_index: int = 0, *, granularity: str | None = None, saved_by: frozenset[str] | None = None
) -> int:
    """Bytes that one layer keeps for the backward of one microbatch, on one rank; with full recompute a unit of one.

    `granularity`: to assume instead of the config's. `saved_by`: what these modules alone save; None: everything."""
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
    """The layers of a stage that full recompute runs again, by unit; none without full recompute."""
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
    return of_layers(config.model, layers, what)


def _layers(config: RunConfig, plan: StagePlan) -> list[tuple[int, int]]:
    """Of each layer of a stage what it keeps for the backward of one microbatch, and what of it is in host memory."""
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
            holds_input = gone > 0
        else:
            holds_input = modules is None or ("attn_norm" if config.model.pre_norms else "qkv_linear") in modules
        if index == plan.first_layer and not plan.has_embedding and holds_input:
            gone -= _unit_input_bytes(config)  # the stage's input, which waits for its gradient
        found.append((kept, gone if offloaded else 0))
    return found


def stage_activation_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that a stage keeps on the device for the backward of one microbatch, with embedding and head if it has them."""
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
    """What of one microbatch's is in host memory."""
    # Most configs offload nothing, and are asked often.
    return sum(gone for _, gone in _layers(with_graphs(config), plan)) if config.training.offloaded_layers else 0


def _head(config: RunConfig) -> float:
    """For each token inputs of final norm and output projection; logits, or what the loss puts in their place."""
    model, (e, _, whole) = config.model, _sizes(config)
    capped = 1 + (model.final_logit_softcapping is not None)
    return 2 * e * model.hidden_size / whole + capped * e * model.padded_vocab_size / config.parallel.tp


def _mtp_bytes(config: RunConfig, index: int) -> int:
    """Of a layer that predicts a further token: itself, its own part of the head, and unless it is recomputed the embedding
    and both norms' outputs beside each other. The hidden state before it is the head's input already."""
    e, _, whole = _sizes(config)
    full = config.training.recompute_granularity == "full"
    own = e * config.model.hidden_size / whole * (1 if full else 3)
    layer = 0 if full else layer_activation_bytes(config, index)
    return layer + round(_tokens(config) * (own + _head(config)))


def _restored_bytes(config: RunConfig, plan: StagePlan) -> int:
    """What was offloaded of two layers is back at a time, or of the last one beside the layer behind it: what that takes
    more than what is kept of the layers behind, and of the head, which is gone by then."""
    most = here = before = 0
    left = stage_activation_bytes(config, plan)
    for kept, gone in _layers(config, plan):
        left, before, here = left - (kept - gone), here, gone
        most = max(most, before + here - left)
    return most


@once_per_reading
def recompute_workspace_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that recomputation, or offloading, brings back at most at once, beside what is kept all along.

    With full recompute that is a unit's activations but its input, with selective all that one module frees in a layer.
    """
    training, layers = config.training, range(plan.first_layer, plan.last_layer)
    mtp = config.model.mtp_layers if plan.has_head else range(0)
    if training.recompute_ahead:
        return recompute_workspace_bytes(with_graphs(config), plan)  # what an R brings back counts as activations
    restored = _restored_bytes(config, plan) if training.offloaded_layers else 0
    if training.recompute_granularity == "full":
        units = (sum(_layer_bytes(config, unit, "none")) for unit in recompute_units(config, plan))
        again = [unit - _unit_input_bytes(config) for unit in units]
        # Both norms' outputs come back too, the layer's own input among what it keeps.
        again += [2 * _unit_input_bytes(config) + layer for layer in _layer_bytes(config, mtp, "none")]
        return max(again, default=0) + restored
    if training.recompute_granularity == "none":
        return restored

    def most(index: int) -> float:
        kept = [*_attention(config, index), *_feed_forward(config, index)]
        freed = (sum(each.bytes for each in kept if name in each.freed_by) for name in training.recompute_modules)
        return max(freed, default=0.0)

    return round(_tokens(config) * max(of_layers(config.model, (*layers, *mtp), most), default=0.0)) + restored


def with_graphs(config: RunConfig) -> RunConfig:
    """What is kept of a stage from the forward that has a graph on: with recompute_ahead from R on, all of it."""
    return (
        replace(config, recompute_granularity="none", recompute_ahead=False)
        if config.training.recompute_ahead
        else config
    )


@once_per_reading
def stage_sizes(config: RunConfig, stages: tuple[StagePlan, ...]) -> Sizes:
    """Activations, what a split backward keeps for W, what recompute-ahead keeps for R, a message between stages, and
    what a backward computes again; of all stages of the pipeline, in order."""
    kept = with_graphs(config)
    message = float(_unit_input_bytes(config))

    def of_stages(size: Callable[[RunConfig, StagePlan], int], of: RunConfig = config) -> tuple[float, ...]:
        return tuple(once_per_kind(stages, partial(kind_of_stage, config), lambda plan: float(size(of, plan))))

    return Sizes(
        activation=of_stages(stage_activation_bytes, kept),
        deferred=of_stages(deferred_bytes),
        kept_input=tuple(0.0 if plan.has_embedding else message for plan in stages),
        message=message,
        workspace=of_stages(recompute_workspace_bytes),
    )


def deferred_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that wait for the W of one microbatch: input and output gradient of each matrix product with a weight.

    With sequence parallelism an input is kept as this rank's part; W gathers it again."""
    layers = range(plan.first_layer, plan.last_layer)
    elements = sum(of_layers(config.model, layers, lambda index: sum(_deferred_of_layer(config, index))))
    if plan.has_head:
        p, model = config.parallel, config.model
        h, whole = model.hidden_size, p.tp if p.sequence_parallel else 1
        elements += h / whole + model.padded_vocab_size / p.tp
        for index in model.mtp_layers:  # lookup, projection, layer, head
            elements += sum(_deferred_of_layer(config, index))
            elements += h + 3 * h / whole + h / whole + model.padded_vocab_size / p.tp
    return round(_tokens(config) * elements * ELEMENT_BYTES[config.training.precision])


def _deferred_of_layer(config: RunConfig, index: int) -> Iterator[float]:
    """Elements a token, product by product."""
    model, p = config.model, config.parallel
    e, exact, whole = _sizes(config)
    h = model.hidden_size
    queries, values = model.num_attention_heads * model.head_size, model.num_attention_heads * model.value_size
    if model.multi_latent_attention:
        latent, q = model.kv_lora_rank, model.q_lora_rank
        # The input is kept once for both products down.
        yield (h + latent + model.qk_pos_emb_head_dim + latent + (0 if q is None else q + q)) / whole
        yield (queries + model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)) / p.tp
    else:
        yield h / whole + (queries + 2 * model.query_groups * model.head_size) / p.tp
    yield values / p.tp + h
    if not model.is_moe_layer(index):
        yield from _deferred_of_mlp(config, model.ffn_size / p.tp)
        return
    assert model.num_experts is not None
    shared = model.moe_shared_expert_intermediate_size
    # Shared experts keep the same input. The router works in fp32 (fp64) on this rank's tokens.
    yield (0.0 if shared else h / p.tp) + exact / e * model.num_experts / p.tp
    rows = model.moe_router_topk / p.tp * kept_share(config)
    yield rows * (h * p.expert_tp + (2 if model.is_gated else 1) * model.expert_ffn_size)
    yield rows * (model.expert_ffn_size + h * p.expert_tp)
    if shared is not None:
        yield from _deferred_of_mlp(config, shared / p.tp)


def _deferred_of_mlp(config: RunConfig, width: float) -> Iterator[float]:
    """The two products of an MLP of `width` local channels."""
    h, p = config.model.hidden_size, config.parallel
    yield h / (p.tp if p.sequence_parallel else 1) + (2 if config.model.is_gated else 1) * width
    yield width + h

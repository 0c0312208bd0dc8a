"""Compute names, shapes and FLOPs of the GPT's parameters, without torch.

The planner, the dry run and the MFU use them. The modules create their parameters independently; a test compares both
for every family. Shapes are those of the full tensors, whatever the layout.

Letters: h hidden size, d head size, g query groups (key/value heads), q query heads of a group, f MLP width, E experts,
V padded vocabulary, P rows of the position embedding, L layers, s sequence length."""

import fnmatch
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from megalite.config.errors import ConfigError
from megalite.config.model import BLOCKS, BlockFacts, ModelConfig
from megalite.config.optimizer import OPTIMIZERS, OptimizerConfig, parse_lr_multipliers
from megalite.config.run import RunConfig, cache_by_object

Init = Literal["normal", "residual", "zeros", "ones", "other"]
Convention = Literal["palm", "megatron"]
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter: full shape, split over tensor-parallel ranks, weight decay and initialization."""

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None  # dimension split by tensor parallelism; None: replicated
    decay: bool  # weight decay applies: to matrices, not to biases and most norms
    # normal: N(0, std²); residual: N(0, std²/branches), for projections into the residual stream; other: the layer has its
    # own distribution
    init: Init
    expert: bool = False
    """Dimension 0 is the experts, split over ep; `shard_dim`, if any, is split over expert-tp ranks."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix, which multiplies tokens."""
        return self.decay and len(self.shape) > 1


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Layers `first_layer <= i < last_layer` of a model, and whether embedding and head belong to their stage."""

    first_layer: int
    last_layer: int
    has_embedding: bool
    has_head: bool


def is_hidden_matrix(name: str, shape: tuple[int, ...], *, decay: bool) -> bool:
    """Return whether the parameter is a matrix outside embedding and head; Muon orthogonalizes these. The filters of a
    depthwise convolution are not a matrix: no sum runs over them."""
    return (
        decay
        and len(shape) >= 2
        and name.split(".")[0] not in ("embedding", "head")
        and not name.endswith(".conv.weight")
    )


WORD = "embedding.word.weight"
VOCABULARY = frozenset({WORD, "head.weight"})
"""Parameters with a row per token: the word embedding and the output head. They have `decoupled_lr`, as in Megatron-LM."""


class LearningRate(NamedTuple):
    """Difference of a parameter's learning rate from `lr`; all parameters of a bucket share it."""

    decoupled: bool = False
    """Whether `decoupled_lr` replaces `lr`."""
    multiplier: float = 1.0
    """Product of the matching `lr_multipliers` and μP's factor."""


def learning_rate(
    name: str, shape: tuple[int, ...], *, decay: bool, model: ModelConfig, config: OptimizerConfig
) -> LearningRate:
    """Return a parameter's learning rate by its name; `use_mup` scales that of hidden matrices."""
    factors = [
        factor for pattern, factor in parse_lr_multipliers(config.lr_multipliers) if fnmatch.fnmatchcase(name, pattern)
    ]
    if is_hidden_matrix(name, shape, decay=decay):
        factors.append(1 / model.width_multiplier)
    return LearningRate(config.decoupled_lr is not None and name in VOCABULARY, math.prod(factors))


class BucketTraits(NamedTuple):
    """Traits that all parameters of a bucket share, besides their split: fields of `BucketKind`."""

    orthogonal: bool
    learning_rate: LearningRate
    fp8: bool
    """Whether it is gathered in fp8: weights of column- and row-parallel layers with fp8 products."""


def bucket_traits(
    name: str, shape: tuple[int, ...], *, decay: bool, shard_dim: int | None, expert: bool, config: RunConfig
) -> BucketTraits:
    """Return the bucket traits of a parameter, by its name."""
    model, fp8 = config.model, False
    if (
        config.parallel.fp8_param_gather
        and shard_dim is not None
        and is_hidden_matrix(name, shape, decay=decay)
        and not expert
    ):
        first, index, *_ = name.split(".")
        fp8 = first == "layers" and 0 < int(index) < model.num_layers - 1
    return BucketTraits(
        orthogonal=OPTIMIZERS.facts(config.optimizer.optimizer).separate_matrices
        and is_hidden_matrix(name, shape, decay=decay),
        learning_rate=learning_rate(name, shape, decay=decay, model=model, config=config.optimizer),
        fp8=fp8,
    )


def check_lr_multipliers(model: ModelConfig, config: OptimizerConfig) -> None:
    """Raise ConfigError if a pattern matches no parameter of the model."""
    if config.lr_multipliers:
        names = [shape.name for shape in stage_shapes(model, 0, model.num_layers, True, True)]
        for pattern, _ in parse_lr_multipliers(config.lr_multipliers):
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"lr_multipliers has {pattern}, which matches no parameter; names are e.g. "
                    f"{names[0]}, {names[-1]}: use 'layers.0.*' for a layer, '*.bias' for all biases"
                )


def _matrix(
    name: str, shape: tuple[int, ...], shard_dim: int | None, init: Init = "normal", expert: bool = False
) -> ParameterShape:
    return ParameterShape(name=name, shape=shape, shard_dim=shard_dim, decay=True, init=init, expert=expert)


def _bias(name: str, shape: tuple[int, ...], shard_dim: int | None) -> ParameterShape:
    return ParameterShape(name=name, shape=shape, shard_dim=shard_dim, decay=False, init="zeros")


def _linear(
    name: str, shape: tuple[int, ...], shard_dim: int, *, bias: bool, init: Init = "normal"
) -> list[ParameterShape]:
    """Return weight and bias of a layer; the bias of a row-parallel layer is replicated."""
    split = None if shard_dim == len(shape) - 1 else shard_dim
    return [_matrix(f"{name}.weight", shape, shard_dim, init), *([_bias(f"{name}.bias", shape[:-1], split)] * bias)]


def _norm(model: ModelConfig, name: str, size: int | None = None) -> list[ParameterShape]:
    """Return a norm's parameters over `size` channels; default h."""
    shape = (size or model.hidden_size,)
    init: Init = "zeros" if model.norm_zero_centered else "ones"
    weight = ParameterShape(name=f"{name}.weight", shape=shape, shard_dim=None, decay=False, init=init)
    return [weight] + ([_bias(f"{name}.bias", shape, None)] if model.normalization == "LayerNorm" else [])


def _attention(model: ModelConfig, prefix: str) -> list[ParameterShape]:
    h, d = model.hidden_size, model.head_size
    # Rows are grouped by key/value head (its query heads, then key, then value), so an equal split of the rows assigns
    # whole groups to each rank.
    rows = model.query_groups * model.group_heads * d
    shapes = _sinks(model, prefix)
    shapes += _linear(f"{prefix}.qkv", (rows, h), 0, bias=model.add_bias_linear or model.add_qkv_bias)
    if model.qk_norm:
        # One weight for all heads: each tensor-parallel rank has a copy, and its own heads' part of the gradient.
        together, split = model.qk_norm_all_heads, 0 if model.qk_norm_all_heads else None
        norms = _norm(model, f"{prefix}.q_norm", model.num_attention_heads * d if together else d)
        norms += _norm(model, f"{prefix}.k_norm", model.query_groups * d if together else d)
        shapes += [replace(shape, shard_dim=split, decay=model.apply_wd_to_qk_layernorm) for shape in norms]
    return shapes + _attention_out(model, prefix)


def _sinks(model: ModelConfig, prefix: str) -> list[ParameterShape]:
    if model.softmax_type != "learnable":
        return []
    return [replace(_matrix(f"{prefix}.sinks", (model.num_attention_heads,), 0), decay=False)]


def _attention_out(model: ModelConfig, prefix: str) -> list[ParameterShape]:
    shape = (model.hidden_size, model.num_attention_heads * model.value_size)
    return _linear(f"{prefix}.out", shape, 1, bias=model.add_bias_linear, init="residual")


def _latent_attention(model: ModelConfig, prefix: str) -> list[ParameterShape]:
    h, heads, r, q = model.hidden_size, model.num_attention_heads, model.kv_lora_rank, model.q_lora_rank
    shapes = _sinks(model, prefix)
    if q is None:
        shapes += [_matrix(f"{prefix}.q.weight", (heads * model.head_size, h), 0)]
    else:
        shapes += [_matrix(f"{prefix}.q_down.weight", (q, h), None)]
        shapes += _norm(model, f"{prefix}.q_latent_norm", q) if model.qk_norm else []
        shapes.append(_matrix(f"{prefix}.q_up.weight", (heads * model.head_size, q), 0))
    shapes.append(_matrix(f"{prefix}.kv_down.weight", (r + model.qk_pos_emb_head_dim, h), None))
    shapes += _norm(model, f"{prefix}.kv_latent_norm", r) if model.qk_norm else []
    shapes.append(_matrix(f"{prefix}.kv_up.weight", (heads * (model.qk_head_dim + model.v_head_dim), r), 0))
    return shapes + _attention_out(model, prefix) + (_indexer(model, f"{prefix}.indexer") if model.is_sparse else [])


def _indexer(model: ModelConfig, prefix: str) -> list[ParameterShape]:
    h, heads, size = model.hidden_size, model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
    return [
        _matrix(f"{prefix}.q_up.weight", (heads * size, model.q_lora_rank or h), None),
        _matrix(f"{prefix}.key.weight", (size, h), None),
        *_norm(replace(model, normalization="LayerNorm"), f"{prefix}.key_norm", size),
        _matrix(f"{prefix}.head_weights.weight", (heads, h), None),
    ]


def _linear_attention(model: ModelConfig, prefix: str) -> list[ParameterShape]:
    h, values, (convolved, projected) = model.hidden_size, model.linear_num_value_heads, model.linear_channels
    width = values * model.linear_value_head_dim
    conv = _matrix(f"{prefix}.conv.weight", (convolved, model.linear_conv_kernel_dim), 0, "other")
    step = replace(_bias(f"{prefix}.dt_bias", (values,), 0), init="ones")
    rate = replace(step, name=f"{prefix}.a_log", init="other")
    norm = replace(step, name=f"{prefix}.norm.weight", shape=(model.linear_value_head_dim,), shard_dim=None)
    into = _matrix(f"{prefix}.in_proj.weight", (projected, h), 0)
    out = _matrix(f"{prefix}.out.weight", (h, width), 1, "residual")
    if model.linear_corrects:
        return [conv, rate, step, into, norm, out]
    bias, skip = _bias(f"{prefix}.conv.bias", (convolved,), 0), replace(step, name=f"{prefix}.skip")
    return [conv, bias, rate, replace(step, init="other"), skip, replace(norm, shape=(width,), shard_dim=0), into, out]


def _mlp(model: ModelConfig, prefix: str, f: int) -> list[ParameterShape]:
    h = model.hidden_size
    # Gate and up projection are stacked on a separate dimension: a split of [2f, h] would give rank 0 only gates.
    up, bias = (2, f, h) if model.is_gated else (f, h), model.add_bias_linear
    down = _linear(f"{prefix}.down", (h, f), 1, bias=bias, init="residual")
    return _linear(f"{prefix}.up", up, len(up) - 2, bias=bias) + down


def _moe(model: ModelConfig, prefix: str) -> list[ParameterShape]:
    assert model.num_experts is not None
    h, f, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
    stacked = (experts, 2, f) if model.is_gated else (experts, f)
    shared, biases = model.moe_shared_expert_intermediate_size, list[ParameterShape]()
    if model.moe_add_bias_linear:
        biases = [_bias(f"{prefix}.experts.up.bias", stacked, len(stacked) - 1)]
        biases.append(_bias(f"{prefix}.experts.down.bias", (experts, h), None))
    return [
        _matrix(f"{prefix}.router.weight", (experts, h), None),
        *([_bias(f"{prefix}.router.linear_bias", (experts,), None)] if biases else []),
        _matrix(f"{prefix}.experts.up.weight", (*stacked, h), len(stacked) - 1, expert=True),
        _matrix(f"{prefix}.experts.down.weight", (experts, h, f), 2, "residual", expert=True),
        *(replace(bias, expert=True) for bias in biases),
        *([] if shared is None else _mlp(model, f"{prefix}.shared", shared)),
        *([_matrix(f"{prefix}.shared_gate.weight", (1, h), None)] if model.moe_shared_expert_gate else []),
    ]


def buffer_shapes(model: ModelConfig, first_layer: int, last_layer: int) -> list[ParameterShape]:
    """Return the saved tensors without gradient: the expert biases of routers, fp32."""
    if not model.moe_router_enable_expert_bias:
        return []
    indices = [*range(first_layer, last_layer), *(model.mtp_layers if last_layer == model.num_layers else ())]
    names = [f"layers.{index}.moe.router" for index in indices if model.is_moe_layer(index)]
    return [_bias(f"{name}.bias", (model.num_experts or 0,), None) for name in names]


def layer_shapes(model: ModelConfig, layer_index: int, block: str | None = None) -> list[ParameterShape]:
    """Return the parameters of block `layer_index` (counted over the whole model), in the order of the forward pass.

    `block`: kind of block instead of the model's."""
    facts: BlockFacts = BLOCKS.facts(block or model.block)
    if facts.shapes is not None:
        return facts.shapes(model, layer_index)
    name, experts = f"layers.{layer_index}", model.is_moe_layer(layer_index)
    shapes_of_layer: list[ParameterShape] = []
    kind = _latent_attention if model.multi_latent_attention else _attention
    attention = (_linear_attention if model.is_linear_layer(layer_index) else kind)(model, f"{name}.attention")
    branches = {"attention": attention}
    if model.has_mlp(layer_index):
        branches["mlp"] = _moe(model, f"{name}.moe") if experts else _mlp(model, f"{name}.mlp", model.ffn_size)
    for branch, shapes in branches.items():
        shapes_of_layer += _norm(model, f"{name}.{branch}_norm") if model.pre_norms else []
        shapes_of_layer += shapes + (_norm(model, f"{name}.{branch}_post_norm") if model.post_norms else [])
    return shapes_of_layer


def _word_embedding(model: ModelConfig) -> ParameterShape:
    return _matrix(WORD, (model.padded_vocab_size, model.hidden_size), 0)


def embedding_shapes(model: ModelConfig) -> list[ParameterShape]:
    """Return the word embedding [V, h] and, with learned positions, the position embedding [P, h].

    Raises:
        ValueError: vocab_size, or with learned positions max_position_embeddings, is not set yet."""
    shapes = [_word_embedding(model)]
    if model.position_embedding_type == "learned_absolute":
        if model.max_position_embeddings is None:
            raise ValueError("max_position_embeddings is not set: validate() the config first")
        shape = (model.max_position_embeddings, model.hidden_size)
        shapes.append(_matrix("embedding.position.weight", shape, None))
    return shapes


def head_shapes(model: ModelConfig) -> list[ParameterShape]:
    """Return the parameters of MTP layers, final norm and, unless tied to the embedding, the output matrix [V, h]."""
    head = [] if model.tie_embeddings else [_matrix("head.weight", (model.padded_vocab_size, model.hidden_size), 0)]
    mtp = [shape for index in model.mtp_layers for shape in _mtp_shapes(model, index)]
    return [*mtp, *_norm(model, "final_norm"), *head]


def _mtp_shapes(model: ModelConfig, index: int) -> list[ParameterShape]:
    name, h = f"layers.{index}", model.hidden_size
    return [
        *_norm(model, f"{name}.embedding_norm"),
        *_norm(model, f"{name}.hidden_norm"),
        _matrix(f"{name}.projection.weight", (h, 2 * h), None),
        *layer_shapes(model, index),
        *_norm(model, f"{name}.final_norm"),
    ]


def needs_copy(model: ModelConfig) -> bool:
    """Return whether the last of several stages needs a copy of the word embedding: for its logits, or for MTP."""
    return model.tie_embeddings or model.mtp_num_layers > 0


def stage_shapes(
    model: ModelConfig, first_layer: int, last_layer: int, has_embedding: bool, has_head: bool
) -> list[ParameterShape]:
    """Return the parameters of a stage with layers `first_layer <= i < last_layer`.

    A stage with the head and without the embedding may have a copy of the word embedding (`needs_copy`), listed here
    under the embedding's name: it takes memory on both ranks although `parameter_count` counts it once."""
    shapes = embedding_shapes(model) if has_embedding else []
    for index in range(first_layer, last_layer):
        shapes.extend(layer_shapes(model, index))
    if has_head:
        if needs_copy(model) and not has_embedding:
            shapes.append(_word_embedding(model))
        shapes.extend(head_shapes(model))
    return shapes


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters, with the padded vocabulary and a tied embedding counted once."""
    return sum(shape.size for shape in stage_shapes(model, 0, model.num_layers, True, True))


def attention_core_flops(model: ModelConfig, layer_index: int, seq_length: int, convention: Convention = "palm") -> int:
    """Return the FLOPs per token of a layer's two attention products, q·kᵀ and P·v, in a sequence of `seq_length`.

    palm: 4·s·(heads·d) for all s positions (d is the mean width if values have a different one); a sliding window w < s
    makes that 4·w·(heads·d). megatron counts only the keys under the causal mask: s/2 on average, so half of that, or
    w - w²/2s with a window, which gives 4·(w - w²/2s)·(heads·d).
    Sparse attention has the chosen keys as a window, and 2·s FLOPs per channel of the indexer's queries (Megatron-LM counts
    all keys and no indexer).
    Linear attention has, as in Megatron-LM, 8 FLOPs per number of each value head's state (dk·dv), Mamba-2 7, in both."""
    if model.is_linear_layer(layer_index):
        state = model.linear_key_head_dim * model.linear_value_head_dim
        return (7 + model.linear_corrects) * model.linear_num_value_heads * state
    window = model.sliding_window if model.has_window(layer_index) else None
    keys = min(seq_length, (model.dsa_indexer_topk if model.is_sparse else window) or seq_length)
    flops = 2 * keys * model.num_attention_heads * (model.head_size + model.value_size)
    index = 2 * seq_length * model.dsa_indexer_n_heads * model.dsa_indexer_head_dim if model.is_sparse else 0
    if convention == "megatron":
        return flops * (2 * seq_length - keys) // (2 * seq_length) + index // 2
    return flops + index


def layer_forward_flops(model: ModelConfig, layer_index: int, seq_length: int, convention: Convention = "palm") -> int:
    """Return the FLOPs per token of layer `layer_index`'s forward, in a sequence of `seq_length`.

    2 per weight of the matrices that multiply a token (with experts, top-k of them), plus the attention core. Norms,
    activations and softmax are not counted."""
    weights = 0
    for shape in layer_shapes(model, layer_index):
        if shape.multiplies:
            weights += shape.size // (model.num_experts or 1) * model.moe_router_topk if shape.expert else shape.size
    return 2 * weights + attention_core_flops(model, layer_index, seq_length, convention)


def map_by_kind(items: Iterable[S], kind: Callable[[S], Hashable], of: Callable[[S], T]) -> list[T]:
    """Return `of(item)` for each item, computed once per kind."""
    items = list(items)
    kinds = list(map(kind, items))
    known = {key: of(item) for key, item in dict(zip(kinds, items, strict=True)).items()}
    return [known[key] for key in kinds]


@cache_by_object()
def layer_kinds(model: ModelConfig) -> tuple[Hashable, ...]:
    """Return the kind of each layer; layers of one kind differ only in their number."""
    indices = range(model.mtp_layers.stop)
    if BLOCKS.facts(model.block).shapes is not None:
        return tuple(indices)
    facts = (model.is_moe_layer, model.has_mlp, model.has_window, model.has_rope, model.is_linear_layer)
    return tuple([tuple([fact(index) for fact in facts]) for index in indices])


def map_layers(model: ModelConfig, layers: Iterable[int], of: Callable[[int], T]) -> list[T]:
    """Return `of(layer)` for each of these layers, computed once per kind."""
    return map_by_kind(layers, layer_kinds(model).__getitem__, of)


def layers_forward_flops(
    model: ModelConfig, layers: Iterable[int], seq_length: int, convention: Convention = "palm"
) -> list[int]:
    """Return `layer_forward_flops` of each of these layers."""
    return map_layers(model, layers, lambda index: layer_forward_flops(model, index, seq_length, convention))


def head_forward_flops(model: ModelConfig) -> int:
    """Return the FLOPs per token of the output projection's forward: 2·V·h. The embedding, a lookup, has none."""
    return 2 * model.padded_vocab_size * model.hidden_size


def end_forward_flops(model: ModelConfig, seq_length: int, convention: Convention = "palm") -> int:
    """Return the FLOPs per token after the last layer: the head; per MTP layer a projection (4·h²), block and head."""
    mtp = sum(layers_forward_flops(model, model.mtp_layers, seq_length, convention))
    mtp += len(model.mtp_layers) * 4 * model.hidden_size**2
    return mtp + (1 + len(model.mtp_layers)) * head_forward_flops(model)


def flops_per_token(model: ModelConfig, seq_length: int, convention: Convention = "palm") -> int:
    """Return the model FLOPs per token of forward and backward, without recomputation.

    palm (Chowdhery et al. 2022, appendix B, the usual MFU): 6·N + 12·L·(heads·d)·s, where N is the number of weights
    that multiply a token (layers and output head, without embedding lookup, norms and biases). For GPT-3's shape that
    is 72·L·h²·(1 + s/6h + V/12hL), Narayanan et al. 2021.
    megatron (Megatron-LM since 2025): the same with causal attention, 6·L·(heads·d)·s."""
    layers = sum(layers_forward_flops(model, range(model.num_layers), seq_length, convention))
    return 3 * (layers + end_forward_flops(model, seq_length, convention))

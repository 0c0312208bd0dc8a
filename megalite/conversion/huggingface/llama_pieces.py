"""Names and shapes of Llama's tensors, which Mistral, Qwen2, Qwen3 and Mixtral share, and Mixtral's of its experts."""

from collections.abc import Collection, Iterator

import torch

from megalite.config.model import ModelConfig
from megalite.conversion.pieces import Piece, View


def llama_pieces(model: ModelConfig, present: Collection[str] | None) -> Iterator[Piece]:
    """Every tensor of LlamaForCausalLM and of those like it, in the order of ours.

    Args:
        model: the network.
        present: the names in the files, which tell the variants apart. None: to write.
    """
    assert model.vocab_size is not None
    h = model.hidden_size
    rows = (model.vocab_size, h)

    def vocabulary(ours: torch.Tensor) -> torch.Tensor:
        return ours[: model.vocab_size]

    word, head = "model.embed_tokens.weight", "lm_head.weight"
    if model.tie_embeddings and present is not None and word not in present and head in present:
        word = head  # of the two names of one tensor the writer kept this one
    yield Piece(word, "embedding.word.weight", rows, vocabulary)
    for i in range(model.num_layers):
        there, here = f"model.layers.{i}", f"layers.{i}"
        yield Piece(f"{there}.input_layernorm.weight", f"{here}.attention_norm.weight", (h,))
        yield from _attention(model, f"{there}.self_attn", f"{here}.attention")
        yield Piece(f"{there}.post_attention_layernorm.weight", f"{here}.mlp_norm.weight", (h,))
        if model.is_moe_layer(i):
            yield from _experts(model, there, f"{here}.moe", present)
        else:
            yield from _mlp(model, f"{there}.mlp", f"{here}.mlp")
    yield Piece("model.norm.weight", "final_norm.weight", (h,))
    if not model.tie_embeddings:
        yield Piece(head, "head.weight", rows, vocabulary)


def _attention(model: ModelConfig, there: str, here: str) -> Iterator[Piece]:
    h, d, groups = model.hidden_size, model.head_size, model.query_groups
    queries = model.num_attention_heads // groups
    # In each of our groups of rows: where its query heads, its key, its value begin and end.
    parts = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}

    def rows(first: int, last: int) -> View:
        return lambda ours: ours.unflatten(0, (groups, queries + 2, d))[:, first:last]

    kinds = ("weight", "bias") if model.add_qkv_bias or model.add_bias_linear else ("weight",)
    for kind in kinds:
        for name, (first, last) in parts.items():
            size = groups * (last - first) * d
            shape = (size, h) if kind == "weight" else (size,)
            yield Piece(f"{there}.{name}_proj.{kind}", f"{here}.qkv.{kind}", shape, rows(first, last))
    if model.qk_norm:
        yield Piece(f"{there}.q_norm.weight", f"{here}.q_norm.weight", (d,))
        yield Piece(f"{there}.k_norm.weight", f"{here}.k_norm.weight", (d,))
    yield Piece(f"{there}.o_proj.weight", f"{here}.out.weight", (h, model.num_attention_heads * d))
    if model.add_bias_linear:
        yield Piece(f"{there}.o_proj.bias", f"{here}.out.bias", (h,))


def _mlp(model: ModelConfig, there: str, here: str) -> Iterator[Piece]:
    h, f = model.hidden_size, model.ffn_size
    for kind in ("weight", "bias") if model.add_bias_linear else ("weight",):
        for i, name in enumerate(("gate", "up")):
            shape = (f, h) if kind == "weight" else (f,)
            yield Piece(f"{there}.{name}_proj.{kind}", f"{here}.up.{kind}", shape, _at(i))
    yield Piece(f"{there}.down_proj.weight", f"{here}.down.weight", (h, f))
    if model.add_bias_linear:
        yield Piece(f"{there}.down_proj.bias", f"{here}.down.bias", (h,))


def _experts(model: ModelConfig, layer: str, here: str, present: Collection[str] | None) -> Iterator[Piece]:
    """Mixtral's, as published (an expert's matrices under names of their own) or as transformers 5 holds them (merged)."""
    h, f, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
    assert experts is not None
    there = f"{layer}.block_sparse_moe"
    if present is not None and f"{there}.gate.weight" not in present:
        there = f"{layer}.mlp"
    yield Piece(f"{there}.gate.weight", f"{here}.router.weight", (experts, h))
    up, down = f"{here}.experts.up.weight", f"{here}.experts.down.weight"
    if present is not None and f"{there}.experts.gate_up_proj" in present:
        yield Piece(f"{there}.experts.gate_up_proj", up, (experts, 2 * f, h))
        yield Piece(f"{there}.experts.down_proj", down, (experts, h, f))
        return
    for e in range(experts):
        for i, name in enumerate(("w1", "w3")):  # gate, up
            yield Piece(f"{there}.experts.{e}.{name}.weight", up, (f, h), _at(e, i))
    for e in range(experts):
        yield Piece(f"{there}.experts.{e}.w2.weight", down, (h, f), _at(e))


def _at(*index: int) -> View:
    """One slice of the leading dimensions."""
    return lambda ours: ours[index]

"""GPT-2 (and GPT-3, with the exact GELU): LayerNorms, biases, learned positions, [in, out] matrices."""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.model_config import MAX_LAYERS, ModelFile
from megalite.conversion.pieces import Piece, View, transposed, whole

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_WRITTEN = {"gelu_tanh": "gelu_new", "gelu": "gelu"}
_PREFIX = "transformer."


def read_gpt2(file: ModelFile) -> tuple[ModelConfig, int]:
    """The network of a GPT-2 config.json, and its number of positions.

    Raises:
        ConversionError: it has a feature that our network has not.
    """
    for name, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if file.flag(name, needed) != needed:
            raise file.fault(
                f"{name} is {str(not needed).lower()}; only {str(needed).lower()} can be expressed"
            )
    positions = file.integer("n_positions", 1024)
    dropouts = [file.number(name, 0.1) for name in ("embd_pdrop", "resid_pdrop")]
    if dropouts[0] != dropouts[1]:
        raise file.fault(
            f"embd_pdrop is {dropouts[0]:g} and resid_pdrop {dropouts[1]:g}; hidden_dropout is one for both: set them "
            "to the same value (it only matters in training)"
        )
    hidden_size = file.integer("n_embd")
    model = file.model(
        seq_length=positions,
        num_layers=file.integer("n_layer", limit=MAX_LAYERS),
        hidden_size=hidden_size,
        num_attention_heads=file.integer("n_head"),
        ffn_hidden_size=file.optional_integer("n_inner") or 4 * hidden_size,
        vocab_size=file.integer("vocab_size"),
        max_position_embeddings=positions,
        norm_epsilon=file.epsilon("layer_norm_epsilon", 1e-5),
        activation=file.activation("activation_function", "gelu_new", _ACTIVATIONS),
        tie_embeddings=file.flag("tie_word_embeddings", True),
        hidden_dropout=dropouts[0],
        attention_dropout=file.number("attn_pdrop", 0.1),
        init_method_std=file.number("initializer_range", 0.02),
    )
    return model, positions


def write_gpt2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """What a GPT-2 config.json says of the network, as far as it can."""
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "n_positions": model.max_position_embeddings or seq_length,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": _WRITTEN.get(model.activation, "gelu_new"),
        "tie_word_embeddings": model.tie_embeddings,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_method_std,
    }


def gpt2_pieces(model: ModelConfig, present: Collection[str] | None) -> Iterator[Piece]:
    """Every tensor of GPT2LMHeadModel, in the order of ours.

    Args:
        model: the network.
        present: the names in the files: without the prefix where it is the inner model that was saved. None: to write.
    """
    prefix = _PREFIX if present is None or f"{_PREFIX}wte.weight" in present else ""
    assert model.vocab_size is not None and model.max_position_embeddings is not None
    h, f, v, positions = model.hidden_size, model.ffn_size, model.vocab_size, model.max_position_embeddings

    def vocabulary(ours: torch.Tensor) -> torch.Tensor:
        return ours[: model.vocab_size]

    yield Piece(f"{prefix}wte.weight", "embedding.word.weight", (v, h), vocabulary)
    yield Piece(f"{prefix}wpe.weight", "embedding.position.weight", (positions, h))
    for i in range(model.num_layers):
        there, here = f"{prefix}h.{i}", f"layers.{i}"
        yield from _norm(f"{there}.ln_1", f"{here}.attention_norm", h)
        yield from _linear(f"{there}.attn.c_attn", f"{here}.attention.qkv", 3 * h, h, _query_key_value(model))
        yield from _linear(f"{there}.attn.c_proj", f"{here}.attention.out", h, h)
        yield from _norm(f"{there}.ln_2", f"{here}.mlp_norm", h)
        yield from _linear(f"{there}.mlp.c_fc", f"{here}.mlp.up", f, h)
        yield from _linear(f"{there}.mlp.c_proj", f"{here}.mlp.down", h, f)
    yield from _norm(f"{prefix}ln_f", "final_norm", h)
    if not model.tie_embeddings:
        yield Piece("lm_head.weight", "head.weight", (v, h), vocabulary)


def _norm(theirs: str, ours: str, size: int) -> Iterator[Piece]:
    for kind in ("weight", "bias"):
        yield Piece(f"{theirs}.{kind}", f"{ours}.{kind}", (size,))


def _linear(theirs: str, ours: str, rows: int, columns: int, order: View = whole) -> Iterator[Piece]:
    """A matrix, ours [rows, columns], theirs [columns, rows], and its bias. `order` puts our rows into theirs' order."""

    def weight(tensor: torch.Tensor) -> torch.Tensor:
        return order(tensor).movedim(-1, 0)

    yield Piece(
        f"{theirs}.weight", f"{ours}.weight", (columns, rows), transposed if order is whole else weight
    )
    yield Piece(f"{theirs}.bias", f"{ours}.bias", (rows,), order)


def _query_key_value(model: ModelConfig) -> View:
    """Our rows come by head (query, key, value of one, of the next, ...), theirs are all queries, keys, values."""

    def view(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (model.num_attention_heads, 3, model.head_size)).movedim(1, 0)

    return view

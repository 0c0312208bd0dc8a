"""Which slice of which of our tensors a Megatron-LM rank holds, under which name.

The rows of qkv are grouped by key/value head there as here. A gate is the first half of each rank's rows of fc1, which
is why the whole fc1 is not the ranks' rows one after the other. The vocabulary is padded to a multiple of the
tensor-parallel size, so the rows of its padding may differ in number.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from megalite.config.model import ModelConfig
from megalite.conversion.pieces import Piece, View, whole
from megalite.models.shapes import ParameterShape, embedding_shapes, head_shapes, layer_shapes

WORD = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Shard:
    """The place of a rank: tensor-parallel rank r of tp, expert-parallel rank e of ep."""

    tp: int
    r: int
    ep: int = 1
    e: int = 0


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage (or one chunk of it) holds: layers [first, last), counted over the whole model."""

    first: int
    last: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class VocabularyPiece(Piece):
    """Rows [first, first + shape[0]) of the padded vocabulary; ours may have fewer of them, or more."""

    first: int = 0

    def put(self, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        """Copy the rows that ours has."""
        place = ours[self.first : self.first + self.shape[0]]
        place.copy_(theirs[: place.shape[0]])

    def take(self, ours: torch.Tensor) -> torch.Tensor:
        """Their rows; zeros below ours."""
        rows = ours[self.first : self.first + self.shape[0]]
        if rows.shape[0] == self.shape[0]:
            return rows
        taken = ours.new_zeros(self.shape)
        taken[: rows.shape[0]] = rows
        return taken


def stage_pieces(
    model: ModelConfig,
    stage: Stage,
    shard: Shard,
    *,
    vocabulary: int,
    grouped: bool = False,
) -> Iterator[Piece]:
    """The tensors of one file's model under their common names, in the order of the forward pass.

    Args:
        vocabulary: their padded vocabulary, over all ranks.
        grouped: experts are megatron.core's GroupedMLP, two matrices for all.
    """
    if stage.has_embedding:
        for shape in embedding_shapes(model):
            yield (
                _vocabulary(WORD, shape, shard, vocabulary)
                if shape.shard_dim == 0
                else Piece("embedding.position_embeddings.weight", shape.name, shape.shape)
            )
    for local, index in enumerate(range(stage.first, stage.last)):
        prefix = f"layers.{index}."
        for shape in layer_shapes(model, index):
            rest, there = shape.name.removeprefix(prefix), f"decoder.layers.{local}"
            if shape.expert:
                yield from _experts(model, shape, there, rest, shard, grouped)
                continue
            yield _sliced(f"{there}.{_LAYER_NAMES[rest]}", shape, shard)
    if stage.has_head:
        for shape in head_shapes(model):
            if shape.shard_dim == 0:
                yield _vocabulary(HEAD, shape, shard, vocabulary)
            else:
                kind = shape.name.rpartition(".")[2]
                yield Piece(f"decoder.final_layernorm.{kind}", shape.name, shape.shape)
        if model.tie_embeddings and not stage.has_embedding:
            word = embedding_shapes(model)[0]
            yield _vocabulary(HEAD, word, shard, vocabulary)


def _both(there: str, here: str) -> dict[str, str]:
    return {f"{here}.{kind}": f"{there}.{kind}" for kind in ("weight", "bias")}


_LAYER_NAMES = {
    **_both("input_layernorm", "attention_norm"),
    **_both("self_attention.linear_qkv", "attention.qkv"),
    **_both("self_attention.q_layernorm", "attention.q_norm"),
    **_both("self_attention.k_layernorm", "attention.k_norm"),
    **_both("self_attention.linear_proj", "attention.out"),
    **_both("pre_mlp_layernorm", "mlp_norm"),
    **_both("mlp.linear_fc1", "mlp.up"),
    **_both("mlp.linear_fc2", "mlp.down"),
    "moe.router.weight": "mlp.router.weight",
    **_both("mlp.shared_experts.linear_fc1", "moe.shared.up"),
    **_both("mlp.shared_experts.linear_fc2", "moe.shared.down"),
}


def _sliced(name: str, shape: ParameterShape, shard: Shard) -> Piece:
    """The shard of one of our tensors; [2, f/tp, ...] of gate and up is [2·f/tp, ...] there."""
    dim = shape.shard_dim
    if dim is None:
        return Piece(name, shape.name, shape.shape)
    size = shape.shape[dim] // shard.tp
    local = (*shape.shape[:dim], size, *shape.shape[dim + 1 :])
    if dim == 1 and shape.name.rpartition(".")[0].endswith(".up"):
        local = (2 * size, *local[2:])
    return Piece(name, shape.name, local, _narrow(dim, shard.r * size, size))


def _narrow(dim: int, first: int, size: int) -> View:
    return lambda tensor: tensor.narrow(dim, first, size)


def _vocabulary(name: str, shape: ParameterShape, shard: Shard, vocabulary: int) -> VocabularyPiece:
    rows = vocabulary // shard.tp
    return VocabularyPiece(name, shape.name, (rows, shape.shape[1]), whole, shard.r * rows)


def _experts(
    model: ModelConfig, shape: ParameterShape, there: str, rest: str, shard: Shard, grouped: bool
) -> Iterator[Piece]:
    """Our stack of experts: one piece for each expert of this rank, or one for all of them."""
    assert shape.shard_dim is not None
    layer = "linear_fc1" if rest == "moe.experts.up.weight" else "linear_fc2"
    size = shape.shape[shape.shard_dim] // shard.tp
    cut = _narrow(shape.shard_dim, shard.r * size, size)
    count = shape.shape[0] // shard.ep
    first, h = shard.e * count, model.hidden_size
    width = 2 * size if layer == "linear_fc1" and model.is_gated else size
    if grouped:
        # [E, h, 2·f/tp] and [E, f/tp, h], each without its first boundary.
        name, wide = (
            ("weight1", (h, count * width)) if layer == "linear_fc1" else ("weight2", (count * size, h))
        )
        last_first = _rows_last if layer == "linear_fc1" else _columns_first
        yield Piece(f"{there}.mlp.experts.{name}", shape.name, wide, _grouped(cut, first, count, last_first))
        return
    local = (width, h) if layer == "linear_fc1" else (h, size)
    for expert in range(count):
        name = f"{there}.mlp.experts.local_experts.{expert}.{layer}.weight"
        yield Piece(name, shape.name, local, _expert(cut, first + expert))


def _expert(cut: View, expert: int) -> View:
    return lambda tensor: cut(tensor)[expert]


def _grouped(cut: View, first: int, count: int, order: Callable[[torch.Tensor], torch.Tensor]) -> View:
    return lambda tensor: order(cut(tensor)[first : first + count])


def _rows_last(up: torch.Tensor) -> torch.Tensor:
    """[E, 2, f, h] or [E, f, h] -> [E, h, 2, f] or [E, h, f]."""
    return up.movedim(-1, 1)


def _columns_first(down: torch.Tensor) -> torch.Tensor:
    """[E, h, f] -> [E, f, h]."""
    return down.transpose(1, 2)


def old_order(piece: Piece, model: ModelConfig, version: float) -> Piece:
    """qkv of checkpoints before version 2: a rank's rows are [3, heads, d] (version 0) or [heads, d, 3] (version 1)."""
    ordered = _three_first if version < 1.0 else _three_last
    return replace(piece, view=_regrouped(piece.view, model.head_size, ordered))


def _regrouped(cut: View, d: int, order: Callable[[torch.Tensor], torch.Tensor]) -> View:
    return lambda tensor: order(cut(tensor).unflatten(0, (-1, 3, d)))


def _three_first(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1)


def _three_last(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(1, 2)

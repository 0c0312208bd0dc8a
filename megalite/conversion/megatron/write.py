"""Megatron-LM's `torch` format, written: the slices of each tensor- and pipeline-parallel rank in a file of its own."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.conversion.megatron.arguments import megatron_args, require_expressible, vocabulary_of
from megalite.conversion.megatron.folders import MODEL_FILES, RELEASE, TRACKER, rank_folder
from megalite.conversion.megatron.layout import Shard, Stage, stage_pieces
from megalite.conversion.megatron.names import fused_name
from megalite.conversion.megatron.torch_writer import Reserve, TorchFileWriter
from megalite.conversion.output import Advance, Log, Output, identity_of, silent
from megalite.conversion.pieces import Piece
from megalite.conversion.weights import ConversionError, Weights

IMPLEMENTATIONS = ("transformer_engine", "local")
"""Megatron-LM's `--transformer-impl`: with the first a norm has the name of the linear layer after it."""


def write_megatron(
    weights: Weights,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    tp: int,
    pp: int,
    advance: Advance,
    implementation: str = "transformer_engine",
    log: Log = silent,
) -> Path:
    """Write a model for Megatron-LM to load on tp x pp ranks: `release/mp_rank_*/model_optim_rng.pt` and the tracker.

    As a release it is loaded without optimizer and random states. Each of our tensors is read once and cut into the
    files of its pipeline stage, which are filled together; a conversion that was interrupted goes on with the first
    stage that is not finished.

    Args:
        dtype: of all weights; default each tensor's own.
        tp, pp: tensor- and pipeline-parallel sizes, which must divide heads, groups, MLP width, and layers.
        implementation: `--transformer-impl` of the run that will load it.
        log: see `Output`.

    Raises:
        ConversionError: the model or the split is one that Megatron-LM does not have, or the target is there already.
        OSError: no permission, no space, ...
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConversionError(
            f"transformer implementation {implementation!r}; it is one of {', '.join(IMPLEMENTATIONS)}"
        )
    require_expressible(weights.model, tp=tp, pp=pp)
    identity = identity_of(weights, to="megatron", dtype=dtype, tp=tp, pp=pp, implementation=implementation)
    export = _Export(weights, dtype, tp, pp, implementation)
    planned = [name for stage in range(pp) for name in export.files(stage)]
    output = Output(folder, identity=identity, files=planned, log=log)
    for stage in range(pp):
        facts = [output.finished(name) for name in export.files(stage)]
        if all(fact is not None for fact in facts):
            advance(sum(fact["bytes"] for fact in facts if fact is not None))
        else:
            export.write_stage(stage, output, advance)
    output.write(TRACKER, RELEASE.encode())
    return output.commit()


def written_bytes(weights: Weights, *, dtype: torch.dtype | None, tp: int, pp: int) -> int:
    """Bytes of tensors that `write_megatron` writes: what its calls of `advance` add up to."""
    export = _Export(weights, dtype, tp, pp, "local")
    return sum(export.bytes_of(stage, rank) for stage in range(pp) for rank in range(tp))


@dataclass(frozen=True)
class _Export:
    weights: Weights
    dtype: torch.dtype | None
    tp: int
    pp: int
    implementation: str

    def files(self, stage: int) -> list[str]:
        """Of each tensor-parallel rank."""
        return [
            f"{RELEASE}/{rank_folder(rank, stage, pp=self.pp)}/{MODEL_FILES[0]}" for rank in range(self.tp)
        ]

    def pieces(self, stage: int, rank: int) -> list[Piece]:
        """What goes into a file."""
        held = self._stage(stage)
        vocabulary = vocabulary_of(self.weights.model, self.tp)[1]
        return list(stage_pieces(self.weights.model, held, Shard(self.tp, rank), vocabulary=vocabulary))

    def bytes_of(self, stage: int, rank: int) -> int:
        """Of a file's tensors."""
        pieces = self.pieces(stage, rank)
        return sum(math.prod(piece.shape) * self._type(piece).itemsize for piece in pieces)

    def write_stage(self, stage: int, output: Output, advance: Advance) -> None:
        """All files of one pipeline stage; each tensor of ours is read once."""
        names = self.files(stage)
        ranks = [self.pieces(stage, rank) for rank in range(self.tp)]
        with contextlib.ExitStack() as files:
            writers = []
            for name, pieces in zip(names, ranks, strict=True):
                path = output.staging / name
                path.parent.mkdir(parents=True, exist_ok=True)
                writers.append(files.enter_context(self._writer(path, stage, pieces)))
            self._fill(writers, stage, ranks, advance)
            for writer in writers:
                writer.finish()
        for rank, name in enumerate(names):
            output.mark(name, {"bytes": self.bytes_of(stage, rank)})

    def _writer(self, path: Path, stage: int, pieces: list[Piece]) -> TorchFileWriter:
        arguments = megatron_args(self.weights, dtype=self._type(pieces[0]), tp=self.tp, pp=self.pp)

        def content(reserve: Reserve) -> Mapping[str, Any]:
            tensors = {self._name(piece, stage): reserve(piece.shape, self._type(piece)) for piece in pieces}
            return {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "model": tensors}

        return TorchFileWriter(path, content)

    def _fill(
        self, writers: list[TorchFileWriter], stage: int, ranks: list[list[Piece]], advance: Advance
    ) -> None:
        name, ours = "", torch.empty(0)
        for slices in zip(*ranks, strict=True):
            if slices[0].ours != name:
                name, ours = slices[0].ours, torch.empty(0)  # the last one goes before the next is read
                ours = self.weights.read(name)
            for writer, piece in zip(writers, slices, strict=True):
                place = writer.content["model"][self._name(piece, stage)]
                writer.fill(piece.ours, place, piece.take(ours), advance)

    def _stage(self, index: int) -> Stage:
        count = self.weights.model.num_layers // self.pp
        first = index * count
        return Stage(first, first + count, has_embedding=index == 0, has_head=index == self.pp - 1)

    def _type(self, piece: Piece) -> torch.dtype:
        return self.dtype or self.weights.dtype(piece.ours)

    def _name(self, piece: Piece, stage: int) -> str:
        """The name in the layers that will load it."""
        if self.implementation == "local":
            return piece.theirs
        parts = piece.theirs.split(".")
        in_layer = parts[1] == "layers"
        layer = self._stage(stage).first + int(parts[2]) if in_layer else 0
        return fused_name(piece.theirs, has_experts=in_layer and self.weights.model.is_moe_layer(layer))

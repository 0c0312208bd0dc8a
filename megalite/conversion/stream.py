"""Writing safetensors files from `Weights`, a tensor at a time, so that an interruption costs one file.

Memory: the tensor of ours that was read last, and the tensor that is made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from megalite.checkpoint.manifest import FileEntry
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, SafetensorsWriter
from megalite.checkpoint.safetensors_header import Record
from megalite.conversion.output import Advance, Output
from megalite.conversion.pieces import Piece
from megalite.conversion.weights import ConversionError, Weights
from megalite.conversion.wrapped import LastRead

_HEADER_ROOM = 160
"""Bytes that a tensor takes in a file's header at most, beside its key: dtype, shape and two offsets."""


@dataclass(frozen=True)
class Target:
    """One tensor to be written.

    Args:
        key: its name in the file.
        piece: from which of our tensors, and how.
        dtype: that it is stored in.
    """

    key: str
    piece: Piece
    dtype: torch.dtype

    @property
    def record(self) -> Record:
        """The tensor as its file declares it."""
        return Record(self.key, DTYPE_NAMES[self.dtype], self.piece.shape)


def split_files(targets: Sequence[Target], max_file_bytes: int) -> list[list[Target]]:
    """The targets in order, in files of at most that many bytes; a tensor larger than that gets one of its own."""
    files: list[list[Target]] = []
    room = 0
    for target in targets:
        size = target.record.nbytes + len(target.key.encode()) + _HEADER_ROOM
        if not files or size > room:
            files.append([])
            room = max_file_bytes - _HEADER_ROOM
        files[-1].append(target)
        room -= size
    return files


def write_file(
    output: Output,
    name: str,
    targets: Sequence[Target],
    weights: Weights,
    advance: Advance,
    *,
    digest: bool,
    metadata: Mapping[str, str],
) -> FileEntry:
    """Write one file, or, if an earlier run has finished it, pass over it (and advance by its bytes all the same).

    Args:
        name: below `output.staging`; folders are made.
        targets: in the order of the file. Those that are pieces of one tensor should follow each other: then it is read
            once, also across files if `weights` is a `LastRead`.
        digest: hash what is written.

    Raises:
        ConversionError: a value is too large for the type that it is to be stored in, and what `weights.read` raises.
        OSError: disk full, no permission, ...
    """
    done = output.finished(name)
    if done is not None:
        advance(sum(target.record.nbytes for target in targets))
        return FileEntry(done["length"], done["sha256"])
    if not isinstance(weights, LastRead):
        weights = LastRead(weights)
    path = output.staging / name
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = SafetensorsWriter(path, [target.record for target in targets], metadata=metadata, digest=digest)
    try:
        for target in targets:
            writer.write(_made(target, weights.read(target.piece.ours)))
            advance(target.record.nbytes)
        entry = writer.finish()
    finally:
        writer.close()
    output.mark(name, asdict(entry))
    return entry


def _made(target: Target, ours: torch.Tensor) -> torch.Tensor:
    """The target's tensor: no copy if it is a contiguous part of ours in the same type, else one."""
    place = target.piece.view(ours)
    if place.dtype == target.dtype and place.is_contiguous():
        return place.reshape(target.piece.shape)
    theirs = torch.empty(place.shape, dtype=target.dtype)
    theirs.copy_(place)
    refuse_overflow(target.piece.ours, place, theirs)
    return theirs.reshape(target.piece.shape)


def refuse_overflow(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """No finite value may become infinite, as large ones do in float16.

    Args:
        name: of the tensor of ours that they are a part of.
        before, after: the same elements in the type that they have and in the one that they get.

    Raises:
        ConversionError: one does; it is named.
    """
    if before.numel() == 0 or not before.dtype.is_floating_point:
        return
    if torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max:
        return
    low, high = (float(value) for value in torch.aminmax(after))
    if torch.isfinite(torch.tensor([low, high])).all():
        return
    limit = torch.finfo(after.dtype).max
    for row, stored in zip(before.reshape(-1).split(1 << 20), after.reshape(-1).split(1 << 20)):
        lost = row.isfinite() & ~stored.isfinite()
        if lost.any():
            worst = float(row[lost].double().abs().max())
            raise ConversionError(
                f"{name} holds {worst:g}, too large for {str(after.dtype).removeprefix('torch.')}, which "
                f"ends at {limit:g}; use bf16 or fp32"
            )

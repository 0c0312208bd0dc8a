"""Write a conversion to a staging folder, which keeps finished files across interruptions, then rename it to the target.

.tmp-convert-NAME/        beside the target NAME
  progress.json           the identity of the conversion, and the finished files
  files/                  becomes the target by a rename

The checkpoint's writer writes safetensors files from `Weights` one tensor at a time. The safetensors library needs all
tensors in memory and computes no hashes."""

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megalite import __version__
from megalite.checkpoint.files import (
    FileEntry,
    file_length,
    lock_folder,
    not_writable,
    read_text,
    remove_tree,
    replace_durably,
    sync_folder,
    write_durably,
)
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, SafetensorsWriter
from megalite.checkpoint.safetensors_header import Record
from megalite.config.data import local_path
from megalite.config.errors import CheckpointError
from megalite.conversion.weights import ConversionError, WeightPiece, Weights, blocks, innermost, parameter_shapes

Advance = Callable[[int], None]  # called with the number of bytes just written, for a progress bar

Log = Callable[[str], None]  # called with a line for the user

STAGING_PREFIX = ".tmp-convert-"


def silent(_: object) -> None:
    """A `Log` and `Advance` that does nothing."""


DEFAULT_FILE_BYTES = 5 * 10**9  # maximum of a safetensors file; a larger tensor gets its own file


class Output:
    """The unfinished folder `target` of a conversion.

    Files are written to `staging`, beside the target. `mark` records a finished file, which a later conversion of the
    same `identity` into the same target does not write again. `commit` renames the folder.

    `target`: must not exist, or be an empty folder."""

    def __init__(
        self, target: Path, *, identity: Mapping[str, Any], files: Sequence[str] = (), log: Log = silent
    ) -> None:
        self._target = target.resolve()
        self._workplace = workplace_of(target)
        self.staging = self._workplace / "files"
        self._identity = json.loads(json.dumps(identity))
        _refuse_existing(self._target, self._workplace)
        self._workplace.mkdir(parents=True, exist_ok=True)
        self._unlock = self._lock()
        is_new = not (self._workplace / "progress.json").exists()
        previous = self._previous_marks()
        self._marks = previous or {}
        if previous is not None:
            done = sum(name in previous and _is_whole(self.staging / name, previous[name]["length"]) for name in files)
            log(f"continues: {done} of {len(files)} files are done")
        elif not is_new:
            log("starts again: the source or a setting has changed since the interruption")
        self.staging.mkdir(exist_ok=True)
        for path in sorted(self.staging.rglob("*")):
            if (path.is_symlink() or not path.is_dir()) and str(path.relative_to(self.staging)) not in self._marks:
                remove_tree(path)  # unfinished
        self._save_progress()
        sync_folder(self._workplace)
        sync_folder(self._workplace.parent)

    def finished(self, name: str) -> Mapping[str, Any] | None:
        """Return the facts passed to `mark` for a finished file. Otherwise remove its remains and return None."""
        mark = self._marks.get(name)
        if mark is not None and _is_whole(self.staging / name, mark["length"]):
            return mark["facts"]
        if mark is not None:
            del self._marks[name]
            self._save_progress()
        remove_tree(self.staging / name)
        return None

    def mark(self, name: str, facts: Mapping[str, Any]) -> None:
        """Record that a file is complete and synced. `facts`: JSON that `finished` returns in a later conversion."""
        sync_folder((self.staging / name).parent)
        length = file_length(self.staging / name)
        self._marks[name] = {"length": length, "facts": json.loads(json.dumps(facts))}
        self._save_progress()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file. It is rewritten after an interruption."""
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(path)
        write_durably(path, data)

    def commit(self) -> Path:
        """Rename the staging folder to the target durably, and return the target."""
        for folder in sorted({self.staging, *(path for path in self.staging.rglob("*") if path.is_dir())}):
            sync_folder(folder)
        _refuse_existing(self._target, self._workplace)
        self.staging.rename(self._target)  # an empty folder there is replaced
        sync_folder(self._target.parent)
        remove_tree(self._workplace)
        self._unlock()
        return self._target

    def _lock(self) -> Callable[[], Any]:
        """Lock the folder. Return the function that unlocks it, which also runs when this object is deleted."""
        try:
            descriptor = lock_folder(self._workplace)
        except BlockingIOError:
            raise ConversionError(f"another process is converting into {self._target}; give another target") from None
        return weakref.finalize(self, os.close, descriptor) if descriptor is not None else lambda: None

    def _previous_marks(self) -> dict[str, Any] | None:
        """Return the marks of an interrupted conversion of the same identity. Otherwise remove its files, return None."""
        try:
            progress = json.loads(read_text(self._workplace / "progress.json"))
            if progress["identity"] == self._identity and all(
                isinstance(mark["length"], int) and isinstance(mark["facts"], dict)
                for mark in progress["marks"].values()
            ):
                return dict(progress["marks"])
        except (CheckpointError, ValueError, LookupError, TypeError, AttributeError):
            pass  # nothing to continue
        remove_tree(self.staging)
        return None

    def _save_progress(self) -> None:
        text = json.dumps({"identity": self._identity, "marks": self._marks}, indent=1)
        replace_durably(self._workplace / "progress.json", text.encode())


def check_target(target: Path) -> None:
    """Raise early, without creating anything, if an `Output` could not be created or written."""
    workplace, resolved = workplace_of(target), target.resolve()
    _refuse_existing(resolved, workplace)
    if (fault := not_writable(resolved.parent)) is not None:
        raise ConversionError(f"cannot write {target}: {fault[0]}: {fault[1]}; give another target")


def workplace_of(target: Path) -> Path:
    """Return the folder beside `target` that contains the files of an unfinished conversion."""
    resolved = Path(local_path(str(target))).resolve()
    if not resolved.name:
        raise ConversionError(f"the target {resolved} already exists; give a folder below it")
    return resolved.with_name(f"{STAGING_PREFIX}{resolved.name}")


def identity_of(weights: Weights, **settings: object) -> dict[str, Any]:
    """Return everything that determines the result of a conversion: the source's files with size and time, and settings."""
    files = []
    for folder, folders, names in os.walk(weights.path):
        # Leave out the staging folder of a target inside the source.
        folders[:] = sorted(name for name in folders if not name.startswith(STAGING_PREFIX))
        files += [Path(folder, name) for name in sorted(names)]
    return {
        "megalite": __version__,
        "source": str(weights.path.resolve()),
        "format": weights.format,
        "model": str(weights.model),
        "weights": innermost(weights).kind,
        "tensors": {name: str(weights.dtype(name)) for name in parameter_shapes(weights.model)},
        "files": [_state(path) for path in (*files, *weights.tokenizer_files)],
        "settings": {name: str(value) for name, value in settings.items()},
    }


def _state(path: Path) -> list[Any]:
    """Return file metadata that changes with the content. The last two change even if the modification time is reset."""
    try:
        status = path.stat()
    except OSError:
        return [str(path)]  # a dangling link
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _refuse_existing(target: Path, workplace: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConversionError(f"{target} already exists and is not a folder; give another target")
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return
    if workplace.is_dir() and not (workplace / "files").exists():
        remove_tree(workplace)  # left by a kill after the rename: the target is complete
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    raise ConversionError(f"{target} exists and is not empty ({shown}); give another target, or remove it")


def _is_whole(path: Path, length: int) -> bool:
    try:
        return file_length(path) == length
    except CheckpointError:
        return False


_HEADER_ROOM = 160  # maximum bytes of a tensor in a file's header, beside its key: dtype, shape and two offsets


@dataclass(frozen=True)
class Target:
    piece: WeightPiece
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return self.piece.name

    @property
    def record(self) -> Record:
        return Record(self.key, DTYPE_NAMES[self.dtype], self.piece.shape)


def split_files(targets: Sequence[Target], max_file_bytes: int) -> list[list[Target]]:
    """Split the targets, in order, into files of at most `max_file_bytes`. A larger tensor gets its own file."""
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
    output: Output, name: str, targets: Sequence[Target], weights: Weights, advance: Advance, *, digest: bool
) -> FileEntry:
    """Write one file. If an earlier run has finished it, skip it, but still advance by its bytes.

    `name`: path below `output.staging`; its folders are created. `targets`: in the order of the file. Pieces of one
    tensor should be consecutive, so that a `LastRead` reads it once. `digest`: compute the hash of the file."""
    done = output.finished(name)
    if done is not None:
        advance(sum(target.record.nbytes for target in targets))
        return FileEntry(**done)
    path = output.staging / name
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = SafetensorsWriter(path, [target.record for target in targets], digest=digest)
    try:
        for target in targets:
            writer.write_blocks(stored_blocks(weights, target.piece, target.dtype))
            advance(target.record.nbytes)
        entry = writer.finish()
    finally:
        writer.close()
    output.mark(name, asdict(entry))
    return entry


def stored_blocks(weights: Weights, piece: WeightPiece, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the elements of a piece as contiguous blocks of `dtype`, then zeros for padding. Each block is a new
    tensor, so that a queued write or hash keeps no more memory alive. Contiguous elements are read block by block if
    the weights support it; otherwise the whole tensor is read."""
    name, left, streamed = piece.parameter, math.prod(piece.shape), weights.elements(piece)
    whole = weights.read(name) if streamed is None else torch.empty(streamed[0], device="meta")
    for _, place in piece.places(whole):
        for block in blocks(place):
            if streamed is not None and block.is_contiguous():
                values = streamed[1](int(block.storage_offset()), block.numel(), None)
                stored = values.to(dtype)
            else:
                values = block
                if streamed is not None:
                    values = weights.read(name).as_strided(block.shape, block.stride(), block.storage_offset())
                stored = torch.empty(block.shape, dtype=dtype).copy_(values)
            refuse_overflow(name, values, stored)
            yield stored
        left -= place.numel()
    yield from blocks(torch.zeros(left, dtype=dtype))


def refuse_overflow(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Raise ConversionError if the conversion made a finite value infinite, as float16 does with large ones."""
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
            raise ConversionError(f"{name} has {worst:g}, above the {limit:g} of {after.dtype}; use bf16 or fp32")

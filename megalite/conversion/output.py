"""Where a conversion writes: a folder beside the target that keeps finished files across interruptions, then one rename.

.tmp-convert-NAME/        beside the target NAME
  progress.json           which conversion it is, and the files that are finished
  files/                  what becomes the target by one rename

Safetensors files are written from `Weights` a tensor at a time by the checkpoints' own writer: the safetensors library
writes a file from tensors that are all in memory, and hashes nothing.
"""

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
    file_length,
    lock_folder,
    not_writable,
    read_text,
    remove_tree,
    replace_durably,
    sync_folder,
    write_durably,
)
from megalite.checkpoint.manifest import FileEntry
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, SafetensorsWriter
from megalite.checkpoint.safetensors_header import Record
from megalite.config.errors import CheckpointError
from megalite.conversion.weights import ConversionError, Piece, Weights, blocks, innermost, parameter_shapes

Advance = Callable[[int], None]  # called with the number of bytes just written, for a progress bar

Log = Callable[[str], None]  # called with a line for people

STAGING_PREFIX = ".tmp-convert-"


def silent(said: object) -> None:
    """The `Log` and the `Advance` of who wants none."""


DEFAULT_FILE_BYTES = 5 * 10**9  # where the next safetensors file begins; a larger tensor has a file for itself


class Output:
    """The folder `target` in the making.

    Files are written to `staging`, beside the target. One that is finished is noted with `mark`; a later conversion of
    the same `identity` into the same target finds it there and does not write it again. `commit` renames the folder.

    `target`: must not exist yet, or be an empty folder."""

    def __init__(
        self, target: Path, *, identity: Mapping[str, Any], files: Sequence[str] = (), log: Log = silent
    ) -> None:
        self._target = target.resolve()
        self._workplace = workplace_of(target)
        self.staging = self._workplace / "files"
        self._identity = json.loads(json.dumps(identity))
        _refuse_existing(self._target, self._workplace)
        self._workplace.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        is_new = not (self._workplace / "progress.json").exists()
        former = self._former_marks()
        self._marks = former or {}
        if former is not None:
            done = sum(name in former and _is_whole(self.staging / name, former[name]["length"]) for name in files)
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
        """The facts that a finished file was marked with; None if it must be written (what is there of it is gone)."""
        mark = self._marks.get(name)
        if mark is not None and _is_whole(self.staging / name, mark["length"]):
            facts: Mapping[str, Any] = mark["facts"]
            return facts
        if mark is not None:
            del self._marks[name]
            self._save_progress()
        remove_tree(self.staging / name)
        return None

    def mark(self, name: str, facts: Mapping[str, Any]) -> None:
        """The file is complete and on the disk."""
        sync_folder((self.staging / name).parent)
        length = file_length(self.staging / name)
        self._marks[name] = {"length": length, "facts": json.loads(json.dumps(facts))}
        self._save_progress()

    def write(self, name: str, data: bytes) -> None:
        """A small file, written by every run."""
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(path)
        write_durably(path, data)

    def commit(self) -> Path:
        """Give the folder its name, durably; returns it."""
        for folder in sorted({self.staging, *(path for path in self.staging.rglob("*") if path.is_dir())}):
            sync_folder(folder)
        _refuse_existing(self._target, self._workplace)
        self.staging.rename(self._target)  # an empty folder there is replaced
        sync_folder(self._target.parent)
        remove_tree(self._workplace)
        self._lock()
        return self._target

    def _locked(self) -> Callable[[], Any]:
        """Keep other processes out; returns what lets them in again, at the latest when this object goes."""
        try:
            descriptor = lock_folder(self._workplace)
        except BlockingIOError:
            raise ConversionError(f"another process is converting into {self._target}; give another target") from None
        return weakref.finalize(self, os.close, descriptor) if descriptor is not None else lambda: None

    def _former_marks(self) -> dict[str, Any] | None:
        """What an interrupted conversion of the same identity has finished; None, and no files, of any other."""
        try:
            former = json.loads(read_text(self._workplace / "progress.json"))
            if former["identity"] == self._identity and all(
                isinstance(mark["length"], int) and isinstance(mark["facts"], dict) for mark in former["marks"].values()
            ):
                return dict(former["marks"])
        except (CheckpointError, ValueError, LookupError, TypeError, AttributeError):
            pass  # nothing to continue
        remove_tree(self.staging)
        return None

    def _save_progress(self) -> None:
        text = json.dumps({"identity": self._identity, "marks": self._marks}, indent=1)
        replace_durably(self._workplace / "progress.json", text.encode())


def check_target(target: Path) -> None:
    """Find out early, and without making anything, what would stop an `Output`."""
    workplace, resolved = workplace_of(target), target.resolve()
    _refuse_existing(resolved, workplace)
    if (fault := not_writable(resolved.parent)) is not None:
        raise ConversionError(f"cannot write {target}: {fault[0]}: {fault[1]}; give another target")


def workplace_of(target: Path) -> Path:
    """The folder beside `target` that an unfinished conversion keeps its files in."""
    resolved = target.resolve()
    if not resolved.name:
        raise ConversionError(f"the target is {resolved}, which is there already; give a folder below it")
    return resolved.with_name(f"{STAGING_PREFIX}{resolved.name}")


def identity_of(weights: Weights, **settings: object) -> dict[str, Any]:
    """All that the result of a conversion depends on: the source's files with their sizes and times, and settings."""
    files = []
    for folder, folders, names in os.walk(weights.path):
        # A target inside the source is not of the source.
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
    """What changes when a file does; the last two also when its time is set back."""
    try:
        status = path.stat()
    except OSError:
        return [str(path)]  # a dangling link
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _refuse_existing(target: Path, workplace: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConversionError(f"{target} is there already and is not a folder; give another target")
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return
    if workplace.is_dir() and not (workplace / "files").exists():
        remove_tree(workplace)  # killed between the rename and the tidying up: the target is whole
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    raise ConversionError(f"{target} exists and is not empty ({shown}); give another target, or remove it")


def _is_whole(path: Path, length: int) -> bool:
    try:
        return file_length(path) == length
    except CheckpointError:
        return False


_HEADER_ROOM = 160  # bytes that a tensor takes in a file's header at most, beside its key: dtype, shape and two offsets


@dataclass(frozen=True)
class Target:
    piece: Piece
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return self.piece.theirs

    @property
    def record(self) -> Record:
        return Record(self.key, DTYPE_NAMES[self.dtype], self.piece.shape)


def split_files(targets: Sequence[Target], max_file_bytes: int) -> list[list[Target]]:
    """The targets in order, in files of at most that many bytes; a larger tensor gets a file for itself."""
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
    `name`: below `output.staging`; folders are made. `targets`: in the order of the file. Those that are pieces of
    one tensor should follow each other: then it is read once, if `weights` is a `LastRead`.
    `digest`: hash what is written."""
    done = output.finished(name)
    if done is not None:
        advance(sum(target.record.nbytes for target in targets))
        return FileEntry(**done)
    path = output.staging / name
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = SafetensorsWriter(path, [target.record for target in targets], metadata=metadata, digest=digest)
    try:
        for target in targets:
            writer.write_blocks(stored_blocks(weights, target.piece, target.dtype))
            advance(target.record.nbytes)
        entry = writer.finish()
    finally:
        writer.close()
    output.mark(name, asdict(entry))
    return entry


def stored_blocks(weights: Weights, piece: Piece, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The elements of a piece in contiguous blocks of a type, then zeros; each in new memory, so that who writes
    or hashes it late keeps no more. What lies together is read block by block, if the weights can; else the whole is."""
    left, streamed = math.prod(piece.shape), weights.elements(piece)
    whole = weights.read(piece.ours) if streamed is None else torch.empty(streamed[0], device="meta")
    for _, place in piece.places(whole):
        for block in blocks(place):
            if streamed is not None and block.is_contiguous():
                values = streamed[1](int(block.storage_offset()), block.numel(), None)
                stored = values.to(dtype)
            else:
                if streamed is None:
                    values = block
                else:
                    values = weights.read(piece.ours).as_strided(block.shape, block.stride(), block.storage_offset())
                stored = torch.empty(block.shape, dtype=dtype).copy_(values)
            refuse_overflow(piece.ours, values, stored)
            yield stored
        left -= place.numel()
    yield from blocks(torch.zeros(left, dtype=dtype))


def refuse_overflow(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """No finite value may become infinite, as large ones do in float16."""
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
            raise ConversionError(f"{name} holds {worst:g}, above the {limit:g} of {after.dtype}; use bf16 or fp32")

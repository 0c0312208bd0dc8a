"""Finding a checkpoint that verifies, and reading any slice of any tensor in it."""

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from megalite.checkpoint.digests import entry_fault
from megalite.checkpoint.files import open_plain, read_text
from megalite.checkpoint.folders import Candidate, candidates
from megalite.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointMissing,
    FileEntry,
    Manifest,
    TensorEntry,
    from_pieces,
    in_pieces,
    part_keys,
)
from megalite.checkpoint.safetensors_file import TORCH_DTYPES, SafetensorsReader
from megalite.checkpoint.safetensors_header import Record
from megalite.checkpoint.tiling import Slice, overlap, relative, within
from megalite.config.errors import CheckpointError
from megalite.topology.group import Group

MAX_OPEN = 64
"""Files held open: a checkpoint may have more of them than a process may open."""


class Checkpoint:
    """A verified checkpoint, open for reading, by several threads too. Files are opened when first touched."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._readers: dict[str, SafetensorsReader] = {}
        self._open: dict[str, None] = {}
        self._lock = Lock()

    def keys(self) -> list[str]:
        return sorted(self.manifest.tensors)

    def has(self, key: str) -> bool:
        return key in self.manifest.tensors

    def entry(self, key: str) -> TensorEntry:
        if key not in self.manifest.tensors:
            near = difflib.get_close_matches(key, self.manifest.tensors, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise CheckpointError(f"{self.path}: there is no {key}{hint}")
        return self.manifest.tensors[key]

    def read(
        self, key: str, slice: Slice | None = None, *, device: torch.device, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A new tensor with a slice of the stored one, put together from the parts that overlap it.

        Only the bytes of the slice are read (of rows cut into pieces below a page, whole rows), and beside the result
        no more than a few megabytes are in memory.

        Args:
            slice: per dimension [start, stop) in the global shape; None for all of it.
        """
        entry = self.entry(key)
        wanted = tuple((0, size) for size in entry.global_shape) if slice is None else tuple(slice)
        self._check(key, wanted)
        shape = tuple(stop - start for start, stop in wanted)
        result = torch.empty(shape, dtype=dtype or TORCH_DTYPES[entry.dtype], device=device)
        self.read_into(result, key, wanted)
        return result

    def read_into(self, output: torch.Tensor, key: str, slice: Slice) -> None:
        """`read` into a tensor that is there, of the slice's shape and any strides, type and device.

        Into contiguous memory on the CPU and of the stored type the bytes come directly from the disk.
        """
        entry = self._check(key, slice)
        names = part_keys(key, [part.file for part in entry.parts])
        for part, name in zip(entry.parts, names, strict=True):
            common = overlap(part.slice, slice)
            if common is not None:
                held = tuple(stop - start for start, stop in part.slice)
                record = Record(name, entry.dtype, held)
                target = output[relative(common, slice)]
                self._reader(part.file).read_into(target, record, relative(common, part.slice))

    def _check(self, key: str, slice: Slice) -> TensorEntry:
        entry = self.entry(key)
        if not within(slice, entry.global_shape, may_be_empty=True):
            raise CheckpointError(f"{self.path}: {key} has shape {list(entry.global_shape)}, asked for {list(slice)}")
        return entry

    def _reader(self, name: str) -> SafetensorsReader:
        with self._lock:
            reader = self._readers.get(name) or SafetensorsReader(self.path / name)
            self._readers[name] = reader
            reader.open()
            self._open.pop(name, None)
            self._open[name] = None  # the last one is the one used last
            if len(self._open) > MAX_OPEN:
                longest_unused = next(iter(self._open))
                self._readers[longest_unused].close()
                del self._open[longest_unused]
            return reader


def find_checkpoint(folder: Path | str, *, step: int | None, world: Group, log: Callable[[str], None]) -> Checkpoint:
    """The newest checkpoint in `folder` that verifies, or that of `step`.

    A checkpoint verifies if its manifest is sound and every file has the length and sha256 that the manifest says.
    The ranks share out the hashing and agree on the outcome: all open the same checkpoint or raise the same error,
    CheckpointMissing where nothing is named like a checkpoint.

    Args:
        step: only this one, with no fallback; None for the newest.
        log: gets a line for each damaged checkpoint passed over: which file, and what is wrong. Every rank calls it
            with the same lines, so give it one that prints on one rank.

    Collectives: a broadcast over `world`, and those of `verify_checkpoint` for each checkpoint examined.
    """
    folder, damaged = Path(folder), list[str]()
    for candidate in _agreed_candidates(folder, step, world):
        path = folder / candidate.name
        manifest, fault = verify_checkpoint(path, candidate.step, world=world)
        if manifest is not None:
            return Checkpoint(path, manifest)
        damaged.append(f"{candidate.name}: {fault}")
        if step is None:
            log(f"checkpoint {path} is damaged and passed over: {fault}")
    which = "no checkpoint verifies" if step is None else f"the checkpoint of step {step} is damaged"
    raise CheckpointError(f"{folder}: {which}: {'; '.join(damaged)}")


def _agreed_candidates(folder: Path, step: int | None, world: Group) -> list[Candidate]:
    """Rank 0's view of the folder, which may change while the ranks look, on every rank."""
    view: dict[str, object] = {}
    if world.rank == 0:
        try:
            view = {"found": [[item.step, item.name] for item in candidates(folder, step)]}
        except CheckpointError as error:
            view = {"error": str(error), "missing": isinstance(error, CheckpointMissing)}
    agreed = world.broadcast_json(view)
    if "error" in agreed:
        raise (CheckpointMissing if agreed["missing"] else CheckpointError)(agreed["error"])
    return [Candidate(number, name) for number, name in agreed["found"]]


def verify_checkpoint(path: Path, step: int, *, world: Group) -> tuple[Manifest | None, str]:
    """The manifest if the checkpoint verifies, else None and what is wrong with it; the same on every rank.

    Rank 0 reads and checks it; the others get a copy and parse what they ask for: thousands of ranks write 10^5 parts.

    Collectives: a broadcast and two `gather_json` over `world`.
    """
    manifest, sent = None, list[Any]()
    if world.rank == 0:
        try:
            text = read_text(path / MANIFEST_NAME)
            manifest = Manifest.from_json(text)
            at = text.rindex('"sha256":')  # of the whole: no tensor has such a field
            fault = "" if manifest.step == step else f"{MANIFEST_NAME}: is of step {manifest.step}"
            sent = [fault, at, text[at : at + 75], *(in_pieces(manifest) if world.size > 1 else ())]
        except CheckpointError as error:
            sent = [str(error), 0, ""]
    fault, at, seal, *pieces = world.broadcast_json(sent)
    if fault:
        return None, fault
    if manifest is None:
        manifest = from_pieces(*pieces)
    faults = world.gather_json(_unlike(path / MANIFEST_NAME, at, seal.encode()))
    if any(faults):
        return None, next(filter(None, faults))
    files_fault = verify_files(path, manifest.files, world=world)
    return (None, files_fault) if files_fault else (manifest, "")


def _unlike(manifest: Path, at: int, seal: bytes) -> str:
    """Why this rank does not see the manifest that rank 0 has read, from its seal alone; empty if it does."""
    try:
        with os.fdopen(open_plain(manifest), "rb", buffering=0) as file:
            file.seek(at)
            same = file.read(len(seal)) == seal
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{manifest.name}: {error.strerror}"
    return "" if same else f"{manifest.name}: ranks read different content: the folder must be on a shared file system"


def verify_files(path: Path, files: Mapping[str, FileEntry], *, world: Group, from_disk: bool = False) -> str:
    """What is wrong with a checkpoint's files, on every rank; empty if nothing is. The ranks share out the reading.

    Args:
        from_disk: read what the disk has, not what the system still has in memory.

    Collectives: one `gather_json` over `world`.
    """
    # Largest first and in turn, so that the ranks' shares are about equal.
    names = sorted(files, key=lambda name: (-files[name].length, name))
    found = []
    for name in names[world.rank :: world.size]:
        found.append(entry_fault(path / name, files[name], from_disk=from_disk))
        world.heartbeat.beat()
    every = sorted(fault for faults in world.gather_json(list(filter(None, found))) for fault in faults)
    more = f" (and {len(every) - 3} more files)" if len(every) > 3 else ""
    return "; ".join(every[:3]) + more

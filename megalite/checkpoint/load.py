"""Find a checkpoint that verifies, and read any slice of any tensor in it."""

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from megalite.checkpoint.files import FileEntry, entry_fault, open_plain, read_text
from megalite.checkpoint.folders import Candidate, candidates
from megalite.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointMissing,
    Manifest,
    Slice,
    TensorEntry,
    from_pieces,
    in_pieces,
    overlap,
    part_keys,
    relative,
    within,
)
from megalite.checkpoint.safetensors_file import TORCH_DTYPES, SafetensorsReader
from megalite.checkpoint.safetensors_header import Record
from megalite.config.errors import CheckpointError
from megalite.topology.group import Group

MAX_OPEN = 64
"""Maximum number of open files. A checkpoint may have more files than a process may open."""


class Checkpoint:
    """A verified checkpoint, open for reading from several threads. Files are opened on first use."""

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
        """Return a slice of a stored tensor as a new tensor, assembled from the parts that overlap it.

        Reads only the bytes of the slice (whole rows, if the wanted part of a row is smaller than a page) and uses
        only a few megabytes of memory beside the result.

        Args:
            slice: per dimension [start, stop) in the global shape; None for the whole tensor."""
        entry = self.entry(key)
        wanted = tuple((0, size) for size in entry.global_shape) if slice is None else tuple(slice)
        self._check(key, wanted)
        shape = tuple(stop - start for start, stop in wanted)
        result = torch.empty(shape, dtype=dtype or TORCH_DTYPES[entry.dtype], device=device)
        self.read_into(result, key, wanted)
        return result

    def read_into(self, output: torch.Tensor, key: str, slice: Slice) -> None:
        """Read a slice into `output`, which has the slice's shape and any strides, dtype and device.

        If `output` is contiguous, on the CPU and of the stored dtype, the bytes are read into it without a copy."""
        entry = self._check(key, slice)
        names = part_keys(key, [part.file for part in entry.parts])
        for part, name in zip(entry.parts, names, strict=True):
            common = overlap(part.slice, slice)
            if common is not None:
                record = Record(name, entry.dtype, tuple(stop - start for start, stop in part.slice))
                target = output[relative(common, slice)]
                self._reader(part.file).read_into(target, record, relative(common, part.slice))

    def _check(self, key: str, slice: Slice) -> TensorEntry:
        entry = self.entry(key)
        if not within(slice, entry.global_shape, may_be_empty=True):
            raise CheckpointError(f"{self.path}: {key} has shape {list(entry.global_shape)}, requested {list(slice)}")
        return entry

    def _reader(self, name: str) -> SafetensorsReader:
        with self._lock:
            reader = self._readers.get(name) or SafetensorsReader(self.path / name)
            self._readers[name] = reader
            reader.open()
            self._open.pop(name, None)
            self._open[name] = None  # the last key is the most recently used file
            if len(self._open) > MAX_OPEN:
                least_recent = next(iter(self._open))
                self._readers[least_recent].close()
                del self._open[least_recent]
            return reader


def find_checkpoint(folder: Path | str, *, step: int | None, world: Group, log: Callable[[str], None]) -> Checkpoint:
    """Open the newest checkpoint in `folder` that verifies, or the one of `step`.

    A checkpoint verifies if its manifest is sound and every file has the length and sha256 in the manifest.
    The ranks divide the hashing and agree on the outcome: all open the same checkpoint or raise the same error,
    CheckpointMissing if no folder has a checkpoint's name.

    Args:
        step: the only step to try, without fallback; None for the newest.
        log: receives a line for each damaged checkpoint that is skipped, with the file and the fault. Every rank calls
            it with the same lines, so pass a function that prints on one rank.

    Collectives: a broadcast over `world`, and those of `verify_checkpoint` for each checkpoint examined."""
    folder, damaged = Path(folder), list[str]()
    for candidate in agreed_candidates(folder, step, world):
        path = folder / candidate.name
        manifest, fault = verify_checkpoint(path, candidate.step, world=world)
        if manifest is not None:
            return Checkpoint(path, manifest)
        damaged.append(f"{candidate.name}: {fault}")
        if step is None:
            log(f"checkpoint {path} is damaged and passed over: {fault}")
    which = "no checkpoint verifies" if step is None else f"the checkpoint of step {step} is damaged"
    raise CheckpointError(f"{folder}: {which}: {'; '.join(damaged)}")


def agreed_candidates(folder: Path, step: int | None, world: Group) -> list[Candidate]:
    """Return rank 0's candidates on every rank: the folder may change while the ranks list it."""
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
    """Return the manifest if the checkpoint verifies, else None and the fault; the same on every rank. Rank 0 reads and
    checks the manifest. The other ranks receive a copy and parse tensor entries on demand, because thousands of ranks
    write 10^5 parts.

    Collectives: a broadcast and two `gather_json` over `world`."""
    manifest, sent = None, list[Any]()
    if world.rank == 0:
        try:
            text = read_text(path / MANIFEST_NAME)
            manifest = Manifest.from_json(text)
            at = text.rindex('"sha256":')  # the manifest's own: no tensor entry has this field
            fault = "" if manifest.step == step else f"{MANIFEST_NAME}: is of step {manifest.step}"
            sent = [fault, at, text[at : at + 75], *(in_pieces(manifest) if world.size > 1 else ())]
        except CheckpointError as error:
            sent = [str(error), 0, ""]
    fault, at, seal, *pieces = world.broadcast_json(sent)
    if fault:
        return None, fault
    if manifest is None:
        manifest = from_pieces(*pieces)
    faults = world.gather_json(_seal_fault(path / MANIFEST_NAME, at, seal.encode()))
    if any(faults):
        return None, next(filter(None, faults))
    files_fault = verify_files(path, manifest.files, world=world)
    return (None, files_fault) if files_fault else (manifest, "")


def _seal_fault(manifest: Path, at: int, seal: bytes) -> str:
    """Return why this rank's file is not the manifest that rank 0 read, comparing only its sha256; empty if it is."""
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
    """Return what is wrong with a checkpoint's files, the same on every rank; empty if nothing is. The ranks divide the
    reading.

    Args:
        from_disk: read from the disk, not from the page cache.

    Collectives: one `gather_json` over `world`."""
    # Assign files in turn, largest first, to balance the ranks' shares.
    names = sorted(files, key=lambda name: (-files[name].length, name))
    found = []
    for name in names[world.rank :: world.size]:
        found.append(entry_fault(path / name, files[name], from_disk=from_disk))
        world.heartbeat.beat()
    every = sorted(fault for faults in world.gather_json(list(filter(None, found))) for fault in faults)
    more = f" (and {len(every) - 3} more files)" if len(every) > 3 else ""
    return "; ".join(every[:3]) + more

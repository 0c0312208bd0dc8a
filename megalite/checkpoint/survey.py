"""List the checkpoints in a folder and check them, for inspection. Imports no torch."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.checkpoint.files import entry_fault, file_length, open_plain, read_text
from megalite.checkpoint.folders import STAGING_PREFIX, candidates, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing, Manifest, part_keys
from megalite.checkpoint.safetensors_header import HeaderFault, Record, read_header
from megalite.config.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with the number of files hashed so far and their bytes."""


class CheckpointRemoved(CheckpointMissing):
    """A checkpoint was removed during the inspection, for example by a run with --keep-latest."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was removed meanwhile, perhaps by a run with --keep-latest")
        self.path = path


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint's folder and the result of its checks."""

    path: Path
    manifest: Manifest | None
    """None if it cannot be read or is damaged; then `faults` has the reason."""
    faults: tuple[str, ...]
    """Faults, each with the file's name."""
    verified: bool = False
    """Whether every file was hashed and has the right sha256, not only the right length."""
    removed: bool = False
    """Whether it was removed during the inspection; then `faults` is empty."""

    @property
    def step(self) -> int | None:
        """The manifest's step or, without a manifest, the folder name's."""
        return step_of(self.path.name) if self.manifest is None else self.manifest.step

    @property
    def bytes(self) -> int | None:
        """Total bytes of the files that the manifest lists."""
        return None if self.manifest is None else sum(entry.length for entry in self.manifest.files.values())

    @property
    def sound(self) -> bool:
        """Whether it exists and has no known faults."""
        return self.manifest is not None and not self.faults and not self.removed

    @property
    def state(self) -> str:
        """One of `verified`, `complete` (right sizes, not hashed), `removed meanwhile` and `damaged: ...`."""
        if self.removed:
            return "removed meanwhile"
        if self.faults:
            more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
            return f"damaged: {self.faults[0]}{more}"
        return "verified" if self.verified else "complete"


def survey(path: Path, step: int | None = None) -> list[FoundCheckpoint]:
    """List the checkpoints at `path`, a folder of checkpoints or one of them, newest first. Checks manifests and file
    lengths.

    Raises:
        CheckpointMissing: there is no checkpoint.
        CheckpointError: `path` is a file, a folder one level too high or an unfinished save, or `step` does not exist.
    """
    if not _is_checkpoint(path):
        return [_examine(path / item.name, item.step) for item in candidates(path, step)]
    found = _examine(path, step_of(path.absolute().name))
    if step is not None and found.step != step:
        raise CheckpointError(f"{path} is the checkpoint of step {found.step}, not of step {step}")
    return [found]


def _is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint, sound or damaged, rather than a folder of checkpoints."""
    name = path.absolute().name
    if path.is_file():
        sibling = (path.parent / MANIFEST_NAME).is_file()
        remedy = f"give its folder, {path.parent}" if sibling else "give a folder of checkpoints, or one of them"
        raise CheckpointError(f"{path} is a file; {remedy}")
    if path.is_dir() and name.startswith(STAGING_PREFIX):
        raise CheckpointError(f"{path} is an unfinished save, in progress or left by a crash; it cannot be loaded")
    return path.is_dir() and (step_of(name) is not None or os.path.lexists(path / MANIFEST_NAME))


def _examine(path: Path, step: int | None) -> FoundCheckpoint:
    if not os.path.lexists(path / MANIFEST_NAME):
        return _unless_removed(FoundCheckpoint(path, None, (f"no {MANIFEST_NAME}: not complete, or not a checkpoint",)))
    try:
        manifest = Manifest.from_json(read_text(path / MANIFEST_NAME))
    except CheckpointError as error:
        return _unless_removed(FoundCheckpoint(path, None, (str(error),)))
    if step is not None and manifest.step != step:
        return FoundCheckpoint(path, manifest, (f"{MANIFEST_NAME}: is of step {manifest.step}",))
    return _unless_removed(FoundCheckpoint(path, manifest, tuple(_length_faults(path, manifest))))


def _unless_removed(found: FoundCheckpoint) -> FoundCheckpoint:
    """Return `found`, marked as removed instead of damaged if its folder has been removed."""
    removed = found.faults and not os.path.lexists(found.path)
    return replace(found, faults=(), verified=False, removed=True) if removed else found


@contextlib.contextmanager
def raise_if_removed(*found: FoundCheckpoint) -> Iterator[None]:
    """Raise CheckpointRemoved for errors inside the block if one of the checkpoints has been removed."""
    try:
        yield
    except (CheckpointError, OSError):
        for one in found:
            if not os.path.lexists(one.path):
                raise CheckpointRemoved(one.path) from None
        raise


def _length_faults(path: Path, manifest: Manifest) -> Iterator[str]:
    for name, entry in sorted(manifest.files.items()):
        try:
            length = file_length(path / name)
        except CheckpointError as error:
            yield str(error)
            continue
        if length != entry.length:
            yield f"{name}: {length} bytes long, the manifest says {entry.length}"


def verify(surveyed: FoundCheckpoint, progress: Progress = lambda files, size: None) -> FoundCheckpoint:
    """Hash every file, and compare its header with the manifest's tensors."""
    manifest = surveyed.manifest
    if manifest is None or not surveyed.sound:
        return surveyed
    expected = _records(manifest)
    faults: list[str] = []
    size = 0
    for number, (name, entry) in enumerate(sorted(manifest.files.items()), start=1):
        fault = _file_fault(surveyed.path / name, manifest, expected[name])
        faults += [] if fault is None else [fault]
        size += entry.length
        progress(number, size)
    return _unless_removed(replace(surveyed, faults=tuple(faults), verified=not faults))


def _records(manifest: Manifest) -> dict[str, list[Record]]:
    """Return the tensors that each file must contain, by file name."""
    expected: dict[str, list[Record]] = {name: [] for name in manifest.files}
    for key, entry in manifest.tensors.items():
        stored = part_keys(key, [part.file for part in entry.parts])
        for part, name in zip(entry.parts, stored, strict=True):
            shape = tuple(stop - start for start, stop in part.slice)
            expected[part.file].append(Record(name, entry.dtype, shape))
    return expected


def _file_fault(path: Path, manifest: Manifest, expected: list[Record]) -> str | None:
    fault = entry_fault(path, manifest.files[path.name])
    if fault is not None:
        return fault
    with os.fdopen(open_plain(path), "rb") as file:
        try:
            found = read_header(file.fileno(), manifest.files[path.name].length).records
        except HeaderFault as error:
            return f"{path.name}: {error}"
    for record in expected:
        stored = found.get(record.key)
        if stored != record:
            what = "does not have it" if stored is None else f"has {stored.dtype} {list(stored.shape)}"
            return (
                f"{path.name}: the manifest says {record.key} is {record.dtype} {list(record.shape)}, the file {what}"
            )
    return None


def unlisted(surveyed: FoundCheckpoint) -> list[str]:
    """Return the names in the folder that the manifest does not list. Such files are never read."""
    listed = {MANIFEST_NAME, *(surveyed.manifest.files if surveyed.manifest else ())}
    return sorted(path.name for path in surveyed.path.iterdir() if path.name not in listed)

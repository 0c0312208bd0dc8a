"""Name, list, commit and check the checkpoints of a folder. Imports no torch.

step-0000100            a committed checkpoint
step-0000100.replaced   the previous checkpoint of the same step, while a new one replaces it
.tmp-step-100           an unfinished save, in progress or left by a crash
latest                  text: the name of the last committed checkpoint, for people and scripts

A commit is atomic. The order of its steps ensures that a crash between any two of them leaves only checkpoints that verify:
each rank writes and fsyncs its files and a list of them -> rank 0 merges the lists into the manifest and fsyncs it ->
the lists are removed and the folder is fsynced -> the folder is renamed and its parent is fsynced -> `latest` is updated.
An older checkpoint of the same step is first renamed to `step-N.replaced`, which loading also accepts, and removed last.
"""

import contextlib
import difflib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import (
    FileEntry,
    entry_fault,
    length_fault,
    open_plain,
    read_text,
    remove_tree,
    replace_durably,
    sync_folder,
    write_durably,
)
from megalite.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointMissing,
    Manifest,
    Part,
    TensorEntry,
    listed_files,
    part_keys,
    plain_parts,
)
from megalite.checkpoint.safetensors_header import HeaderFault, Record, read_header
from megalite.config.errors import CheckpointError
from megalite.config.registry import gc_paused

LATEST_NAME = "latest"
TRACKER_NAME = "latest_checkpointed_iteration.txt"  # with the iteration of Megatron-LM's newest checkpoint
REPLACED_SUFFIX = ".replaced"
STAGING_PREFIX = ".tmp-step-"
_STEP_NAME = re.compile(r"step-([0-9]{7,19})(\.replaced)?")


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint. Names of up to 7 digits sort like their steps."""
    return f"step-{step:07d}"


def staging_name(step: int) -> str:
    return f"{STAGING_PREFIX}{step}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's folder name, or None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if name.removesuffix(REPLACED_SUFFIX) == step_name(step) else None


@dataclass(frozen=True)
class Candidate:
    """A folder with a checkpoint's name. Its content is not verified."""

    step: int
    name: str


def candidates(folder: Path, step: int | None = None) -> list[Candidate]:
    """List the entries of `folder` with a checkpoint's name (of `step`, if given), newest first.

    `step-N.replaced` follows `step-N`: a crash while step N is saved again may leave only the former.

    Raises:
        CheckpointMissing: there are none; the message lists what the folder contains.
        CheckpointError: the folder is itself a checkpoint, has checkpoints one level below, or has other steps only."""
    names = _names(folder)
    found = [Candidate(number, name) for name in names if (number := step_of(name)) is not None]
    if not found:
        raise _nothing_found(folder, names)
    chosen = [candidate for candidate in found if step is None or candidate.step == step]
    if not chosen:
        steps = ", ".join(str(number) for number in sorted({candidate.step for candidate in found}))
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has steps {steps}")
    return sorted(chosen, key=lambda candidate: (-candidate.step, candidate.name))


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        parent = folder.absolute().parent
        near = difflib.get_close_matches(folder.name, _subfolders(parent), n=1, cutoff=0.7)
        hint = f"; there is {parent / near[0]}" if near else ""
        raise CheckpointMissing(f"no checkpoint: {folder} does not exist{hint}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file; give the folder that contains the checkpoints") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot look for checkpoints: {error.strerror}") from None


def _nothing_found(folder: Path, names: list[str]) -> CheckpointError:
    if MANIFEST_NAME in names:
        here = folder.resolve()
        step = step_of(here.name)
        which = "" if step is None else f" --ckpt-step {step}"
        return CheckpointError(f"{folder} is itself a checkpoint; load it with --load {here.parent}{which}")
    foreign = ""
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        foreign = "a Hugging Face folder"
    elif TRACKER_NAME in names or any(re.fullmatch(r"iter_\d{7}", name) for name in names):
        foreign = "a folder of Megatron-LM's checkpoints"
    if foreign:
        works = f"--load hf:{folder} starts from it, and " if "Hugging Face" in foreign else ""
        return CheckpointError(
            f"{folder} is {foreign}; {works}megalite convert {folder} imported --to native makes a checkpoint of it"
        )
    for name in sorted(_subfolders(folder)):
        if any(step_of(inner) is not None for inner in _subfolders(folder / name)):
            return CheckpointError(f"no checkpoint directly in {folder}, but in {folder / name}: give that folder")
    unfinished = sorted(name for name in names if name.startswith(STAGING_PREFIX))
    if unfinished:
        what = f"only unfinished saves ({', '.join(unfinished)})"
    elif names:
        shown = sorted(names)[:5]
        what = f"{len(names)} other entries ({', '.join(shown)}{', ...' if len(names) > len(shown) else ''})"
    else:
        what = "the folder is empty"
    return CheckpointMissing(f"no checkpoint in {folder}: no step-* folder, {what}")


def _subfolders(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


part_name = "part-{}.json".format


@dataclass(frozen=True)
class RankPart:
    """Files that one rank wrote, and the tensor slices in them."""

    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]


def prepare_staging(folder: Path, step: int) -> Path:
    """Clean up after earlier crashes in `folder` and create the empty staging folder of a save (rank 0)."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    remove_unfinished(folder)
    for path in sorted(folder.iterdir()):
        if step_of(path.name) is not None and path.name.endswith(REPLACED_SUFFIX):
            _finish_replacing(path)
    staging = folder / staging_name(step)
    remove_tree(staging)
    staging.mkdir()
    sync_folder(folder)
    return staging


def remove_unfinished(folder: Path) -> None:
    """Remove the remains of interrupted saves and removals (rank 0). Ignore entries that cannot be removed."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(STAGING_PREFIX):
            abandon(path)


def _finish_replacing(aside: Path) -> None:
    """Finish a replacement that a crash interrupted: remove the old checkpoint `aside` if the new one verifies.

    Otherwise rename `aside` back, because it may be the only sound checkpoint."""
    proper = aside.with_name(aside.name.removesuffix(REPLACED_SUFFIX))
    if proper.exists():
        if _verifies(proper):
            discard(aside)
            return
        proper.rename(_hidden(proper))
    aside.rename(proper)
    sync_folder(aside.parent)
    remove_tree(_hidden(proper))


def _verifies(checkpoint: Path) -> bool:
    try:
        files = listed_files(read_text(checkpoint / MANIFEST_NAME))
    except CheckpointError:
        return False
    return all(entry_fault(checkpoint / name, entry) is None for name, entry in files.items())


def discard(checkpoint: Path) -> None:
    """Rename a checkpoint to a name that loading ignores, then remove it: half removed, it would look damaged."""
    if not checkpoint.is_symlink() and not os.access(checkpoint, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(checkpoint))
    checkpoint.rename(_hidden(checkpoint))
    remove_tree(_hidden(checkpoint))


def _hidden(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{STAGING_PREFIX}{checkpoint.name}")


def write_rank_part(staging: Path, rank: int, part: RankPart) -> None:
    """Write the list of the files and tensors of `rank`, which rank 0 merges."""
    write_durably(staging / part_name(rank), json.dumps(plain_parts(part.files, part.tensors)).encode())
    sync_folder(staging)


def publish(staging: Path, preamble: Manifest, ranks: int, log: Callable[[str], None]) -> Path:
    """Merge the parts of all ranks into the manifest and rename the staging folder to its final name (rank 0).

    Args:
        log: receives a warning about errors after the rename, which do not make the save fail."""
    manifest = _merge(staging, preamble, ranks)
    text = manifest.to_json()
    # Parse it before the rename: a manifest that cannot be loaded must not be committed.
    Manifest.from_json(text, source=str(staging / MANIFEST_NAME))
    write_durably(staging / MANIFEST_NAME, text.encode())
    for rank in range(ranks):
        (staging / part_name(rank)).unlink()
    sync_folder(staging)
    folder, name = staging.parent, step_name(manifest.step)
    final, aside = folder / name, folder / (name + REPLACED_SUFFIX)
    replacing = final.exists() or final.is_symlink()
    if replacing:
        final.rename(aside)
    staging.rename(final)
    sync_folder(folder)
    # The checkpoint is committed: later failures are only logged.
    try:
        replace_durably(folder / LATEST_NAME, f"{name}\n".encode())
        if replacing:
            discard(aside)
    except OSError as error:
        log(f"warning: {final} is saved, but {error.filename or folder}: {error.strerror}")
    return final


def correct_latest(folder: Path, step: int) -> None:
    """Write the checkpoint of `step`, the newest sound one, into `latest` (rank 0).

    After a crash between the rename and the update, `latest` still names the previous checkpoint."""
    path, text = folder / LATEST_NAME, f"{step_name(step)}\n".encode()
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == text:
            return
    replace_durably(path, text)


def abandon(staging: Path) -> None:
    """Remove the files of a failed save, to free the disk space for the next one (rank 0)."""
    with contextlib.suppress(OSError):
        remove_tree(staging)


def _merge(staging: Path, preamble: Manifest, ranks: int) -> Manifest:
    files: dict[str, Any] = {}
    known: dict[str, TensorEntry] = {}
    parts: dict[str, list[Part]] = {}
    with gc_paused():
        for rank in range(ranks):
            part = _read_part(staging, rank)
            files.update(part.files)
            for key, entry in part.tensors.items():
                first = known.setdefault(key, entry)
                if (first.dtype, first.global_shape) != (entry.dtype, entry.global_shape):
                    raise CheckpointError(
                        f"{key}: rank {rank} wrote {entry.dtype} of global shape {list(entry.global_shape)}, "
                        f"an earlier rank {first.dtype} of {list(first.global_shape)}"
                    )
                parts.setdefault(key, []).extend(entry.parts)
        tensors = {key: replace(entry, parts=tuple(parts[key])) for key, entry in known.items()}
    return replace(preamble, files=files, tensors=tensors)


def _read_part(staging: Path, rank: int) -> RankPart:
    path = staging / part_name(rank)
    try:
        body = json.loads(read_text(path))
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: rank {rank} wrote its files but rank 0 does not find them ({error}): "
            f"all ranks must write to one folder, on a shared file system if they run on several machines"
        ) from None
    tensors = {}
    for key, entry in body["tensors"].items():
        parts = tuple(Part(p["file"], tuple((start, stop) for start, stop in p["slice"])) for p in entry["parts"])
        tensors[key] = TensorEntry(entry["name"], entry["dtype"], tuple(entry["global_shape"]), parts)
    return RankPart({name: FileEntry(**entry) for name, entry in body["files"].items()}, tensors)


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
    faults = (length_fault(path / name, entry) for name, entry in sorted(manifest.files.items()))
    return _unless_removed(FoundCheckpoint(path, manifest, tuple(filter(None, faults))))


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
            found, _ = read_header(file.fileno(), manifest.files[path.name].length)
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

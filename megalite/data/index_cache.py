"""Cache dataset indices on disk: each is a folder of arrays, named by the hash of everything that it depends on."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import CHUNK, free_bytes, sync_folder, write_durably
from megalite.config.errors import ConfigError

Arrays = dict[str, NDArray[Any]]

FORMAT = 1  # of an entry; part of its key
SMALL_BYTES = 32 << 20
"""Smaller indices are built in memory by each rank, in less time than agreeing on a file would take."""
_ENTRY = "entry.json"
_LEFTOVER_SECONDS = 86400.0  # a build that has not ended after a day was killed
_ATTEMPTS = 4  # to rename an entry, if several processes replace a damaged one


@dataclass(frozen=True)
class Recipe:
    """How to build an index, and everything that it depends on."""

    name: str  # for messages
    identity: Callable[[], Mapping[str, Any]]
    """Returns everything that the content depends on, as JSON; called only for large indices."""
    arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]]  # type and shape of each array
    fill: Callable[[Arrays], None]  # fills new arrays of those types and shapes

    @property
    def nbytes(self) -> int:
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.arrays.values())

    def make(self) -> Arrays:
        made = {name: np.empty(shape, dtype) for name, (dtype, shape) in self.arrays.items()}
        self.fill(made)
        return made

    @cached_property
    def about(self) -> dict[str, Any]:
        """The content of the key."""
        arrays = {name: [dtype.str, list(shape)] for name, (dtype, shape) in self.arrays.items()}
        return {"format": FORMAT, "arrays": arrays, **self.identity()}

    @cached_property
    def key(self) -> str:
        """Sha256 of `about`, so that an index of changed data is never used."""
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Kept:
    """An index on disk."""

    name: str
    folder: Path
    nbytes: int
    built: bool  # whether this process built it now


@dataclass
class IndexCache:
    """A folder of indices, shared by all runs and ranks without locks.

    A build is written to a temporary folder, synced, and published by one rename. If another process was faster, its
    entry is used. An entry with other lengths or checksums than in its entry.json is built again. The returned arrays
    are memory maps, which stay valid if the file is removed.

    If the folder cannot be written, indices are built in memory and this is logged once; if the user has chosen the
    folder, it is an error."""

    folder: Path
    chosen: bool  # by the user, with data_cache_path
    log: Callable[[str], None]
    small_bytes: int = SMALL_BYTES
    kept: list[Kept] = field(default_factory=list)  # indices found or built by `prepare`, without duplicates
    _complained: bool = False
    _checked: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Verified entries: key -> inode, size and modification time of each file."""

    def get(self, recipe: Recipe) -> Arrays:
        """Return the arrays of an index: in memory if it is small, else mapped from its entry, which is built if
        missing. Raises ConfigError if the user's folder cannot be written."""
        if recipe.nbytes < self.small_bytes:
            return recipe.make()
        return self._open(recipe) or self._build(recipe)[0] or recipe.make()

    def prepare(self, recipe: Recipe) -> Kept | None:
        """Make sure that a large index is on disk. Return None if it is small or cannot be stored. Raises ConfigError
        if the user's folder cannot be written."""
        if recipe.nbytes < self.small_bytes:
            return None
        for one in self.kept:
            if one.folder.name == recipe.key:
                return replace(one, built=False)
        exists = self._open(recipe) is not None
        if not exists and not self._build(recipe)[1]:
            return None
        self.kept.append(Kept(recipe.name, self.folder / recipe.key, recipe.nbytes, not exists))
        return self.kept[-1]

    def need_room(self, recipes: Sequence[Recipe]) -> None:
        """Log now if the disk has no room for all large indices that do not exist yet; raise ConfigError if the user
        has chosen the folder."""
        large = [recipe for recipe in recipes if recipe.nbytes >= self.small_bytes]
        missing = [recipe for recipe in large if not (self.folder / recipe.key).exists()]
        nbytes = sum(recipe.nbytes for recipe in missing)
        if missing and free_bytes(self.folder) < nbytes:
            text = f"no room for {nbytes / 1e6:.0f} MB in {len(missing)} indices"
            self._complain(OSError(errno.ENOSPC, text), missing[0])

    def _open(self, recipe: Recipe) -> Arrays | None:
        """Return the arrays of an intact entry, else None. Checksums are computed once per process."""
        folder = self.folder / recipe.key
        paths = {name: folder / f"{name}.npy" for name in recipe.arrays}
        try:
            entry = json.loads((folder / _ENTRY).read_bytes())
            facts = [path.stat() for path in (folder / _ENTRY, *paths.values())]
            stamps = [(fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts]
            if self._checked.get(recipe.key) != stamps:
                files = {name: _file_facts(path) for name, path in paths.items()}
                if entry != {"about": recipe.about, "files": files}:
                    return None
            arrays = {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}
        except (OSError, ValueError, EOFError):
            return None
        if any((arrays[name].dtype, arrays[name].shape) != recipe.arrays[name] for name in arrays):
            return None
        self._checked[recipe.key] = stamps
        # As plain ndarrays, because slicing an np.memmap is ten times as slow.
        return {name: np.asarray(array).view(np.ndarray) for name, array in arrays.items()}

    def _build(self, recipe: Recipe) -> tuple[Arrays, bool]:
        """Build and store an index. Return its arrays, if they were built, and whether it is on disk now."""
        made: Arrays = {}
        for left in reversed(range(_ATTEMPTS)):
            temporary = self.folder / f".tmp-{recipe.key[:16]}-{secrets.token_hex(6)}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                temporary.mkdir()
                if shutil.disk_usage(temporary).free < recipe.nbytes:
                    raise OSError(errno.ENOSPC, f"no room for {recipe.nbytes / 1e6:.0f} MB")
                made = made or recipe.make()
                files = {name: _write(temporary / f"{name}.npy", array) for name, array in made.items()}
                entry = {"about": recipe.about, "files": files}
                write_durably(temporary / _ENTRY, json.dumps(entry, indent=1).encode())
                sync_folder(temporary)
                self._put(temporary, recipe)
                sync_folder(self.folder)
            except OSError as error:
                is_emptied = isinstance(error, FileNotFoundError)  # by a user or another process
                if self._open(recipe) is None and not (is_emptied and left):
                    self._complain(error, recipe)
                    break
            finally:
                for rest in self.folder.glob(f"{temporary.name}*"):
                    shutil.rmtree(rest, ignore_errors=True)
            if (found := self._open(recipe)) is not None:
                return found, True
        return made, False

    def _put(self, temporary: Path, recipe: Recipe) -> None:
        """Rename a new entry, unless an intact one exists. Raises OSError if that fails, or if other processes put
        damaged entries there each time."""
        target = self.folder / recipe.key
        for attempt in range(_ATTEMPTS):
            try:
                temporary.rename(target)
                return
            except OSError:
                if self._open(recipe) is not None:
                    return  # another process was first
                if attempt == _ATTEMPTS - 1:
                    raise
            # The existing entry is damaged. It is moved away first, because removing it may take a while; it is missing
            # if another process has moved it.
            with suppress(FileNotFoundError):
                target.rename(temporary.with_name(f"{temporary.name}-damaged{attempt}"))
                self.log(f"{target} is damaged: the index of {recipe.name} has been built again")

    def _remove_leftovers(self) -> None:
        for old in self.folder.glob(".tmp-*"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > _LEFTOVER_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)

    def _complain(self, error: OSError, recipe: Recipe) -> None:
        what = f"the index of {recipe.name} ({recipe.nbytes / 1e6:.0f} MB)"
        if self.chosen:
            raise ConfigError(
                f"data_cache_path {self.folder}: {error.strerror}: cannot store {what} there; use a writable folder with "
                "enough room, or leave data_cache_path out"
            ) from None
        if not self._complained:
            self._complained = True
            self.log(
                f"cannot write to {self.folder} ({error.strerror}): {what} and other indices are built in the memory of "
                "each rank of a run; --data-cache-path FOLDER stores them on disk"
            )


class OneIndex:
    """Base class of datasets with one index for all samples, stored on disk if it is large."""

    cache: IndexCache | None

    @cached_property
    def recipe(self) -> Recipe:
        raise NotImplementedError

    @property
    def index_bytes(self) -> int:
        return self.recipe.nbytes

    @cached_property
    def arrays(self) -> Arrays:
        return self.recipe.make() if self.cache is None else self.cache.get(self.recipe)

    def _keep(self) -> list[Kept | None]:
        return [] if self.cache is None else [self.cache.prepare(self.recipe)]


def _write(path: Path, array: NDArray[Any]) -> dict[str, int]:
    """Write and sync a .npy file. Return its length and checksum."""
    with path.open("xb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return _file_facts(path)


def _file_facts(path: Path) -> dict[str, int]:
    checksum, length = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            length += len(chunk)
    return {"bytes": length, "crc32": checksum}

"""Indices that are made once and kept on disk: arrays in a folder named by the hash of everything they depend on."""

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

from megalite.checkpoint.files import CHUNK, sync_folder, write_durably
from megalite.config.errors import ConfigError

Arrays = dict[str, NDArray[Any]]

FORMAT = 1  # of an entry; part of its key
SMALL_BYTES = 32 << 20
"""Indices below this are made in memory by each rank, in less time than it takes to agree on a file."""
_ENTRY = "entry.json"
_LEFTOVER_SECONDS = 86400.0  # a build that has not ended after a day was killed
_ATTEMPTS = 4  # to give an entry its name, where several processes replace a damaged one


@dataclass(frozen=True)
class Recipe:
    """How an index is made, and what it depends on."""

    name: str  # for messages
    identity: Callable[[], Mapping[str, Any]]
    """Everything that the content depends on, as JSON has it; asked for only where the index is large."""
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
        """What the key is the hash of."""
        arrays = {name: [dtype.str, list(shape)] for name, (dtype, shape) in self.arrays.items()}
        return {"format": FORMAT, "arrays": arrays, **self.identity()}

    @cached_property
    def key(self) -> str:
        """Sha256 of `about`: an index of changed data can never be taken for this one."""
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Kept:
    name: str
    folder: Path
    nbytes: int
    built: bool  # now; else it was there


@dataclass
class IndexCache:
    """A folder of indices, shared by all runs and ranks that see it; there are no locks.

    A build is written to a temporary folder, put on the disk, and gets its name by one rename. Who comes second finds
    the name taken, and uses what is there. An entry with other lengths or checksums than its entry.json says is built
    again. The returned arrays are memory maps, which outlive a removed file.

    Where the folder cannot be written, indices are made in memory, and that is logged once; but if the user has
    chosen the folder, it is an error.
    """

    folder: Path
    chosen: bool  # by the user, with data_cache_path
    log: Callable[[str], None]
    small_bytes: int = SMALL_BYTES
    kept: list[Kept] = field(default_factory=list)  # what `prepare` found or built, each once
    _complained: bool = False
    _checked: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Of entries with right checksums or written here: key -> what identifies their files."""

    def get(self, recipe: Recipe) -> Arrays:
        """The arrays of an index: in memory if it is small, else mapped from its entry, which is built if need be.
        Raises ConfigError: the folder was chosen by the user and cannot be written."""
        if recipe.nbytes < self.small_bytes:
            return recipe.make()
        return self._open(recipe) or self._build(recipe)[0] or recipe.make()

    def prepare(self, recipe: Recipe) -> Kept | None:
        """Make sure that a large index is on the disk; None for a small one, and where it cannot be kept. Raises
        ConfigError: the folder was chosen by the user and cannot be written."""
        if recipe.nbytes < self.small_bytes:
            return None
        for one in self.kept:
            if one.folder.name == recipe.key:
                return replace(one, built=False)
        is_there = self._open(recipe) is not None
        if not is_there and not self._build(recipe)[1]:
            return None
        self.kept.append(Kept(recipe.name, self.folder / recipe.key, recipe.nbytes, not is_there))
        return self.kept[-1]

    def need_room(self, recipes: Sequence[Recipe]) -> None:
        """Complain now if the disk has no room for all large indices among these that do not exist yet. Raises
        ConfigError: there is none, and the folder was chosen by the user."""
        large = [recipe for recipe in recipes if recipe.nbytes >= self.small_bytes]
        missing = [recipe for recipe in large if not (self.folder / recipe.key).exists()]
        nbytes = sum(recipe.nbytes for recipe in missing)
        there = next((folder for folder in (self.folder, *self.folder.parents) if folder.is_dir()), None)
        if there is not None and missing and shutil.disk_usage(there).free < nbytes:
            text = f"no room for {nbytes / 1e6:.0f} MB in {len(missing)} indices"
            self._complain(OSError(errno.ENOSPC, text), missing[0])

    def _open(self, recipe: Recipe) -> Arrays | None:
        """The arrays of a whole entry; None where there is none. Checksums are computed once per process."""
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
        # Plain ndarrays over the maps: slicing np.memmap itself costs ten times as much.
        return {name: np.asarray(array).view(np.ndarray) for name, array in arrays.items()}

    def _build(self, recipe: Recipe) -> tuple[Arrays, bool]:
        """The arrays of an index that is not on the disk yet, if they were made, and whether it is there now."""
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
                is_emptied = isinstance(error, FileNotFoundError)  # by a user or another process meanwhile
                if self._open(recipe) is None and not (is_emptied and left):
                    self._complain(error, recipe)
                    break
            finally:  # also after a signal that ends the run
                for rest in self.folder.glob(f"{temporary.name}*"):
                    shutil.rmtree(rest, ignore_errors=True)
            if (found := self._open(recipe)) is not None:
                return found, True
        return made, False

    def _put(self, temporary: Path, recipe: Recipe) -> None:
        """Give a new entry its name, unless a whole one has it. Raises OSError: it cannot be had; or other processes
        put damaged ones there each time."""
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
            # What has the name is damaged. Moved away first, as its removal may take a while; another process may do the
            # same, and then it is gone.
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
                f"data_cache_path {self.folder}: {error.strerror}: cannot keep {what} there; give a folder that can be "
                "written and has room, or leave data_cache_path out"
            ) from None
        if not self._complained:
            self._complained = True
            self.log(
                f"cannot write to {self.folder} ({error.strerror}): {what} and the like are not kept, but made in the "
                "memory of each rank of a run; --data-cache-path FOLDER keeps them"
            )


class OneIndex:
    """A dataset with one index for all of its samples, which is kept where it is large."""

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
    """Write a .npy file to the disk; its length and checksum."""
    with path.open("xb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return _file_facts(path)


def _file_facts(path: Path) -> dict[str, int]:
    """Length and checksum of a file as it is now."""
    checksum, length = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            length += len(chunk)
    return {"bytes": length, "crc32": checksum}

"""The folder of an unfinished run, its lock and its state, and what of it the next run can resume from."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import lock_folder, replace_durably, sync_folder
from megalite.checkpoint.manifest import seal
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.data.indexed_writer import LENGTH, TokenCounts
from megalite.preprocess.inputs import Input
from megalite.preprocess.job import PreprocessJob
from megalite.preprocess.output import LengthStatistics, OutputState
from megalite.preprocess.pieces import Place

STATE = "state.json"
_OURS = re.compile(r"\.?state\.json(\.new)?|[0-9]+\.(bin|idx|json|lengths)")
_BLOCK = 1 << 22
_REMEDY = "add --restart to drop it and begin again, or choose another --output-prefix"

Facts = Mapping[str, Any]
Stamp = list[Any]  # [absolute path, bytes, mtime in ns] of an input; of standard input [-, None, None]


class FolderInUse(ConfigError):
    """Another process works in the folder."""


class UnfinishedFolder:
    """`{output_prefix}.unfinished`, locked against a second process. Raises ConfigError: another process works there,
    it holds other files, or it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, path / STATE
        self._lock: int | None = None
        # A process that has just finished removes the folder: then we have locked what is gone, and make another.
        while not self._open():
            self.close()
        foreign = sorted(file.name for file in path.iterdir() if not _OURS.fullmatch(file.name))
        if foreign:
            self.close()
            raise ConfigError(f"{path} holds {foreign[0]!r}, which is none of ours; choose another --output-prefix")

    def clear(self) -> None:
        """Remove all files, the state first: without it the others mean nothing."""
        self.state.unlink(missing_ok=True)
        for file in self.path.iterdir():
            file.unlink()

    def remove(self) -> None:
        self.clear()
        self.path.rmdir()
        sync_folder(self.path.parent)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _open(self) -> bool:
        remedy = "choose another --output-prefix"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path)
        except FileExistsError:
            raise ConfigError(f"{self.path} is not a folder; move it away or {remedy}") from None
        except BlockingIOError:
            raise FolderInUse(f"{self.path} is in use by another process; wait for it, or {remedy}") from None
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}; {remedy}") from None
        if self._lock is None:
            return True
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), self.path.stat())
        return False


@dataclass(frozen=True, kw_only=True)
class State:
    """What of a run is on the disk. It is replaced as a whole, after what it speaks of, and has its own sha256: a kill
    leaves the one before, and what has changed is as good as none."""

    job: Facts  # all that the output depends on, except the inputs
    inputs: list[Stamp]  # as the run found them
    place: Place  # the input is done up to here
    input_bytes: int
    disk_bytes: int
    bad: dict[str, int]  # lines left out, by kind
    faults: list[str]  # the first bad lines
    outputs: list[OutputState]  # in the order of the keys

    def write(self, path: Path) -> None:
        replace_durably(path, seal({**vars(self), "place": vars(self.place)}).encode())

    @classmethod
    def read(cls, path: Path) -> "State | None":
        """What an earlier run left; None if there is nothing that can be trusted. Raises OSError: it cannot be read."""
        try:
            text = path.read_bytes().decode("ascii")
            body = json.loads(text)
            del body["sha256"]
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None
        if seal(body) != text:
            return None
        outputs = [OutputState(*output) for output in body["outputs"]]
        return cls(**{**body, "place": Place(**body["place"]), "outputs": outputs})


def input_stamp(item: Input) -> Stamp:
    """What identifies an input; stdin is identified by its content. Raises ConfigError: it is gone."""
    if item.size is None:
        return [item.path, None, None]
    try:
        status = Path(item.path).stat()
    except OSError as error:
        raise ConfigError(f"input {item.path} cannot be read: {error.strerror}; put it back") from None
    path = os.path.abspath(item.path)  # noqa: PTH100 resolve() would name another path than the user gave
    return [path, status.st_size, status.st_mtime_ns]


def require_same(folder: Path, state: State, facts: Facts, stamps: Sequence[Stamp]) -> None:
    """Raise a ConfigError if the state is that of another job, or of inputs that are not there as they were."""
    for name, value in facts.items():
        if state.job.get(name) != value:
            raise ConfigError(f"{folder} holds another job: {name} was {state.job.get(name)}, now {value}; {_REMEDY}")
    for number in range(state.place.source + 1):
        before, now = state.inputs[number], stamps[number] if number < len(stamps) else None
        if now != before:
            found = _describe(now) if now else "missing"
            raise ConfigError(f"{folder} holds work on {_describe(before)}, now it is {found}; {_REMEDY}")
        if before[1] is None and number < state.place.source:
            raise ConfigError(f"{folder} holds work on standard input, which cannot be compared; {_REMEDY}")


def take_back(
    folder: Path, job: PreprocessJob, states: Sequence[OutputState], vocab_size: int
) -> list[tuple[TokenCounts, LengthStatistics]] | None:
    """Of each key what its files hold, up to where the states say; None if that is not what they say. A run may have
    been stopped while it gave its files their names: what has its name is taken back, to be finished once more."""
    kept = []
    named = []
    for number, (prefix, state) in enumerate(zip(job.prefixes, states, strict=True)):
        made, given = folder / f"{number}.bin", Path(f"{prefix}.bin")
        if not made.exists():
            named.append((made, given))
        one = _read_kept(made if made.exists() else given, folder / f"{number}.lengths", state, vocab_size)
        if one is None:
            return None
        kept.append(one)
    for made, given in named:
        for suffix in (".json", ".idx"):
            given.with_name(f"{given.stem}{suffix}").unlink(missing_ok=True)
        given.replace(made)
        sync_folder(given.parent)
    return kept


def _read_kept(
    tokens_file: Path, lengths_file: Path, state: OutputState, vocab_size: int
) -> tuple[TokenCounts, LengthStatistics] | None:
    counts, statistics = TokenCounts(token_dtype(vocab_size)), LengthStatistics()
    try:
        with tokens_file.open("rb") as file:
            for tokens in _blocks(file, counts.dtype, state.tokens):
                if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                    return None
                counts.add_tokens(tokens.view(np.uint8).data)
        with lengths_file.open("rb") as file:
            for lengths in _blocks(file, LENGTH, state.documents):
                counts.add_lengths(lengths)
                statistics.add(lengths)
    except FileNotFoundError:
        return None
    return (counts, statistics) if OutputState.of(counts) == state else None


def _blocks(file: BinaryIO, dtype: np.dtype, count: int) -> Iterator[NDArray]:
    """The next `count` items of a file, or what there is of them."""
    while count > 0:
        data = file.read(min(count * dtype.itemsize, _BLOCK))
        block = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
        if not len(block):
            return
        count -= len(block)
        yield block


def _describe(stamp: Stamp) -> str:
    state = "" if stamp[1] is None else f" ({stamp[1]} bytes of {np.datetime64(stamp[2] // 10**9, 's')} UTC)"
    return f"{stamp[0]}{state}"

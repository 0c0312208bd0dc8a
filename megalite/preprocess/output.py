"""The files of an output: tokens, statistics and side file; the folder and the state from which a killed run resumes."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import lock_folder, replace_durably, sync_folder
from megalite.checkpoint.manifest import seal
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import LENGTH, SUFFIXES, TokenCounts, TokenStream, token_dtype
from megalite.preprocess.inputs import Input
from megalite.preprocess.job import PreprocessJob, Progress, check_output_prefix, job_inputs
from megalite.preprocess.pieces import Place
from megalite.tokenizers.base import Tokenizer


class LengthStatistics:
    """Statistics of document lengths for the side file, independent of the order and grouping of documents."""

    def __init__(self) -> None:
        self._documents = self._tokens = self._longest = 0
        self._shortest: int | None = None
        # Bucket b counts lengths from 2^(b-1) to 2^b - 1; bucket 0 counts empty documents.
        self._buckets = np.zeros(33, dtype=np.int64)

    def add(self, lengths: NDArray) -> None:
        if not len(lengths):
            return
        low, high = int(lengths.min()), int(lengths.max())
        self._documents += len(lengths)
        self._tokens += int(lengths.sum(dtype=np.int64))
        self._shortest = low if self._shortest is None else min(self._shortest, low)
        self._longest = max(self._longest, high)
        self._buckets += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=33)

    def facts(self) -> dict[str, Any]:
        buckets = enumerate(self._buckets.tolist())
        return {
            "min": self._shortest or 0,
            "mean": round(self._tokens / max(self._documents, 1), 2),
            "max": self._longest,
            "buckets": {str(1 << (b - 1) if b else 0): count for b, count in buckets if count},
        }


class OutputState(NamedTuple):
    documents: int
    tokens: int
    bin_sha256: str  # of the .bin so far
    lengths_sha256: str  # of the .lengths so far

    @classmethod
    def of(cls, counts: TokenCounts) -> "OutputState":
        digests = counts.bin_sha256.hexdigest(), counts.lengths_sha256.hexdigest()
        return cls(counts.documents, counts.tokens, *digests)


class Output(TokenStream):
    """The files of one key in the folder of an unfinished run. `counts`, `lengths`: contents to keep; the files are
    truncated to them."""

    def __init__(self, stem: Path, counts: TokenCounts, lengths: LengthStatistics, *, name: str) -> None:
        self.lengths = lengths
        kept = {".bin": counts.tokens * counts.dtype.itemsize, ".lengths": counts.documents * LENGTH.itemsize}
        for suffix, size in kept.items():
            if stem.with_suffix(suffix).exists():
                os.truncate(stem.with_suffix(suffix), size)
        super().__init__(stem, counts, name=name)

    def append(self, tokens: NDArray, lengths: Sequence[int] | NDArray) -> None:
        super().append(tokens, lengths)
        self.lengths.add(np.asarray(lengths))

    def state(self) -> OutputState:
        """Flush the files and return the contents that they have after `sync`."""
        self.flush()
        return OutputState.of(self.counts)

    def side_facts(
        self,
        job: PreprocessJob,
        key: str,
        tokenizer: Tokenizer,
        progress: Progress,
        files: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return the contents of the side file (see `megalite.data.token_files`); `files` describes .bin and .idx."""
        return {
            "documents": self.counts.documents,
            "tokens": self.counts.tokens,
            "dtype": self.counts.dtype.name,
            "key": key,
            "keys": list(job.json_keys),
            "append_eod": job.append_eod,
            "bad_lines": dict(sorted(progress.bad.items())),
            "tokenizer": {
                "kind": tokenizer.name,
                "sha256": tokenizer.fingerprint(),
                "vocab_size": tokenizer.vocab_size,
                "eod": tokenizer.eod,
            },
            "files": dict(files),
            **({"shard": job_inputs(job)[1]} if job.shard else {}),
            "document_lengths": self.lengths.facts(),
        }


def refuse_existing(prefixes: Sequence[str]) -> None:
    """Raise ConfigError if a new dataset would replace a file or has no name."""
    for prefix in prefixes:
        check_output_prefix(prefix, example="whole")
        for suffix in SUFFIXES:
            if Path(f"{prefix}{suffix}").exists():
                raise ConfigError(f"{prefix}{suffix} exists; use another --output-prefix or move it away")


def make_folder(prefix: str | Path) -> Path:
    """Create the folder of a prefix if it does not exist. Raises ConfigError if no file can be written there."""
    folder = Path(f"{prefix}.new").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A permission check is not enough: it succeeds for the superuser even on a read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output_prefix {prefix}: cannot write to {folder}: {error.strerror}") from None
    return folder


STATE = "state.json"
_OWN_FILES = re.compile(r"\.?state\.json(\.new)?|[0-9]+\.(bin|idx|json|lengths)")
_BLOCK = 1 << 22
_REMEDY = "add --restart to drop it and start again, or choose another --output-prefix"

Facts = Mapping[str, Any]
Stamp = list[Any]  # [absolute path, bytes, mtime in ns] of an input; [-, None, None] for standard input


class FolderInUse(ConfigError):
    """Raised if another process works in the folder."""


class UnfinishedFolder:
    """`{output_prefix}.unfinished`, locked against other processes. Raises ConfigError if another process works there,
    the folder contains other files, or it cannot be created."""

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, path / STATE
        self._lock: int | None = None
        # If a process that has just finished removed the locked folder, create it again.
        while not self._open():
            self.close()
        foreign = sorted(file.name for file in path.iterdir() if not _OWN_FILES.fullmatch(file.name))
        if foreign:
            self.close()
            raise ConfigError(f"{path} contains an unknown file {foreign[0]!r}; choose another --output-prefix")

    def clear(self) -> None:
        """Remove all files, the state first, because it describes the others."""
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
            raise ConfigError(f"{self.path} cannot be created: {error.strerror}; {remedy}") from None
        if self._lock is None:
            return True
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), self.path.stat())
        return False


@dataclass(frozen=True, kw_only=True)
class State:
    """The part of a run that is on disk. It is replaced atomically after the files that it describes, so a kill leaves
    the previous state. It contains its sha256: a damaged state is ignored."""

    job: Facts  # everything that the output depends on, except the inputs
    inputs: list[Stamp]
    place: Place  # end of the processed input
    input_bytes: int
    disk_bytes: int
    bad: dict[str, int]  # bad lines, by kind
    faults: list[str]  # the first bad lines
    outputs: list[OutputState]  # in the order of the keys

    def write(self, path: Path) -> None:
        replace_durably(path, seal({**vars(self), "place": vars(self.place)}).encode())

    @classmethod
    def read(cls, path: Path) -> "State | None":
        """Read the state of an earlier run; return None if it is missing or damaged. Raises OSError if it cannot be
        read."""
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
    """Return the identity of an input; stdin is identified by its content instead. Raises ConfigError if it is
    missing."""
    if item.size is None:
        return [item.path, None, None]
    try:
        status = Path(item.path).stat()
    except OSError as error:
        raise ConfigError(f"input {item.path} cannot be read: {error.strerror}; put it back") from None
    path = os.path.abspath(item.path)  # noqa: PTH100 resolve() would name another path than the user gave
    return [path, status.st_size, status.st_mtime_ns]


def require_same(folder: Path, state: State, facts: Facts, stamps: Sequence[Stamp]) -> None:
    """Raise ConfigError if the state belongs to another job, or its inputs have changed."""
    for name, value in facts.items():
        if state.job.get(name) != value:
            raise ConfigError(f"{folder} holds another job: {name} was {state.job.get(name)}, now {value}; {_REMEDY}")
    for number in range(state.place.source + 1):
        before, now = state.inputs[number], stamps[number] if number < len(stamps) else None
        if now != before:
            found = _stamp_text(now) if now else "missing"
            raise ConfigError(f"{folder} holds work on {_stamp_text(before)}, now it is {found}; {_REMEDY}")
        if before[1] is None and number < state.place.source:
            raise ConfigError(f"{folder} holds work on standard input, which cannot be compared; {_REMEDY}")


def recover_outputs(
    folder: Path, job: PreprocessJob, states: Sequence[OutputState], vocab_size: int
) -> list[tuple[TokenCounts, LengthStatistics]] | None:
    """Read the files of each key up to their saved states; return None if they do not match the states. If the run was
    killed while it renamed its files, finished files are moved back into the folder."""
    kept = []
    renamed = []
    for number, (prefix, state) in enumerate(zip(job.prefixes, states, strict=True)):
        unfinished, finished = folder / f"{number}.bin", Path(f"{prefix}.bin")
        if not unfinished.exists():
            renamed.append((unfinished, finished))
        one = _read_kept(
            unfinished if unfinished.exists() else finished, folder / f"{number}.lengths", state, vocab_size
        )
        if one is None:
            return None
        kept.append(one)
    for unfinished, finished in renamed:
        for suffix in (".json", ".idx"):
            finished.with_name(f"{finished.stem}{suffix}").unlink(missing_ok=True)
        finished.replace(unfinished)
        sync_folder(finished.parent)
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
    """Yield the next `count` items of a file, or fewer if it ends."""
    while count and len(data := file.read(min(count * dtype.itemsize, _BLOCK))) >= dtype.itemsize:
        block = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
        count -= len(block)
        yield block


def _stamp_text(stamp: Stamp) -> str:
    state = "" if stamp[1] is None else f" ({stamp[1]} bytes of {np.datetime64(stamp[2] // 10**9, 's')} UTC)"
    return f"{stamp[0]}{state}"

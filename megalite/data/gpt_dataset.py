"""Cut training samples from documents; sample k is a pure function of (documents, seq_length, seed, k)."""

import hashlib
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.dataset import DocumentDataset, KeyedPermutation, memoize, permutation, require_sample
from megalite.data.index_cache import Arrays, IndexCache, Kept, Recipe

_DOCUMENT_STREAM, _SAMPLE_STREAM = 0, 1
_BLOCK = 1 << 20


@dataclass(frozen=True)
class _Epoch:
    """The order of one epoch, a stream of tokens."""

    documents: NDArray[np.int32] | NDArray[np.int64]  # sequence numbers in this epoch's order
    ends: NDArray[np.int64]  # position in the stream after the last token of each document
    samples: KeyedPermutation  # i -> start of the epoch's i-th sample in the stream, in units of seq_length


@dataclass(eq=False, kw_only=True)
class GPTDataset(DocumentDataset):
    """An endless sequence of samples over some documents of a token file.

    An epoch concatenates the documents in a random order and cuts this stream into samples of seq_length tokens plus
    the next one (neighbours share a token: the last label of one is the first input of the next); the last partial
    sample is dropped. The samples come in a random order too. Both orders of an epoch are drawn from (seed, epoch), so
    sample k is the same in a longer run and after a resume.

    An epoch needs an index of 12 bytes per document (16 from 2^31 documents on), for any number of samples, because
    their order is computed (`KeyedPermutation`).

    Raises ConfigError if the split has fewer than seq_length + 1 tokens."""

    cache: IndexCache | None = None  # stores large indices; None: all are built in memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.samples_per_epoch = (self.num_tokens - 1) // self.seq_length
        if self.samples_per_epoch < 1:
            shorter = f" (or seq_length at most {self.num_tokens - 1})" if self.num_tokens > 1 else ""
            raise self._too_small(
                f"fewer than the {self.seq_length + 1} of one sample with seq_length {self.seq_length}{shorter}"
            )
        self._epoch = memoize(self._make_epoch)
        self._stop_epoch = 0  # the first epoch that will not be read, from `prepare`
        self.background: threading.Thread | None = None  # builds the index of the next epoch

    def sample(self, k: int) -> NDArray[np.int64]:
        """Return sample k >= 0, int64 `[seq_length + 1]`; inputs are all but the last token, labels all but the first.
        Raises ConfigError, with file, document and id, if a token id is outside the vocabulary."""
        require_sample(k)
        number, within = divmod(k, self.samples_per_epoch)
        epoch = self._epoch(number)
        start = epoch.samples(within) * self.seq_length
        position = int(epoch.ends.searchsorted(start, "right"))
        offset = start - epoch.ends.item(position - 1) if position else start
        return self._read(epoch.documents, position, offset, self.seq_length + 1)

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Store the large indices that samples [first, stop) need. `epochs`: build only this many now. Each other index
        is built in the background, when the first sample of the previous epoch is read; the disk space for all is
        checked now. Returns the entry of each epoch built now, or None if its index is small or cannot be stored.
        Raises ConfigError if the user's cache folder is full or not writable."""
        if self.cache is None or first >= stop:
            return []
        numbers = range(first // self.samples_per_epoch, (stop - 1) // self.samples_per_epoch + 1)
        self._stop_epoch = max(self._stop_epoch, numbers.stop)
        recipes = [self._recipe(number) for number in numbers]
        self.cache.need_room(recipes)
        return [self.cache.prepare(recipe) for recipe in recipes[:epochs]]

    def _prepare_in_background(self, number: int) -> None:
        """Build the index of an epoch that will be read, in a daemon thread."""
        if self.cache is None or number >= self._stop_epoch or self.index_bytes < self.cache.small_bytes:
            return
        cache, recipe = self.cache, self._recipe(number)

        def prepare() -> None:
            # An error of the folder is raised again in the reader's thread when the epoch is reached.
            with suppress(ConfigError):
                cache.prepare(recipe)

        self.background = threading.Thread(target=prepare, name="megalite-index", daemon=True)
        self.background.start()

    @property
    def index_bytes(self) -> int:
        return self._recipe(0).nbytes

    def _make_epoch(self, number: int) -> _Epoch:
        recipe = self._recipe(number)
        arrays = recipe.make() if self.cache is None else self.cache.get(recipe)
        samples = KeyedPermutation(self.samples_per_epoch, seed=self.seed, index=number, stream=_SAMPLE_STREAM)
        self._prepare_in_background(number + 1)
        return _Epoch(arrays["documents"], arrays["ends"], samples)

    @cached_property
    def _digest(self) -> str:
        return sizes_digest(self._sizes)

    def _recipe(self, number: int) -> Recipe:
        count = len(self.documents)
        dtype = np.dtype(np.int32 if self.documents.stop <= 1 << 31 else np.int64)

        def identity() -> Mapping[str, Any]:
            # Without seq_length, which does not affect the order of documents.
            first = self.documents.start
            return {"kind": "epoch", "sizes": self._digest, "first": first, "seed": self.seed, "epoch": number}

        def fill(arrays: Arrays) -> None:
            documents, ends, total = arrays["documents"], arrays["ends"], 0
            order = permutation(count, seed=self.seed, index=number, stream=_DOCUMENT_STREAM, dtype=dtype)
            # A copy, since the file's array may be unaligned, and numpy would copy it again for each block.
            sizes = np.array(self._sizes)
            for first in range(0, count, _BLOCK):
                block = slice(first, min(first + _BLOCK, count))
                np.cumsum(sizes[order[block]], dtype=np.int64, out=ends[block])
                ends[block] += total
                total = ends.item(block.stop - 1)
            np.add(order, self.documents.start, out=documents)

        return Recipe(
            name=f"{self.indexed.prefix}, {self.name}, epoch {number}",
            identity=identity,
            arrays={"documents": (dtype, (count,)), "ends": (np.dtype(np.int64), (count,))},
            fill=fill,
        )


def sizes_digest(sizes: NDArray[np.int32]) -> str:
    """Return the sha256 of the document lengths (little endian), the part of a token file that an index depends on."""
    sha256 = hashlib.sha256()
    for first in range(0, len(sizes), _BLOCK):
        sha256.update(sizes[first : first + _BLOCK].astype("<i4").tobytes())
    return sha256.hexdigest()

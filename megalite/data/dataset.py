"""Dataset interfaces, the random numbers of the data order, and the default dataset over a token file.

Random numbers are pure functions of (seed, index). They use only the raw output of Philox4x64-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC'11), a counter-based generator with a published definition, and none
of numpy's distributions or shuffles: their algorithms may change between versions of numpy."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megalite.config.data import parse_split
from megalite.config.errors import ConfigError
from megalite.data.index_cache import Arrays, IndexCache, Kept, Recipe
from megalite.data.indexed_dataset import IndexedDataset

_WORD = (1 << 64) - 1
_BLOCK = 1 << 20
_ROUNDS = 8
_DOCUMENT_STREAM, _SAMPLE_STREAM = 0, 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Packing:
    """Positions of the documents in a packed sample of seq_length inputs. Documents do not attend to each other.

    A document of L tokens that starts at position a has inputs a .. a+L-2, each with a label, the next token of the
    document. Its last token predicts nothing: the next token belongs to another document."""

    starts: tuple[int, ...]  # positions at which a document starts, ascending, 0 first
    used: int
    """Position of the last document's last token (seq_length if that token is only a label). Predictions from this
    position on do not count; after it comes padding."""
    counts: NDArray[np.bool_] | None = None
    """Whether the prediction of each position counts, `[seq_length]`; None if all do."""


class SampleSource(Protocol):
    """An endless sequence of numbered samples."""

    def sample(self, k: int) -> NDArray[np.int64]:
        """Return sample k >= 0, int64 `[seq_length + 1]`; inputs are all but the last token, labels all but the first."""
        ...


class PackedSource(SampleSource, Protocol):
    """An endless sequence of packed samples."""

    def packing(self, k: int) -> Packing: ...


def require_sample(k: int) -> None:
    """Raise IndexError for a negative number."""
    if k < 0:
        raise IndexError(f"sample {k}: samples are numbered from 0")


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Return ranges of documents for train, valid and test, split at round(share · documents) as in Megatron. Raises
    ConfigError if `split` is malformed (`parse_split`)."""
    train, valid, test = parse_split(split)
    ends = [round(end * documents) for end in (train, train + valid, train + valid + test)]
    return range(ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2])


def memoize(function: Callable[[int], _T]) -> Callable[[int], _T]:
    """Cache the last two results of a function, because batches cross from one epoch to the next. Unlike with a plain
    `lru_cache`, several threads never compute the same result twice."""
    cached, lock = lru_cache(maxsize=2)(function), threading.Lock()

    def result(k: int) -> _T:
        with lock:
            return cached(k)

    return result


@dataclass(eq=False)
class DocumentDataset:
    """Base class of datasets over the documents of one split; subclasses define the tokens of sample k."""

    indexed: IndexedDataset  # the token file
    _: KW_ONLY
    documents: range  # sequence numbers of this split
    seq_length: int  # inputs of a sample; a sample has one token more
    seed: int  # of the order
    name: str  # of the split, for messages
    vocab_size: int | None = None  # ids must be below it; None: not checked

    def __post_init__(self) -> None:
        documents = self.documents
        assert 0 <= documents.start <= documents.stop <= len(self.indexed) and documents.step == 1, documents
        self._sizes = self.indexed.sizes[documents.start : documents.stop]
        self.num_tokens = int(self._sizes.sum(dtype=np.int64))  # tokens of this split
        self._stop_id = 1 << 64 if self.vocab_size is None else self.vocab_size

    def _too_small(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.indexed.prefix}: the {self.name} split holds {self.num_tokens} tokens in {len(self.documents)} documents, "
            f"{why}; give {self.name} a larger share of --split or more documents"
        )

    def _read(self, documents: NDArray[np.integer], position: int, offset: int, length: int) -> NDArray[np.int64]:
        """Read `length` tokens (int64) of `documents`, end to end, from token `offset` of `documents[position]` on.
        Raises ConfigError, with file, document and id, if a token id is outside the vocabulary."""
        indexed, itemsize = self.indexed, self.indexed.dtype.itemsize
        tokens, sizes, pointers = indexed.tokens, indexed.sizes, indexed.pointers
        sample = np.empty(length, dtype=np.int64)
        at, filled = position, 0
        # item() returns Python numbers: arithmetic on numpy's scalars would cost more than the copying.
        while True:
            sequence = documents.item(at)
            first = pointers.item(sequence) // itemsize + offset
            take = sizes.item(sequence) - offset
            if take >= length - filled:
                sample[filled:] = tokens[first : first + length - filled]
                break
            sample[filled : filled + take] = tokens[first : first + take]
            filled += take
            at += 1
            offset = 0
        # Negative ids are huge as unsigned numbers, so one pass finds both kinds of bad ids.
        if np.maximum.reduce(sample.view(np.uint64)) >= self._stop_id:
            bad = int(sample[(sample < 0) | (sample >= self._stop_id)][0])
            while bad not in indexed[documents.item(position)]:
                position += 1
            raise ConfigError(
                f"{indexed.bin_path}: document {documents.item(position)} holds token id {bad}, outside vocab_size "
                f"{self.vocab_size}; set vocab_size to that of the tokenizer that wrote the file"
            )
        return sample


@dataclass(eq=False, kw_only=True)
class MockDataset:
    """Samples of a noisy recurrence, for timing and for tests without files.

    Token i+1 is (token i + stride) mod vocab_size, except at one in eight positions, which restart at a random id
    (small ids are more likely). A model can learn this: the loss falls from ln(vocab_size) towards the loss of the
    restarts, about (1/8)·ln(vocab_size) + 0.4. Sample k is a pure function of (vocab_size, seq_length, seed, split, k).
    """

    vocab_size: int
    seq_length: int
    seed: int
    split: int = 0  # number of the split; each has different samples

    _RESTART = 1 / 8
    _STRIDE = 17

    def sample(self, k: int) -> NDArray[np.int64]:
        require_sample(k)
        length = self.seq_length + 1
        words = raw_draws(2 * length, seed=self.seed, index=k, stream=self.split)
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        restarts = uniform[:length] < self._RESTART
        restarts[0] = True
        starts = (uniform[length:] ** 2 * self.vocab_size).astype(np.int64)
        positions = np.arange(length)
        last = np.maximum.accumulate(np.where(restarts, positions, 0))
        return (starts[last] + self._STRIDE * (positions - last)) % self.vocab_size


def raw_draws(count: int, *, seed: int, index: int, stream: int = 0) -> NDArray[np.uint64]:
    """Return `count` uniform 64-bit words `[count]`, a pure function of (seed, index, stream, position)."""
    key = np.array([seed & _WORD, index & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream & _WORD], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(count: int, *, seed: int, index: int, stream: int = 0, dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """Return a permutation of range(count), shape `[count]`: the order that sorts `count` random words.

    The low bits of each word, as many as a position needs, are replaced by the position, so that sorting the words in
    place also sorts the positions. 37 random bits are left for a hundred million; positions with equal random bits (one
    in four thousand of those) are in ascending order. Needs 8·count bytes more than the result."""
    words = raw_draws(count, seed=seed, index=index, stream=stream)
    low = np.uint64((1 << max(count - 1, 0).bit_length()) - 1)
    for first in range(0, count, _BLOCK):
        block = words[first : first + _BLOCK]
        block &= ~low
        block |= np.arange(first, first + len(block), dtype=np.uint64)
    words.sort()
    words &= low
    return words.astype(dtype)


class KeyedPermutation:
    """A permutation of range(count) that computes any single element without a table.

    A number x is written as (x // a, x mod a) with a = ceil(sqrt(count)), and the two halves are alternately shifted,
    modulo their range, by a random function of the other half: an alternating Feistel network over a domain of
    a·ceil(count/a) numbers. Fewer than a of these are not below count; from such a number the network is applied again
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The random function of a round is
    splitmix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) of the
    half and the round's 64-bit key.

    `count`: at least 1 and below 2^64. `seed`, `index`, `stream`: arguments of `raw_draws` for the keys."""

    def __init__(self, count: int, *, seed: int, index: int, stream: int = 0) -> None:
        assert 0 < count <= _WORD, count
        self.count = count
        self._columns = isqrt(count - 1) + 1
        self._rows = -(-count // self._columns)
        keys = raw_draws(_ROUNDS, seed=seed, index=index, stream=stream).tolist()
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __call__(self, x: int) -> int:
        """Return the image of x, 0 <= x < count."""
        columns, rows = self._columns, self._rows
        while True:
            row, column = divmod(x, columns)
            # Inlined twice, because a call would cost as much as the arithmetic.
            for row_key, column_key in self._keys:
                z = row ^ row_key
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
                column = (column + (z ^ (z >> 31))) % columns
                z = column ^ column_key
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
                row = (row + (z ^ (z >> 31))) % rows
            x = row * columns + column
            if x < self.count:
                return x


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

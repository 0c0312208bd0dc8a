"""Pack whole documents into samples by best fit; sample k is a pure function of (documents, seq_length, seed, k)."""

import bisect
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.dataset import DocumentDataset, KeyedPermutation, Packing, memoize, permutation, require_sample
from megalite.data.indexed_dataset import IndexedDataset

_DOCUMENT_STREAM, _SAMPLE_STREAM = 0, 1


class _Piece(NamedTuple):
    """The part of a document in one sample; each token but the first is the label of the previous one."""

    sequence: int
    start: int
    length: int


@dataclass(frozen=True)
class _Epoch:
    documents: NDArray[np.int64] | NDArray[np.int32]
    """Documents with a partial piece, in the order of their bins."""
    samples: KeyedPermutation  # i -> number of the epoch's i-th sample; full pieces come before bins


@dataclass(eq=False, kw_only=True)
class PackedDataset(DocumentDataset):
    """An endless sequence of samples of whole documents that do not attend to each other.

    A document of L tokens has L - 1 predictions, each used once per epoch. A document with at most seq_length
    predictions is never cut. A longer one is cut after each seq_length predictions: such a full piece is a sample, and
    its last label is the first token of the next piece. Its remainder and the short documents are packed by best fit.
    The lengths that are packed together are the same in each epoch, but the documents of those lengths and the order of
    the samples are drawn from (seed, epoch). So sample k is the same in a longer run and after a resume. A document of
    fewer than two tokens predicts nothing and is left out.

    A sample has seq_length inputs and one more token; only a document that ends with that token has a last token that
    is not an input (see `Packing`). `pad_token` fills the rest. A document is a sequence of the file; end-of-document
    tokens within one are ignored.

    With `responses`, documents are fine-tuning examples: the remainder of a long one is left out, because it would have
    no prompt.

    Raises ConfigError if no document of the split has two tokens."""

    pad_token: int = 0
    responses: IndexedDataset | None = None
    """Per document, 1 for each token that counts as a label (a response token), else 0; None: all count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        predictions = self._predictions()
        self.num_predictions = int(predictions.sum())
        """Labels per epoch: all tokens of the split except the first of each document."""
        # Full pieces up to and including each document, to find a full piece by its number.
        self._full_ends = np.cumsum(predictions // self.seq_length)
        self._full = int(self._full_ends[-1]) if len(predictions) else 0
        rest = predictions % self.seq_length
        counts = np.bincount(rest[rest > 0] + 1, minlength=self.seq_length + 2)
        self._bins = best_fit(counts, self.seq_length + 1)
        self._bin_ends = np.cumsum(self._bins.items())  # documents in the bins up to and including each
        self.samples_per_epoch = self._full + self._bins.count
        if self.samples_per_epoch < 1:
            raise self._too_small("but no document has the two that a prediction needs")
        self._epoch = memoize(self._make_epoch)
        self._pieces = lru_cache(maxsize=1)(self._find_pieces)  # `sample` and `packing` alternate

    @property
    def idle_share(self) -> float:
        """Share of an epoch's positions that predict nothing: padding and last tokens of documents."""
        return 1.0 - self.num_predictions / (self.samples_per_epoch * self.seq_length)

    @property
    def summary(self) -> str:
        count, what = len(self.documents), "documents" if self.responses is None else "examples"
        text = f"{self.indexed.prefix}: {count} {what} are packed into {self.samples_per_epoch} samples per epoch; "
        if self.responses is None:
            return text + f"{100.0 * self.idle_share:.2f} % of their positions predict nothing"
        cut = int((self._sizes > self.seq_length + 1).sum())
        return text + f"{cut} are longer than seq_length {self.seq_length} and cut there; the loss is on responses"

    def sample(self, k: int) -> NDArray[np.int64]:
        sample = np.full(self.seq_length + 1, self.pad_token, dtype=np.int64)
        position = 0
        for sequence, start, length in self._pieces(k):
            sample[position : position + length] = self._read(np.array([sequence]), 0, start, length)
            position += length
        return sample

    def packing(self, k: int) -> Packing:
        starts, position = [], 0
        counts = None if self.responses is None else np.zeros(self.seq_length, dtype=np.bool_)
        for piece in self._pieces(k):
            starts.append(position)
            if self.responses is not None and counts is not None:
                is_response = self.responses[piece.sequence][piece.start + 1 : piece.start + piece.length]
                counts[position : position + piece.length - 1] = is_response != 0
            position += piece.length
        return Packing(starts=tuple(starts), used=position - 1, counts=counts)

    def _find_pieces(self, k: int) -> list[_Piece]:
        require_sample(k)
        number, within = divmod(k, self.samples_per_epoch)
        epoch = self._epoch(number)
        index, first_document = epoch.samples(within), self.documents.start
        if index < self._full:
            document = int(np.searchsorted(self._full_ends, index, side="right"))
            before = int(self._full_ends[document - 1]) if document else 0
            return [_Piece(first_document + document, (index - before) * self.seq_length, self.seq_length + 1)]
        index -= self._full
        first = int(self._bin_ends[index - 1]) if index else 0
        pieces = []
        for document in epoch.documents[first : int(self._bin_ends[index])].tolist():
            size = int(self._sizes[document])
            start = (size - 1) // self.seq_length * self.seq_length
            pieces.append(_Piece(first_document + document, start, size - start))
        return pieces

    def _predictions(self) -> NDArray[np.int64]:
        predictions = np.maximum(self._sizes.astype(np.int64) - 1, 0)
        return predictions if self.responses is None else np.minimum(predictions, self.seq_length)

    def _make_epoch(self, number: int) -> _Epoch:
        rest = self._predictions() % self.seq_length
        documents = np.flatnonzero(rest)
        if len(self.documents) < 1 << 31:
            documents = documents.astype(np.int32)
        if self.seq_length < 1 << 16:
            rest = rest.astype(np.uint16)  # numpy uses radix sort for 16 bits
        order = permutation(len(documents), seed=self.seed, index=number, stream=_DOCUMENT_STREAM)
        documents = documents[order]
        # A bin takes any documents of its lengths: sort by length, random within equal lengths, as `of_items` expects.
        documents = documents[np.argsort(rest[documents], kind="stable")]
        documents = documents[np.argsort(self._bins.of_items(), kind="stable")]
        samples = KeyedPermutation(self.samples_per_epoch, seed=self.seed, index=number, stream=_SAMPLE_STREAM)
        return _Epoch(documents, samples)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """A packing of item lengths into bins; it does not assign individual items of equal length.

    Part p: each of `bins[p]` bins, from number `first[p]` on, gets `each[p]` items of length `lengths[p]`. Parts are in
    ascending order of length."""

    lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    bins: NDArray[np.int64]
    each: NDArray[np.int64]
    count: int  # number of bins

    def items(self) -> NDArray[np.int64]:
        """Return the number of items in each bin, shape `[count]`."""
        changes = np.zeros(self.count + 1, dtype=np.int64)
        np.add.at(changes, self.first, self.each)
        np.add.at(changes, self.first + self.bins, -self.each)
        return np.cumsum(changes)[:-1]

    def of_items(self) -> NDArray[np.int64]:
        """Return the bin of each item, shape `[items]`, for items in ascending order of length."""
        sizes = self.bins * self.each
        before = np.cumsum(sizes) - sizes
        within = np.arange(int(sizes.sum())) - np.repeat(before, sizes)
        return np.repeat(self.first, sizes) + within // np.repeat(self.each, sizes)


class _Filled(NamedTuple):
    """Contents of a group of equal bins: `each` items of one length, added to the contents `before`."""

    length: int
    each: int
    before: "_Filled | None"


def best_fit(counts: NDArray[np.int64], capacity: int) -> Bins:
    """Pack counts[n] items of each length n, the longest first, each into the fullest bin with enough room.

    Best-fit decreasing needs at most 11/9 of the minimum number of bins, plus 4 (Johnson, "Near-optimal bin packing
    algorithms", 1973). Items of one length are placed together, and equal bins are stored as one group with a count
    (Krell et al., "Efficient sequence packing without cross-contamination", 2021), so the work depends only on the
    number of different lengths. Source of packing whole documents this way: Ding et al., "Fewer truncations improve
    language modeling", 2024.

    `counts`: items of each length 0 .. capacity, `[capacity + 1]`; none of length 0. `capacity`: of a bin, in the unit
    of the lengths."""
    assert len(counts) == capacity + 1 and counts[0] == 0, (len(counts), capacity)
    groups: dict[int, list[tuple[_Filled, int]]] = {}
    rooms: list[int] = []  # keys of `groups`, ascending

    def add(room: int, filled: _Filled, bins: int) -> None:
        if room not in groups:
            groups[room] = []
            bisect.insort(rooms, room)
        groups[room].append((filled, bins))

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            place = bisect.bisect_left(rooms, length)
            before: _Filled | None = None
            if place == len(rooms):
                room, available = capacity, left  # new bins
            else:
                room = rooms[place]
                before, available = groups[room].pop()
                if not groups[room]:
                    del groups[room], rooms[place]
            # A bin that got an item is the fullest one for the next item of the same length, until it has no room.
            each = min(room // length, left)
            bins = min(available, left // each)
            left -= bins * each
            add(room - each * length, _Filled(length, each, before), bins)
            if before is not None and bins < available:
                add(room, before, available - bins)
    # The bins of each group get consecutive numbers.
    parts: list[tuple[int, int, int, int]] = []
    first = 0
    for _, group in sorted(groups.items()):
        for content, bins in group:
            filled: _Filled | None = content
            while filled is not None:
                parts.append((filled.length, first, bins, filled.each))
                filled = filled.before
            first += bins
    table = np.array(sorted(parts), dtype=np.int64).reshape(-1, 4).T
    return Bins(lengths=table[0], first=table[1], bins=table[2], each=table[3], count=first)

"""One dataset cut into several: whole documents, in order."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.config.split import SPLITS
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.side_file import read_side_file
from megalite.data.splits import split_documents
from megalite.data.tools.copying import SideFile, Stretch, Written, write_stretches
from megalite.data.tools.documents import first_token
from megalite.data.tools.prefixes import SUFFIXES, refuse_existing
from megalite.data.tools.side_facts import side_of_part, vocab_size_of


def parts_of_equal_tokens(dataset: IndexedDataset, parts: int) -> list[range]:
    """Documents of each part: `parts` of them, each with a document at least, about as many tokens in one as in another.

    Part k ends at the document's border that is nearest to token (k + 1) / parts of all.

    Raises:
        ConfigError: more parts than documents, or none.
    """
    documents, tokens = dataset.num_documents, dataset.num_tokens
    if not 1 <= parts <= documents:
        raise ConfigError(f"parts {parts}: {dataset.prefix} has {documents} documents; give 1 to {documents}")
    ends: list[int] = []
    for part in range(1, parts):
        target = tokens * part / parts
        above = bisect_left(range(documents), target, key=lambda i: first_token(dataset, i))
        below_is_nearer = above > 0 and (
            target - first_token(dataset, above - 1) <= first_token(dataset, above) - target
        )
        near = above - 1 if below_is_nearer else above
        ends.append(min(max(near, ends[-1] + 1 if ends else 1), documents - (parts - part)))
    return [range(start, stop) for start, stop in zip([0, *ends], [*ends, documents], strict=True)]


def parts_of_split(dataset: IndexedDataset, split: str) -> list[range]:
    """Documents of train, valid and test, cut exactly where a run with this --split cuts.

    Raises:
        ConfigError: the split is none, or a run would cut between two sequences of one document.
    """
    indices = dataset.document_indices
    stops = [sequences.stop for sequences in split_documents(split, len(dataset))]
    above = [bisect_left(indices, stop) for stop in stops]
    for name, stop, document in zip(SPLITS, stops, above, strict=True):
        if indices[document] != stop:
            nearest = [_nearest_border(indices, stop) for stop in stops]
            cut = " ".join(
                f"--documents {part.start}:{part.stop}"
                for part in _parts(nearest, dataset.num_documents)
                if part
            )
            raise ConfigError(
                f"split {split}: {name} ends before sequence {stop}, within document {document - 1} (sequences "
                f"{indices[document - 1]} to {indices[document] - 1}); cut between documents instead: {cut}"
            )
    return _parts(above, dataset.num_documents)


def _nearest_border(indices: NDArray[np.int64], sequence: int) -> int:
    """The document whose first sequence is nearest to one; of two that are, the one before it."""
    above = bisect_left(indices, sequence)
    is_nearer = above > 0 and sequence - indices[above - 1] <= indices[above] - sequence
    return bisect_left(indices, indices[above - 1]) if is_nearer else above


def _parts(stops: Sequence[int], documents: int) -> list[range]:
    """Documents of each part, all of them; `stops` is where parts end by the sequences that they hold."""
    borders = [0, *stops]
    # Documents without a sequence, behind the last that has one, belong to the last part that has any.
    last = max(i for i in range(1, 4) if i == 1 or borders[i] > borders[i - 1])
    borders[last:] = [documents] * (4 - last)
    return [range(start, stop) for start, stop in pairwise(borders)]


def split_dataset(
    prefix: str,
    outputs: Sequence[tuple[str, range]],
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Written]:
    """Write some documents of a dataset as a dataset of their own, for each of `outputs`; all of them or none.

    If the dataset has a side file, each part gets one.

    Args:
        prefix: of the dataset.
        outputs: (prefix, documents) of each part.
        on_bytes: called with the number of bytes of .bin just read.

    Raises:
        ConfigError: the dataset is damaged, or an output is there already.
    """
    refuse_existing([output for output, _ in outputs])
    side = read_side_file(prefix)
    dataset = IndexedDataset(prefix)
    stretches = [Stretch.of(dataset, documents) for _, documents in outputs]
    vocab_size = vocab_size_of([side])
    begun: list[str] = []
    done: list[Written] = []
    try:
        for (output, _), stretch in zip(outputs, stretches, strict=True):
            side_file = None
            if side is not None and vocab_size is not None:
                side_file = SideFile(vocab_size, partial(side_of_part, side, stretch))
            begun.append(output)
            done.append(
                write_stretches(
                    output, [stretch], dtype=stretch.dtype, side_file=side_file, on_bytes=on_bytes
                )
            )
    except BaseException:
        for output in begun:
            for suffix in SUFFIXES:
                Path(f"{output}{suffix}").unlink(missing_ok=True)
        raise
    return done

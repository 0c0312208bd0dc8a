"""What a dataset holds, without reading all its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocess.statistics import DatasetStatistics
from megalite.data.side_file import read_side_file
from megalite.data.tools.documents import first_token, lengths_in_blocks


@dataclass(frozen=True)
class Document:
    """The start of one document."""

    number: int
    sequences: int
    length: int
    """All its tokens."""
    tokens: list[int]
    """The first of them."""


def inspect(dataset: IndexedDataset) -> dict[str, Any]:
    """The facts of a dataset; reads its index and side file. Memory does not grow with the files.

    Raises:
        ConfigError: the side file is none.
    """
    statistics = DatasetStatistics(0)
    empty = 0
    for lengths in lengths_in_blocks(dataset, range(dataset.num_documents)):
        statistics.add_lengths(lengths)
        empty += int((lengths == 0).sum())
    return {
        "prefix": dataset.prefix,
        "dtype": dataset.dtype.name,
        "documents": dataset.num_documents,
        "empty_documents": empty,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "bytes": {path.suffix: Path(path).stat().st_size for path in (dataset.bin_path, dataset.idx_path)},
        "document_lengths": statistics.lengths(),
        "side_file": read_side_file(dataset.prefix),
    }


def read_documents(dataset: IndexedDataset, documents: range, *, max_tokens: int) -> Iterator[Document]:
    """Documents with at most `max_tokens` of their tokens each."""
    indices = dataset.document_indices
    for number in documents:
        start, stop = first_token(dataset, number), first_token(dataset, number + 1)
        tokens = dataset.tokens[start : min(stop, start + max_tokens)].tolist()
        yield Document(number, int(indices[number + 1] - indices[number]), stop - start, tokens)

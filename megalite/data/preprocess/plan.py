"""What a job would do, without doing it."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from megalite.config.errors import ConfigError
from megalite.data.inputs.find import Input, find_inputs
from megalite.data.inputs.pieces import cut
from megalite.data.inputs.read import read_piece
from megalite.data.preprocess.job import PreprocessJob, check_settings, require_tokenizer
from megalite.data.preprocess.journal import read_journal
from megalite.data.preprocess.target import check_target, require_free
from megalite.data.preprocess.workers import check_workers
from megalite.data.preprocess.workplace import JOURNAL, unfinished_folder
from megalite.data.tokenizers.base import Tokenizer

_SEARCHED_PIECES = 100
_PIECE_BYTES = 1 << 14


@dataclass(frozen=True)
class FirstDocument:
    """The first good document of the input."""

    path: str
    line: int
    """From 1."""
    text: str
    """Under the first key."""
    ids: list[int]
    """With the end-of-document token, if the job appends it."""


@dataclass(frozen=True)
class Plan:
    """Inputs that would be read, and how their first document would look."""

    inputs: list[Input]
    tokenizer: Tokenizer
    first: FirstDocument | None
    """None if the beginning of the input holds no good document, or is stdin, which can be read only once."""

    @property
    def num_bytes(self) -> int:
        """Of the files on disk."""
        return sum(item.size or 0 for item in self.inputs)


def plan(job: PreprocessJob) -> Plan:
    """Find the inputs, load the tokenizer and read the first document; nothing is written.

    Raises:
        ConfigError: as the job itself would.
    """
    check_settings(job)
    check_workers(job.workers)
    inputs = find_inputs(job.inputs)
    check_target(job, inputs)
    unfinished = read_journal(unfinished_folder(job.output_prefix) / JOURNAL)
    if unfinished is None or not unfinished.marks:
        require_free(job)
    tokenizer = require_tokenizer(job)
    return Plan(inputs, tokenizer, _first_document(job, inputs, tokenizer))


def _first_document(
    job: PreprocessJob, inputs: Sequence[Input], tokenizer: Tokenizer
) -> FirstDocument | None:
    files = [item for item in inputs if item.size is not None]
    limits = replace(job.limits, piece_bytes=_PIECE_BYTES)
    before = None
    with closing(cut(files, keys=job.json_keys, limits=limits)) as pieces:
        for _, piece in zip(range(_SEARCHED_PIECES), pieces):
            read = read_piece(piece, job.json_keys, limits)
            place = piece.after(0, before)
            for line, text in zip(read.at, read.texts[0], strict=True):
                try:
                    ids = tokenizer.encode(text)
                except ConfigError:
                    continue
                if ids:
                    ids = [*ids, tokenizer.eod] if job.append_eod else list(ids)
                    return FirstDocument(piece.path, place.lines + line + 1, text, ids)
            before = piece.after(read.lines, before)
    return None

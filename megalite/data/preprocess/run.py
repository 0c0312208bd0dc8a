"""A preprocessing run from its inputs to finished token files."""

import contextlib
import errno
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import sync_folder, write_durably
from megalite.config.errors import ConfigError
from megalite.data.indexed_writer import write_index
from megalite.data.inputs.find import Input, find_inputs
from megalite.data.inputs.pieces import Piece, cut
from megalite.data.inputs.places import Place
from megalite.data.preprocess.job import (
    MAX_FAULTS,
    PreprocessJob,
    Progress,
    check_settings,
    require_tokenizer,
)
from megalite.data.preprocess.journal import Mark
from megalite.data.preprocess.output import Output, OutputFiles
from megalite.data.preprocess.resume import Beginning, begin, complete_output, input_stamp, job_facts
from megalite.data.preprocess.safekeeping import Safekeeper
from megalite.data.preprocess.side_facts import side_facts
from megalite.data.preprocess.target import check_target
from megalite.data.preprocess.tokenizing import PieceTokenizer, TokenizedPiece
from megalite.data.preprocess.workers import WorkerPool, check_workers
from megalite.data.preprocess.workplace import SUFFIXES, Workplace, move_into_place
from megalite.data.side_file import encode_side_file
from megalite.data.tokenizers.base import Tokenizer

_FEW_PIECES = 8
"""Fewer are not worth the start of a worker."""
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def preprocess(
    job: PreprocessJob, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Progress:
    """Run the job; `on_progress` is called after each piece of input with the running totals.

    Memory is bounded: some pieces of input in flight for each worker. Outputs appear under their names when all is
    done; a failed or killed run leaves earlier outputs as they were. What it has done is kept in
    `{output_prefix}.unfinished`, and the same job goes on from there; an exception that ends a run carries a note
    (`__notes__`) of that. The output does not depend on workers, on how the input was cut, or on kills.

    Raises:
        ConfigError: inputs, keys or tokenizer are bad, no document is good, (strict) any line is bad, a worker died,
            the disk is full, the output cannot be where it is wanted or is there already, or the unfinished work is that
            of another job.
    """
    check_settings(job)
    check_workers(job.workers)
    inputs = find_inputs(job.inputs)
    check_target(job, inputs)
    tokenizer = require_tokenizer(job)
    stamps = [input_stamp(item) for item in inputs]
    facts = job_facts(job, tokenizer)
    workplace = Workplace(job.output_prefix)
    try:
        mark = complete_output(workplace, job, facts, stamps)
        if mark is not None:
            return _finish_earlier(workplace, job, inputs, mark)
        run = Run(job, inputs, stamps, tokenizer, workplace, begin(workplace, job, facts, stamps))
        return run.go(on_progress)
    finally:
        workplace.close()


def _finish_earlier(
    workplace: Workplace, job: PreprocessJob, inputs: Sequence[Input], mark: Mark
) -> Progress:
    """Give their names to files that an earlier run has completed."""
    progress = _progress_at(mark, inputs, list(mark.faults))
    progress.notice = "an earlier run had done all of it and only had to rename its files"
    try:
        move_into_place(workplace.folder, job.prefixes)
    except BaseException as error:
        error.add_note(_kept_note(progress.documents, workplace))
        raise
    workplace.remove()
    return _with_outputs(progress, job)


class Run:
    """Takes tokenized pieces in order, appends them to the outputs and makes them safe from time to time."""

    def __init__(
        self,
        job: PreprocessJob,
        inputs: Sequence[Input],
        stamps: list[list[Any]],
        tokenizer: Tokenizer,
        workplace: Workplace,
        beginning: Beginning,
    ) -> None:
        self._job, self._inputs, self._stamps = job, inputs, stamps
        self._tokenizer, self._workplace, self._journal = tokenizer, workplace, beginning.journal
        self._outputs = [
            Output(OutputFiles(workplace.folder, number), kept, name=prefix)
            for number, (prefix, kept) in enumerate(zip(job.prefixes, beginning.kept, strict=True))
        ]
        self._place: Place | None = beginning.mark.place if beginning.mark else None
        self._disk_before = [0, *itertools.accumulate(item.size or 0 for item in inputs)]
        self.progress = (
            _progress_at(beginning.mark, inputs, beginning.faults) if beginning.mark else _no_progress(inputs)
        )
        self.progress.notice = beginning.notice
        self._keeper = Safekeeper(
            self._journal,
            self._outputs,
            beginning.mark,
            len(self.progress.faults),
            job.checkpoint_seconds,
        )
        self._halfway = False
        """Some outputs may have a piece that others do not."""

    def go(self, on_progress: Callable[[Progress], None]) -> Progress:
        """Do the job, or leave what is done where the next run finds it."""
        with ExitStack() as stack:
            stack.callback(self._journal.close)
            for output in self._outputs:
                stack.callback(output.close)
            stack.callback(self._keeper.close)
            try:
                self._read_all(on_progress)
                self._complete()
                move_into_place(self._workplace.folder, self._job.prefixes)
            except BaseException as error:
                self._give_up(error)
                if isinstance(error, OSError) and error.errno in _FULL_DISK:
                    raise self._full_disk(error) from None
                raise
        self._workplace.remove()
        return _with_outputs(self.progress, self._job)

    def _read_all(self, on_progress: Callable[[Progress], None]) -> None:
        if self._job.strict and self.progress.bad:
            raise ConfigError(f"{self.progress.faults[0]} (stopped by --strict)")
        on_progress(self.progress)
        pieces = cut(self._inputs, keys=self._job.json_keys, limits=self._job.limits, after=self._place)
        with closing(pieces), closing(_tokenized(self._job, self._tokenizer, pieces)) as results:
            for piece, result in results:
                self._take(piece, result)
                on_progress(self.progress)
                assert self._place is not None
                self._keeper.save_soon(self._place, self.progress)

    def _take(self, piece: Piece, result: TokenizedPiece) -> None:
        """Append one piece; pieces come in order."""
        place, progress = self._place, self.progress
        is_next = place is None or place.source != piece.source
        if place is not None and is_next:
            self._require_unchanged(place.source)
        lines_before = 0 if place is None or is_next else place.lines
        faults = [f"{piece.path}:{lines_before + line + 1}: {reason}" for line, reason in result.faults]
        if faults and self._job.strict:
            raise ConfigError(f"{faults[0]} (stopped by --strict)")
        self._halfway = True
        for output, tokens, lengths in zip(self._outputs, result.tokens, result.lengths, strict=True):
            output.append(tokens, lengths)
            progress.tokens += len(tokens)
        progress.documents += len(result.lengths[0])
        progress.input_bytes += piece.num_bytes
        progress.disk_bytes = self._disk_before[piece.source] + piece.disk_bytes
        for kind, count in result.bad.items():
            progress.bad[kind] = progress.bad.get(kind, 0) + count
        progress.faults += faults[: MAX_FAULTS - len(progress.faults)]
        self._place = piece.after(result.lines, place)
        self._halfway = False

    def _complete(self) -> None:
        """Make all files of the output, on the disk, and say so in the journal."""
        if not self.progress.documents:
            bad = self.progress.bad_lines
            first = f"; the first of {bad} bad lines: {self.progress.faults[0]}" if bad else ""
            others = f" and {len(self._inputs) - 1} more" if len(self._inputs) > 1 else ""
            raise ConfigError(f"no document in {self._inputs[0].path}{others}{first}")
        assert self._place is not None
        self._require_unchanged(self._place.source)
        self._keeper.save_now(self._place, self.progress)
        made = []
        for output in self._outputs:
            counts, path = output.counts, output.files.path
            for suffix in (".idx", ".json"):
                path(suffix).unlink(missing_ok=True)
            length, digest = write_index(path(".idx"), path(".lengths"), counts)
            bin_length = counts.tokens * counts.dtype.itemsize
            files = {
                ".bin": {"bytes": bin_length, "sha256": counts.bin_sha256.hexdigest()},
                ".idx": {"bytes": length, "sha256": digest},
            }
            facts = side_facts(
                self._job,
                output,
                inputs=self._inputs,
                tokenizer=self._tokenizer,
                progress=self.progress,
                files=files,
            )
            content = encode_side_file(facts)
            write_durably(path(".json"), content)
            made.append(
                files | {".json": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
            )
        sync_folder(self._workplace.folder)
        self._journal.complete(made)

    def _require_unchanged(self, source: int) -> None:
        """Raise a ConfigError if an input that has been read is not what it was at the start."""
        before, now = self._stamps[source], input_stamp(self._inputs[source])
        if now != before:
            raise ConfigError(
                f"input {before[0]} has changed while it was read (it had {before[1]} bytes, now {now[1]}); "
                "once nothing writes to it, start again with --restart"
            )

    def _give_up(self, error: BaseException) -> None:
        """Keep what can be kept, and note on the error what that is; nothing kept leaves nothing behind."""
        with contextlib.suppress(OSError):
            if self._halfway:
                self._keeper.wait()
            else:
                self._keeper.save_now(self._place, self.progress)
        safe = self._keeper.safe
        documents = safe.outputs[0].documents if safe is not None else 0
        if documents:
            error.add_note(_kept_note(documents, self._workplace))
        else:
            self._workplace.remove()

    def _full_disk(self, error: OSError) -> ConfigError:
        full = ConfigError(
            f"{error.filename or self._workplace.folder}: {error.strerror}; make room on the disk, or give an "
            "--output-prefix on another"
        )
        for note in getattr(error, "__notes__", []):
            full.add_note(note)
        return full


def _tokenized(
    job: PreprocessJob, tokenizer: Tokenizer, pieces: Iterator[Piece]
) -> Generator[tuple[Piece, TokenizedPiece], None, None]:
    """Pieces with their tokens, in the order given, whoever did the work."""
    first: list[Piece] = []
    fault: Exception | None = None
    try:
        for piece in itertools.islice(pieces, _FEW_PIECES):
            first.append(piece)
    except Exception as error:  # raised when the pieces before it are done
        fault = error
    everything = itertools.chain(first, pieces)
    if job.workers == 1 or len(first) < _FEW_PIECES:
        tokenize = PieceTokenizer(job, tokenizer)
        for piece in everything:
            yield piece, tokenize(piece)
        if fault is not None:
            raise fault
        return
    pool: WorkerPool[PreprocessJob, Piece, TokenizedPiece] = WorkerPool(job.workers, PieceTokenizer, job)
    try:
        yield from pool.map(everything, lambda piece: max(piece.num_bytes, piece.held_bytes))
    except BaseException:
        pool.close(kill=True)
        raise
    pool.close()


def _kept_note(documents: int, workplace: Workplace) -> str:
    return f"{documents:,} documents are kept in {workplace.folder}: the same command goes on from there, --restart drops them"


def _no_progress(inputs: Sequence[Input]) -> Progress:
    sizes = [item.size for item in inputs]
    return Progress(disk_total=None if None in sizes else sum(size or 0 for size in sizes))


def _progress_at(mark: Mark, inputs: Sequence[Input], faults: list[str]) -> Progress:
    progress = _no_progress(inputs)
    progress.documents = progress.kept_documents = mark.outputs[0].documents
    progress.tokens = progress.kept_tokens = sum(output.tokens for output in mark.outputs)
    progress.input_bytes = progress.kept_bytes = mark.input_bytes
    progress.disk_bytes = progress.kept_disk_bytes = mark.disk_bytes
    progress.bad, progress.faults = dict(mark.bad), faults
    return progress


def _with_outputs(progress: Progress, job: PreprocessJob) -> Progress:
    progress.outputs = job.prefixes
    progress.output_bytes = sum(
        Path(f"{prefix}{suffix}").stat().st_size for prefix in job.prefixes for suffix in SUFFIXES
    )
    return progress

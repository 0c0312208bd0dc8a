"""A preprocessing run from its inputs to finished token files, and what one would do (--dry-run)."""

import contextlib
import errno
import hashlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import sync_folder, write_durably
from megalite.config.errors import ConfigError
from megalite.config.registry import Registry
from megalite.data.indexed_writer import write_lengths_index
from megalite.data.token_files import SUFFIXES, encode_side_file
from megalite.preprocess import resume
from megalite.preprocess.documents import NoTemplate, read_piece
from megalite.preprocess.inputs import Input
from megalite.preprocess.job import (
    MAX_FAULTS,
    PreprocessJob,
    Progress,
    check_settings,
    check_target,
    require_free,
    require_tokenizer,
)
from megalite.preprocess.output import Output, PieceTokenizer, TokenizedPiece
from megalite.preprocess.pieces import Piece, Place, cut
from megalite.preprocess.shards import job_inputs
from megalite.preprocess.workers import WorkerPool
from megalite.tokenizers.base import Tokenizer

_OF_EXAMPLES: Registry[Any] = Registry(
    "part",
    {
        "tokenizer": "megalite.preprocess.sft:ExampleTokenizer",
        "encoder": "megalite.preprocess.sft:ExampleEncoder",
        "parse": "megalite.preprocess.sft:parse_example",
    },
)
"""Imported for jobs of examples to fine-tune on."""
_FEW_PIECES = 8  # fewer are not worth the start of a worker
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SEARCHED_PIECES, _SEARCHED_BYTES = 100, 1 << 14  # of the input, for the first document of a plan


@dataclass(frozen=True)
class Plan:
    inputs: list[Input]
    tokenizer: Tokenizer
    place: str = ""  # `file:line` of the first document; empty if none begins the input, or it is stdin
    text: str = ""  # under the first key
    ids: Sequence[int] = ()  # with the end-of-document token, if the job appends it


def plan(job: PreprocessJob) -> Plan:
    """Find the inputs, load the tokenizer and read the first document; nothing is written. Raises ConfigError: as the
    job itself would."""
    check_settings(job)
    inputs, _ = job_inputs(job)
    check_target(job, inputs)
    unfinished = resume.read_journal(job.unfinished / resume.JOURNAL)
    if unfinished is None or not unfinished.marks:
        require_free(job)
    tokenizer = require_tokenizer(job)
    files = [item for item in inputs if item.size is not None]
    limits = replace(job.limits, piece_bytes=_SEARCHED_BYTES)
    before = None
    encode = _OF_EXAMPLES.get("encoder")(tokenizer) if job.sft else None
    parse = _OF_EXAMPLES.get("parse") if job.sft else None
    with closing(cut(files, keys=job.json_keys, limits=limits)) as pieces:
        for piece in itertools.islice(pieces, _SEARCHED_PIECES):
            read = read_piece(piece, ("example",) if job.sft else job.json_keys, limits, parse)
            for line, text in zip(read.at, read.texts[0], strict=True):
                try:
                    ids = list(tokenizer.encode(text) if encode is None else encode(text)[0])
                except NoTemplate:
                    raise
                except ValueError:  # a bad document
                    continue
                if ids:
                    text = text if encode is None else tokenizer.decode(ids)
                    ids += [tokenizer.eod] if job.append_eod and encode is None else []
                    place = f"{piece.path}:{piece.after(line + 1, before).lines}"
                    return Plan(inputs, tokenizer, place, text, ids)
            before = piece.after(read.lines, before)
    return Plan(inputs, tokenizer)


def job_facts(job: PreprocessJob, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that the output depends on, except the inputs."""
    facts = resume.job_facts(job, tokenizer) | ({"shard": list(job.shard)} if job.shard else {})
    return facts | {"chat template": _OF_EXAMPLES.get("encoder")(tokenizer).fingerprint} if job.sft else facts


def preprocess(job: PreprocessJob, on_progress: Callable[[Progress], None] = lambda progress: None) -> Progress:
    """Run the job; `on_progress` is called after each piece of input with the running totals.

    Memory is bounded: some pieces of input in flight for each worker. Outputs appear under their names when all is
    done; a failed or killed run leaves earlier outputs as they were. Its work is kept in `{output_prefix}.unfinished`,
    from which the same job resumes; an exception that ends a run has a note (`__notes__`) of that. The output does not
    depend on workers, on how the input was cut, or on kills.

    Raises ConfigError: inputs, keys or tokenizer are bad, no document is good, (strict) any line is bad, a worker died,
    the disk is full, the output cannot be where it is wanted or exists already, or the unfinished work is that of
    another job."""
    check_settings(job)
    inputs, part = job_inputs(job)
    check_target(job, inputs)
    if not inputs:
        assert part is not None and job.shard is not None
        return Progress(notice=f"shard {job.shard[0]}/{job.shard[1]} is empty: the input is cut into {part[1]} parts")
    tokenizer = require_tokenizer(job)
    stamps = [resume.input_stamp(item) for item in inputs]
    facts = job_facts(job, tokenizer)
    folder = resume.UnfinishedFolder(job.unfinished)
    try:
        mark = resume.complete_output(folder, job, facts, stamps)
        if mark is None:
            beginning = resume.begin(folder, job, facts, stamps)
            progress = _Run(job, inputs, stamps, tokenizer, folder, beginning).run(on_progress)
        else:
            progress = _progress_at(mark, inputs, list(mark.faults))
            progress.notice = "an earlier run had done all of it and only had to rename its files"
            try:
                resume.move_into_place(folder.path, job.prefixes)
            except BaseException as error:
                error.add_note(_kept_note(progress.documents, folder))
                raise
        folder.remove()
    finally:
        folder.close()
    paths = [Path(f"{prefix}{suffix}") for prefix in job.prefixes for suffix in SUFFIXES]
    progress.outputs, progress.output_bytes = job.prefixes, sum(path.stat().st_size for path in paths)
    return progress


class _Run:
    """Takes tokenized pieces in order, appends them to the outputs and saves them from time to time."""

    def __init__(
        self,
        job: PreprocessJob,
        inputs: Sequence[Input],
        stamps: list[resume.Stamp],
        tokenizer: Tokenizer,
        folder: resume.UnfinishedFolder,
        beginning: resume.Beginning,
    ) -> None:
        self._job, self._inputs, self._stamps = job, inputs, stamps
        self._tokenizer, self._folder, self._journal = tokenizer, folder, beginning.journal
        self._outputs = [
            Output(folder.path, number, kept.counts, kept.statistics, name=prefix)
            for number, (prefix, kept) in enumerate(zip(job.prefixes, beginning.kept, strict=True))
        ]
        mark = beginning.mark
        self._place: Place | None = mark.place if mark else None
        self._disk_before = [0, *itertools.accumulate(item.amount or 0 for item in inputs)]
        self.progress = _progress_at(mark, inputs, beginning.faults)
        self.progress.notice = beginning.notice
        self._saver = BackgroundSaver(
            self._journal, self._outputs, mark, len(self.progress.faults), job.checkpoint_seconds
        )
        self._is_halfway = False  # some outputs may have a piece that others do not

    def run(self, on_progress: Callable[[Progress], None]) -> Progress:
        """Do the job, or leave the work where the next run finds it."""
        with ExitStack() as stack:
            stack.callback(self._journal.close)
            for output in self._outputs:
                stack.callback(output.close)
            stack.callback(self._saver.close)
            try:
                self._read_all(on_progress)
                self._complete()
                resume.move_into_place(self._folder.path, self._job.prefixes)
            except BaseException as error:
                self._give_up(error)
                if not isinstance(error, OSError) or error.errno not in _FULL_DISK:
                    raise
                full = ConfigError(
                    f"{error.filename or self._folder.path}: {error.strerror}; make room on the disk, or give an "
                    "--output-prefix on another"
                )
                for note in getattr(error, "__notes__", []):
                    full.add_note(note)
                raise full from None
        return self.progress

    def _read_all(self, on_progress: Callable[[Progress], None]) -> None:
        if self._job.strict and self.progress.bad:
            raise ConfigError(f"{self.progress.faults[0]} (stopped by --strict)")
        on_progress(self.progress)
        pieces = cut(self._inputs, keys=self._job.json_keys, limits=self._job.limits, after=self._place)
        with closing(pieces), closing(_tokenized(self._job, self._tokenizer, pieces)) as results:
            for piece, result in results:
                self._place = self._take(piece, result)
                self._is_halfway = False
                on_progress(self.progress)
                self._saver.save_soon(self._place, self.progress)

    def _take(self, piece: Piece, result: TokenizedPiece) -> Place:
        """Append one piece; pieces come in order. Returns where it ends."""
        place, progress = self._place, self.progress
        if place is not None and place.source != piece.source:
            self._require_unchanged(place.source)
            place = None
        lines_before = place.lines if place is not None else 0
        begin = self._inputs[piece.source].start
        path = f"{piece.path} from byte {begin}" if begin else piece.path
        faults = [f"{path}:{lines_before + line + 1}: {reason}" for line, reason in result.faults]
        if faults and self._job.strict:
            raise ConfigError(f"{faults[0]} (stopped by --strict)")
        self._is_halfway = True
        for output, tokens, lengths in zip(self._outputs, result.tokens, result.lengths, strict=True):
            output.append(tokens, lengths)
            progress.tokens += len(tokens)
        progress.documents += len(result.lengths[0])
        progress.input_bytes += piece.num_bytes
        progress.disk_bytes = self._disk_before[piece.source] + piece.disk_bytes - begin
        for kind, count in result.bad.items():
            progress.bad[kind] = progress.bad.get(kind, 0) + count
        progress.faults += faults[: MAX_FAULTS - len(progress.faults)]
        return piece.after(result.lines, place)

    def _complete(self) -> None:
        """Make all files of the output, on the disk, and say so in the journal."""
        if not self.progress.documents:
            bad = self.progress.bad_lines
            first = f"; the first of {bad} bad lines: {self.progress.faults[0]}" if bad else ""
            others = f" and {len(self._inputs) - 1} more" if len(self._inputs) > 1 else ""
            raise ConfigError(f"no document in {self._inputs[0].path}{others}{first}")
        assert self._place is not None
        self._require_unchanged(self._place.source)
        self._saver.save_now(self._place, self.progress)
        made = []
        for output in self._outputs:
            counts, path = output.counts, output.path
            for suffix in (".idx", ".json"):
                path(suffix).unlink(missing_ok=True)
            length, digest = write_lengths_index(path(".idx"), path(".lengths"), counts)
            bin_length = counts.tokens * counts.dtype.itemsize
            files = {
                ".bin": {"bytes": bin_length, "sha256": counts.bin_sha256.hexdigest()},
                ".idx": {"bytes": length, "sha256": digest},
            }
            facts = output.side_facts(self._job, self._inputs, self._tokenizer, self.progress, files)
            content = encode_side_file(facts)
            write_durably(path(".json"), content)
            side = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            made.append(files | {".json": side})
        sync_folder(self._folder.path)
        self._journal.append({"complete": made})

    def _require_unchanged(self, source: int) -> None:
        before, now = self._stamps[source], resume.input_stamp(self._inputs[source])
        if now != before:
            raise ConfigError(f"input {before[0]} has changed while it was read; start again with --restart")

    def _give_up(self, error: BaseException) -> None:
        """Save what can be saved, and note on the error what that is; if nothing is saved, leave nothing behind."""
        with contextlib.suppress(OSError):
            if self._is_halfway:
                self._saver.wait()
            else:
                self._saver.save_now(self._place, self.progress)
        saved = self._saver.saved
        if saved is not None and saved.outputs[0].documents:
            error.add_note(_kept_note(saved.outputs[0].documents, self._folder))
        else:
            self._folder.remove()


class BackgroundSaver:
    """Puts outputs on the disk and then a mark into the journal, in a thread: a slow disk does not delay the work.
    `last`: the mark that the run resumes from. `faults`: how many bad lines the journal has. `seconds`: how often
    `save_soon` does something; 0 is always, even if it has to wait for the previous save."""

    def __init__(
        self, journal: resume.Journal, outputs: Sequence[Output], last: resume.Mark | None, faults: int, seconds: float
    ) -> None:
        self._journal, self._outputs, self._faults, self._seconds = journal, outputs, faults, seconds
        self.saved = self._captured = last  # the last mark in the journal
        self._captured_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._saving: Future[None] | None = None

    def save_soon(self, place: Place, progress: Progress) -> None:
        """Save in the background, if it is time to and the previous save is over. Raises OSError: the previous save
        failed."""
        if time.monotonic() - self._captured_at < self._seconds:
            return
        if self._saving is not None:
            if self._seconds and not self._saving.done():
                return
            self._saving.result()
        self._saving = self._thread.submit(self._save, self._capture(place, progress))

    def save_now(self, place: Place | None, progress: Progress) -> None:
        self.wait()
        if place is not None and (self._captured is None or self._captured.place != place):
            self._save(self._capture(place, progress))

    def wait(self) -> None:
        # One thread works in order: this also comes after a save of which a signal has lost the future.
        self._thread.submit(lambda: None).result()
        if self._saving is not None:
            self._saving.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _capture(self, place: Place, progress: Progress) -> resume.Mark:
        """The state now, all of it handed to the system."""
        self._captured = mark = resume.Mark(
            place=place,
            input_bytes=progress.input_bytes,
            disk_bytes=progress.disk_bytes,
            bad=dict(progress.bad),
            faults=progress.faults[self._faults :],
            outputs=[output.state() for output in self._outputs],
        )
        self._faults = len(progress.faults)
        self._captured_at = time.monotonic()
        return mark

    def _save(self, mark: resume.Mark) -> None:
        for output in self._outputs:
            output.sync()
        self._journal.mark(mark)
        self.saved = mark


def _tokenized(
    job: PreprocessJob, tokenizer: Tokenizer, pieces: Iterator[Piece]
) -> Generator[tuple[Piece, TokenizedPiece], None, None]:
    """Pieces with their tokens, in order, tokenized here or by workers."""
    first: list[Piece] = []
    fault: Exception | None = None
    try:
        first.extend(itertools.islice(pieces, _FEW_PIECES))
    except Exception as error:  # raised when the pieces before it are done
        fault = error
    everything = itertools.chain(first, pieces)
    build: type[PieceTokenizer] = _OF_EXAMPLES.get("tokenizer") if job.sft else PieceTokenizer
    if job.workers == 1 or len(first) < _FEW_PIECES:
        tokenize = build(job, tokenizer)
        for piece in everything:
            yield piece, tokenize(piece)
        if fault is not None:
            raise fault
        return
    pool: WorkerPool[PreprocessJob, Piece, TokenizedPiece] = WorkerPool(job.workers, build, job)
    try:
        yield from pool.map(everything, lambda piece: piece.num_bytes)
    except BaseException:
        pool.close(kill=True)
        raise
    pool.close()


def _kept_note(documents: int, folder: resume.UnfinishedFolder) -> str:
    return f"{documents:,} documents are kept in {folder.path}: the same command resumes there, --restart drops them"


def _progress_at(mark: resume.Mark | None, inputs: Sequence[Input], faults: list[str]) -> Progress:
    sizes = [item.amount for item in inputs]
    progress = Progress(disk_total=None if None in sizes else sum(size or 0 for size in sizes))
    if mark is not None:
        progress.documents = progress.kept_documents = mark.outputs[0].documents
        progress.tokens = progress.kept_tokens = sum(output.tokens for output in mark.outputs)
        progress.input_bytes = progress.kept_bytes = mark.input_bytes
        progress.disk_bytes = mark.disk_bytes
        progress.bad, progress.faults = dict(mark.bad), faults
    return progress

"""Run a preprocessing job from its inputs to finished token files, or plan one (--dry-run)."""

import contextlib
import errno
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import sync_folder, write_durably
from megalite.config.errors import ConfigError
from megalite.config.registry import imported
from megalite.data.indexed_dataset import SUFFIXES, TokenCounts, move_into_place, token_dtype
from megalite.data.token_files import encode_side_file
from megalite.preprocess.documents import PieceTokenizer, TokenizedPiece
from megalite.preprocess.inputs import Input
from megalite.preprocess.job import (
    MAX_FAULTS,
    PreprocessJob,
    Progress,
    check_settings,
    check_target,
    job_inputs,
    require_free,
    require_tokenizer,
)
from megalite.preprocess.output import (
    STATE,
    Facts,
    LengthStatistics,
    Output,
    Stamp,
    State,
    UnfinishedFolder,
    input_stamp,
    recover_outputs,
    require_same,
)
from megalite.preprocess.pieces import Piece, Place, cut
from megalite.preprocess.workers import WorkerPool
from megalite.tokenizers.base import Tokenizer

_JOB_FORMAT = 1
_FEW_PIECES = 8  # with fewer pieces workers are not started
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SEARCHED_PIECES, _SEARCHED_BYTES = 100, 1 << 14  # pieces and their size, searched for the first document of a plan


@dataclass(frozen=True)
class Plan:
    inputs: list[Input]
    tokenizer: Tokenizer
    place: str = ""  # `file:line` of the first document; empty if none was found, or for stdin
    text: str = ""  # decoded text of the first document
    ids: Sequence[int] = ()  # its tokens under the first key, with EOD if the job appends it


def plan(job: PreprocessJob) -> Plan:
    """Find the inputs, load the tokenizer and read the first document, without writing. Raises ConfigError as
    `preprocess`."""
    check_settings(job)
    inputs, _ = job_inputs(job)
    check_target(job, inputs)
    if State.read(job.unfinished / STATE) is None:
        require_free(job)
    tokenizer = require_tokenizer(job)
    files = [item for item in inputs if item.size is not None]
    job = replace(job, piece_bytes=_SEARCHED_BYTES)
    tokenize, before = _piece_tokenizer(job)(job, tokenizer), None
    with closing(cut(files, keys=job.json_keys, limits=job.limits)) as pieces:
        for piece in itertools.islice(pieces, _SEARCHED_PIECES):
            found = tokenize(piece)
            if found.first_line is not None:
                ids = found.tokens[0][: int(found.lengths[0][0])].tolist()
                text = tokenizer.decode(ids[:-1] if job.append_eod else ids)
                place = f"{piece.path}:{piece.after(found.first_line + 1, before).lines}"
                return Plan(inputs, tokenizer, place, text, ids)
            before = piece.after(found.lines, before)
    return Plan(inputs, tokenizer)


# `sft` is imported by name, because it loads jinja2.
def _piece_tokenizer(job: PreprocessJob) -> type[PieceTokenizer]:
    return imported("megalite.preprocess.sft:ExampleTokenizer") if job.sft else PieceTokenizer


def job_facts(job: PreprocessJob, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return everything that the output depends on, except the inputs."""
    encoder = imported("megalite.preprocess.sft:ExampleEncoder")(tokenizer) if job.sft else None
    return {
        "format": _JOB_FORMAT,
        "json keys": list(job.json_keys),
        "append_eod": job.append_eod,
        "tokenizer": tokenizer.name,
        "tokenizer's sha256": tokenizer.fingerprint(),
        "vocabulary": tokenizer.vocab_size,
        "end of document": tokenizer.eod,
        "token type": token_dtype(tokenizer.vocab_size).name,
        "max_document_bytes": job.max_document_bytes,
        "text_documents": job.text_documents,
        **({"shard": list(job.shard)} if job.shard else {}),
        **({"chat template": encoder.fingerprint} if encoder else {}),
    }


def preprocess(job: PreprocessJob, on_progress: Callable[[Progress], None] = lambda progress: None) -> Progress:
    """Run the job; `on_progress` is called after each piece of input with the running totals.

    Memory is bounded: some pieces of input in flight for each worker. Outputs are renamed to their prefixes at the end;
    a failed or killed run leaves earlier outputs unchanged. Its work stays in `{output_prefix}.unfinished`, and the
    same job resumes from there; an exception that ends a run has a note (`__notes__`) about it. The output does not
    depend on the number of workers, the pieces, or kills.

    Raises ConfigError if inputs, keys or tokenizer are bad, no document is good, any line is bad (strict), a worker
    dies, the disk is full, the output is not writable or exists, or the unfinished work belongs to another job."""
    check_settings(job)
    inputs, part = job_inputs(job)
    check_target(job, inputs)
    if not inputs:
        assert part is not None and job.shard is not None
        return Progress(notice=f"shard {job.shard[0]}/{job.shard[1]} is empty: the input is cut into {part[1]} parts")
    tokenizer = require_tokenizer(job)
    stamps = [input_stamp(item) for item in inputs]
    facts = job_facts(job, tokenizer)
    folder = UnfinishedFolder(job.unfinished)
    try:
        left = None if job.restart else State.read(folder.state)
        kept = None
        if left is not None:
            require_same(folder.path, left, facts, stamps)
            kept = recover_outputs(folder.path, job, left.outputs, tokenizer.vocab_size)
        if kept is None:
            try:
                require_free(job)
            except ConfigError:
                if left is None:
                    folder.remove()
                raise
        progress = _Run(job, inputs, stamps, tokenizer, folder, facts, left, kept).run(on_progress)
        folder.remove()
    finally:
        folder.close()
    paths = [Path(f"{prefix}{suffix}") for prefix in job.prefixes for suffix in SUFFIXES]
    progress.outputs, progress.output_bytes = job.prefixes, sum(path.stat().st_size for path in paths)
    return progress


class _Run:
    """Appends tokenized pieces to the outputs in order, and saves the work periodically. `left`: state of an earlier
    run of the same job; `kept`: contents of its files, None if they do not match the state."""

    def __init__(
        self,
        job: PreprocessJob,
        inputs: Sequence[Input],
        stamps: list[Stamp],
        tokenizer: Tokenizer,
        folder: UnfinishedFolder,
        facts: Facts,
        left: State | None,
        kept: list[tuple[TokenCounts, LengthStatistics]] | None,
    ) -> None:
        self._job, self._inputs, self._stamps, self._facts = job, inputs, stamps, facts
        self._tokenizer, self._folder, size = tokenizer, folder, tokenizer.vocab_size
        notice = "" if left is None else f"the work of an earlier run in {folder.path} is damaged and is done again"
        if kept is None:
            left = None
            folder.clear()
            kept = [(TokenCounts(token_dtype(size)), LengthStatistics()) for _ in job.json_keys]
        elif left is not None:
            notice = f"resuming after {left.outputs[0].documents:,} documents of an earlier run"
        self._outputs = [
            Output(folder.path / str(number), counts, lengths, name=prefix)
            for number, (prefix, (counts, lengths)) in enumerate(zip(job.prefixes, kept, strict=True))
        ]
        self._place: Place | None = left.place if left else None
        self._disk_before = [0, *itertools.accumulate(item.amount or 0 for item in inputs)]
        self.progress = _progress_at(left, inputs)
        self.progress.notice = notice
        self._saved = left  # the state on disk
        self._next_save = time.monotonic() + job.checkpoint_seconds
        self._is_halfway = False  # a piece may be in some outputs only

    def run(self, on_progress: Callable[[Progress], None]) -> Progress:
        """Run the job; on an error, save the work for the next run."""
        with ExitStack() as stack:
            for output in self._outputs:
                stack.callback(output.close)
            try:
                self._read_all(on_progress)
                self._complete()
                move_into_place(self._folder.path, self._job.prefixes)
            except BaseException as error:
                self._give_up(error)
                if not isinstance(error, OSError) or error.errno not in _FULL_DISK:
                    raise
                full = ConfigError(
                    f"{error.filename or self._folder.path}: {error.strerror}; make room on the disk, or use an "
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
                if time.monotonic() >= self._next_save:
                    self._save()

    def _take(self, piece: Piece, result: TokenizedPiece) -> Place:
        """Append the next piece, and return the place of its end."""
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
        if not self.progress.documents:
            bad = self.progress.bad_lines
            first = f"; the first of {bad} bad lines: {self.progress.faults[0]}" if bad else ""
            others = f" and {len(self._inputs) - 1} more" if len(self._inputs) > 1 else ""
            raise ConfigError(f"no document in {self._inputs[0].path}{others}{first}")
        assert self._place is not None
        self._require_unchanged(self._place.source)
        self._save()
        for key, output in zip(self._job.json_keys, self._outputs, strict=True):
            counts = output.counts
            for suffix in (".idx", ".json"):
                output.path(suffix).unlink(missing_ok=True)
            length, digest = output.write_index()
            bin_length = counts.tokens * counts.dtype.itemsize
            files = {
                ".bin": {"bytes": bin_length, "sha256": counts.bin_sha256.hexdigest()},
                ".idx": {"bytes": length, "sha256": digest},
            }
            side = output.side_facts(self._job, key, self._tokenizer, self.progress, files)
            write_durably(output.path(".json"), encode_side_file(side))
        sync_folder(self._folder.path)

    def _save(self) -> None:
        """Sync the outputs, then write the state that describes them."""
        assert self._place is not None
        begun, progress = time.monotonic(), self.progress
        state = State(
            job=self._facts,
            inputs=self._stamps,
            place=self._place,
            input_bytes=progress.input_bytes,
            disk_bytes=progress.disk_bytes,
            bad=dict(progress.bad),
            faults=list(progress.faults),
            outputs=[output.state() for output in self._outputs],
        )
        if state != self._saved:
            for output in self._outputs:
                output.sync()
            state.write(self._folder.state)
            self._saved = state
        # Workers soon run out of work during a save, so on a slow disk saving takes at most a twentieth of the time.
        seconds, now = self._job.checkpoint_seconds, time.monotonic()
        self._next_save = now + (max(seconds, 19 * (now - begun)) if seconds else 0.0)

    def _require_unchanged(self, source: int) -> None:
        before, now = self._stamps[source], input_stamp(self._inputs[source])
        if now != before:
            raise ConfigError(f"input {before[0]} has changed while it was read; start again with --restart")

    def _give_up(self, error: BaseException) -> None:
        """Save the work and add a note about it to the error, or remove the folder if there is nothing to save."""
        with contextlib.suppress(OSError):
            if not self._is_halfway and self._place is not None:
                self._save()
        saved = self._saved
        if saved is not None and saved.outputs[0].documents:
            error.add_note(
                f"{saved.outputs[0].documents:,} documents are kept in {self._folder.path}: the same command resumes there, "
                "--restart drops them"
            )
        else:
            self._folder.remove()


def _tokenized(
    job: PreprocessJob, tokenizer: Tokenizer, pieces: Iterator[Piece]
) -> Generator[tuple[Piece, TokenizedPiece], None, None]:
    """Yield pieces with their tokens, in order, tokenized by workers, or in this process if there are only a few."""
    build, first, fault = _piece_tokenizer(job), list[Piece](), None
    try:
        first.extend(itertools.islice(pieces, _FEW_PIECES))
    except Exception as error:  # raised after the pieces before it
        fault = error
    everything, tokenize = itertools.chain(first, pieces), build(job, tokenizer)
    if job.workers > 1 and len(first) == _FEW_PIECES:
        remedy = f"use megalite preprocess --workers {job.workers // 2}, or a smaller --max-document-mb"
        others = WorkerPool[PreprocessJob, Piece, TokenizedPiece](job.workers - 1, build, job, remedy=remedy)
        with others as pool:
            yield from pool.map(everything, lambda piece: piece.num_bytes, tokenize)
        return
    for piece in everything:
        yield piece, tokenize(piece)
    if fault is not None:
        raise fault


def _progress_at(state: State | None, inputs: Sequence[Input]) -> Progress:
    sizes = [item.amount for item in inputs]
    progress = Progress(disk_total=None if None in sizes else sum(size or 0 for size in sizes))
    if state is not None:
        progress.documents = progress.kept_documents = state.outputs[0].documents
        progress.tokens = progress.kept_tokens = sum(output.tokens for output in state.outputs)
        progress.input_bytes = progress.kept_bytes = state.input_bytes
        progress.disk_bytes = state.disk_bytes
        progress.bad, progress.faults = dict(state.bad), list(state.faults)
    return progress

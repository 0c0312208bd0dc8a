"""Tokenize text in a run's data paths once, into a cache, as `megalite preprocess --append-eod` does."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.checkpoint.files import not_writable
from megalite.config.data import is_address
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.data.token_files import is_dataset, read_side_file
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.job import PreprocessJob, Progress, require_tokenizer
from megalite.preprocess.output import FolderInUse, input_stamp
from megalite.preprocess.run import job_facts, preprocess
from megalite.tokenizers.base import Tokenizer
from megalite.watchdog.processes import usable_cores

_KEY_CHARACTERS = 16
_POLL_SECONDS = 0.5
_WILD = re.compile(r"[*?\[]")


class Abandoned(Exception):
    """Raised when the run is stopped during tokenization; the work is kept."""


@dataclass(frozen=True)
class Text:
    """The text files of a data path, and the job that tokenizes them."""

    path: str
    job: PreprocessJob
    files: int
    num_bytes: int

    @property
    def prefix(self) -> str:
        return self.job.prefixes[0]

    @property
    def is_done(self) -> bool:
        """Whether all files exist: the side file of the last dataset is written last."""
        return Path(f"{self.job.prefixes[-1]}.json").exists()


def find_texts(config: RunConfig) -> list[Text]:
    """Find the texts among the data paths, without writing.

    The name of a text in the cache depends on its files (path, size, modification time), the tokenizer and all settings
    of the job, so an existing file is always up to date. Raises ConfigError if a file is missing or not readable, or no
    tokenizer is set."""
    paths = [path for path in config.data.texts if not is_address(path) and not is_dataset(path)]
    tokenizer: Tokenizer | None = None
    texts = []
    for path in paths:
        inputs = find_inputs([path])
        job = _job(config, path)
        tokenizer = tokenizer or require_tokenizer(job)
        stamps = [input_stamp(item) for item in inputs]
        key = hashlib.sha256(json.dumps([job_facts(job, tokenizer), stamps], sort_keys=True).encode()).hexdigest()
        job = replace(job, output_prefix=f"{job.output_prefix}-{key[:_KEY_CHARACTERS]}")
        texts.append(Text(path, job, len(inputs), sum(item.size or 0 for item in inputs)))
    return texts


def tokenize_text(
    config: RunConfig,
    prefixes: Mapping[str, str] | None,
    *,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, str]:
    """Tokenize the texts that are not in the cache yet. Return path -> token file.

    If several processes need the same text, one works and the others wait; a killed one is resumed. `prefixes`: the
    result on the first node; None there. `say`: writes to the log. `stopped`: called after each piece of input.

    Raises ConfigError as `preprocess`, and if the files cannot be stored; Abandoned if `stopped` returns True."""

    def check(progress: Progress) -> None:
        on_progress(progress)
        if stopped():
            raise Abandoned

    found = dict(prefixes or {})
    if prefixes is not None and all(is_dataset(prefix) for prefix in prefixes.values()):
        return found
    for text in find_texts(config):
        # Modification times differ between nodes' disks, so all nodes use the first node's name.
        stem = found.setdefault(text.path, text.prefix).removesuffix(text.prefix.removeprefix(text.job.output_prefix))
        text = replace(text, job=replace(text.job, output_prefix=stem))
        if text.is_done:
            say(f"{text.path}: tokenized before, in {text.prefix}")
            continue
        result = _make(text, check, say, stopped)
        if result is None:
            say(f"{text.path}: tokenized by another run, in {text.prefix}")
            continue
        bad = f"; {result.bad_lines:,} bad lines were left out, the first: {result.faults[0]}" if result.faults else ""
        say(
            f"{text.path}: {result.documents:,} documents, {result.tokens:,} tokens, tokenized into {text.prefix}{bad}"
            f"{'; ' + result.notice if result.notice else ''}"
        )
    return found


def _make(
    text: Text, check: Callable[[Progress], None], say: Callable[[str], None], stopped: Callable[[], bool]
) -> Progress | None:
    """Tokenize a text; return None if another process has done it."""
    folder = Path(text.job.output_prefix).parent
    if (fault := not_writable(folder)) is not None:
        raise ConfigError(
            f"{folder}: {fault[1]}: the token files of {text.path} are stored there; set --data-cache-path to a writable "
            "folder"
        )
    waits = False
    while True:
        try:
            return preprocess(text.job, check)
        except FolderInUse:
            if not waits:
                say(f"{text.path}: another run is tokenizing it into {text.prefix}: waiting for it")
            waits = True
        except ConfigError:
            if not text.is_done:
                raise
        if text.is_done:
            return None
        if stopped():
            raise Abandoned
        time.sleep(_POLL_SECONDS)


def _job(config: RunConfig, path: str) -> PreprocessJob:
    """Build the job of a path. Its output is in data_cache_path, or else in a folder `cache` beside the path."""
    data, wild = config.data, _WILD.search(path)
    beside = Path(path[: wild.start()] + "x" if wild else path).parent
    name = re.sub(r"[^\w.-]+", "-", Path(path).name)[:80]
    return PreprocessJob(
        inputs=(path,),
        output_prefix=str(Path(data.data_cache_path or beside / "cache") / name),
        tokenizer=data,
        vocab_size=config.model.vocab_size,
        json_keys=(data.text_field,),
        sft=data.sft,
        append_eod=not data.sft,
        workers=usable_cores(),
    )


def documents_of(text: Text) -> int | None:
    """Return the number of documents in a text's token file, or None if it does not exist."""
    facts = read_side_file(text.prefix) if text.is_done else None
    return None if facts is None else int(facts["documents"])

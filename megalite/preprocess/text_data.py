"""Text that a run names as its data: tokenized once into a cache, as `megalite preprocess --append-eod` would."""

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
from megalite.data.token_files import read_side_file
from megalite.preprocess import resume
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.job import PreprocessJob, Progress, require_tokenizer
from megalite.preprocess.run import job_facts, preprocess
from megalite.tokenizers.base import Tokenizer
from megalite.watchdog.processes import usable_cores

_KEY_CHARACTERS = 16
_POLL_SECONDS = 0.5
_WILD = re.compile(r"[*?\[]")


class Abandoned(Exception):
    """The run has been stopped; what is done is kept."""


@dataclass(frozen=True)
class Text:
    """Files of text that a data path names, and the token file that they become."""

    path: str
    job: PreprocessJob
    files: int
    num_bytes: int

    @property
    def prefix(self) -> str:
        return self.job.prefixes[0]

    @property
    def is_done(self) -> bool:
        """All files are there: the side file of the last dataset comes last."""
        return Path(f"{self.job.prefixes[-1]}.json").exists()


def find_texts(config: RunConfig) -> list[Text]:
    """The texts that the data paths name; nothing is written.

    A text's place in the cache depends on its files (path, size, time of change), the tokenizer and all settings of
    the job: what is there is what would be made. Raises ConfigError: a file is missing or cannot be read, or there is
    no tokenizer."""
    paths = [path for path in config.data.texts if not is_address(path) and not _is_dataset(path)]
    tokenizer: Tokenizer | None = None
    texts = []
    for path in paths:
        inputs = find_inputs([path])
        job = _job(config, path)
        tokenizer = tokenizer or require_tokenizer(job)
        stamps = [resume.input_stamp(item) for item in inputs]
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
    """Path -> token file of each text, made where it is missing.

    Several processes may ask for the same: one works, the others wait. A killed one is resumed. `prefixes`: what the
    first node has called them; None there. `say`: for the log. `stopped`: asked after each piece of input.

    Raises ConfigError: as `preprocess`, or no place for the files. Abandoned: `stopped` has said so."""

    def check(progress: Progress) -> None:
        on_progress(progress)
        if stopped():
            raise Abandoned

    found = dict(prefixes or {})
    if prefixes is not None and all(_is_dataset(prefix) for prefix in prefixes.values()):
        return found
    for text in find_texts(config):
        # Files of the same content have other times of change on another disk, but the first node's name goes.
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
    """Tokenize it; None if another process was quicker."""
    folder = Path(text.job.output_prefix).parent
    if (fault := not_writable(folder)) is not None:
        raise ConfigError(
            f"{folder}: {fault[1]}: the token files of {text.path} are kept there; name a folder that can be written "
            "with --data-cache-path"
        )
    waits = False
    while True:
        try:
            return preprocess(text.job, check)
        except resume.FolderInUse:
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
    """In a folder `cache` beside what is named, unless another is given."""
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


def _is_dataset(prefix: str) -> bool:
    return Path(f"{prefix}.idx").exists()


def documents_of(text: Text) -> int | None:
    """Documents in its token file, if that is there."""
    facts = read_side_file(text.prefix) if text.is_done else None
    return None if facts is None else int(facts["documents"])

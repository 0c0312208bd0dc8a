"""`megalite train`, and what pretrain_gpt.py calls."""

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megalite
from megalite.cli.failures import UNDER_TORCHRUN, End, guarded, is_first_rank, refuse
from megalite.cli.output import show, stdout_is_terminal, tell
from megalite.config.data import is_address
from megalite.config.describe import redact_text
from megalite.config.exit_codes import INTERRUPTED
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.training.stopping import RunFolder, StopRequests, StopRun
from megalite.watchdog.processes import started_at

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

_IMPORTED = time.time()  # stands for the start of the process where the system does not say it; torch is imported later

EXIT_FILE = "STOP"  # in the folder of the run, where no other is given


def main(argv: Sequence[str] | None = None, *, program: str = "megalite train") -> int:
    """Train, or show help or a dry run; returns the exit status."""
    with guarded("megalite train", argv, lasting=True) as end:
        invocation = parse_arguments(end.words, world_size=_of_environment("WORLD_SIZE", 1), shape=shape_in)
        if is_first_rank():
            for remark in invocation.remarks:
                tell(remark)
        if invocation.help is not None:
            name = "full_help" if invocation.help == "all" else "basic_help"
            show(imported(f"megalite.config.help:{name}")(program))
        elif invocation.version:
            print(f"megalite {megalite.__version__}")
        elif invocation.dry_run:
            if invocation.config.data.texts:
                imported("megalite.cli.preprocess:report_texts")(invocation.config)
            show(imported("megalite.cli.dry_run:dry_run")(invocation))
        else:
            config, stops = invocation.config, _stop_requests(invocation.config)
            if config.data.texts:  # the workers inherit it: they are the parallelism
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            with _stopped_at_start(config, end), _training(stops, end):
                end.status = _trainer(invocation, stops).fit().exit_code
            # An error that a frame of its traceback still names is a cycle, and keeps every process group alive;
            # gloo aborts the process, and spoils the status, if its threads are joined as late as the interpreter's end.
            gc.collect()
            if end.status == INTERRUPTED and is_first_rank():
                tell("interrupted")
    return end.status or 0


def _trainer(invocation: Invocation, stops: StopRequests) -> "Trainer":
    # Not at the top: help and dry run start in a fraction of the time that importing torch takes.
    from megalite.training.trainer import Trainer

    config, sources = invocation.config, invocation.provenance.items()
    return Trainer(
        config,
        explicit=invocation.explicit,
        fixed=frozenset(name for name, source in sources if source.startswith("flag ")),
        log=RunLog(),
        stops=stops,
        watched=True,
        started=started_at(os.getpid()) or _IMPORTED,
        take_layout=imported("megalite.planner.elastic:take_layout") if config.parallel.elastic else None,
        tokenize=imported("megalite.cli.preprocess:tokenize_text") if config.data.texts else None,
    )


def shape_in(load: str, step: int | None) -> Mapping[str, Any] | None:
    """The model, the sequence length and the tokenizer of what --load names; None where there is nothing."""
    read = partial(imported("megalite.conversion.start:settings_in"), load, step)
    if is_address(load) and _of_environment("WORLD_SIZE", 1) > 1:  # else each of a thousand ranks would ask a store
        read = partial(imported("megalite.topology.topology:of_rank_0"), read)
    found: Mapping[str, Any] | None = read()
    return found


def _stop_requests(config: RunConfig) -> StopRequests:
    training, run_dir = config.training, config.logging.run_dir
    file = training.exit_file or (run_dir and Path(run_dir, EXIT_FILE))
    return StopRequests(
        signals=training.exit_signals,
        minutes=training.exit_duration_in_mins,
        file=None if file is None else Path(file),
        patience=training.exit_timeout_seconds,
        say=lambda line: tell(f"rank {_of_environment('RANK', 0)}: {line}"),
    )


@contextlib.contextmanager
def _stopped_at_start(config: RunConfig, end: End) -> Iterator[None]:
    """Around the others: a stop may come before there is a Trainer, while torch is imported."""
    try:
        yield
    except StopRun as stop:
        if is_first_rank():
            RunFolder(config.logging.run_dir).leave(stop.request.ending(None, "before the start"))
        end.status = stop.request.exit_code


@contextlib.contextmanager
def _training(stops: StopRequests, end: End) -> Iterator[None]:
    """Listen for stops, and end as the exit statuses say; torchrun gets the traceback of an unexpected error."""
    with stops.listen(), _recorded():
        try:
            yield
        except Exception as error:
            if not hasattr(error, "exit_code"):
                _let_the_first_be_seen(error)
                raise
            with contextlib.suppress(StopRun):  # torchrun's SIGTERM, because rank 0 has ended by the same error
                end.status = refuse(error, "megalite train")


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """What torchelastic's `record` does, without its frame."""
    if UNDER_TORCHRUN not in os.environ:
        yield
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except Exception as error:
        handler.record_exception(error)
        raise


def _let_the_first_be_seen(error: Exception) -> None:
    """torchrun takes the earliest error, to the second, for the root cause, and ends all others when it has seen it."""
    from megalite.data_parallel.peers import is_failure_of_other_rank

    if UNDER_TORCHRUN in os.environ and isinstance(error, RuntimeError) and is_failure_of_other_rank(error):
        rank = os.environ.get("RANK", "0")
        tell(f"rank {rank} was not the first to fail: {error}")
        time.sleep(2.0)


def _of_environment(name: str, default: int) -> int:
    """What torchrun says; that it is a number is checked where the ranks meet."""
    word = os.environ.get(name, "")
    return int(word) if word.isdecimal() else default


_COLOURS = {
    r"^\d\d:\d\d:\d\d": "dim",
    r"\bstep +\S+": "cyan",
    r"\b(?:(?:validation|test) )?loss (?=[-\dn])\S+": "bold green",
    r"\bETA \S+": "dim",
    r"\b(?:warning|straggler): .*|\bskipped \d+ of \d+ steps|\bdata wait \S+ ms/step": "yellow",
}


class RunLog:
    """The log on stdout: each line with the time of day, in colour on a terminal. That stdout cannot be written, as on a full disk, ends no run; that its reader has gone does."""

    def __init__(self) -> None:
        self._failed, self._day = 0, ""

    def __call__(self, line: str) -> None:
        try:
            now = time.localtime()
            if self._day != (day := time.strftime("%Y-%m-%d %Z", now)):
                _print(day)
                self._day = day
            _print(f"{time.strftime('%H:%M:%S', now)} {redact_text(line)}")
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._failed:
                tell(f"warning: cannot write the log: {error.strerror}; training continues")
            self._failed += 1
            return
        if self._failed:
            failed, self._failed = self._failed, 0
            self(f"the log is written again; up to {failed} lines before this one are missing")


def _print(line: str) -> None:
    if not stdout_is_terminal():
        print(line, flush=True)
        return
    from rich.console import Console  # which a file needs not
    from rich.text import Text

    text = Text(line)
    for pattern, style in _COLOURS.items():
        text.highlight_regex(pattern, style)
    Console(highlight=False).print(text, soft_wrap=True)

"""`megalite train`, also called by pretrain_gpt.py."""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megalite
from megalite.cli.output import (
    UNDER_TORCHRUN,
    End,
    environment_number,
    guarded,
    is_first_rank,
    is_terminal,
    notify,
    report_error,
    show,
)
from megalite.config.describe import redact_text
from megalite.config.errors import INTERRUPTED
from megalite.config.flags import Invocation, basic_help, full_help, parse_arguments
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.training.stopping import RunFolder, StopRequests, StopRun
from megalite.watchdog.processes import started_at

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

_IMPORT_TIME = time.time()  # replaces the start time of the process if the system does not report it

EXIT_FILE = "STOP"  # default name in the folder of the run


def main(argv: Sequence[str] | None = None, *, program: str = "megalite train") -> int:
    """Train, or show help or a dry run. Return the exit status."""
    with guarded("megalite train", argv, long_running=True) as end:
        world_size = environment_number("WORLD_SIZE", 1)
        invocation = parse_arguments(end.words, world_size=world_size, shape=checkpoint_settings)
        if is_first_rank():
            for remark in invocation.remarks:
                notify(remark)
        if invocation.help is not None:
            show((full_help if invocation.help == "all" else basic_help)(program))
        elif invocation.version:
            print(f"megalite {megalite.__version__}")
        elif invocation.dry_run:
            if invocation.config.data.texts:
                imported("megalite.cli.preprocess:report_texts")(invocation.config)
            show(imported("megalite.cli.dry_run:dry_run")(invocation))
        else:
            config, stops = invocation.config, _stop_requests(invocation.config)
            if config.data.texts:  # the worker processes, which inherit this, are the parallelism
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            with _stopped_at_start(config, end), _training(stops, end):
                end.status = _trainer(invocation, stops).fit().exit_code
            # An error in a reference cycle with its traceback keeps the process groups alive. gloo aborts the process,
            # with another exit status, if its threads are joined only when the interpreter exits.
            gc.collect()
            if end.status == INTERRUPTED and is_first_rank():
                notify("interrupted")
    return end.status or 0


def _trainer(invocation: Invocation, stops: StopRequests) -> "Trainer":
    config, sources = invocation.config, invocation.provenance.items()
    return imported("megalite.training.trainer:Trainer")(
        config,
        explicit=invocation.explicit,
        fixed=frozenset(name for name, source in sources if source.startswith("flag ")),
        log=RunLog(),
        stops=stops,
        watched=True,
        started=started_at(os.getpid()) or _IMPORT_TIME,
        take_layout=imported("megalite.planner.elastic:take_layout") if config.parallel.elastic else None,
        tokenize=imported("megalite.cli.preprocess:tokenize_text") if config.data.texts else None,
    )


def checkpoint_settings(load: str, step: int | None) -> Mapping[str, Any] | None:
    """Return the settings of model, sequence length and tokenizer of a checkpoint; None if `load` has none."""
    return imported("megalite.conversion.model_folder:settings_on_all_ranks")(load, step)


def _stop_requests(config: RunConfig) -> StopRequests:
    training, run_dir = config.training, config.logging.run_dir
    file = training.exit_file or (run_dir and Path(run_dir, EXIT_FILE))
    return StopRequests(
        signals=training.exit_signals,
        minutes=training.exit_duration_in_mins,
        file=None if file is None else Path(file),
        patience=training.exit_timeout_seconds,
        say=lambda line: notify(f"rank {environment_number('RANK', 0)}: {line}"),
    )


@contextlib.contextmanager
def _stopped_at_start(config: RunConfig, end: End) -> Iterator[None]:
    """Handle a stop request that arrives before the Trainer exists, while torch is imported."""
    try:
        yield
    except StopRun as stop:
        if is_first_rank():
            RunFolder(config.logging.run_dir).leave(stop.request.ending(None, "before the start"))
        end.status = stop.request.exit_code


@contextlib.contextmanager
def _training(stops: StopRequests, end: End) -> Iterator[None]:
    """Listen for stop requests, and set the exit status of an error. torchrun records unexpected errors."""
    with stops.listen(), _recorded():
        try:
            yield
        except Exception as error:
            if not hasattr(error, "exit_code"):
                _delay_if_not_first(error)
                raise
            with contextlib.suppress(StopRun):  # torchrun sends SIGTERM when rank 0 has ended with the same error
                end.status = report_error(error, "megalite train")


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """Record errors as torchelastic's `record` does, without its frame in the traceback."""
    if UNDER_TORCHRUN not in os.environ:
        yield
        return
    handler = imported("torch.distributed.elastic.multiprocessing.errors:get_error_handler")()
    handler.initialize()
    try:
        yield
    except Exception as error:
        handler.record_exception(error)
        raise


def _delay_if_not_first(error: Exception) -> None:
    """Wait if another rank failed first: torchrun takes the earliest error, to the second, as root cause."""
    from megalite.topology.lost_peers import is_failure_of_other_rank

    if UNDER_TORCHRUN in os.environ and isinstance(error, RuntimeError) and is_failure_of_other_rank(error):
        notify(f"rank {environment_number('RANK', 0)} was not the first to fail: {error}")
        time.sleep(2.0)


_COLOURS = {
    r"^\d\d:\d\d:\d\d": "dim",
    r"\bstep +\S+": "cyan",
    r"\b(?:(?:validation|test) )?loss (?=[-\dn])\S+": "bold green",
    r"\bETA \S+": "dim",
    r"\b(?:warning|straggler): .*|\bskipped \d+ of \d+ steps|\bdata wait \S+ ms/step": "yellow",
}


class RunLog:
    """The log on stdout: each line with the time of day, in colour on a terminal.

    A run continues if stdout cannot be written, as on a full disk. It ends if the reader of a pipe has closed it."""

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
                notify(f"warning: cannot write the log: {error.strerror}; training continues")
            self._failed += 1
            return
        if self._failed:
            failed, self._failed = self._failed, 0
            self(f"the log is written again; up to {failed} lines before this one are missing")


def _print(line: str) -> None:
    if not is_terminal(sys.stdout):
        print(line, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    text = Text(line)
    for pattern, style in _COLOURS.items():
        text.highlight_regex(pattern, style)
    Console(highlight=False).print(text, soft_wrap=True)

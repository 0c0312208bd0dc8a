"""`megalite train`, and what pretrain_gpt.py calls."""

import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import megalite
from megalite.cli.dry_run import dry_run
from megalite.cli.failures import command, show_traceback
from megalite.cli.output import show
from megalite.config.errors import ConfigError, RankError
from megalite.config.exit_codes import BAD_INPUT, INTERRUPTED
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.help import basic_help, full_help
from megalite.config.secrets import redact_text
from megalite.training.ending import write_ending
from megalite.training.stopping import StopRequests, StopRun

EXIT_FILE = "STOP"
"""In the folder of the run, where no other is given."""

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets."""


@command("megalite train", lasting=True)
def main(argv: Sequence[str], *, program: str = "megalite train") -> int:
    """Train, or show help or a dry run; returns the exit status."""
    try:
        invocation = parse_arguments(list(argv))
        if invocation.help is not None:
            show(basic_help(program) if invocation.help == "basic" else full_help(program))
        elif invocation.version:
            print(f"megalite {megalite.__version__}")
        elif invocation.dry_run:
            show(dry_run(invocation))
        else:
            return _train(invocation)
    except ConfigError as error:
        return _refuse(error, BAD_INPUT)
    except KeyboardInterrupt:
        # torchrun hands Ctrl-C on to every rank; a traceback of each would bury what was printed before.
        if _is_first_rank():
            print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _train(invocation: Invocation) -> int:
    logging, training = invocation.config.logging, invocation.config.training
    run_dir = None if logging.run_dir is None else Path(logging.run_dir)
    file = training.exit_file or (run_dir and run_dir / EXIT_FILE)
    stops = StopRequests(
        signals=training.exit_signals,
        minutes=training.exit_duration_in_mins,
        file=None if file is None else Path(file),
        patience=training.exit_timeout_seconds,
        say=lambda line: print(f"rank {_rank()}: {line}", file=sys.stderr, flush=True),
    )
    try:
        with stops.listen():
            return _run(invocation, stops)
    except StopRun as stop:  # while torch was being imported
        if _is_first_rank():
            write_ending(run_dir, stop.request.ending(None, "before the start"))
        return stop.request.exit_code


def _run(invocation: Invocation, stops: StopRequests) -> int:
    # Not at the top: help and dry run start in a fraction of the time that importing torch takes.
    from torch.distributed.elastic.multiprocessing.errors import record

    from megalite.data_parallel.lost_peers import others_failed_first
    from megalite.training.loop import train
    from megalite.training.non_finite import NonFiniteError

    def run() -> int:
        try:
            status = train(
                invocation.config,
                explicit=invocation.explicit,
                fixed=_flags(invocation),
                log=_log,
                stops=stops,
                watched=True,
            ).exit_code
        except (ConfigError, NonFiniteError) as error:
            status = _refuse(error, error.exit_code)
        except RuntimeError as error:
            if others_failed_first(error):
                _let_the_first_be_seen(error)
            raise
        # An error that a frame of its own traceback still names is a cycle, and keeps every process group alive; gloo
        # aborts the process, and spoils the status, if its threads are joined as late as the interpreter's end.
        gc.collect()
        if status == INTERRUPTED and _is_first_rank():
            print("interrupted", file=sys.stderr, flush=True)
        return status

    # torchrun then has the traceback of an unexpected error for its summary.
    status = record(run)() if _UNDER_TORCHRUN in os.environ else run()
    assert status is not None
    return status


def _flags(invocation: Invocation) -> frozenset[str]:
    """Settings of the command line itself, not of files and presets."""
    return frozenset(name for name, source in invocation.provenance.items() if source.startswith("flag "))


def _refuse(error: Exception, status: int) -> int:
    _report(f"error: {error}", alone=isinstance(error, RankError))
    show_traceback(error)
    return status


def _log(line: str) -> None:
    print(redact_text(line), flush=True)


def _report(message: str, *, alone: bool = False) -> None:
    """Print an error that all ranks share, once; or one that this rank found alone."""
    if alone or _is_first_rank():
        print(redact_text(message), file=sys.stderr, flush=True)
    elif _UNDER_TORCHRUN in os.environ:
        # torchrun ends all ranks as soon as one has failed: let rank 0 be the first, as soon as it has printed.
        time.sleep(5.0)


def _let_the_first_be_seen(error: Exception) -> None:
    """torchrun takes the earliest error, to the second, for the root cause, and ends all others when it has seen it."""
    if _UNDER_TORCHRUN in os.environ:
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank} was not the first to fail: {error}", file=sys.stderr, flush=True)
        time.sleep(2.0)


def _is_first_rank() -> bool:
    return _rank() == 0


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))

"""`megalite train`, and what pretrain_gpt.py calls."""

import gc
import os
import sys
import time
from collections.abc import Sequence

import megalite
from megalite.cli.dry_run import dry_run
from megalite.cli.failures import command, show_traceback
from megalite.cli.output import show
from megalite.config.errors import ConfigError, RankError
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.help import basic_help, full_help

BAD_INPUT = 2
"""Exit status of a run that was refused."""

NON_FINITE = 3
"""Exit status of a run that was stopped because its loss or gradient was NaN or infinite."""

NOT_SAVED = 4
"""Exit status of a run that was stopped because a checkpoint could not be written."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

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
    # Not at the top: help and dry run start in a fraction of the time that importing torch takes.
    from torch.distributed.elastic.multiprocessing.errors import record

    from megalite.training.loop import train
    from megalite.training.saving import SaveError
    from megalite.training.step import NonFiniteError

    def run() -> int:
        status = 0
        try:
            train(invocation.config, explicit=invocation.explicit, log=_log)
        except SaveError as error:
            status = _refuse(error, NOT_SAVED)
        except ConfigError as error:
            status = _refuse(error, BAD_INPUT)
        except NonFiniteError as error:
            status = _refuse(error, NON_FINITE)
        # An error that a frame of its own traceback still names is a cycle, and keeps every process group alive; gloo
        # aborts the process, and spoils the status, if its threads are joined as late as the interpreter's end.
        gc.collect()
        return status

    # torchrun then has the traceback of an unexpected error for its summary.
    status = record(run)() if _UNDER_TORCHRUN in os.environ else run()
    assert status is not None
    return status


def _refuse(error: Exception, status: int) -> int:
    _report(f"error: {error}", alone=isinstance(error, RankError))
    show_traceback(error)
    return status


def _log(line: str) -> None:
    print(line, flush=True)


def _report(message: str, *, alone: bool = False) -> None:
    """Print an error that all ranks share, once; or one that this rank found alone."""
    if alone or _is_first_rank():
        print(message, file=sys.stderr, flush=True)
    elif _UNDER_TORCHRUN in os.environ:
        # torchrun ends all ranks as soon as one has failed: let rank 0 be the first, as soon as it has printed.
        time.sleep(5.0)


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0

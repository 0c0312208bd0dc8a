"""`megalite train`, and what pretrain_gpt.py calls."""

import os
import sys
import time
from collections.abc import Sequence

import megalite
from megalite.cli.dry_run import dry_run
from megalite.config.errors import ConfigError
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.help import basic_help, full_help

BAD_INPUT = 2
"""Exit status of a run that was refused."""

NON_FINITE = 3
"""Exit status of a run that was stopped because its loss or gradient was NaN or infinite."""


def main(argv: Sequence[str] | None = None, *, program: str = "megalite train") -> int:
    """Train, or show help or a dry run; returns the exit status."""
    try:
        invocation = parse_arguments(list(sys.argv[1:] if argv is None else argv))
        if invocation.help is not None:
            print(basic_help(program) if invocation.help == "basic" else full_help(program))
        elif invocation.version:
            print(f"megalite {megalite.__version__}")
        elif invocation.dry_run:
            print(dry_run(invocation))
        else:
            return _train(invocation)
    except ConfigError as error:
        _report(f"error: {error}")
        return BAD_INPUT
    return 0


def _train(invocation: Invocation) -> int:
    # Not at the top: help and dry run start in a fraction of the time that importing torch takes.
    from megalite.training.loop import train
    from megalite.training.step import NonFiniteError

    try:
        train(invocation.config, explicit=invocation.explicit, log=_log)
    except NonFiniteError as error:
        _report(f"error: {error}")
        return NON_FINITE
    return 0


def _log(line: str) -> None:
    print(line, flush=True)


def _report(message: str) -> None:
    """Print an error that all ranks share, once."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(message, file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends all ranks as soon as one has failed: let rank 0 print first.
        time.sleep(1.0)

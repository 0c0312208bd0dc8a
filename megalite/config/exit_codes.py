"""Exit statuses of a training run and their meanings: the one list for code, documentation and scripts."""

from collections.abc import Mapping
from types import MappingProxyType

DONE = 0
FAILED = 1
BAD_INPUT = 2
NON_FINITE = 3
NOT_SAVED = 4
NO_PROGRESS = 5
HUNG = 44
"""Also the signal number (SIGRTMIN + 10 on Linux) that ends a hanging rank with this status."""
REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
INTERRUPTED = 130
"""As shells define it."""

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        DONE: "the run has reached its end, its `--exit-interval` or its exit file",
        FAILED: "an unexpected error, with a traceback: a bug, a lost peer, replicas that differ",
        BAD_INPUT: "bad input: one line `error: ...`",
        NON_FINITE: "loss, gradient or weights are NaN or infinite; the newest checkpoint is sound",
        NOT_SAVED: "a checkpoint, or the last folder of `--export-hf`, could not be written; earlier checkpoints are intact",
        NO_PROGRESS: "the same step has failed repeatedly: another start would fail too",
        HUNG: "no rank progressed for `--hang-timeout-minutes`: the watchdog reported the hanging rank and ended the run",
        REQUEUE: "stopped by a signal or a time limit, and saved: start the same command again",
        INTERRUPTED: "stopped by Ctrl-C; saved, unless it was pressed twice",
    }
)
"""Status -> the condition for it."""

"""Exit statuses of a training run, each with what it means: the one list that code, documentation and scripts go by."""

from collections.abc import Mapping
from types import MappingProxyType

DONE = 0
FAILED = 1
BAD_INPUT = 2
NON_FINITE = 3
NOT_SAVED = 4
NO_PROGRESS = 5
HUNG = 44
"""Also the signal (SIGRTMIN + 10 of Linux) at which a rank leaves with it, whatever it is doing."""
REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
INTERRUPTED = 130
"""As shells have it."""

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        DONE: "the run has come to its end, or to the `--exit-interval` or the exit file that it was given",
        FAILED: "an unexpected error, with a traceback: a bug, a lost peer, replicas that differ",
        BAD_INPUT: "bad input: one line `error: ...`",
        NON_FINITE: "loss, gradient or weights are NaN or infinite; the newest checkpoint is sound",
        NOT_SAVED: "a checkpoint, or the last folder of `--export-hf`, could not be written; earlier checkpoints are as they were",
        NO_PROGRESS: "the same step has failed again and again: starting once more would change nothing",
        HUNG: "no rank progressed for `--hang-timeout-minutes`: ended from outside, with a report of who stood still",
        REQUEUE: "stopped by a signal or a time limit, and saved: start the same command again",
        INTERRUPTED: "stopped by Ctrl-C; after one, saved",
    }
)
"""Status -> when a run ends with it."""

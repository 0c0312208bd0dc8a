"""The real command with small pieces of input and its state saved after each, so that a kill leaves more work done.

With `--file-limit BYTES` in front, files cannot grow beyond that size, as on a full disk."""

import resource
import sys
from collections.abc import Callable
from dataclasses import replace

from megalite.cli import preprocess as command
from megalite.cli.model_commands import PREPROCESS
from megalite.preprocess import run
from megalite.preprocess.job import PreprocessJob, Progress


def preprocess(job: PreprocessJob, on_progress: Callable[[Progress], None]) -> Progress:
    return run.preprocess(replace(job, piece_bytes=2000, checkpoint_seconds=0.0), on_progress)


def main(words: list[str]) -> int:
    if words[0] == "--file-limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(words[1]), resource.RLIM_INFINITY))
        words = words[2:]
    command.preprocess = preprocess
    return PREPROCESS(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

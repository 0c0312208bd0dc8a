"""Runs commands of the documentation in the current folder, as a reader of the page would."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from megalite.cli import train
from megalite.cli.main import main
from tests.e2e.commands import Command
from tests.e2e.forked import train_forked
from tests.e2e.programs import REPOSITORY
from tests.support.ranks import forked_pools

LINKED = ("examples", "tools", "pretrain_gpt.py")
"""What commands name by its path in the clone."""


def link_clone(folder: Path) -> None:
    """Make a folder look like the root of the clone to those who read it; what they write lands in the folder."""
    for name in LINKED:
        (folder / name).symlink_to(REPOSITORY / name)


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


def execute(command: Command) -> Said:
    """Run a command here: `megalite` in this process, scripts in their own, the ranks of torchrun as forks.

    (Launching is for the tests in tests/e2e: `test_kill`, `test_bad_input`.)

    Raises:
        AssertionError: no one has said how to run a program of this name.
    """
    program, *words = command.words
    if program == "export":
        return Said(0, "", "")
    if program == "megalite":
        with forked_pools():  # of `megalite parity`
            return in_process(main, words)
    if program == "torchrun":
        ranks, flags = training_of(command)
        outcome = train_forked(ranks, *flags, seconds=240, folder=Path.cwd())
        return Said(outcome.status, outcome.out, outcome.err)
    assert program in ("python", "python3"), f"{command}: how is {program} to be run?"
    return _start(sys.executable, *words)


def in_process(run: object, words: list[str]) -> Said:
    """The status of `run(words)` with what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert callable(run)
        status = run(words)
    return Said(status or 0, out.getvalue(), err.getvalue())


def rehearse(command: Command) -> Said:
    """A command that trains, as a dry run on the ranks that it would start; made-up data on few ranks is trained on."""
    ranks, flags = training_of(command)
    if "--mock-data" in flags and ranks <= 2 and "--dry-run" not in flags:
        outcome = train_forked(ranks, *flags)
        return Said(outcome.status, outcome.out, outcome.err)
    world = [] if "--dry-run" in flags else ["--dry-run", "--world-size", str(ranks)]
    return in_process(train.main, [*flags, *world])


def training_of(command: Command) -> tuple[int, list[str]]:
    """Ranks and flags of a command that trains; 0 ranks for every other command."""
    program, *words = command.words
    if program == "megalite" and words[0] == "train":
        return 1, words[1:]
    if program != "torchrun":
        return 0, []
    launch = get_args_parser().parse_args(words)
    if launch.training_script != "pretrain_gpt.py":
        return 0, []
    hosts = int(launch.nnodes.split(":")[-1])
    return hosts * int(launch.nproc_per_node), launch.training_script_args


def _start(*words: str) -> Said:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = [str(REPOSITORY), *filter(None, [inherited.get("PYTHONPATH")])]
    done = subprocess.run(
        words,
        env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)

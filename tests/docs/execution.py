"""Run commands of the documentation in the current folder, as a reader of the page would."""

import contextlib
import io
import runpy
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
"""Paths that commands name relative to the clone."""


def link_clone(folder: Path) -> None:
    """Link the clone's files into a folder; files that commands write stay in the folder."""
    for name in LINKED:
        (folder / name).symlink_to(REPOSITORY / name)


@dataclass(frozen=True)
class Said:
    """Output and exit status of a command."""

    status: int
    out: str
    err: str


def execute(command: Command) -> Said:
    """Run a command here: `megalite` and scripts in this process, ranks of torchrun as forks.

    (Programs are started by tests in tests/e2e: `test_kill`, `test_bad_input`, `test_examples`.)

    Raises:
        AssertionError: the program is not known here."""
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
    assert program in ("python", "python3"), f"{command}: cannot run {program}"
    return in_process(run_script, words)


def in_process(run: object, words: list[str]) -> Said:
    """Call `run(words)`. Returns its status and output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert callable(run)
        status = run(words)
    return Said(status or 0, out.getvalue(), err.getvalue())


def rehearse(command: Command) -> Said:
    """Dry-run a training command on the ranks that it would start; train on mock data if there are few ranks (except
    profiles: tests/e2e/test_visibility.py)."""
    ranks, flags = training_of(command)
    if "--mock-data" in flags and ranks <= 2 and not {"--dry-run", "--profile"} & set(flags):
        outcome = train_forked(ranks, *flags)
        return Said(outcome.status, outcome.out, outcome.err)
    world = [] if "--dry-run" in flags else ["--dry-run", "--world-size", str(ranks)]
    return in_process(train.main, [*flags, *world])


def training_of(command: Command) -> tuple[int, list[str]]:
    """Ranks and flags of a training command; 0 ranks for other commands."""
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


def run_script(words: list[str]) -> int:
    """Run a Python file as a program. Returns its exit status."""
    given, sys.argv = sys.argv, words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = given
    return 0

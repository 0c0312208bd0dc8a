"""Faults put into megalite on purpose, and for each the test that must fail with it.

`catalogue.txt` has what each part of training could get wrong without a crash, a paragraph each: its name and what it breaks,
the file, the text there (-) and what stands in its place (+), the test that sees it. If a fault's text has changed, write the
same fault into the new text; do not remove it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 240
"""Seconds after which a test fails, in a mutant that makes it hang."""


class MutantError(Exception):
    """A mutant that cannot be judged."""


@dataclass(frozen=True)
class Mutant:
    """Args:
    name: of the fault.
    file: below the root.
    old, new: the text that it replaces, which must be in the file exactly once, and what with.
    test: the pytest id that must fail.
    breaks: what goes wrong, in a line.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    breaks: str

    def applied(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            MutantError: the text to replace is not there exactly once.
        """
        found = text.count(self.old)
        if found != 1:
            raise MutantError(f"mutant {self.name}: its old text is {found} times in {self.file}, must be once")
        return text.replace(self.old, self.new)


def _texts(lines: Sequence[str], sign: str) -> str:
    """Those with this sign; a last one that is empty stands for the end of the line before it."""
    return "\n".join(line[2:] for line in lines if line.startswith(sign))


def _mutants(text: str) -> Iterator[Mutant]:
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("#"):
            first, file, *changed, test = paragraph.strip().splitlines()
            name, _, breaks = first.partition(": ")
            yield Mutant(name, file, _texts(changed, "-"), _texts(changed, "+"), test, breaks)


MUTANTS = tuple(_mutants(Path(__file__).with_name("catalogue.txt").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    killed: bool
    seconds: float
    output: str


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A folder in which the package and the tests are copies, and the rest links to what is in `root`."""
    with tempfile.TemporaryDirectory(prefix="megalite-mutant-") as folder:
        for entry in root.iterdir():
            if entry.name in ("megalite", "tests"):
                shutil.copytree(entry, Path(folder) / entry.name)  # with the byte code, which is by file time
            elif not entry.name.startswith("."):
                (Path(folder) / entry.name).symlink_to(entry)
        yield Path(folder)


def run_tests(root: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest in a copy, stopping at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--timeout={LONGEST}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=2 * LONGEST + 600
    )


def judge(mutant: Mutant, root: Path = ROOT) -> Verdict:
    """Put the fault into a copy and run the test there.

    Raises:
        MutantError: the fault cannot be put in, or the test does not get as far as failing.
    """
    started = time.monotonic()
    with copy_of(root) as copy:
        path = copy / mutant.file
        path.write_text(mutant.applied(path.read_text()))
        done = run_tests(copy, [mutant.test])
    output = done.stdout + done.stderr
    failed = done.returncode == 1 and "FAILED " in done.stdout
    if not failed and done.returncode != 0:
        raise MutantError(f"mutant {mutant.name}: pytest ended with {done.returncode}\n{output[-3000:]}")
    return Verdict(failed, time.monotonic() - started, output)

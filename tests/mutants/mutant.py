"""Deliberate faults in megalite, each with the test that must detect it.

`catalogue.txt` lists what training could get wrong without a crash, one paragraph per fault: its name and effect, the file, the
original text (-) and its replacement (+), the test that detects it. If the original text changes, put the same fault into the
new text; do not remove it."""

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
"""Seconds after which a test that hangs because of a mutant fails."""


class MutantError(Exception):
    """A mutant that cannot be tested."""


@dataclass(frozen=True)
class Mutant:
    """Args:
    file: relative to the root.
    old, new: text to replace, which must occur exactly once in the file, and its replacement.
    test: the pytest id that must fail.
    breaks: the effect, in one line."""

    name: str
    file: str
    old: str
    new: str
    test: str
    breaks: str

    def applied(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            MutantError: the text to replace does not occur exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise MutantError(f"mutant {self.name}: its old text is {found} times in {self.file}, must be once")
        return text.replace(self.old, self.new)


def _texts(lines: Sequence[str], sign: str) -> str:
    """Lines with this sign; a last empty one is the line end before it."""
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
    """Result of a mutant."""

    killed: bool
    seconds: float
    output: str


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A folder with copies of the package and the tests, and links to everything else in `root`."""
    with tempfile.TemporaryDirectory(prefix="megalite-mutant-") as folder:
        for entry in root.iterdir():
            if entry.name in ("megalite", "tests"):
                shutil.copytree(
                    entry, Path(folder) / entry.name
                )  # including byte code, which depends on modification times
            elif not entry.name.startswith("."):
                (Path(folder) / entry.name).symlink_to(entry)
        yield Path(folder)


def run_tests(root: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest in a copy, until the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--timeout={LONGEST}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=2 * LONGEST + 600
    )


def judge(mutant: Mutant, root: Path = ROOT) -> Verdict:
    """Insert the fault into a copy and run the test there.

    Raises:
        MutantError: the fault cannot be inserted, or the test fails for another reason."""
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

"""Load and inspect the malicious checkpoints, and report forbidden actions.

Prints a JSON line per checkpoint: its name and the problems. All are handled by one process with limited address space;
Python reports each opened file, import and execution to an audit hook."""

import contextlib
import importlib
import io
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from megalite.cli.model_commands import INSPECT as inspect_main
from megalite.config.errors import CheckpointError
from tests.checkpoint.evil_contents import HEADERS, MANIFESTS
from tests.checkpoint.evil_files import FILES
from tests.checkpoint.evil_target import Evil, Outcome, Target
from tests.checkpoint.samples import assert_holds, find

CORPUS: dict[str, tuple[Outcome, Evil]] = {**FILES, **MANIFESTS, **HEADERS}
WATCH = "the watch sees"
"""Name of the line that lists what the audit hook and the memory limit do not detect."""

ROOM = 3 << 30
"""Bytes of address space beyond the imports: enough for threads' stacks and arenas, but not for a terabyte."""

LONGEST = 3000
"""Characters of a message."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = re.compile(
    r"exec|compile|import|pickle\.|marshal\.|ctypes\.|socket\.|subprocess\.|shutil\.|code\.__new__"
    r"|os\.(system|exec|posix_spawn|spawn|fork|startfile|remove|rename|rmdir|mkdir|link|symlink|truncate|chmod|chown"
    r"|chflags|utime|setxattr|removexattr|putenv|unsetenv|kill)"
)


class Watch:
    """An audit hook that records forbidden events while it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & WRITING:
                self.seen.append(f"opened for writing: {arguments[0]!r}")
        elif FORBIDDEN.match(event):
            self.seen.append(f"{event} {str(arguments)[:200]}")


@contextlib.contextmanager
def armed(watch: Watch) -> Iterator[list[str]]:
    """Watch with limited memory; yields the list of recorded events."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    watch.seen = []
    watch.armed = True
    try:
        yield watch.seen
    finally:
        watch.armed = False
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def listing(root: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, size and modification time of every path below `root`, without following links."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def attempt(problems: list[str], what: str, action: Callable[[], Any]) -> Any:
    """Run the action. Returns its result or its CheckpointError; any other exception is a problem."""
    try:
        return action()
    except CheckpointError as error:
        message = str(error)
        if len(message) > LONGEST:
            problems.append(f"{what}: a message of {len(message)} characters: {message[:200]}...")
        if not message.isprintable():
            problems.append(f"{what}: a message that is not printable: {message[:300]!r}")
        return error
    except Exception:
        problems.append(f"{what}: {traceback.format_exc(limit=-4)}")
        return None


def check_loading(target: Target, expected: Outcome, problems: list[str]) -> None:
    lines: list[str] = []
    asked = attempt(problems, "step 2", lambda: find(target.run, step=2, log=lines.append))
    found = attempt(problems, "newest", lambda: find(target.run, log=lines.append))
    if isinstance(asked, CheckpointError) != (expected is Outcome.DAMAGED):
        problems.append(f"step 2: {asked}")
    step = 1 if expected is Outcome.DAMAGED else 2
    if getattr(getattr(found, "manifest", None), "step", None) != step:
        problems.append(f"newest: {found} instead of step {step}")
        return
    if len(lines) != (expected in (Outcome.DAMAGED, Outcome.PASSED_OVER)):
        problems.append(f"lines: {lines}")
    for line in lines:
        if not (line.isprintable() and len(line) < LONGEST and re.search(r"\.(json|safetensors): ", line)):
            problems.append(f"a line that is too long, not printable or names no file: {line[:300]!r}")
    holds = attempt(problems, "reading", lambda: assert_holds(found, seed=step))
    if isinstance(holds, CheckpointError) != (expected is Outcome.UNREADABLE):
        problems.append(f"reading: {holds}")


def check_inspecting(target: Target, expected: Outcome, problems: list[str]) -> None:
    """Run `megalite inspect` with several options and check the exit statuses."""
    run, older, newest = str(target.run), str(target.run / "step-0000001"), str(target.newest)
    bad = expected is not Outcome.HARMLESS
    of_newest = expected in (Outcome.DAMAGED, Outcome.UNREADABLE)
    wanted: list[tuple[list[str], set[int]]] = [
        ([run, "--tensors", "*"], {int(bad)}),
        ([run, "--no-verify"], {0, int(bad)}),
        ([newest], {int(of_newest)}),
        ([run, "--config", "--step", "2"], {0, 2} if of_newest else {0}),
        (["--diff", older, newest], {2 if of_newest else 1}),
    ]
    for arguments, statuses in wanted:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = attempt(problems, f"inspect {arguments}", lambda: inspect_main(arguments))  # noqa: B023
        said = out.getvalue() + err.getvalue()
        if status not in statuses:
            problems.append(f"inspect {arguments} returns {status} instead of {statuses}: {said[-500:]}")
        if not said.replace("\n", "").isprintable():
            problems.append(f"inspect {arguments} writes on the screen: {said[:500]!r}")


def check(name: str, target: Target, watch: Watch) -> list[str]:
    """Apply one of the malicious changes, load and inspect. Returns the problems."""
    expected, evil = CORPUS[name]
    evil(target)
    before = listing(target.root)
    problems: list[str] = []
    with armed(watch) as seen:
        check_loading(target, expected, problems)
        check_inspecting(target, expected, problems)
    problems += seen
    if target.canary.exists():
        problems.append("code of the corpus was run")
    if listing(target.root) != before:
        problems.append("files were changed")
    return problems


def unseen(watch: Watch, target: Target) -> list[str]:
    """Return the forbidden actions that the watch does not detect."""
    (target.root / "fresh_module_of_evil.py").write_text("x = 1")
    sys.path.insert(0, str(target.root))
    deeds: dict[str, Callable[[], Any]] = {
        "unpickling": lambda: pickle.loads(target.payload()),
        "writing": lambda: (target.root / "written").write_text("x"),
        "removing": lambda: (target.root / "written").unlink(),
        "executing": lambda: exec("1"),
        "importing": lambda: importlib.import_module("fresh_module_of_evil"),
        "starting": lambda: subprocess.run(["true"], check=True),
    }
    passed = []
    for name, deed in deeds.items():
        with armed(watch) as seen:
            deed()
        passed += [] if seen else [name]
    with armed(watch):
        try:
            bytearray(1 << 40)
            passed.append("a terabyte")
        except MemoryError:
            pass
    return passed + ([] if target.canary.exists() else ["the bomb is a dud"])


def main(words: list[str]) -> int:
    """Run in the given folder."""
    root = Path(words[0])
    Target.prepare(root / "pristine")
    watch = Watch()
    # Import now whatever is imported lazily.
    warm = Target.make(root / "warm", root / "pristine")
    check_loading(warm, Outcome.HARMLESS, [])
    check_inspecting(warm, Outcome.HARMLESS, [])
    cell_len("\uff21")  # rich's table of wide characters
    print(json.dumps({"name": WATCH, "problems": unseen(watch, warm)}), flush=True)
    for number, name in enumerate(CORPUS):
        target = Target.make(root / str(number), root / "pristine")
        print(json.dumps({"name": name, "problems": check(name, target, watch)}), flush=True)
    return 0

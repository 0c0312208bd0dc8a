"""A program that saves a checkpoint and is killed with SIGKILL at every system call that changes the disk, in turn.

    python -m tests.checkpoint.crash_writer FOLDER SCENARIO

To be run with OMP_NUM_THREADS=1: a torch that has started a pool of threads, or been told how many to use, does not
survive the fork. It imports torch once and forks a process for each point; of a new save two threads are the ranks, of
one that replaces another one. After each kill it checks FOLDER: every visible checkpoint must verify, and a new save
must succeed and leave nothing behind.
Prints a JSON object: the points hit by kind of call, and the failures.
"""

import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalite.checkpoint.folders import candidates
from tests.checkpoint.samples import SOLO, assert_holds, find, on_threads, save_as

CALLS = ["open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"]


class Trap:
    """Kills this process before the n-th call, or half-way through the n-th write; notes which call it was."""

    def __init__(self, kill_at: int, half: bool, note: int) -> None:
        self.kill_at, self.half, self.note = kill_at, half, note
        self.count = 0
        self.lock = threading.Lock()

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if (self.half and name != "write") or (name == "open" and not args[1] & os.O_CREAT):
                return real(*args, **kwargs)
            with self.lock:  # a rank that comes while the other one is being killed waits here for ever
                self.count += 1
                if self.count == self.kill_at:
                    if self.half:
                        real(args[0], args[1][: max(1, len(args[1]) // 2)])
                    os.pwrite(self.note, name.encode(), 0)
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call


def killed_save(folder: Path, ranks: int, kill_at: int, half: bool) -> str | None:
    """Save step 2 in a child that dies at its `kill_at`-th call; that call's name, or None if it got to the end."""
    note = os.memfd_create("note")
    child = os.fork()
    if child == 0:
        trap = Trap(kill_at, half, note)
        for name in CALLS:
            setattr(os, name, trap.around(name, getattr(os, name)))
        results = on_threads(ranks, lambda group: save_as(folder, group, step=2, seed=3))
        for result in results:
            if not isinstance(result, Path):
                print(f"a rank failed: {result!r}", file=sys.stderr, flush=True)
        os._exit(0 if all(isinstance(result, Path) for result in results) else 1)
    _, status = os.waitpid(child, 0)
    name = os.pread(note, 20, 0).decode()
    os.close(note)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return name
    assert status == 0, status
    return None


def check(folder: Path, had_step_2: bool) -> None:
    """Every visible checkpoint verifies and holds what it should, and the next save works."""
    names = {path.name for path in folder.iterdir() if path.name.startswith("step-")}
    assert {candidate.name for candidate in candidates(folder)} == names
    for name in names:
        alone = folder.parent / "alone"
        alone.mkdir()
        (alone / name).symlink_to(folder / name)
        find(alone, log=_refuse)
        shutil.rmtree(alone)
    newest = find(folder, log=_refuse)
    if had_step_2:
        assert newest.manifest.step == 2
    if newest.manifest.step == 2:
        try:
            assert_holds(newest, seed=3)
        except AssertionError:
            assert had_step_2
            assert_holds(newest, seed=2)
    else:
        assert_holds(newest, seed=1)
    assert (folder / "latest").read_text() in ("step-0000001\n", "step-0000002\n")
    save_as(folder, SOLO, step=3, seed=3)
    assert_holds(find(folder, log=_refuse), seed=3)
    left = {path.name for path in folder.iterdir()}
    assert left <= {"latest", "step-0000001", "step-0000002", "step-0000003"}, left
    assert newest.manifest.step == 1 or "step-0000002" in left


def _refuse(line: str) -> None:
    raise AssertionError(line)


def main(root: Path, scenario: str) -> None:
    before = root / "before"
    save_as(before, SOLO, step=1, seed=1)
    if scenario == "replace":
        # As an earlier crash may have left it: step 2 moved aside, a save begun.
        save_as(before, SOLO, step=2, seed=2).rename(before / "step-0000002.replaced")
        (before / ".tmp-step-7").mkdir()
        (before / ".tmp-step-7" / "weights-00000.safetensors").write_bytes(b"half")
    hit: Counter[str] = Counter()
    failures = []
    for half in (False, True):
        kill_at = 0
        while True:
            kill_at += 1
            folder = root / "run"
            shutil.copytree(before, folder)
            name = killed_save(folder, 1 if scenario == "replace" else 2, kill_at, half)
            if name is not None:
                hit[f"inside {name}" if half else name] += 1
                try:
                    check(folder, scenario == "replace")
                except Exception:
                    failures.append(f"{kill_at} {name} half={half}: {traceback.format_exc()}")
            shutil.rmtree(folder)
            shutil.rmtree(root / "alone", ignore_errors=True)
            if name is None:
                break
    print(json.dumps({"hit": hit, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Save a checkpoint repeatedly and kill the process with SIGKILL at each system call that changes the disk.

A process that has started torch's thread pool cannot be forked again, so this one is a fork of the fork server; it forks a child
for each point. A new save has two threads as ranks; a save that replaces another has one. After each kill every visible
checkpoint must verify, and a new save must succeed and remove leftovers."""

import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path

from megalite.checkpoint.folders import candidates
from tests.checkpoint.samples import SOLO, assert_holds, find, on_threads, save_as
from tests.faults.trap import REMOVAL, Point, Trap

CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", REMOVAL, "rmdir", "mkdir")


def is_killed(folder: Path, ranks: int, point: Point) -> bool:
    """Save step 2 in a child that is killed at the given point. Returns False if the save was completed."""
    child = os.fork()
    if child == 0:
        Trap(
            folder.parent, point, os.memfd_create("note")
        ).set()  # in the parent, since the folder itself is synced too
        results = on_threads(ranks, lambda group: save_as(folder, group, step=2, seed=3))
        for result in results:
            if not isinstance(result, Path):
                print(f"a rank failed: {result!r}", file=sys.stderr, flush=True)
        os._exit(0 if all(isinstance(result, Path) for result in results) else 1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert status == 0, status
    return False


def check(folder: Path, had_step_2: bool) -> None:
    """Check that every visible checkpoint verifies and has the right contents, and that the next save works."""
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


def main(words: list[str]) -> int:
    """Run a scenario in a folder. Prints the points hit per kind of call, and the failures, as JSON."""
    root, scenario = Path(words[0]), words[1]
    before = root / "before"
    save_as(before, SOLO, step=1, seed=1)
    if scenario == "replace":
        # A state that an earlier crash may leave: step 2 moved aside, and a started save.
        save_as(before, SOLO, step=2, seed=2).rename(before / "step-0000002.replaced")
        (before / ".tmp-step-7").mkdir()
        (before / ".tmp-step-7" / "weights-00000.safetensors").write_bytes(b"half")
    hit: Counter[str] = Counter()
    failures = []
    for where, call in (*(("before", call) for call in CALLS), ("inside", "write")):
        for count in itertools.count(1):
            folder, point = root / "run", Point(call, where, count)
            shutil.copytree(before, folder)
            killed = is_killed(folder, 1 if scenario == "replace" else 2, point)
            if killed:
                hit[f"inside {call}" if where == "inside" else call] += 1
                try:
                    check(folder, scenario == "replace")
                except Exception:
                    failures.append(f"{point}: {traceback.format_exc()}")
            shutil.rmtree(folder)
            shutil.rmtree(root / "alone", ignore_errors=True)
            if not killed:
                break
    print(json.dumps({"hit": hit, "failures": failures}))
    return 0

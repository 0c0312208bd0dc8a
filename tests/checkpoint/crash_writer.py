"""A process that saves a checkpoint and is killed with SIGKILL at every system call that changes the disk, in turn.

It is a fork of the fork server, since a torch that has started a pool of threads does not survive another fork, and forks for
each point; of a new save two threads are the ranks, of one that replaces another one. After each kill every visible
checkpoint must verify, and a new save must succeed and leave nothing behind.
"""

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
    """Save step 2 in a child that dies at that point; False if it got to the end."""
    child = os.fork()
    if child == 0:
        Trap(folder.parent, point, os.memfd_create("note")).set()  # the folder itself is synced too
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


def main(words: list[str]) -> int:
    """In a folder, a scenario; prints as JSON the points hit by kind of call, and the failures."""
    root, scenario = Path(words[0]), words[1]
    before = root / "before"
    save_as(before, SOLO, step=1, seed=1)
    if scenario == "replace":
        # As an earlier crash may have left it: step 2 moved aside, a save begun.
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

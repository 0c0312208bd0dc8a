"""Run a job repeatedly and kill it before its first, second, ... call that changes the disk, then once more without a kill.

A killed process loses what it wrote and did not sync. The job must then continue to the same bytes as an undisturbed run
(without --restart if anything was kept), and at any time an .idx or .json must be in the folder of the .bin that it describes.
Prints its results as JSON.

A separate program, because it forks, which is only safe without threads."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megalite.preprocess.output import State
from megalite.preprocess.run import preprocess
from tests.preprocess.jobs import SUFFIXES, number_job, output_bytes, write_numbers

CALLS = ("fsync", "replace", "rename", "unlink", "ftruncate", "truncate", "write", "mkdir", "rmdir")
KILLED = 77


def run_job(folder: Path) -> None:
    """Run the job as a user would: with --restart only if there is nothing to resume, which replaces earlier output."""
    restart = State.read(folder / "work" / "out.unfinished" / "state.json") is None
    preprocess(number_job(folder / "work", folder / "a.jsonl", piece_bytes=150, restart=restart))


def fork(work: Callable[..., None], *arguments: Any) -> int:
    """Run the function in a child. Returns its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(*arguments)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_until(folder: Path, point: int) -> None:
    """Run the job and end the process before call number `point`; files in work lose unsynced data."""
    synced: dict[int, int] = {}
    seen = [0]

    def patched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if seen[0] == point:
                for path in (folder / "work").rglob("*"):
                    if path.suffix in (".bin", ".lengths", ".idx") or "state.json" in path.name:
                        keep = synced.get(path.stat().st_ino, 0)
                        originals["truncate"](path, min(keep, path.stat().st_size))
                os._exit(KILLED)
            seen[0] += 1
            result = original(*arguments, **named)
            if name == "fsync":
                status = os.fstat(arguments[0])
                synced[status.st_ino] = status.st_size
            return result

        return call

    originals = {name: getattr(os, name) for name in CALLS}
    for path in (folder / "work").rglob("*"):
        synced[path.stat().st_ino] = path.stat().st_size  # leftovers of an earlier run are already on the disk
    for name, original in originals.items():
        setattr(os, name, patched(name, original))
    run_job(folder)


def mismatch(prefix: str, whole: Sequence[Sequence[bytes]]) -> bool:
    """Find an .idx or side file with a .bin of another output; `whole`: the valid outputs (.bin, .idx, .json)."""
    found = [path.read_bytes() if path.exists() else None for path in (Path(prefix + suffix) for suffix in SUFFIXES)]
    for place in (1, 2):
        known = [(output[0], output[place]) for output in whole]
        if found[place] is not None and (found[0], found[place]) not in known:
            return True
    return False


def main(folder: Path) -> None:
    work = folder / "work"
    prefix = str(work / "out_text_document")
    # Earlier output of other input exists: at any time it must be complete or removed, never mixed with new output.
    write_numbers(folder / "a.jsonl", 5, 900)
    work.mkdir()
    assert fork(run_job, folder) == 0
    earlier = folder / "earlier"
    shutil.copytree(work, earlier)
    replaced = output_bytes(work)
    write_numbers(folder / "a.jsonl", 24)
    assert fork(run_job, folder) == 0
    expected = output_bytes(work)
    wrong: list[str] = []
    kept = point = 0
    while True:
        shutil.rmtree(work)
        shutil.copytree(earlier, work)
        status = fork(run_until, folder, point)
        if status != KILLED:
            break
        kept += (work / "out.unfinished" / "state.json").exists()
        # Two more kills at earlier points, then a run without one.
        again = [0]
        for earlier_point in (point % 8, point // 2):
            if mismatch(prefix, (replaced, expected)):
                wrong.append(f"{point}: files of different datasets side by side")
            again.append(fork(run_until, folder, earlier_point))
        if not {*again} <= {0, KILLED} or fork(run_job, folder) != 0:
            wrong.append(f"{point}: it did not continue")
        elif output_bytes(work) != expected or (work / "out.unfinished").exists():
            wrong.append(f"{point}: other bytes")
        point += 1
    print(json.dumps({"points": point, "kept": kept, "wrong": wrong, "status": status}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

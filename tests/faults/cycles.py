"""Start and stop runs repeatedly by the signals of schedulers and users, and check that nothing is left behind.

    python -m tests.faults.cycles N [--seed S] [--folder DIR]

Each start resumes from the previous one's checkpoint. After each: every rank has ended by itself with the same documented
status, exit.json has this status, and no process, open file or shared memory is left. After the end of a run its losses and
state must be bit-equal to those of an uninterrupted run; then the next layout follows. The report is JSON in the last line;
the exit status is 1 after a failure."""

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.errors import DONE, INTERRUPTED, REQUEUE
from tests.e2e.corpus import build_corpus
from tests.faults.compare import check_records, check_state, open_sound, records, steps_in
from tests.faults.life import Kill, Life, live, printed
from tests.faults.scenarios import LAYOUTS, STEPS, Saving
from tests.faults.story import Workspace
from tests.support.listeners import descendants

SAVING = Saving("async", 5, ("--async-save",))
SIGNALS = {signal.SIGTERM: REQUEUE, signal.SIGUSR1: REQUEUE, signal.SIGINT: INTERRUPTED}
"""Signal -> exit status of the run."""
PLAIN = [layout for layout in LAYOUTS if not layout.then]


@dataclass
class Cycles:
    """Results so far."""

    workspace: Workspace
    random: random.Random
    ended: Counter[str] = field(default_factory=Counter)
    """Counts by signal and ending of the run."""
    runs: int = 0
    """Number of completed and compared runs."""
    slowest: float = 0.0
    """Seconds of the slowest life."""

    def one(self) -> bool:
        """Start a run once and check its end. Returns whether the run is complete."""
        layout = PLAIN[self.runs % len(PLAIN)]
        reference = self.workspace.reference(layout)
        run_dir = self.workspace.root / f"cycled-{self.runs}"
        checkpoints = run_dir / "checkpoints"
        before = max(steps_in(checkpoints), default=0)
        kill = self._draw_kill(layout.ranks, before, reference.seconds)
        log = self.workspace.root / f"cycle-{sum(self.ended.values())}"
        life = live(layout.ranks, self.workspace.command(layout, SAVING, run_dir), run_dir, log, kill)
        self.slowest = max(self.slowest, life.seconds)
        try:
            end = self._check_end(life, kill, log, run_dir, before)
        except AssertionError as error:
            logs = "\n".join(printed(log, rank) for rank in range(layout.ranks))
            raise AssertionError(f"{layout.name}, {kill}: {life.statuses}: {error}\n{logs}") from None
        made = records(run_dir / "metrics.jsonl")
        check_records(made, reference.records, 0.0)
        name = "no signal" if kill is None else signal.Signals(kill.number).name
        self.ended[f"{name}: {end}"] += 1
        print(f"{sum(self.ended.values()):4}  {layout.name:<32} {name}: {end}, {life.seconds:.1f} s", flush=True)
        if end != "finished":
            return False
        ours, theirs = (open_sound(folder / "checkpoints", STEPS) for folder in (run_dir, reference.run_dir))
        check_state(ours, theirs, 0.0)
        self.runs += 1
        return True

    def _draw_kill(self, ranks: int, before: int, seconds: float) -> Kill | None:
        """Draw a signal to all ranks, as launchers send it, after a step or at any time; every fourth life gets none."""
        kind = self.random.random()
        all_ranks, number = tuple(range(ranks)), self.random.choice(list(SIGNALS))
        if kind < 0.5 and before < STEPS - 1:
            return Kill(all_ranks, after_step=self.random.randint(before + 1, STEPS - 1), number=number)
        if kind < 0.75:
            return Kill(all_ranks, after_seconds=self.random.uniform(0.05, 0.8 * seconds), number=number)
        return None

    def _check_end(self, life: Life, kill: Kill | None, log: Path, run_dir: Path, before: int) -> str:
        assert not life.hung, f"ranks {life.hung} were still running"
        ending = json.loads((run_dir / "exit.json").read_text()) if (run_dir / "exit.json").exists() else None
        saved = max(steps_in(run_dir / "checkpoints"), default=0)
        mute = {status for rank, status in enumerate(life.statuses) if not printed(log, rank, ("err",))}
        # Before it listened, or after it had reported its end; then SIGINT ends a fork with 1 and no message.
        if kill is not None and (-kill.number in life.statuses or (kill.number == signal.SIGINT and 1 in mute)):
            assert ending is None or ending["step"] in (None, saved), ending
            return "finished" if ending is not None and ending["status"] == "finished" else "before it listened"
        status, *others = set(life.statuses)
        assert not others and status in (DONE, SIGNALS.get(kill.number) if kill else DONE), "not as documented"
        if ending is None and status != DONE and not run_dir.exists():
            return "at the start"  # before the run had created its folder, in which it would have left a record
        assert ending is not None, "exit.json is missing"
        early = status != DONE and saved == before and ending["step"] is None  # before it had looked for checkpoints
        assert ending["exit_code"] == status and saved >= before, ending
        assert ending["step"] == saved or early, ending
        if status == DONE:
            assert ending["status"] == "finished" and saved == STEPS, ending
            return "finished"
        return "at the start" if saved == before else "saved"


def left_over() -> dict[str, Any]:
    """Resources that a process may leave behind: processes, open files, torch's shared memory."""
    gc.collect()  # resources of a life end with its objects
    below = descendants(os.getpid())  # ranks are children of the fork server
    shared = sorted(
        path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid() and "torch" in path.name
    )
    return {"processes": len(below), "files": len(list(Path("/proc/self/fd").iterdir())), "shared memory": shared}


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cycles", description=__doc__.partition("\n")[0])
    parser.add_argument("cycles", type=int, nargs="?", default=5, help="how many; default 5")
    parser.add_argument("--seed", type=int, default=0, help="which ones; default 0")
    parser.add_argument("--folder", type=Path, help="where the runs are left to be looked at; must not exist")
    arguments = parser.parse_args(words)
    started, failure = time.monotonic(), ""
    with contextlib.ExitStack() as stack:
        root = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.folder:
            root.mkdir(parents=True)
        root = root.resolve()
        workspace = Workspace(root, build_corpus(root, megabytes=0.2), arguments.seed)
        cycles = Cycles(workspace, random.Random(arguments.seed))
        workspace.reference(PLAIN[0])
        before, number = left_over(), 0
        try:
            while number < arguments.cycles:
                number += 1
                cycles.one()
                now = left_over()
                assert now == before, f"left behind: {now}, before {before}"
        except AssertionError as error:
            failure = f"cycle {number}: {error}"
    report = {
        "cycles": sum(cycles.ended.values()),
        "ended": dict(sorted(cycles.ended.items())),
        "compared": cycles.runs,
        "slowest": round(cycles.slowest, 2),
        "seconds": round(time.monotonic() - started, 1),
        "left over": left_over(),
        "failure": failure,
    }
    for name, count in report["ended"].items():
        print(f"{name:<40}{count:5}")
    print(failure or "nothing was left")
    print(json.dumps(report))
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())

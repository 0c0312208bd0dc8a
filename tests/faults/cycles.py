"""Start and stop runs again and again, by the signals that a scheduler and a user send, and see whether anything is left.

    python -m tests.faults.cycles N [--seed S] [--folder DIR]

Each start continues from what the one before has saved. After each: every rank has ended by itself, all with one status of
those that are documented, exit.json says the same, and no process, open file or shared memory is left. When a run has come
to its end its losses and its state are those of a run that no one stopped, bit for bit, and the next layout's turn begins.
The report is JSON in the last line; the exit status is 1 after a failure.
"""

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

from megalite.config.exit_codes import DONE, INTERRUPTED, REQUEUE
from tests.e2e.corpus import build_corpus
from tests.faults.compare import check_records, check_state, open_sound, records, steps_in
from tests.faults.life import Blow, Life, live, printed
from tests.faults.scenarios import LAYOUTS, STEPS, Saving
from tests.faults.story import Laboratory
from tests.support.listeners import descendants

SAVING = Saving("async", 5, ("--async-save",))
SIGNALS = {signal.SIGTERM: REQUEUE, signal.SIGUSR1: REQUEUE, signal.SIGINT: INTERRUPTED}
"""What is sent -> the status that a run then ends with."""
PLAIN = [layout for layout in LAYOUTS if not layout.then]


@dataclass
class Cycles:
    """What has been seen so far."""

    laboratory: Laboratory
    random: random.Random
    ended: Counter[str] = field(default_factory=Counter)
    """By signal and how the run ended."""
    runs: int = 0
    """That have come to their end, and were compared."""
    slowest: float = 0.0
    """Seconds of a life."""

    def one(self) -> bool:
        """One start and its end, by itself or not; whether the run has come to its end."""
        layout = PLAIN[self.runs % len(PLAIN)]
        reference = self.laboratory.reference(layout)
        run_dir = self.laboratory.root / f"cycled-{self.runs}"
        checkpoints = run_dir / "checkpoints"
        before = max(steps_in(checkpoints), default=0)
        blow = self._blow(layout.ranks, before, reference.seconds)
        log = self.laboratory.root / f"cycle-{sum(self.ended.values())}"
        life = live(layout.ranks, self.laboratory.command(layout, SAVING, run_dir), run_dir, log, blow)
        self.slowest = max(self.slowest, life.seconds)
        try:
            end = self._check_end(life, blow, log, run_dir, before)
        except AssertionError as error:
            logs = "\n".join(printed(log, rank) for rank in range(layout.ranks))
            raise AssertionError(f"{layout.name}, {blow}: {life.statuses}: {error}\n{logs}") from None
        made = records(run_dir / "metrics.jsonl")
        check_records(made, reference.records, 0.0)
        name = "no signal" if blow is None else signal.Signals(blow.number).name
        self.ended[f"{name}: {end}"] += 1
        print(f"{sum(self.ended.values()):4}  {layout.name:<32} {name}: {end}, {life.seconds:.1f} s", flush=True)
        if end != "finished":
            return False
        ours, theirs = (open_sound(folder / "checkpoints", STEPS) for folder in (run_dir, reference.run_dir))
        check_state(ours, theirs, 0.0)
        self.runs += 1
        return True

    def _blow(self, ranks: int, before: int, seconds: float) -> Blow | None:
        """To all ranks, as launchers send it; after a step or at any time; every fourth life is left alone."""
        kind = self.random.random()
        everybody, number = tuple(range(ranks)), self.random.choice(list(SIGNALS))
        if kind < 0.5 and before < STEPS - 1:
            return Blow(everybody, after_step=self.random.randint(before + 1, STEPS - 1), number=number)
        if kind < 0.75:
            return Blow(everybody, after_seconds=self.random.uniform(0.05, 0.8 * seconds), number=number)
        return None

    def _check_end(self, life: Life, blow: Blow | None, log: Path, run_dir: Path, before: int) -> str:
        assert not life.hung, f"ranks {life.hung} were still there"
        ending = json.loads((run_dir / "exit.json").read_text()) if (run_dir / "exit.json").exists() else None
        saved = max(steps_in(run_dir / "checkpoints"), default=0)
        mute = {status for rank, status in enumerate(life.statuses) if not printed(log, rank, ("err",))}
        # Before it listened, or after it had said how it ended; there SIGINT ends a fork with 1, and without a word.
        if blow is not None and (-blow.number in life.statuses or (blow.number == signal.SIGINT and 1 in mute)):
            assert ending is None or ending["step"] in (None, saved), ending
            return "finished" if ending is not None and ending["status"] == "finished" else "before it listened"
        status, *others = set(life.statuses)
        assert not others and status in (DONE, SIGNALS.get(blow.number) if blow else DONE), "not as documented"
        if ending is None and status != DONE and not run_dir.exists():
            return "at the start"  # before the run had made its folder, where it would have left a word
        assert ending is not None, "there is no exit.json"
        early = status != DONE and saved == before and ending["step"] is None  # before it had looked
        assert ending["exit_code"] == status and saved >= before, ending
        assert ending["step"] == saved or early, ending
        if status == DONE:
            assert ending["status"] == "finished" and saved == STEPS, ending
            return "finished"
        return "at the start" if saved == before else "saved"


def left_over() -> dict[str, Any]:
    """What a process may leave behind: processes, open files, shared memory of ours."""
    gc.collect()  # what a life has had, ends with its objects
    below = descendants(os.getpid())  # the ranks are children of the fork server
    shared = sorted(
        path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid() and "torch" in path.name
    )
    return {"processes": len(below), "files": len(list(Path("/proc/self/fd").iterdir())), "shared memory": shared}


def main(words: Sequence[str] | None = None) -> int:
    """See above."""
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
        laboratory = Laboratory(root, build_corpus(root, megabytes=0.2), arguments.seed)
        cycles = Cycles(laboratory, random.Random(arguments.seed))
        laboratory.reference(PLAIN[0])
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

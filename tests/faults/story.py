"""One run from start to end: killed, checked, restarted by the same command, and compared at the end."""

import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.programs import Corpus
from tests.faults.compare import check_records, check_state, open_sound, records, steps_in
from tests.faults.life import Kill, Life, live, printed
from tests.faults.scenarios import KILLS, LAYOUTS, SAVINGS, SIZES, STEPS, TRAINING, Layout, Saving
from tests.faults.trap import LOAD, REMOVAL, Point

MOMENTS = ("after a step", "at any time")
"""Kills timed by the parent; the others are points that the victim reaches."""
OTHER_LAYOUT = 1e-9
"""Relative tolerance of losses in double precision if the layout changes between lives."""


@dataclass
class Story:
    """Record of one run."""

    number: int
    name: str
    lives: int = 0
    kills: list[str] = field(default_factory=list)
    """By kind, in order."""
    missed: list[str] = field(default_factory=list)
    """Kills that came after the run's end."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each life."""
    slowest_end: float = 0.0
    """Maximum seconds from the first rank's death to the last one's end."""
    launcher_ended: int = 0
    """Lives in which a rank died before the others could connect to it."""
    tensors: int = 0
    """Tensors compared at the end, byte by byte."""
    failure: str = ""
    log: list[str] = field(default_factory=list)
    """Events of each life."""


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run of a layout."""

    run_dir: Path
    seconds: float
    counts: list[Counter[str]]
    """Per rank: calls on the checkpoints."""

    @property
    def records(self) -> list[dict[str, Any]]:
        return records(self.run_dir / "metrics.jsonl")


class Workspace:
    """Folder of the runs, with the corpus and the uninterrupted runs, each made when first needed.

    Args:
        root: an absolute folder to write into.
        seed: of all random choices."""

    def __init__(self, root: Path, corpus: Corpus, seed: int) -> None:
        self.root, self.seed = root, seed
        self.data = [
            "--data-path",
            str(corpus.prefix),
            "--split",
            "100,0,0",
            "--tokenizer-model",
            str(corpus.tokenizer),
        ]
        self.reference = cache(self._make_reference)

    def command(self, layout: Layout, saving: Saving, run_dir: Path) -> list[str]:
        resume = ("--load", str(run_dir / "checkpoints"), "--fresh-if-missing", "--run-dir", str(run_dir))
        save = ("--save-interval", str(saving.interval), *saving.flags)
        return [*SIZES, *TRAINING, *self.data, *layout.flags, *resume, *save]

    def _make_reference(self, layout: Layout) -> Reference:
        """Make an uninterrupted run with plain saves."""
        run_dir = self.root / f"reference-{layout.name.replace(' ', '-')}"
        log = self.root / f"{run_dir.name}-log"
        life = live(layout.ranks, self.command(layout, SAVINGS[0], run_dir), run_dir, log, None)
        assert life.statuses == [0] * layout.ranks, f"{life.statuses}{_logs(log)}"
        assert len(records(run_dir / "metrics.jsonl")) == STEPS
        return Reference(run_dir, life.seconds, life.counts)

    def run(self, number: int) -> Story:
        """Execute run `number`: layout, saving and kills follow from it and the seed."""
        layout, saving = LAYOUTS[number % len(LAYOUTS)], SAVINGS[number % len(SAVINGS)]
        return _Driver(self, number, layout, saving).run()


class _Driver:
    """Executes a run."""

    def __init__(self, workspace: Workspace, number: int, layout: Layout, saving: Saving) -> None:
        self.workspace, self.layout, self.saving = workspace, layout, saving
        self.story = Story(number, f"{layout.name}; {saving.name}")
        self.random = random.Random(f"{workspace.seed}:{number}")
        self.tolerance = OTHER_LAYOUT if layout.then else 0.0
        self.run_dir = workspace.root / f"run-{number}"
        self.checkpoints = self.run_dir / "checkpoints"
        self.metrics = self.run_dir / "metrics.jsonl"
        self.saved_last = False
        """The last life saved something, and so removed leftovers of earlier ones."""

    def run(self) -> Story:
        story, log = self.story, self.workspace.root
        try:
            reference = self.workspace.reference(self.layout)
            deck = iter(_deck(self.workspace.seed, story.number))
            for _ in range(KILLS[story.number % len(KILLS)]):
                kill = self._next_kill(deck, reference)
                if kill is None or not self._die(kill, reference):
                    break
            if not story.missed:
                self._finish(reference)
            self._check_end(reference)
        except Exception as error:
            tail = _logs(log / f"run-{story.number}-life-{story.lives - 1}")
            story.failure = f"{type(error).__name__}: {error}\n" + "\n".join(story.log) + tail
        return story

    def _next_kill(self, kinds: Any, reference: Reference) -> Kill | None:
        """The next kill of the deck that is possible in this run; None if the run is complete."""
        steps = steps_in(self.checkpoints)
        start = steps[-1] if steps else 0
        if start == STEPS:
            return None
        layout = self.layout.of_life(self.story.lives)
        alone = self.random.random() < 2 / 3
        # A run that resumes from a checkpoint can also be killed while reading it.
        reads = [f"before {LOAD}"] if self.story.kills and start and self.random.random() < 1 / 3 else []
        for kind in itertools.chain(reads, kinds):
            kill = self._draw_kill(kind, layout, start, reference)
            if kill is not None:
                others = [rank for rank in range(layout.ranks) if rank != kill.ranks[0]]
                ranks = kill.ranks if alone else (*kill.ranks, *others)
                return Kill(ranks, kill.point, kill.after_seconds, kill.after_step)
        raise AssertionError(f"nothing in the deck fits {self.story.name} from step {start}")

    def _draw_kill(self, kind: str, layout: Layout, start: int, reference: Reference) -> Kill | None:
        """Draw a kill of this kind in a life that starts from step `start`; None if it has no such point."""
        victim = self.random.randrange(layout.ranks)
        if kind == "after a step":
            if start >= STEPS - 1:
                return None
            return Kill((victim,), after_step=self.random.randint(start + 1, STEPS - 1))
        if kind == "at any time":
            left = 0.1 + 0.5 * (STEPS - start) / STEPS
            return Kill((victim,), after_seconds=self.random.uniform(0.0, left * reference.seconds))
        where, call = kind.split()
        if call == LOAD:
            return Kill((victim,), Point(call, where, self.random.randint(1, 5)))
        kept, interval = self.saving.keeps, self.saving.interval
        to_come = len([step for step in range(start + 1, STEPS + 1) if step % interval == 0])
        if call in (REMOVAL, "rmdir"):
            # The first removal comes with the first save beyond the number to keep.
            removed = 0 if kept is None else len(steps_in(self.checkpoints)) + to_come - kept
            each = 1 if call == "rmdir" else 1 + layout.ranks
            return Kill((0,), Point(call, where, self.random.randint(1, each))) if removed > 0 else None
        saves = len(SAVINGS[0].left(STEPS))
        often = [counts[call] // saves for counts in reference.counts]
        candidates = [rank for rank, count in enumerate(often) if count]
        if not candidates:
            return None
        victim = self.random.choice(candidates)
        save = self.random.randint(0, min(2, max(1, to_come - 1)) - 1)
        # A save's last writes are its lists, the manifest and `latest`: half of the kills are there.
        first = 1 if self.random.random() < 0.5 else max(1, often[victim] - 3)
        return Kill((victim,), Point(call, where, save * often[victim] + self.random.randint(first, often[victim])))

    def _live(self, kill: Kill | None) -> tuple[Life, str]:
        """Run one life. Returns its result and the output of its first rank."""
        story = self.story
        layout = self.layout.of_life(story.lives)
        log = self.workspace.root / f"run-{story.number}-life-{story.lives}"
        before = steps_in(self.checkpoints)
        command = self.workspace.command(layout, self.saving, self.run_dir)
        story.lives += 1
        life = live(layout.ranks, command, self.run_dir, log, kill)
        story.seconds.append(round(life.seconds, 2))
        story.slowest_end = max(story.slowest_end, round(life.seconds_after_death, 2))
        story.launcher_ended += life.launcher_ended
        happened = f"{kill}: {life.died_at or life.statuses}" if kill else f"to the end: {life.statuses}"
        story.log.append(f"life {story.lives - 1} on {layout.name}, from {before[-1:]}, {happened}")
        assert not life.hung, f"ranks {life.hung} were still running; they printed their stacks"
        said = printed(log, 0)
        self._check_start(said, before, life)
        return life, said

    def _check_start(self, said: str, before: list[int], life: Life) -> None:
        """Check that it resumed from the newest visible checkpoint, which must not be damaged."""
        assert "passed over" not in said, "a visible checkpoint is damaged"
        loaded = re.search(r"loaded \S*step-(\d+) ", said)
        if loaded is not None:
            assert int(loaded[1]) == before[-1], f"started from step {int(loaded[1])}, the newest is {before[-1]}"
        elif "starting from step 0" in said:
            assert not before, f"started over beside checkpoints of steps {before}"
        else:
            assert life.was_killed, "did not log where it started"

    def _die(self, kill: Kill, reference: Reference) -> bool:
        """Run a life that is killed. Returns False if it ended before."""
        before = steps_in(self.checkpoints)
        life, said = self._live(kill)
        if not life.was_killed:
            assert set(life.statuses) == {0}, f"no one was killed, and yet it ended with {life.statuses}"
            self.story.missed.append(kill.kind)
            return False
        self.story.kills.append(kill.kind)
        after = steps_in(self.checkpoints)
        made = records(self.metrics)
        check_records(made, reference.records, self.tolerance)
        for step in after:
            open_sound(self.checkpoints, step)
        assert self._latest() in (None, *after), f"latest names step {self._latest()}, which is not in {after}"
        newest = after[-1] if after else 0
        assert newest >= max(before, default=0), f"the checkpoint of step {before[-1]} is gone; there are {after}"
        saved = [int(step) for step in re.findall(r"^\S+ saved \S*step-(\d+) ", said, re.MULTILINE)]
        assert newest >= max(saved, default=0), f"said that it saved step {saved[-1]}; there are {after}"
        # The step after a save is made after the save is complete, or with async saves, after the previous one is.
        interval = self.saving.interval
        last = made[-1]["step"] if made else 0
        due = (last - 1) // interval * interval - (interval if self.saving.is_async else 0)
        assert newest >= due, f"step {last} was made, and the newest checkpoint is of step {newest}"
        return True

    def _finish(self, reference: Reference) -> None:
        """Run the life until the end."""
        life, said = self._live(None)
        self.saved_last = " saved " in said
        assert set(life.statuses) == {0}, f"no one was killed, and yet it ended with {life.statuses}"

    def _check_end(self, reference: Reference) -> None:
        made = records(self.metrics)
        check_records(made, reference.records, self.tolerance)
        assert [row["step"] for row in made] == list(range(1, STEPS + 1)), [row["step"] for row in made]
        ours = open_sound(self.checkpoints, STEPS)
        theirs = open_sound(reference.run_dir / "checkpoints", STEPS)
        self.story.tensors = check_state(ours, theirs, self.tolerance)
        names = {path.name for path in self.checkpoints.iterdir()}
        expected = {"latest", *(f"step-{step:07}" for step in self.saving.left(STEPS))}
        assert expected <= names, f"{sorted(expected - names)} are gone"
        if self.saved_last:
            assert expected == names, f"{sorted(names - expected)} are left over"
        latest = self._latest()
        assert latest == STEPS, f"the last step is {STEPS}, latest names {latest}"

    def _latest(self) -> int | None:
        """The step in `latest`."""
        path = self.checkpoints / "latest"
        if not path.exists():
            return None
        match = re.fullmatch(r"step-(\d{7})\n", path.read_text())
        assert match, f"latest is {path.read_text()!r}"
        return int(match[1])


def _deck(seed: int, number: int) -> list[str]:
    """Kinds of kills in the order in which run `number` uses them.

    Each run continues in the shuffled round where the previous one has ended, so that no kind waits for long."""
    calls = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir")
    kinds = [f"{where} {call}" for call in calls for where in ("before", "after")]
    kinds += ["inside write", *MOMENTS, *MOMENTS]
    random.Random(seed).shuffle(kinds)
    removals = [f"after {REMOVAL}", "before rmdir", f"before {REMOVAL}", "after rmdir"]
    rounds, rest = divmod(number, len(KILLS))
    first = rounds * sum(KILLS) + sum(KILLS[:rest])
    deck = [kinds[(first + index) % len(kinds)] for index in range(len(kinds))]
    # Few runs remove checkpoints: they start with kills in removals.
    turn = (number // len(SAVINGS) * 2 + number % 2) % len(removals)
    return [removals[turn], *deck]


def _logs(log: Path) -> str:
    """The ends of the ranks' output."""
    ranks = range(len(list(log.glob("*.out"))))
    return "".join(f"\n--- {log.name}, rank {rank}\n{printed(log, rank)[-3000:]}" for rank in ranks)

"""Kill runs at random times, restart them, and check that nothing is lost.

    python -m tests.faults N [--seed S] [--only K] [--folder DIR]

Continues until N kills have been made. Each run depends only on the seed and its number (and on the machine's speed), so
`--only K` repeats run K. Prints a table, and the report as JSON in the last line; the exit status is 1 after a failure.
Files of runs stay in DIR, by default a temporary folder."""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.corpus import build_corpus
from tests.faults.story import Story, Workspace

MOST_FAILURES = 10
"""Number of failures after which to give up."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("kills", type=int, nargs="?", default=10, help="how many kills; default 10")
    parser.add_argument("--seed", type=int, default=0, help="which ones; default 0")
    parser.add_argument("--only", type=int, metavar="K", help="run K alone")
    parser.add_argument("--folder", type=Path, help="where the runs are left to be looked at; must not exist")
    arguments = parser.parse_args(words)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        root = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.folder:
            root.mkdir(parents=True)
        workspace = Workspace(root.resolve(), build_corpus(root.resolve(), megabytes=0.2), arguments.seed)
        stories: list[Story] = []
        while arguments.only is None and _keep_watching(stories, arguments.kills):
            stories.append(_printed(workspace.run(len(stories))))
        if arguments.only is not None:
            stories.append(_printed(workspace.run(arguments.only)))
    report = _report(stories, arguments.seed, time.monotonic() - started)
    _show(report)
    print(json.dumps(report))
    return 1 if report["failures"] else 0


def _keep_watching(stories: list[Story], kills: int) -> bool:
    """Whether more kills are needed and not too many runs have failed."""
    failures = sum(bool(story.failure) for story in stories)
    made = sum(len(story.kills) for story in stories)
    return made < kills and failures < MOST_FAILURES and len(stories) < 10 + 2 * kills


def _printed(story: Story) -> Story:
    state = "FAILED" if story.failure else f"{story.tensors} tensors equal"
    missed = f"; not met: {', '.join(story.missed)}" if story.missed else ""
    print(
        f"run {story.number:3}  {story.name:<50} {', '.join(story.kills) or 'no kill'}{missed}; "
        f"{story.lives} lives, {sum(story.seconds):.1f} s; {state}",
        flush=True,
    )
    return story


def _report(stories: list[Story], seed: int, seconds: float) -> dict[str, Any]:
    by_run: Counter[str] = Counter()
    for story in stories:
        by_run[story.name] += len(story.kills)
    lives = [length for story in stories for length in story.seconds]
    return {
        "seed": seed,
        "runs": len(stories),
        "kills": sum(len(story.kills) for story in stories),
        "by_kind": dict(sorted(Counter(kind for story in stories for kind in story.kills).items())),
        "not_met": dict(sorted(Counter(kind for story in stories for kind in story.missed).items())),
        "by_run": by_run,
        "lives": len(lives),
        "seconds": round(seconds, 1),
        "seconds_a_life": round(sum(lives) / max(1, len(lives)), 2),
        "slowest_end_of_peers": max((story.slowest_end for story in stories), default=0.0),
        "ended_by_launcher": sum(story.launcher_ended for story in stories),
        "tensors_compared": sum(story.tensors for story in stories),
        "failures": [
            {
                "run": story.number,
                "reproduce": f"python -m tests.faults --seed {seed} --only {story.number}",
                "what": story.failure,
            }
            for story in stories
            if story.failure
        ],
    }


def _show(report: dict[str, Any]) -> None:
    print(f"\n{'kind of kill':<24}times")
    for kind, count in report["by_kind"].items():
        print(f"{kind:<24}{count:5}")
    print(
        f"\n{report['kills']} kills in {report['runs']} runs, {report['lives']} lives of {report['seconds_a_life']} s, "
        f"{report['seconds']} s in all; failures: {len(report['failures'])}"
    )
    for failure in report["failures"]:
        print(f"\nrun {failure['run']}: {failure['what']}\nagain: {failure['reproduce']}")


if __name__ == "__main__":
    sys.exit(main())

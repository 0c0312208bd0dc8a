"""Ends a loop of restarts that gets nowhere: whoever starts a failed run again by himself cannot know that it is one.

`attempts.json` in the folder of checkpoints says how this start, and those before it that failed, went. It is a help and
nothing more: where it cannot be read or written, the run goes on without it.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.files import replace_durably
from megalite.config.describe import sectioned
from megalite.config.errors import ConfigError
from megalite.config.exit_codes import NO_PROGRESS
from megalite.config.run import RunConfig
from megalite.config.secrets import redact_text
from megalite.topology.group import Group
from megalite.training.sinks import last_record

FILE_NAME = "attempts.json"
_UNTOLD = "it left no error: killed, out of memory, or crashed"
_MOST = 300
"""Characters of an error that are kept."""


class RestartLoopError(ConfigError):
    """The same step has failed again and again."""

    exit_code = NO_PROGRESS


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A start that failed."""

    start: int
    """Step of the checkpoint that it went on from."""
    failed_in: int
    """The step that it did not bring to its end, as far as is known."""
    error: str


class RestartGuard:
    """Of one start; rank 0 alone has one.

    Args:
        folder: of checkpoints.
        most: failures in the same step after which there is no further start; 0: any number.
        settings: digest of the settings: a run with others is another attempt, and counts anew.
    """

    def __init__(self, folder: Path, *, most: int, settings: str) -> None:
        self._path, self._most, self._settings = folder / FILE_NAME, most, settings
        self._start = 0
        self._failed: list[Attempt] = []

    @classmethod
    def of(cls, config: RunConfig) -> "RestartGuard | None":
        """None where nothing is saved, or nobody wants it."""
        most = config.checkpoint.max_failures_at_step
        if config.checkpoint.save is None or most == 0:
            return None
        return cls(Path(config.checkpoint.save), most=most, settings=settings_digest(config))

    def begin(self, start: int, metrics: Path | None) -> None:
        """The run goes on from step `start`.

        Args:
            metrics: `metrics.jsonl` as the start before has left it: it says how far one came that left no error.

        Raises:
            RestartLoopError: the last `most` starts failed in one step, which is still to come.
        """
        self._start = start
        self._failed = self._read(metrics)
        last = self._failed[-self._most :]
        if len(last) == self._most and len({attempt.failed_in for attempt in last}) == 1:
            self._write(running=False)
            raise RestartLoopError(self._diagnosis(last))
        self._write(running=True)

    def failed(self, step: int, error: BaseException) -> None:
        """The start ends by an error in `step`."""
        text = redact_text(f"{type(error).__name__}: {error}")[:_MOST]
        self._failed.append(Attempt(start=self._start, failed_in=step, error=text))
        self._write(running=False)

    def left(self) -> None:
        """It ends because it was asked to while it was failing, or before it did anything: nobody can say why."""
        self._write(running=False)

    def ended(self) -> None:
        """It ends as it was meant to: what failed before is past."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _diagnosis(self, last: list[Attempt]) -> str:
        step = last[0].failed_in
        errors = [f"  {number}. {attempt.error}" for number, attempt in enumerate(last, start=1)]
        return "\n".join(
            [
                f"step {step} has failed in the last {len(last)} starts, and this one would go on from step {self._start}: "
                "starting once more would change nothing",
                *errors,
                "Change what the errors speak of (other settings count anew), go on from an older checkpoint with "
                f"--ckpt-step, or remove {self._path} to try again as it is",
            ]
        )

    def _read(self, metrics: Path | None) -> list[Attempt]:
        """The last failures in steps that are still to come; [] where nothing is known."""
        try:
            state = json.loads(self._path.read_text())
            if state["settings"] != self._settings:
                return []
            failed = [_attempt(one) for one in state["failed"]]
            if state["running"] is not None:
                start = int(state["running"])
                came_to = start if metrics is None else max(start, last_record(metrics))
                failed.append(Attempt(start=start, failed_in=came_to + 1, error=_UNTOLD))
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [attempt for attempt in failed if attempt.failed_in > self._start][-self._most :]

    def _write(self, *, running: bool) -> None:
        state = {
            "settings": self._settings,
            "running": self._start if running else None,
            "failed": [asdict(attempt) for attempt in self._failed],
        }
        with contextlib.suppress(OSError):
            replace_durably(self._path, json.dumps(state, indent=1).encode() + b"\n")


def _attempt(state: Mapping[str, Any]) -> Attempt:
    return Attempt(
        start=int(state["start"]), failed_in=int(state["failed_in"]), error=str(state["error"])[:_MOST]
    )


def settings_digest(config: RunConfig) -> str:
    """Of all settings but those of the log."""
    tree = {section: values for section, values in sectioned(config).items() if section != "logging"}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def require_progress(
    guard: RestartGuard | None, start: int, metrics: Path | None, *, world: Group, device: torch.device
) -> None:
    """Begin, and let all ranks hear of it if the run is not to.

    Args:
        guard: rank 0's; None on the others.

    Collectives: a broadcast.

    Raises:
        RestartLoopError: the same on every rank.
    """
    refused: str | None = None
    if guard is not None:
        try:
            guard.begin(start, metrics)
        except RestartLoopError as error:
            refused = str(error)
    told = world.broadcast_json(refused, device)
    if told is not None:
        raise RestartLoopError(told)

"""How a run ended, for scripts: `<run_dir>/exit.json`.

A launcher's own exit status says little: torchrun ends with 1 whatever status its workers have ended with.
"""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.checkpoint.files import replace_durably
from megalite.config.exit_codes import DONE, FAILED, INTERRUPTED
from megalite.config.secrets import redacted

FILE_NAME = "exit.json"


@dataclass
class Standing:
    """Where a run stands, for whoever tells of its end."""

    step: int | None = None
    """The last that was made, in this start or before; None until it has looked for a checkpoint."""
    moved: bool = False
    """One was made in this start."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run; the same on every rank, but for errors."""

    status: str
    """`finished`; `requeue`: start the same command again; `stopped`: as it was asked to, and not to be started again;
    `interrupted` by Ctrl-C; `failed`."""
    reason: str
    """In words."""
    step: int | None
    """Steps made since the very first start; None where it ended before it had looked for a checkpoint."""
    exit_code: int
    """Exit status of the ranks: one of `config.exit_codes`."""

    @classmethod
    def finished(cls, step: int) -> "Ending":
        """All steps are made."""
        return cls(status="finished", reason="the last step is made", step=step, exit_code=DONE)

    @classmethod
    def failed(cls, error: BaseException, step: int | None) -> "Ending":
        """An error has ended it; those that tell a cause of their own bring their exit status."""
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED)
        name = "" if code != FAILED else f"{type(error).__name__}: "
        return cls(status="failed", reason=f"{name}{error}", step=step, exit_code=code)


def forget_ending(run_dir: Path | None) -> None:
    """A run begins: what the last one has left is not its end. Without one, a run is under way or was killed."""
    if run_dir is not None:
        with contextlib.suppress(OSError):
            (run_dir / FILE_NAME).unlink(missing_ok=True)


def write_ending(run_dir: Path | None, ending: Ending) -> None:
    """Leave it in the run's folder, if there is one; where that cannot be written the log has said it all."""
    if run_dir is not None and run_dir.is_dir():
        with contextlib.suppress(OSError):
            replace_durably(
                run_dir / FILE_NAME, json.dumps(redacted(asdict(ending)), indent=1).encode() + b"\n"
            )

"""How a run ended, for scripts: `<run_dir>/exit.json`. torchrun's own exit status is 1 whatever its workers ended with."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.checkpoint.files import replace_durably, sync_folder, write_all
from megalite.config.describe import redacted
from megalite.config.exit_codes import DONE, FAILED, INTERRUPTED

FILE_NAME = "exit.json"
_RESERVED, _RESERVED_BYTES = f".{FILE_NAME}.reserved", 16384


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run; the same on every rank, but for errors."""

    status: str
    """`finished`; `requeue`: start the same command again; `stopped`: as it was asked to, and not to be started again;
    `interrupted` by Ctrl-C; `failed`."""
    reason: str
    step: int | None
    """Steps made since the very first start; None where it ended before it had looked for a checkpoint."""
    exit_code: int
    """One of `config.exit_codes`."""

    @classmethod
    def finished(cls, step: int) -> "Ending":
        """All steps are made."""
        return cls(status="finished", reason="the last step is made", step=step, exit_code=DONE)

    @classmethod
    def failed(cls, error: BaseException, step: int | None) -> "Ending":
        """An error has ended it, with the error's own exit status if it has one."""
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED)
        name = "" if code != FAILED else f"{type(error).__name__}: "
        return cls(status="failed", reason=f"{name}{error}", step=step, exit_code=code)


def forget_ending(run_dir: Path | None) -> None:
    """A run begins. Without the file, a run is under way or was killed."""
    if run_dir is not None:
        with contextlib.suppress(OSError):
            (run_dir / FILE_NAME).unlink(missing_ok=True)


def reserve_ending(run_dir: Path) -> None:
    """Take the room that `exit.json` will need: a run that a full disk ends could not say so, and would be started again.

    Raises:
        OSError: there is none.
    """
    replace_durably(run_dir / _RESERVED, b" " * _RESERVED_BYTES)


def write_ending(run_dir: Path | None, ending: Ending, *, make_folder: bool = False) -> None:
    """Leave it in the run's folder, if there is one; where that cannot be written the log has said it all.

    Args:
        make_folder: the run has had its folder, and somebody has removed it.
    """
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        if make_folder:
            run_dir.mkdir(exist_ok=True)
        if not run_dir.is_dir():
            return
        reserved, text = run_dir / _RESERVED, _text_of(ending)
        # Into the room that is there; where nothing was reserved this makes the file.
        descriptor = os.open(reserved, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, memoryview(text))
            os.ftruncate(descriptor, len(text))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reserved.replace(run_dir / FILE_NAME)
        sync_folder(run_dir)


def _text_of(ending: Ending) -> bytes:
    """JSON that fits into what is reserved."""
    fields = redacted(asdict(ending))
    reason, length = fields["reason"], len(fields["reason"])
    while len(text := json.dumps(fields, indent=1).encode() + b"\n") > _RESERVED_BYTES:
        length //= 2
        fields["reason"] = f"{reason[:length]}... (the log has all of it)"
    return text

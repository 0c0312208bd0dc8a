"""The folder of an unfinished run: kept for one process, cleared, and emptied into the place of the output."""

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import lock_folder, sync_folder
from megalite.config.errors import ConfigError

JOURNAL = "journal"
SUFFIXES = (".bin", ".idx", ".json")
"""Of the output, in the order in which the files get their names."""
_OURS = re.compile(r"journal|[0-9]+\.(bin|idx|json|lengths)")


def unfinished_folder(output_prefix: str) -> Path:
    """Where a job works until all is done."""
    return Path(f"{output_prefix}.unfinished")


class Workplace:
    """`{output_prefix}.unfinished`, locked against a second process.

    Raises:
        ConfigError: another process works there, it is not a folder of ours, or it cannot be made.
    """

    def __init__(self, output_prefix: str) -> None:
        self.folder = unfinished_folder(output_prefix)
        self._lock: int | None = None
        # Who has just finished removes the folder: then what we have locked is gone, and we make another.
        while not self._open():
            self.close()
        strangers = sorted(path.name for path in self.folder.iterdir() if not _OURS.fullmatch(path.name))
        if strangers:
            self.close()
            raise ConfigError(
                f"{self.folder} holds {strangers[0]!r}, which no run has left; move it away or choose another --output-prefix"
            )

    @property
    def journal(self) -> Path:
        """The journal's path."""
        return self.folder / JOURNAL

    def clear(self) -> None:
        """Remove all files; the journal goes last, so that what is left of a half-cleared folder says so."""
        for path in self.folder.iterdir():
            if path.name != JOURNAL:
                path.unlink()
        self.journal.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        self.clear()
        self.folder.rmdir()
        sync_folder(self.folder.parent)

    def close(self) -> None:
        """Let others in."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _open(self) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(
                f"{self.folder} is no folder; move it away or choose another --output-prefix"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be made: {error.strerror}; choose another --output-prefix"
            ) from None
        try:
            self._lock = lock_folder(self.folder)
        except BlockingIOError:
            raise ConfigError(
                f"{self.folder} is in use: another process writes the same output; wait for it, or choose another "
                "--output-prefix"
            ) from None
        except FileNotFoundError:
            return False
        if self._lock is None:
            return True
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), self.folder.stat())
        return False


def move_into_place(folder: Path, prefixes: Sequence[str]) -> None:
    """Give complete output its names; what is there already is left, so a second call goes on after a kill.

    An .idx or .json of an earlier output goes before its .bin does: neither ever stands beside a .bin that it does not
    describe.
    """
    for number, prefix in enumerate(prefixes):
        for suffix in SUFFIXES:
            made = folder / f"{number}{suffix}"
            if not made.exists():
                continue
            if suffix == ".bin":
                for old in (".json", ".idx"):
                    Path(f"{prefix}{old}").unlink(missing_ok=True)
                sync_folder(Path(f"{prefix}{suffix}").parent)
            made.replace(f"{prefix}{suffix}")
    sync_folder(folder.parent)


def any_has_its_name(folder: Path, keys: int) -> bool:
    """Whether some files of complete output are no longer in the folder."""
    return not all((folder / f"{number}{suffix}").exists() for number in range(keys) for suffix in SUFFIXES)


def complete_output_fault(
    folder: Path, prefixes: Sequence[str], files: Sequence[Mapping[str, Mapping[str, Any]]]
) -> str | None:
    """What is wrong with complete output of which some files may have their names already, or None."""
    for number, (prefix, wanted) in enumerate(zip(prefixes, files, strict=True)):
        for suffix in SUFFIXES:
            made, named = folder / f"{number}{suffix}", Path(f"{prefix}{suffix}")
            path = made if made.exists() else named
            if not path.is_file() or path.stat().st_size != wanted[suffix]["bytes"]:
                return f"{path} is missing or has changed"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted[suffix]["sha256"]:
                    return f"{path} has changed"
    return None

"""The names of new files that a command line asks for."""

import tempfile
from pathlib import Path

from megalite.config.errors import ConfigError


def check_output_prefix(prefix: str | Path, *, example: str) -> None:
    """A prefix ends in a name: files of `folder/` would be hidden ones, with a suffix alone.

    Raises:
        ConfigError: it does not; shows a prefix that ends in `example`.
    """
    if not Path(prefix).name or str(prefix).endswith(("/", "/.", "/..")):
        raise ConfigError(f"output_prefix {prefix} has no name; give one such as {Path(prefix) / example}")


def make_folder(prefix: str | Path) -> Path:
    """The folder of the files of a prefix, made if need be; a file can be written there.

    Raises:
        ConfigError: none can; names the prefix, the folder and the reason.
    """
    folder = Path(f"{prefix}.new").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Asking for permission is not enough: the superuser has it on a disk that is read-only, too.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_prefix {prefix}: no file can be written in {folder} ({error.strerror}); give a prefix in a folder "
            "that can be written to"
        ) from None
    return folder

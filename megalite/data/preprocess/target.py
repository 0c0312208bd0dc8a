"""Whether the output can be where it is wanted: looked at before any work, and nothing is written."""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.data.inputs.find import Input
from megalite.data.preprocess.job import PreprocessJob
from megalite.data.preprocess.workplace import SUFFIXES, unfinished_folder
from megalite.data.side_file import read_side_file

_USUAL_NAME_BYTES = 255
_REMEDY = "give another --output-prefix"


def check_target(job: PreprocessJob, inputs: Sequence[Input]) -> None:
    """Refuse an --output-prefix that cannot work, or whose files are the input.

    Raises:
        ConfigError: names the path, what is wrong with it, and the remedy.
    """
    prefix = job.output_prefix
    if not prefix or prefix.endswith("/") or "\0" in prefix:
        raise ConfigError(
            f"--output-prefix {prefix!r} must end in the beginning of a file's name; try {prefix.rstrip(chr(0)) or 'data/'}corpus"
        )
    unfinished = unfinished_folder(prefix)
    targets = _targets(job)
    _check_folder(unfinished.parent)
    _check_lengths([unfinished, *targets])
    for target in targets:
        try:
            if stat.S_ISDIR(target.lstat().st_mode):
                raise ConfigError(f"{target} is a folder, and the output would have that name; {_REMEDY}")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _unfit(target, str(error.strerror)) from None
    if unfinished.is_symlink():
        raise ConfigError(f"{unfinished} is a link; remove it, or {_REMEDY}")
    _check_inputs(inputs, unfinished, targets)


def require_free(job: PreprocessJob) -> None:
    """Raise a ConfigError if the output is there already and may not be replaced."""
    if job.restart:
        return
    for prefix in job.prefixes:
        for suffix in SUFFIXES:
            if os.path.lexists(f"{prefix}{suffix}"):
                raise ConfigError(
                    f"{prefix}{suffix} is there already{_documents(prefix)}; {_REMEDY}, or --restart to replace it"
                )


def _targets(job: PreprocessJob) -> list[Path]:
    return [Path(f"{prefix}{suffix}") for prefix in job.prefixes for suffix in SUFFIXES]


def _documents(prefix: str) -> str:
    try:
        facts = read_side_file(prefix)
    except ConfigError:
        return ""
    return f" ({facts['documents']:,} documents)" if facts else ""


def _check_folder(folder: Path) -> None:
    """The folder can be written, or made in one that can."""
    there = Path(os.path.abspath(folder))  # noqa: PTH100 resolve() would fail where there is a loop of links
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise _unfit(there, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        raise _unfit(there, os.strerror(errno.EROFS if read_only else errno.EACCES))


def _check_lengths(paths: Sequence[Path]) -> None:
    folder = paths[0].parent
    try:
        limit = os.pathconf(folder, "PC_NAME_MAX")
    except OSError:  # not made yet
        limit = _USUAL_NAME_BYTES
    for path in paths:
        for part in path.parts:
            length = len(os.fsencode(part))
            if length > limit:
                raise ConfigError(
                    f"the name {part[:40]}... has {length} bytes, and a file's name may have {limit}; give a shorter "
                    "--output-prefix"
                )


def _check_inputs(inputs: Sequence[Input], unfinished: Path, targets: Sequence[Path]) -> None:
    outputs = {os.path.realpath(target) for target in targets}
    folder = os.path.realpath(unfinished)
    for item in inputs:
        if item.size is None:
            continue
        path = os.path.realpath(item.path)
        if path in outputs:
            raise ConfigError(f"input {item.path} is what the output would be written over; {_REMEDY}")
        if path.startswith(folder + os.sep):
            raise ConfigError(
                f"input {item.path} lies in {unfinished}, the folder of the unfinished output; move it, or {_REMEDY}"
            )


def _unfit(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"the output cannot be written at {path}: {reason}; {_REMEDY}")

"""Which datasets a command line means, and names for new ones."""

import os
from collections.abc import Sequence
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.data.output_prefix import check_output_prefix

SUFFIXES = (".bin", ".idx", ".json")
"""Files of one dataset: tokens, index and, where it was preprocessed here, the side file."""


def find_prefixes(entries: Sequence[str]) -> list[str]:
    """Prefixes of datasets, in the order given; those in a folder by name.

    An entry is a prefix, one of a dataset's files (so that a shell may expand `data/*.idx` or `data/*`), or a folder
    of datasets. The different files of one dataset count once. Half a pair counts too: whoever opens it says what is
    missing.

    Raises:
        ConfigError: a dataset is given twice, under whatever names; an entry is nothing of the kind, or a folder holds
            none.
    """
    found: list[str] = []
    given: dict[tuple[str, str], dict[str, str]] = {}
    for entry in entries:
        prefixes, suffix = _of_entry(entry)
        for prefix in prefixes:
            name = prefix + suffix
            names = given.setdefault(_files(prefix), {})
            if names and (not suffix or "" in names or suffix in names):
                other = names.get(suffix) or next(iter(names.values()))
                which = f"{name} is given twice" if name == other else f"{other} and {name} are one dataset"
                raise ConfigError(f"{which}; give each dataset once")
            if not names:
                found.append(prefix)
            names[suffix] = name
    return found


def refuse_existing(prefixes: Sequence[str]) -> None:
    """New datasets replace none.

    Raises:
        ConfigError: a file of one of them is there, or one has no name; names it.
    """
    for prefix in prefixes:
        check_output_prefix(prefix, example="whole")
        for suffix in SUFFIXES:
            if Path(f"{prefix}{suffix}").exists():
                raise ConfigError(
                    f"{prefix}{suffix} is there already; give another --output-prefix or move it away"
                )


def _files(prefix: str) -> tuple[str, str]:
    """What two names of one dataset have in common: the files that they lead to."""
    return os.path.realpath(f"{prefix}.bin"), os.path.realpath(f"{prefix}.idx")


def _of_entry(entry: str) -> tuple[list[str], str]:
    """Prefixes, and the suffix if the entry is one file of a dataset."""
    # An .idx is what makes a dataset; a .bin alone is half a one.
    for sign in (".idx", ".bin"):
        if Path(f"{entry}{sign}").exists():
            return [entry], ""
        for suffix in SUFFIXES:
            prefix = entry.removesuffix(suffix)
            if prefix != entry and Path(f"{prefix}{sign}").exists():
                return [prefix], suffix
    if Path(entry).is_dir():
        return _in_folder(Path(entry)), ""
    raise ConfigError(
        f"{entry}: neither {entry}.idx nor a folder of datasets is there; give a path without .bin"
    )


def _in_folder(folder: Path) -> list[str]:
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; give a folder that can be") from None
    stems = sorted({name[:-4] for name in names if name.endswith((".bin", ".idx"))} - {""})
    if not stems:
        raise ConfigError(f"{folder} holds no dataset, a pair of .bin and .idx; give the folder that does")
    return [str(folder / stem) for stem in stems]

"""Reading input files: regular files only (no pipe, no device), and YAML without surprises."""

import difflib
import errno
import os
import re
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from megalite.config.errors import Problems


def open_regular(path: str | Path) -> BinaryIO:
    """The file, opened for reading without a buffer.

    Raises:
        OSError: it cannot be opened, or is no regular file: to open a pipe would wait for its writer for ever, and
            /dev/zero has no end.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or device, not a file", str(path))
    return os.fdopen(number, "rb", buffering=0)


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The whole of a text file.

    Raises:
        OSError: as `open_regular`.
        UnicodeDecodeError: it is not of that encoding.
    """
    with open_regular(path) as file:
        return file.read().decode(encoding, errors)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML's last one would win without a word), and YAML 1.1's odd numbers.

    `1:30:00` is no 5400 and `010` no 8: what is not a plain number stays text, which a setting that wants a number then
    refuses by what is written in the file. So does an integer of more digits than any setting takes.
    """

    problems: Problems
    """Gets keys that are given twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as PyYAML declares it
        first: [(tag, form) for tag, form in rules if tag not in (_INT, _FLOAT)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            # A merge (<<) may stand beside others; what it brings gives way to the mapping's own keys.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            # As Python has it: 1.0 and 1 are one key. A list or mapping is no key, as construct_mapping says below.
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue
            if key in lines:
                on = f"lines {lines[key]} and {line}" if lines[key] != line else f"line {line}"
                self.problems.add(f"{key} is given twice, on {on}; keep one of them", str(key).replace("-", "_"))
            lines[key] = line
        return super().construct_mapping(node, deep)


_DIGITS = list("0123456789")
UniqueKeyLoader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,30}|0x[0-9a-fA-F]{1,24})\Z"), ["-", "+", *_DIGITS]
)
UniqueKeyLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    ["-", "+", ".", *_DIGITS],
)


def load_yaml(text: str, problems: Problems) -> Any:
    """What YAML text holds; keys that are given twice are problems.

    Raises:
        yaml.YAMLError, RecursionError: it is not YAML, or nested too deeply.
    """
    loader = UniqueKeyLoader(text)
    loader.problems = problems
    try:
        return loader.get_single_data()
    except (ValueError, LookupError, AttributeError) as error:
        # PyYAML's own, for a tag or a date with a value that does not fit.
        raise yaml.YAMLError(f"a value is not of the type that it is written as: {error}") from None
    finally:
        loader.dispose()


def near_files(path: Path) -> str:
    """`: did you mean x?` for files of similar name in the same folder."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return f": there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f": did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""

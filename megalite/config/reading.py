"""Read input files: regular files only (no pipe, no device), strict YAML, and dataclasses from it."""

import dataclasses
import difflib
import errno
import io
import json
import math
import os
import stat
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megalite.config.errors import ConfigError, Problems, nearest, raise_at_end, shortened
from megalite.config.registry import imported

T = TypeVar("T")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
OR_ZERO = {"least": 0.0}  # metadata of a field that may be 0; others must be above it
AT_LEAST_ONE = {"least": 1.0}  # metadata of a field that must be at least 1
FRACTION = {"most": 1.0}  # metadata of a field that is a fraction: above 0, at most 1


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for unbuffered reading. Raises OSError: it cannot be opened or is not a regular file. Opening a pipe
    would wait for its writer forever, and /dev/zero has no end."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or device, not a file", str(path))
    return os.fdopen(number, "rb", buffering=0)


class Span(io.RawIOBase):
    """The bytes [start, stop) of an open file, as a file; closing it closes the open file too."""

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        self._file, self._start, self._length, self._place = file, start, stop - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), max(0, self._length - self._place))
        self._file.seek(self._start + self._place)
        count = self._file.readinto(memoryview(buffer)[:wanted])  # type: ignore[attr-defined]
        self._place += count
        return int(count)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read a text file. Raises OSError: see `open_regular`. Raises UnicodeDecodeError: it has another encoding."""
    with open_regular(path) as file:
        return file.read().decode(encoding, errors)


def read_input(path: str | Path, what: str) -> str:
    """Read a text file that the user named; `what` is its kind in messages. Raises ConfigError: it cannot be read."""
    path = Path(path)
    try:
        return read_text(path, "utf-8-sig")  # spreadsheets save a BOM
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist{_near(path)}") from None
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} cannot be read: it is not UTF-8 text") from None


def _near(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == path.suffix]
    except OSError:
        return f": there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f": did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""


def read_json(path: str | Path, what: str, example: str) -> Any:
    """Read a JSON file that the user named; `what` names its kind in messages. Raises ConfigError: it cannot be read,
    is not JSON, or has a duplicate key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:  # json.loads would silently keep the last one
            if key in found:
                raise ConfigError(f"{what} {path}: {key} is given twice; keep one of them")
            found[key] = value
        return found

    try:
        return json.loads(read_input(path, what), object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}; write e.g. {example}") from None


def load_mapping(text: str, source: str, example: str, problems: Problems | None = None) -> dict[Any, Any]:
    """Parse a YAML mapping; `problems` collects duplicate keys (default: raised). Raises ConfigError: not YAML, nested
    too deeply, or not a mapping; the message starts with `source`."""
    twice = Problems()
    tree = imported("megalite.config.yaml_text:tree_of")(text, source, twice)
    with raise_at_end(problems) as found:
        for problem in twice.found:
            found.add(f"{source}: {problem}", *twice.wrong)
    if not isinstance(tree, dict):
        found_instead = "nothing" if tree is None else shortened(tree)
        raise ConfigError(f"{source} must hold `key: value` lines such as `{example}`, found {found_instead}")
    return tree


def read_yaml(path: Path, *, kind: str) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises ConfigError: see `load_mapping` and `read_input`."""
    return load_mapping(read_input(path, f"{kind} file"), f"{kind} file {path}", f"name: my-{kind}")


def find_file(name_or_path: str, folder: Path, *, kind: str) -> Path:
    """Return the file of a known name, or the path itself if it ends in .yaml or .yml or exists. Raises ConfigError:
    neither; the nearest names are listed."""
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name_or_path in names:
        return folder / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{kind} file {path} does not exist{_near(path)}")
    raise ConfigError(
        f"unknown {kind} {name_or_path}{nearest(name_or_path, names)} (there are {', '.join(names)}, or give the path "
        f"of a YAML file)"
    )


def build(cls: type[T], tree: Any, where: str) -> T:
    """Build a dataclass from a mapping; nested dataclasses are mappings too, and a field with `read` in its metadata is
    parsed by that function of (value, where). `where` starts messages: the file and the section in it. Raises
    ConfigError: a key is unknown or missing, or a value has another type, is not finite or is out of range."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} takes `key: value` lines, got {shortened(tree)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key}{nearest(str(key), fields)} (keys are {', '.join(fields)})")
    types = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _value(types[name], tree[name], f"{where}: {name}", field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            # Examples for floats: a fraction; seconds, which may be 0; bytes or operations per second.
            number = "0.8" if "most" in field.metadata else "1.0e-6" if "least" in field.metadata else "1.0e9"
            examples = {int: "8", float: number, bool: "true", str: "some text"}
            example = field.metadata.get("example", examples.get(types[name], "{...}"))
            raise ConfigError(f"{where}: {name} is missing; add `{name}: {example}`")
    return cls(**values)


def _value(kind: Any, value: Any, where: str, metadata: Mapping[str, Any]) -> Any:
    if "read" in metadata:
        return metadata["read"](value, where)
    if isinstance(kind, types.UnionType):
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    if typing.get_origin(kind) is tuple:  # one value, or a list of them
        values = value if isinstance(value, list) else [value]
        return tuple(_value(typing.get_args(kind)[0], each, where, metadata) for each in values)
    if kind is Path:
        return Path(_value(str, value, where, metadata))
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if typing.get_origin(kind) is Mapping:
        return _mapping(typing.get_args(kind)[1], value, where, metadata)
    if kind is str and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{where} takes text, got {shortened(value)}; write it in quotes")
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{where} takes true or false, got {shortened(value)}")
    return value if kind in (str, bool) else number(kind, value, where, metadata)


def _mapping(kind: Any, value: Any, where: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} takes `name: value` lines, got {shortened(value)}")
    known = metadata.get("keys")
    for key in value:
        if not isinstance(key, str) or (known is not None and key not in known):
            names = f"{nearest(str(key), known)} (there are {', '.join(known)})" if known else ""
            raise ConfigError(f"{where}: unknown name {key}{names}")
    if known is not None and not value:
        raise ConfigError(f"{where} is empty; give at least one of {', '.join(known)}")
    return {key: _value(kind, inner, f"{where}.{key}", metadata) for key, inner in value.items()}


def number(kind: type, value: Any, where: str, metadata: Mapping[str, Any]) -> int | float:
    """Parse a number within the bounds of a field's metadata, also from text, since YAML reads 1e9 as text and only
    1.0e+9 as a number."""
    found = value
    if isinstance(value, str):
        try:
            found = float(value)
        except ValueError:
            found = None
    # An integer may be too large for a float.
    finite = isinstance(found, int | float) and abs(found) <= sys.float_info.max
    whole = isinstance(found, int) or (finite and found % 1 == 0)
    if isinstance(found, bool) or not isinstance(found, int | float) or (kind is int and not whole):
        wanted = "a whole number such as 8" if kind is int else "a number such as 1.0e9"
        raise ConfigError(f"{where} takes {wanted}, got {shortened(value)}")
    least, most = metadata.get("least"), metadata.get("most", math.inf)
    if not finite or (found <= 0 if least is None else found < least):
        wanted = "above 0" if least is None else f"{least:g} or more"
        raise ConfigError(f"{where} is {shortened(value)}; it must be {wanted} and finite")
    if found > most:
        raise ConfigError(f"{where} is {shortened(value)}; it is at most {most:g}")
    return kind(found)


def as_yaml(tree: Any, **style: Any) -> str:
    """Dump plain data as YAML, in its order."""
    return imported("yaml:safe_dump")(tree, sort_keys=False, allow_unicode=True, **style)


def write_yaml(value: Any, path: str | Path, *, header: str = "") -> None:
    """Write a dataclass to a file that `build` reads back equal; `header` becomes comment lines at the top. Raises
    ConfigError: the file cannot be written."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    write_text(path, comment + as_yaml(plain(value), width=110))


def write_text(path: str | Path, text: str) -> None:
    """Write a file that the user named. Raises ConfigError: it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a path in a folder that exists") from None


def plain(value: Any) -> Any:
    """Convert dataclasses (without fields that are None) and mappings to dicts, and numbers to Python's types."""
    if dataclasses.is_dataclass(value):
        return {name: plain(found) for name, found in vars(value).items() if found is not None}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, bool | str):
        return value
    return int(value) if isinstance(value, int) else float(value)

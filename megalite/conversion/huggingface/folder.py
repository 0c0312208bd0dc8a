"""Files of a folder that somebody else has made: none leads out of the folder, and text is read as text alone."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.conversion.weights import ConversionError

MAX_JSON = 256 << 20
"""Bytes of a JSON file that is read: the largest tokenizers take a tenth of it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}")


def find_file(folder: Path, name: str) -> Path | None:
    """Where the content of a file of `folder` is; None if there is none of that name.

    A link may stay inside the folder. In Hugging Face's cache, `.../snapshots/REVISION/`, files are links to
    `.../blobs/`: those are followed too, and no others.

    Raises:
        ConversionError: not the plain name of a file, a link that leads elsewhere or nowhere, not a plain file.
    """
    if not _NAME.fullmatch(name):
        raise ConversionError(f"{folder}: {name[:200]!r} is not the name of a file in this folder")
    path = folder / name
    if not path.is_symlink() and not path.exists():
        return None
    try:
        root, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ConversionError(f"{path}: a link that leads nowhere: {error}") from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ConversionError(
            f"{path} is a link to {target}, outside of the folder; put the file itself there if you trust it"
        )
    if not target.is_file():
        raise ConversionError(f"{path}: not a plain file")
    return target


def read_bytes(folder: Path, name: str) -> bytes | None:
    """The content of a file of `folder`, or None if there is none.

    Raises:
        ConversionError: as `find_file`, or it is too large or cannot be read.
    """
    path = find_file(folder, name)
    if path is None:
        return None
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ConversionError(f"{folder / name}: {size} bytes; more than {MAX_JSON} are not read")
        return path.read_bytes()
    except OSError as error:
        raise ConversionError(f"{folder / name}: {error.strerror}") from None


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of `folder`, or None if there is no such file.

    Raises:
        ConversionError: as `read_bytes`, or it is not a JSON object, or has a key twice.
    """
    content = read_bytes(folder, name)
    return None if content is None else parse_json(content, folder / name)


def parse_json(content: bytes, where: Path | str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConversionError: naming `where`.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise ConversionError(f"{where}: the key {twice[:100]!r} is there twice")
        return found

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=without_duplicates)
    except ConversionError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{where}: not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{where}: not a JSON object")
    return value


def refuse_code(values: Mapping[str, Any], where: Path | str) -> None:
    """Nothing from a folder is ever run, so a file that asks for it describes something else than is read here.

    Raises:
        ConversionError: it names Python code of its own.
    """
    for key in ("auto_map", "trust_remote_code", "custom_pipelines"):
        if values.get(key):
            raise ConversionError(
                f"{where}: {key} names code of the folder's own, which is never run; convert a folder of a model that "
                f"transformers has itself, or remove {key} if it is one"
            )

"""Prompts out of files: a line of text each, or a key of a line of JSON."""

import sys
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.data.inputs.documents import BadDocument, parse_line, plain_text
from megalite.data.inputs.opening import STDIN, open_regular, unreadable

_JSON_SUFFIXES = (".jsonl", ".ndjson")
_MAX_BYTES = 1 << 30


def read_prompts(path: str, key: str | None) -> list[str]:
    """The prompts of a file: of a .jsonl the texts under `key`, of any other, and of standard input, its lines.

    Blank lines are left out.

    Args:
        path: `-` is standard input.
        key: None: `prompt`.

    Raises:
        ConfigError: the file cannot be read, has a line that is no prompt or none at all, or `key` has no effect.
    """
    is_json = Path(path).suffix.lower() in _JSON_SUFFIXES
    if key is not None and not is_json:
        raise ConfigError(
            f"--prompt-key {key} has no effect on {path}, whose lines are the prompts; leave it out, or give a .jsonl file"
        )
    prompts = []
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts += parse_line(line, [key or "prompt"]) if is_json else [plain_text(line.rstrip(b"\r"))]
        except BadDocument as error:
            raise ConfigError(f"{path}:{number}: {error}; mend the line or leave it out") from None
    if not prompts:
        raise ConfigError(f"{path} has no prompts; write one on each line")
    return prompts


def _content(path: str) -> bytes:
    if path == STDIN:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError(
                f"--prompts {STDIN}: standard input is a terminal; pipe prompts into the command"
            )
        return sys.stdin.buffer.read()
    with open_regular(path) as file:
        try:
            content = file.read(_MAX_BYTES + 1) or b""
        except OSError as error:
            raise unreadable(path, error) from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES:,} bytes; give prompts, not a corpus")
    return content.removeprefix(b"\xef\xbb\xbf")

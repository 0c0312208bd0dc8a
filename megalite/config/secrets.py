"""What must not stand in a file that a run leaves behind: credentials in addresses, values of secret names.

Nothing here ever writes the environment out. What is redacted is what a user may have put into a setting: a path or a
name that is an address with a password in it.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_NAMES = frozenset(
    {"key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials"}
)
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# The last @ before a slash ends the credentials: a password may hold one. As a path an address has one slash.
_ADDRESS = re.compile(r"(?<=:/)(/?)[^\s/'\"]*(?=@)")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_-]*)=(?:'[^']*'|\"[^\"]*\"|[^\s&'\",;]+)", re.ASCII)


def is_secret_name(name: str) -> bool:
    """`WANDB_API_KEY`, `hf-token`, `clientSecret`; not `tokenizer_model`, `tokens_per_second` or `eod_token_id`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and words[-1] in _NAMES


def redact_text(text: str) -> str:
    """Text without the credentials of addresses (`s3://user:pass@host`) and without the values of secret names
    (`?token=...`, `API_KEY=...`)."""

    def assigned(found: re.Match[str]) -> str:
        # A folder may well be called key=1.
        if not is_secret_name(found["name"]) or found["name"].lower() == "key":
            return found[0]
        return f"{found['name']}={HIDDEN}"

    return _ASSIGNED.sub(assigned, _ADDRESS.sub(rf"\1{HIDDEN}", text))


def redacted(value: Any) -> Any:
    """A tree of mappings and lists with every text redacted, and the text of every secret name hidden."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if isinstance(inner, str) and isinstance(name, str) and is_secret_name(name)
            else redacted(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value

"""`option()`: a dataclass field that also knows how it is spelled on the command line."""

import dataclasses
from typing import Any


def option(default: Any, *, flags: tuple[str, ...] = (), choices: tuple[str, ...] = (), basic: bool = False) -> Any:
    """Declare one setting of a config dataclass.

    The attribute docstring under the field is its help text; the field's name, with dashes, is its flag.

    Args:
        default: value when no preset, file or flag sets it. A list default is copied for each instance.
        flags: further spellings (`("--tensor-model-parallel-size",)`); Megatron-LM's long names go here.
        choices: the legal values, where they are few.
        basic: shown by `--help`; the others only by `--help-all`.
    """
    metadata = {"flags": flags, "choices": choices, "basic": basic}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)

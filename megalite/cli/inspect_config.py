"""The part of a checkpoint's config that belongs to the run that wrote it, rather than to what was trained."""

import json
from collections.abc import Mapping
from typing import Any

OWN = {
    "checkpoint": ("save", "load", "ckpt_step", "fresh_if_missing", "finetune"),
    "logging": ("run_dir", "tensorboard_dir"),
}
"""Section -> settings that say where a run lives and what it starts from: another run that took them over would write
into the same folders, and remove checkpoints there."""

_PLACES = (
    "config.checkpoint",
    "config.logging",
    "config.data.tokenizer_model",
    "config.data.vocab_file",
    "config.data.merge_file",
)


def for_another_run(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config without the `OWN` settings, and those of them that were set, by name."""
    kept: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    for section, values in config.items():
        own = OWN.get(section, ())
        if not isinstance(values, dict):
            kept[section] = values
            continue
        kept[section] = {name: value for name, value in values.items() if name not in own}
        left_out |= {name: value for name, value in values.items() if name in own and value not in (None, False)}
    return kept, left_out


def head_comment(path: str, left_out: Mapping[str, Any]) -> str:
    """One line of YAML that says whose config it is and what it lacks."""
    values = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in left_out.items())
    names = ", ".join(name for own in OWN.values() for name in own)
    # In quotes, so that a line break in a name does not end the comment.
    return (
        f"# {json.dumps(path, ensure_ascii=False)}, without its run's own folders and start ({names}); "
        f"it had {values or 'none of them set'}"
    )


def only_a_place(field: str) -> bool:
    """Whether a field of the manifest, such as `config.logging.run_dir`, says where and how a run was kept, which does
    not make its checkpoint another one: two runs can hardly have the same."""
    return any(field == place or field.startswith(f"{place}.") for place in _PLACES)

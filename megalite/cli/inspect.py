"""`megalite inspect`: what is in a checkpoint, whether it is sound, and how two of them differ."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megalite.checkpoint.survey import CheckpointRemoved, Surveyed, noticing_removal, survey, verify
from megalite.cli.command import fetched
from megalite.cli.display import working
from megalite.cli.failures import BAD_INPUT
from megalite.cli.inspect_text import (
    format_checkpoint,
    format_passed_over,
    format_state,
    format_statistics,
    format_table,
    in_order,
)
from megalite.cli.model_commands import INSPECT
from megalite.cli.output import json_text, show, tell, visible
from megalite.config.byte_size import format_bytes
from megalite.config.errors import CheckpointError, ConfigError

OK, DAMAGED, DIFFERENT = 0, 1, 1
OWN = {
    "checkpoint": ("save", "load", "ckpt_step", "fresh_if_missing", "finetune"),
    "logging": ("run_dir", "tensorboard_dir"),
}
"""Section -> settings that say where a run lives and what it starts from: another run that took them over would write
into the same folders, and remove checkpoints there."""

main = INSPECT


def run(flags: Namespace) -> int:
    if (flags.checkpoint is None) == (flags.diff is None):
        raise ConfigError("give one checkpoint to look at, or two behind --diff")
    if flags.diff is None:
        flags.checkpoint = fetched(flags.checkpoint, flags.step)
    else:
        flags.diff = [fetched(place, flags.step) for place in flags.diff]
    look = _diff if flags.diff is not None else _config if flags.config else _inspect
    try:
        return look(flags)
    except RecursionError:
        tell("error: lists nested too deeply in the manifest's config, counters or layout")
        return BAD_INPUT


def _inspect(flags: Namespace) -> int:
    surveyed, shown = _newest_sound(flags.checkpoint, flags)
    rows: dict[str, dict[str, Any]] | None = None
    with noticing_removal(shown):
        if flags.tensors is not None and shown.sound:
            # Reading tensors takes torch, and to import it takes longer than all the rest.
            from megalite.cli.inspect_tensors import tensor_statistics

            rows = tensor_statistics(shown, flags.tensors)
        if flags.json:
            show(json_text(_data(surveyed, shown, rows)))
        else:
            parts = [format_table(surveyed)] if len(surveyed) > 1 else []
            parts.append(f"{format_checkpoint(shown)}\n{format_state(shown)}")
            parts += [] if rows is None else [format_statistics(rows)]
            parts.append(format_passed_over(surveyed, shown))
            show(visible("\n\n".join(part for part in parts if part)))
    return DAMAGED if any(found.faults for found in surveyed) else OK


def _config(flags: Namespace) -> int:
    """The manifest carries its sha256: its config is right even where other files are not."""
    surveyed = survey(flags.checkpoint, flags.step)
    found = next((found for found in surveyed if found.manifest is not None), None)
    if found is None or found.manifest is None:
        if surveyed[0].gone:
            raise CheckpointRemoved(surveyed[0].path)
        raise CheckpointError(f"{flags.checkpoint}: {surveyed[0].path.name} is {surveyed[0].state}")
    config, left_out = _for_another_run(in_order(found.manifest.config))
    if flags.json:
        show(json_text(config))
        return OK
    values = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in left_out.items())
    names = ", ".join(name for own in OWN.values() for name in own)
    # The path in quotes, so that a line break in it does not end the comment.
    head = (
        f"# {json.dumps(str(found.path), ensure_ascii=False)}, without its run's own folders and start ({names}); "
        f"it had {values or 'none of them set'}"
    )
    # YAML escapes whatever a terminal would not show as it is.
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=False).removesuffix("\n")
    show(f"{visible(head)}\n{text}")
    return OK


def _for_another_run(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config without the `OWN` settings, and those of them that were set, by name."""
    kept: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    for section, values in config.items():
        own = OWN.get(section, ())
        kept[section] = values
        if isinstance(values, dict):
            kept[section] = {name: value for name, value in values.items() if name not in own}
            left_out |= {name: value for name, value in values.items() if name in own and value not in (None, False)}
    return kept, left_out


def _diff(flags: Namespace) -> int:
    sides: list[Surveyed] = []
    passed_over: list[Surveyed] = []
    for path in flags.diff:
        surveyed, found = _newest_sound(path, flags)
        if not found.sound:
            # Damage that only hashing shows leaves tensors that can be read.
            hashed = found.manifest is not None and not flags.no_verify
            remedy = "; --no-verify compares it all the same" if hashed and survey(found.path)[0].sound else ""
            raise CheckpointError(f"{found.path} is {found.state}{remedy}")
        passed_over += surveyed[: surveyed.index(found)]
        sides.append(found)
    from megalite.cli.inspect_tensors import CheckpointDiff

    with noticing_removal(*sides):
        difference = CheckpointDiff(*sides, pattern=flags.tensors, trust_hashes=not flags.no_verify)
    for passed in passed_over:
        tell(visible(f"{passed.path} is passed over: {passed.state}"))
    show(json_text(difference.data()) if flags.json else visible(difference.text()))
    return OK if difference.same else DIFFERENT


def _newest_sound(path: Path, flags: Namespace) -> tuple[list[Surveyed], Surveyed]:
    """All that is there, and the one to show: the newest that verifies, else the newest that says anything."""
    surveyed = survey(path, flags.step)
    for index, found in enumerate(surveyed):
        if not flags.no_verify:
            with working(f"verifying {found.path.name}") as say:
                found = surveyed[index] = verify(found, partial(_progress, found, say))
        if found.sound:
            return surveyed, found
    for found in surveyed:
        if found.gone:
            raise CheckpointRemoved(found.path)
    return surveyed, next((found for found in surveyed if found.manifest is not None), surveyed[0])


def _progress(found: Surveyed, say: Callable[[str], None], files: int, done: int) -> None:
    assert found.manifest is not None and found.bytes is not None
    total = len(found.manifest.files)
    say(f"verifying {found.path.name}: {files} of {total} files, {format_bytes(done)} of {format_bytes(found.bytes)}")


def _data(surveyed: Sequence[Surveyed], shown: Surveyed, rows: dict[str, dict[str, Any]] | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "path": str(shown.path),
        "state": shown.state,
        "faults": list(shown.faults),
        "checkpoints": [
            {"name": found.path.name, "step": found.step, "bytes": found.bytes, "state": found.state}
            for found in surveyed
        ],
    }
    manifest = shown.manifest
    if manifest is not None:
        same = ("step", "megalite_version", "code", "layout", "counters", "tokenizer", "config")
        data |= {name: getattr(manifest, name) for name in same}
        data |= {
            "bytes": shown.bytes,
            "files": {name: vars(entry) for name, entry in manifest.files.items()},
            "tensors": {
                key: {"dtype": entry.dtype, "shape": list(entry.global_shape), "parts": len(entry.parts)}
                for key, entry in manifest.tensors.items()
            },
        }
    if rows is not None:
        data["statistics"] = rows
    return data


if __name__ == "__main__":
    sys.exit(main())

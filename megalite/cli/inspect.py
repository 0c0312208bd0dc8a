"""`megalite inspect`: show and verify a checkpoint, or compare two."""

import json
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megalite.checkpoint.folders import CheckpointRemoved, FoundCheckpoint, raise_if_removed, survey, unlisted, verify
from megalite.checkpoint.manifest import ITEM_SIZES, MANIFEST_NAME, Manifest, TensorEntry
from megalite.cli.command import fetch
from megalite.cli.display import folded, short, table, working
from megalite.cli.output import json_text, notify, show, visible
from megalite.config.compute import kernels_in_words
from megalite.config.errors import BAD_INPUT, CheckpointError, ConfigError
from megalite.config.numbers import format_bytes
from megalite.config.registry import imported
from megalite.config.run import RunConfig

OK, DAMAGED, DIFFERENT = 0, 1, 1
RUN_SETTINGS = {
    "checkpoint": ("save", "load", "ckpt_step", "fresh_if_missing", "finetune"),
    "logging": ("run_dir", "tensorboard_dir"),
}
"""Section -> settings with the folders and the start of a run. Another run with these values would write into the same
folders and remove checkpoints there."""


def run(flags: Namespace) -> int:
    if (flags.checkpoint is None) == (flags.diff is None):
        raise ConfigError("give one checkpoint to inspect, or two after --diff")
    if flags.diff is None:
        flags.checkpoint = fetch(flags.checkpoint, flags.step)
    else:
        flags.diff = [fetch(checkpoint, flags.step) for checkpoint in flags.diff]
    command = _diff if flags.diff is not None else _config if flags.config else _inspect
    try:
        return command(flags)
    except RecursionError:
        notify("error: lists nested too deeply in the manifest's config, counters or layout")
        return BAD_INPUT


def _inspect(flags: Namespace) -> int:
    surveyed, shown = _newest_sound(flags.checkpoint, flags)
    rows: dict[str, dict[str, Any]] | None = None
    with raise_if_removed(shown):
        if flags.tensors is not None and shown.sound:
            # Imports torch, which takes longer than all the rest.
            rows = imported("megalite.cli.inspect_tensors:tensor_statistics")(shown, flags.tensors)
        if flags.json:
            show(json_text(_data(surveyed, shown, rows)))
        else:
            parts = [_table_of(surveyed)] if len(surveyed) > 1 else []
            parts.append(f"{_described(shown)}\n{_state(shown)}")
            parts += [] if rows is None else [_statistics(rows)]
            parts.append(_damaged(surveyed, shown))
            show(visible("\n\n".join(part for part in parts if part)))
    return DAMAGED if any(found.faults for found in surveyed) else OK


def _config(flags: Namespace) -> int:
    """Print the config of the manifest, which has a checksum: it is valid even if other files are damaged."""
    surveyed = survey(flags.checkpoint, flags.step)
    found = next((found for found in surveyed if found.manifest is not None), None)
    if found is None or found.manifest is None:
        if surveyed[0].removed:
            raise CheckpointRemoved(surveyed[0].path)
        raise CheckpointError(f"{flags.checkpoint}: {surveyed[0].path.name} is {surveyed[0].state}")
    config, removed = _for_another_run(_in_order(found.manifest.config))
    if flags.json:
        show(json_text(config))
        return OK
    values = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in removed.items())
    names = ", ".join(name for settings in RUN_SETTINGS.values() for name in settings)
    # json quotes the path, so that a line break in it does not end the comment.
    head = (
        f"# {json.dumps(str(found.path), ensure_ascii=False)}, without the folders and the start of its run ({names}); "
        f"it had {values or 'none of them set'}"
    )
    # YAML escapes control characters.
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=False).removesuffix("\n")
    show(f"{visible(head)}\n{text}")
    return OK


def _for_another_run(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config without `RUN_SETTINGS`, and the values of those that were set."""
    kept: dict[str, Any] = {}
    removed: dict[str, Any] = {}
    for section, values in config.items():
        names = RUN_SETTINGS.get(section, ())
        kept[section] = values
        if isinstance(values, dict):
            kept[section] = {name: value for name, value in values.items() if name not in names}
            removed |= {name: value for name, value in values.items() if name in names and value not in (None, False)}
    return kept, removed


def _diff(flags: Namespace) -> int:
    sides: list[FoundCheckpoint] = []
    skipped: list[FoundCheckpoint] = []
    for path in flags.diff:
        surveyed, found = _newest_sound(path, flags)
        if not found.sound:
            # If only the hashes are wrong the tensors can still be read.
            hashed = found.manifest is not None and not flags.no_verify
            remedy = "; --no-verify compares it anyway" if hashed and survey(found.path)[0].sound else ""
            raise CheckpointError(f"{found.path} is {found.state}{remedy}")
        skipped += surveyed[: surveyed.index(found)]
        sides.append(found)
    from megalite.cli.inspect_tensors import CheckpointDiff

    with raise_if_removed(*sides):
        difference = CheckpointDiff(*sides, pattern=flags.tensors, trust_hashes=not flags.no_verify)
    for found in skipped:
        notify(visible(f"{found.path} is passed over: {found.state}"))
    show(json_text(difference.data()) if flags.json else visible(difference.text()))
    return OK if difference.same else DIFFERENT


def _newest_sound(path: Path, flags: Namespace) -> tuple[list[FoundCheckpoint], FoundCheckpoint]:
    """Return all checkpoints, and the one to show: the newest sound one, else the newest with a readable manifest."""
    surveyed = survey(path, flags.step)
    for index, found in enumerate(surveyed):
        if not flags.no_verify:
            with working(f"verifying {found.path.name}") as update:
                found = surveyed[index] = verify(found, partial(_progress, found, update))
        if found.sound:
            return surveyed, found
    for found in surveyed:
        if found.removed:
            raise CheckpointRemoved(found.path)
    return surveyed, next((found for found in surveyed if found.manifest is not None), surveyed[0])


def _progress(found: FoundCheckpoint, update: Callable[[str], None], files: int, done: int) -> None:
    assert found.manifest is not None and found.bytes is not None
    total, size = len(found.manifest.files), format_bytes(found.bytes)
    update(f"verifying {found.path.name}: {files} of {total} files, {format_bytes(done)} of {size}")


def _data(
    surveyed: Sequence[FoundCheckpoint], shown: FoundCheckpoint, rows: dict[str, dict[str, Any]] | None
) -> dict[str, Any]:
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


_DIGITS = re.compile(r"\d+")
_MAX_FILES = 16  # more files are grouped by name


def _table_of(surveyed: Sequence[FoundCheckpoint]) -> str:
    rows = [["checkpoint", "files", "size", "state"]]
    for found in surveyed:
        files = "-" if found.manifest is None else str(len(found.manifest.files))
        rows.append([found.path.name, files, "-" if found.bytes is None else format_bytes(found.bytes), found.state])
    lines = table(rows, right={1, 2})
    if any(found.state == "complete" for found in surveyed):
        lines.append("complete: all files exist with the right length; --step N verifies their sha256 too")
    return "\n".join(lines)


def _described(found: FoundCheckpoint) -> str:
    """Return the contents of a checkpoint in about thirty lines."""
    manifest = found.manifest
    if manifest is None:
        return f"checkpoint   {found.path}"
    axes = {axis: manifest.layout[axis] for axis in ("tp", "pp", "dp", "cp", "ep") if axis in manifest.layout}
    rows = [
        ("checkpoint", str(found.path)),
        ("step", f"{manifest.step}, {_origin(found, manifest)}"),
        ("layout", _pairs(axes | manifest.layout) or "unknown"),
        ("counters", _pairs(manifest.counters) or "none"),
        ("tokenizer", "none" if manifest.tokenizer is None else f"sha256 {manifest.tokenizer}"),
    ]
    extra = unlisted(found)
    if extra:
        rows.append(("other files", f"{', '.join(extra[:5])}{', ...' if len(extra) > 5 else ''} (not read)"))
    lines = [f"{name:<12} {value}" for name, value in rows]
    return "\n".join([*lines, *_files(manifest), *_weights(manifest), *_states(manifest), *_settings(manifest.config)])


def _origin(found: FoundCheckpoint, manifest: Manifest) -> str:
    written = datetime.fromtimestamp((found.path / MANIFEST_NAME).stat().st_mtime)
    special = ("megalite", "kernels")
    code = {name: value for name, value in manifest.code.items() if name not in special and value is not None}
    kernels = manifest.code.get("kernels")
    if isinstance(kernels, dict) and kernels:
        code["kernels"] = kernels_in_words({name: str(backend) for name, backend in kernels.items()})
    rest = f" ({_pairs(code)})" if code else ""
    return f"by megalite {manifest.megalite_version}{rest}, files of {written:%Y-%m-%d %H:%M:%S}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in values.items())


def _files(manifest: Manifest) -> list[str]:
    lengths = {name: entry.length for name, entry in sorted(manifest.files.items())}
    rows = [[name, format_bytes(length)] for name, length in lengths.items()]
    if len(rows) > _MAX_FILES:
        rows = []
        for pattern, names in folded(lengths, _DIGITS):
            sizes = [lengths[name] for name in names]
            least, most, total = map(format_bytes, (min(sizes), max(sizes), sum(sizes)))
            each = f"x{len(names)}, {least} to {most} each, {total} in all"
            rows.append([pattern, each if len(names) > 1 else total])
    return [f"files        {len(lengths)}, {format_bytes(sum(lengths.values()))}", *table(rows, indent=2)]


def _weights(manifest: Manifest) -> list[str]:
    weights = {entry.name: entry for key, entry in manifest.tensors.items() if key.startswith("weight:")}
    if not weights:
        return ["weights      none"]
    elements = sum(math.prod(entry.global_shape) for entry in weights.values())
    head = f"weights      {len(weights)} tensors, {elements:,} elements, {format_bytes(_bytes(weights.values()))}"
    return [head, *table(_tensor_rows(weights), indent=2)]


def _tensor_rows(entries: Mapping[str, TensorEntry]) -> list[list[str]]:
    """Return a row for each group of tensors that differ only in the numbers in their names."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in sorted(entries, key=_natural):
        groups.setdefault((entries[name].dtype, entries[name].global_shape), []).append(name)
    rows = []
    for (dtype, shape), names in groups.items():
        for pattern, members in folded(names):
            counts = sorted({len(entries[name].parts) for name in members})
            parts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            count = f"x{len(members)}" if len(members) > 1 else ""
            rows.append([pattern, str(list(shape)), dtype, count, "" if parts == "1" else f"in {parts} parts"])
    return sorted(rows, key=lambda row: _natural(row[0]))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders 10 after 9."""
    return [(int(word) if word.isdigit() else -1, word) for word in re.split(r"(\d+)", name)]


def _bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.global_shape) * ITEM_SIZES[entry.dtype] for entry in entries)


def _states(manifest: Manifest) -> list[str]:
    """Return the optimizer states; their tensors have the names and shapes of the weights."""
    states: dict[str, list[TensorEntry]] = {}
    for key, entry in manifest.tensors.items():
        group, _, _ = key.partition(":")
        if group != "weight":
            states.setdefault(group.removeprefix("optimizer."), []).append(entry)
    if not states:
        return ["optimizer    none"]
    rows = []
    for state, entries in sorted(states.items()):
        dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
        rows.append([state, f"{len(entries)} tensors", dtypes, format_bytes(_bytes(entries))])
    total = format_bytes(sum(map(_bytes, states.values())))
    return [f"optimizer    {len(states)} states, {total}", *table(rows, indent=2)]


def _settings(config: Mapping[str, Any]) -> list[str]:
    """Return the settings that are not at their defaults, one line per section."""
    defaults = _defaults()
    lines = ["config       settings that are not at their default (--json shows all)"]
    for section, values in _in_order(config).items():
        usual = defaults.get(section, {})
        changed = short(values)
        if isinstance(values, dict):
            changed = _pairs({name: each for name, each in values.items() if name not in usual or usual[name] != each})
        if changed:
            lines.append(f"  {section:<10} {changed}")
    return lines


def _in_order(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with sections and settings in the order of `RunConfig`; unknown ones last."""
    defaults = _defaults()

    def order(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name in known if name in values] + [name for name in values if name not in known]
        return {name: values[name] for name in names}

    return {
        section: order(values, defaults.get(section, {})) if isinstance(values, dict) else values
        for section, values in order(config, defaults).items()
    }


def _defaults() -> dict[str, Any]:
    """Return the default config with JSON types: lists instead of tuples."""
    return json.loads(json.dumps(asdict(RunConfig())))


def _state(found: FoundCheckpoint) -> str:
    """Return the result of the verification: sound, or the faults of each file."""
    if found.faults:
        return "\n".join(["damaged:", *(f"  {fault}" for fault in found.faults)])
    assert found.manifest is not None and found.bytes is not None
    files = f"{len(found.manifest.files)} files, {format_bytes(found.bytes)}"
    if found.verified:
        return f"verified     {files}: sha256 OK"
    return f"complete     {files}: all exist with the right length; not hashed"


def _damaged(surveyed: Sequence[FoundCheckpoint], shown: FoundCheckpoint) -> str:
    """Return a line for each damaged checkpoint except the one shown."""
    damaged = [found for found in surveyed if found.faults and found is not shown]
    return "\n".join(f"{found.path.name} is {found.state}; shown is {shown.path.name}" for found in damaged)


def _statistics(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of statistics. `rows`: tensor -> fields of `Statistics`."""
    lines = [["tensor", "shape", "dtype", "min", "max", "mean", "std", "NaN", "Inf"]]
    for name, row in rows.items():
        numbers = ["-" if row[field] is None else f"{row[field]:.5g}" for field in ("min", "max", "mean", "std")]
        lines.append([name, str(row["shape"]), row["dtype"], *numbers, f"{row['nan']:,}", f"{row['inf']:,}"])
    return "\n".join(table(lines, right=range(3, 9)))

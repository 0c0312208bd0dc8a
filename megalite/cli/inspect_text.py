"""Checkpoints as text: what one holds, a table of several, and statistics. No torch."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from megalite.checkpoint.manifest import ITEM_SIZES, MANIFEST_NAME, Manifest, TensorEntry
from megalite.checkpoint.survey import Surveyed, unlisted
from megalite.cli.display import folded, table
from megalite.config.byte_size import format_bytes
from megalite.config.compute import kernels_in_words
from megalite.config.run import RunConfig

_DIGITS = re.compile(r"\d+")
_MAX_FILES = 16  # files listed one by one


def format_table(surveyed: Sequence[Surveyed]) -> str:
    rows = [["checkpoint", "files", "size", "state"]]
    for found in surveyed:
        files = "-" if found.manifest is None else str(len(found.manifest.files))
        rows.append([found.path.name, files, "-" if found.bytes is None else format_bytes(found.bytes), found.state])
    lines = table(rows, right={1, 2})
    if any(found.state == "complete" for found in surveyed):
        lines.append("complete: all files are there and of the right length; --step N verifies their sha256 too")
    return "\n".join(lines)


def format_checkpoint(found: Surveyed) -> str:
    """All that a checkpoint says about itself, in some thirty lines."""
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
        rows.append(("also there", f"{', '.join(extra[:5])}{', ...' if len(extra) > 5 else ''} (not read)"))
    lines = [f"{name:<12} {value}" for name, value in rows]
    return "\n".join([*lines, *_files(manifest), *_weights(manifest), *_states(manifest), *_settings(manifest.config)])


def _origin(found: Surveyed, manifest: Manifest) -> str:
    written = datetime.fromtimestamp((found.path / MANIFEST_NAME).stat().st_mtime)
    apart = ("megalite", "kernels")
    code = {name: value for name, value in manifest.code.items() if name not in apart and value is not None}
    kernels = manifest.code.get("kernels")
    if isinstance(kernels, dict) and kernels:
        code["kernels"] = kernels_in_words({name: str(backend) for name, backend in kernels.items()})
    rest = f" ({_pairs(code)})" if code else ""
    return f"by megalite {manifest.megalite_version}{rest}, files of {written:%Y-%m-%d %H:%M:%S}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in values.items())


def short(value: Any) -> str:
    """A value as text, cut to 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    """Tensors that are alike but for the numbers in their names share a row."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in sorted(entries, key=_natural):
        alike.setdefault((entries[name].dtype, entries[name].global_shape), []).append(name)
    rows = []
    for (dtype, shape), names in alike.items():
        for pattern, members in folded(names):
            parts = sorted({len(entries[name].parts) for name in members})
            cut = f"{parts[0]}" if len(parts) == 1 else f"{parts[0]} to {parts[-1]}"
            count = f"x{len(members)}" if len(members) > 1 else ""
            rows.append([pattern, str(list(shape)), dtype, count, "" if cut == "1" else f"in {cut} parts"])
    return sorted(rows, key=lambda row: _natural(row[0]))


def _natural(name: str) -> list[tuple[int, str]]:
    """To sort 10 behind 9."""
    return [(int(word) if word.isdigit() else -1, word) for word in re.split(r"(\d+)", name)]


def _bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.global_shape) * ITEM_SIZES[entry.dtype] for entry in entries)


def _states(manifest: Manifest) -> list[str]:
    """The optimizer's states: their tensors are named and shaped as the weights."""
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
    """The settings that are not at their defaults, a line a section."""
    defaults = _defaults()
    lines = ["config       what is not at its default (--json shows all)"]
    for section, values in in_order(config).items():
        usual = defaults.get(section, {})
        changed = short(values)
        if isinstance(values, dict):
            changed = _pairs({name: each for name, each in values.items() if name not in usual or usual[name] != each})
        if changed:
            lines.append(f"  {section:<10} {changed}")
    return lines


def in_order(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with sections and settings in the order of the tables instead of the alphabet's; unknown ones last."""
    defaults = _defaults()

    def order(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name in known if name in values] + [name for name in values if name not in known]
        return {name: values[name] for name in names}

    return {
        section: order(values, defaults.get(section, {})) if isinstance(values, dict) else values
        for section, values in order(config, defaults).items()
    }


def _defaults() -> dict[str, Any]:
    """As JSON has them: lists for tuples."""
    defaults: dict[str, Any] = json.loads(json.dumps(asdict(RunConfig())))
    return defaults


def format_state(found: Surveyed) -> str:
    """The outcome: sound, or what is wrong with which file."""
    if found.faults:
        return "\n".join(["damaged:", *(f"  {fault}" for fault in found.faults)])
    assert found.manifest is not None and found.bytes is not None
    files = f"{len(found.manifest.files)} files, {format_bytes(found.bytes)}"
    if found.verified:
        return f"verified     {files}: sha256 OK"
    return f"complete     {files}: all there and of the right length; not hashed"


def format_passed_over(surveyed: Sequence[Surveyed], shown: Surveyed) -> str:
    """A line for each damaged checkpoint but the one shown; empty if there is none."""
    passed = [found for found in surveyed if found.faults and found is not shown]
    return "\n".join(f"{found.path.name} is {found.state}; shown is {shown.path.name}" for found in passed)


def format_statistics(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of statistics; `rows` by tensor, as `megalite.checkpoint.compare.Statistics` has them."""
    lines = [["tensor", "shape", "dtype", "min", "max", "mean", "std", "NaN", "Inf"]]
    for name, row in rows.items():
        numbers = ["-" if row[field] is None else f"{row[field]:.5g}" for field in ("min", "max", "mean", "std")]
        lines.append([name, str(row["shape"]), row["dtype"], *numbers, f"{row['nan']:,}", f"{row['inf']:,}"])
    return "\n".join(table(lines, right=range(3, 9)))

"""The report of one rank as text."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megalite.cli.dry_run_text import layer_range, memory_cells, rank_list, size, volume_line

_SHOWN_ACTIONS = 16
"""At the beginning of the list, and half as many at its end."""
_LINE = 110


def format_rank(report: dict[str, Any]) -> str:
    """The dict of `dry_run_rank.rank_report` in sections, for a terminal about 110 columns wide."""
    parts = [
        _place(report),
        _stages(report["stages"]),
        _parameters(report["parameters"]),
        _buckets(report["buckets"]),
        _memory(report["memory"]),
        _communication(report["communication"]),
        _actions(report),
    ]
    return "\n\n".join(part for part in parts if part)


def _place(report: dict[str, Any]) -> str:
    at = report["coordinate"]
    dense = ", ".join(f"{axis} {at[axis]}" for axis in ("tp", "cp", "dp", "pp"))
    experts = ", ".join(f"{axis} {at[axis]}" for axis in ("ep", "etp", "edp"))
    groups = report["groups"]
    apart = groups["ep"]["size"] > 1 or groups["expert-tp"]["ranks"] != groups["tp"]["ranks"]
    lines = [
        f"Rank {report['rank']} of {report['world_size']}: {dense}{f'; of the experts {experts}' if apart else ''}"
    ]
    for kind, group in groups.items():
        if group["size"] > 1:
            lines.append(f"  {kind:<18} {group['index']:>5} of {group['size']:<6} {rank_list(group['ranks'])}")
    alone = [kind for kind, group in groups.items() if group["size"] == 1]
    if alone:
        lines.append(f"  alone in: {', '.join(alone)}")
    return "\n".join(lines)


def _stages(stages: list[dict[str, Any]]) -> str:
    lines = ["Stages"]
    for row in stages:
        ends = [name for name in ("embedding", "head") if row[name]]
        layers = layer_range(row["first_layer"], row["last_layer"])
        lines.append(f"  chunk {row['chunk']}: stage {row['stage']:<4} layers {layers:<9} {' and '.join(ends)}")
    return "\n".join(line.rstrip() for line in lines)


def _parameters(rows: list[dict[str, Any]]) -> str:
    """One line a parameter; layers of one stage that follow each other and are alike share theirs."""
    total = sum(row["bytes"] for row in rows)
    lines = [f"Parameters: {len(rows)}, {size(total)}"]
    for _, of_stage in itertools.groupby(rows, key=lambda row: row["stage"]):
        for run in _runs(list(of_stage)):
            first, last, members = run[0], run[-1], run[0][1]
            for row in members:
                name = row["name"]
                if len(run) > 1:
                    name = f"layers.{first[0]}-{last[0]}.{name.split('.', 2)[2]}"
                alike = [f"each of {len(run)} layers"] if len(run) > 1 else []
                lines.append("  " + _parameter(name, row, alike))
    return "\n".join(lines)


def _parameter(name: str, row: dict[str, Any], remarks: list[str]) -> str:
    cuts = [
        f"[{start}:{stop}] of {extent} along {dim}"
        for dim, ((start, stop), extent) in enumerate(zip(row["slice"], row["global_shape"], strict=True))
        if stop - start < extent
    ]
    shape = " x ".join(map(str, row["shape"]))
    words = ", ".join([*cuts, *remarks])
    return f"{name:<38} {shape:<20} {row['dtype']} {size(row['bytes']):>11}  {words}".rstrip()


def _runs(rows: list[dict[str, Any]]) -> list[list[tuple[int, list[dict[str, Any]]]]]:
    """Rows by layer, layers that differ in number alone together; what is in no layer is a run by itself."""
    found: list[list[tuple[int, list[dict[str, Any]]]]] = []
    for layer, group in itertools.groupby(rows, key=lambda row: _layer(row["name"])):
        members = list(group)
        before = found[-1][-1] if found else None
        follows = before is not None and layer is not None and _layer(before[1][0]["name"]) == layer - 1
        if before is not None and follows and _likeness(before[1]) == _likeness(members):
            found[-1].append((before[0] + 1, members))
        else:
            found.append([(-1 if layer is None else layer, members)])
    return found


def _layer(name: str) -> int | None:
    match = re.match(r"layers\.(\d+)\.", name)
    return None if match is None else int(match[1])


def _likeness(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["name"].split(".", 2)[2], row["shape"], row["slice"], row["global_shape"]) for row in rows]


def _buckets(rows: list[dict[str, Any]]) -> str:
    lines = [f"Buckets: {len(rows)}; what is kept here of parameters, gradients and optimizer state"]
    for row in rows:
        replicas = f"{row['index']} of {row['size']} in {row['group']}" if row["size"] > 1 else "no replica"
        held = ", ".join(size(row[f"{part}_bytes"]) for part in ("parameter", "gradient", "optimizer"))
        names = row["parameters"]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  stage {row['stage']:<4} {row['elements']:>13,} elements, {replicas}: {held}; {names[0]}{more}")
    return "\n".join(lines)


def _memory(memory: dict[str, int]) -> str:
    names, cells = memory_cells(memory)
    return f"Memory (activations and workspace at the largest batch)\n  {names}\n  {cells}"


def _communication(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    return "\n".join(["Communication in a step (see docs/parallelism.md)", *map(volume_line, rows)])


def _actions(report: dict[str, Any]) -> str:
    actions, schedule = report["actions"], report["schedule"]
    kinds = Counter(re.sub(r"\d", "", action) for action in actions)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    shown = list(actions)
    if len(actions) > 2 * _SHOWN_ACTIONS:
        hidden = len(actions) - _SHOWN_ACTIONS - _SHOWN_ACTIONS // 2
        shown = [*actions[:_SHOWN_ACTIONS], f"... {hidden} more ...", *actions[-(_SHOWN_ACTIONS // 2) :]]
    lines = [f"Actions of a step: {schedule['name']}, {schedule['microbatches']} microbatches: {counts}", "  "]
    for word in shown:
        if len(lines[-1]) + len(word) + 1 > _LINE:
            lines.append("  ")
        lines[-1] += ("" if lines[-1] == "  " else " ") + word
    return "\n".join(lines)

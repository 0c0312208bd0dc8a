"""A plan for a terminal."""

from collections.abc import Sequence
from typing import Any

from megalite.config.byte_size import format_bytes
from megalite.planner.report.data import (
    PARTS,
    count_in_words,
    duration_in_words,
    seconds_in_words,
)

_MEMORY = (
    ("parameter_bytes", "parameters"),
    ("gradient_bytes", "gradients"),
    ("optimizer_bytes", "optimizer"),
    ("activation_bytes", "activations"),
    ("workspace_bytes", "workspace"),
)
COLUMNS = (
    *("tp", "pp", "vpp", "cp", "ep", "dp", "mbs", "schedule", "recompute", "strategy", "sp"),
    *("step", "tokens/s", "MFU", "causal", "bubble", "exposed", "memory", "time"),
)


def format_plan(data: dict[str, Any]) -> str:
    """The dict of `plan_data` in sections."""
    return "\n\n".join((_question(data), _table(data), _best(data), *_losers(data)))


def _question(data: dict[str, Any]) -> str:
    model, cluster, space = data["model"], data["cluster"], data["space"]
    lines = [
        f"{count_in_words(model['parameters'])} parameters, sequence {model['seq_length']}, batch "
        f"{model['global_batch_size']}, {model['precision']} on {cluster['ranks']} ranks of {cluster['name']}, stack "
        f"{cluster['stack']}",
        f"{space['layouts']} layouts are legal, {space['fitting']} fit into "
        f"{format_bytes(cluster['memory_limit_bytes'])} a rank",
    ]
    if data["constraints"]:
        words = (f"{name} {' or '.join(map(str, values))}" for name, values in data["constraints"].items())
        lines.append(f"constraints: {', '.join(words)}")
    assumed = [name for name, source in cluster["provenance"].items() if source.startswith("assumed")]
    if assumed:
        lines.append(f"assumed, neither measured nor fitted: {', '.join(assumed)}")
    return "\n".join(lines)


def _table(data: dict[str, Any]) -> str:
    rows = [COLUMNS, *(cells(layout) for layout in data["layouts"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"{'' if index == 0 else index:>2}  {line}" for index, line in enumerate(lines))


def cells(layout: dict[str, Any]) -> Sequence[str]:
    """One line of the table: the texts of COLUMNS."""
    chosen = layout["settings"]
    strategy = "zero-2" if chosen["shard_gradients"] else chosen["dp_strategy"]
    return (
        *(str(chosen[name]) for name in ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch_size")),
        chosen["pipeline_schedule"] if chosen["pp"] > 1 else "-",
        chosen["recompute_granularity"],
        strategy if chosen["dp"] * chosen["cp"] > 1 else "-",
        "yes" if chosen["sequence_parallel"] else "no",
        seconds_in_words(layout["step_seconds"]),
        f"{layout['tokens_per_second']:,.0f}",
        f"{layout['mfu']['palm']:.1%}",
        f"{layout['mfu']['megatron']:.1%}",
        f"{layout['bubble']:.1%}",
        f"{sum(layout['exposed_seconds'].values()) / layout['step_seconds']:.1%}",
        format_bytes(layout["memory"]["total_bytes"]),
        duration_in_words(layout["training_seconds"]),
    )


def _best(data: dict[str, Any]) -> str:
    best = data["layouts"][0]
    memory = best["memory"]
    held = ", ".join(f"{name} {format_bytes(memory[key])}" for key, name in _MEMORY if memory[key])
    parts = [(name, value) for name, value in best["parts"].items() if value > 5e-4 * best["step_seconds"]]
    exposed = [(name, value) for name, value in best["exposed_seconds"].items() if value > 0]
    lines = [
        f"Best: {best['words']}; {best['microbatches']} microbatches",
        f"  step        {_shares(parts, best['step_seconds'], PARTS)}",
        f"  exposed     {_shares(exposed, best['step_seconds'], {}) or 'no communication'}",
        f"  memory      {format_bytes(memory['total_bytes'])} on pipeline rank {memory['pipeline_rank']}: {held}",
        f"  {count_in_words(data['tokens'])} tokens take {duration_in_words(best['training_seconds'])}",
    ]
    if best["layers"]:
        lines.insert(1, f"  layers      {best['layers']} of each stage, cut by their predicted seconds")
    return "\n".join(lines)


def _shares(parts: Sequence[tuple[str, float]], whole: float, names: Any) -> str:
    ranked = sorted(parts, key=lambda part: -part[1])
    return ", ".join(
        f"{names.get(name, name)} {seconds_in_words(value)} ({value / whole:.1%})" for name, value in ranked
    )


def _losers(data: dict[str, Any]) -> list[str]:
    others = data["layouts"][1:]
    if not others:
        return []
    lines = [f"{rank:>2}  {layout['why']}" for rank, layout in enumerate(others, start=2)]
    return ["\n".join(["Why the others lose:", *lines])]

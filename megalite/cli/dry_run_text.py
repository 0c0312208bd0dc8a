"""Format the reports of a dry run as text, for a terminal of about 110 columns."""

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megalite.cli.display import NUMBER, folded, table
from megalite.config.batch import ramp_in_words
from megalite.config.numbers import format_bytes

_SHOWN = 16
"""Maximum number of ranks, stages, and actions at the start of the list; half of it for groups and last actions."""
_LINE = 110


def format_report(report: dict[str, Any]) -> str:
    parts = [
        _layout(report),
        _ranks(report["layout"]["ranks"]),
        _stages(report["stages"]),
        _memory(report["memory"]),
        _communication(report["communication"], report["memory"]["fullest_pipeline_rank"]),
        _schedule(report["schedule"]),
        _batch(report["batch"]),
        _model(report["model"]),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def format_rank(report: dict[str, Any]) -> str:
    parts = [
        _groups(report),
        _chunks(report["stages"]),
        _parameters(report["parameters"]),
        _buckets(report["buckets"]),
        ["Memory (activations and workspace at the largest batch)", *_memory_table([report["memory"]])],
        _communication(report["communication"]),
        _actions(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _layout(report: dict[str, Any]) -> list[str]:
    axes, layout = report["layout"]["axes"], report["layout"]
    experts = f"; experts: ep {axes['ep']}, etp {axes['etp']}" if axes["ep"] > 1 or axes["etp"] != axes["tp"] else ""
    rows, alone = [], []
    for kind, groups in layout["groups"].items():
        if groups["size"] == 1:
            alone.append(kind)
            continue
        shown = [_rank_list(ranks) for ranks in groups["ranks"][: _SHOWN // 2]]
        more = " ..." if groups["count"] > len(shown) else ""
        rows.append([kind, str(groups["count"]), f"of {groups['size']}", " ".join(shown) + more])
    return [
        f"Layout: {report['world_size']} ranks = tp {axes['tp']} x cp {axes['cp']} x dp {axes['dp']} x pp {axes['pp']}, "
        f"order {layout['order']}{experts}",
        *table(rows, right={1}, indent=2),
        *([f"  each rank alone: {', '.join(alone)}"] if alone else []),
    ]


def _rank_list(ranks: Sequence[int]) -> str:
    words = [str(rank) for rank in ranks]
    return f"[{' '.join(words if len(words) <= 8 else [*words[:4], '...', words[-1]])}]"


def _ranks(ranks: list[dict[str, int]]) -> list[str]:
    if not 1 < len(ranks) <= _SHOWN:
        return []
    names = {"Rank": "rank"} | {f"  {axis}": axis for axis in ("tp", "cp", "dp", "pp")}
    rows = [[name, *(str(row[key]) for row in ranks)] for name, key in names.items()]
    return table(rows, right=range(1, len(ranks) + 1))


def _stages(stages: list[dict[str, Any]]) -> list[str]:
    rows = []
    for run in [[row] for row in stages] if len(stages) <= _SHOWN else _alike(stages):
        first, last = run[0], run[-1]
        each = f" in {len(run)} stages" if len(run) > 1 else ""
        rows.append(
            [
                f"stage {_range(first['stage'], last['stage'])}",
                f"on pipeline rank {_range(first['pipeline_rank'], last['pipeline_rank'])}",
                f"{first['layers']} layers",
                _layer_range(first["first_layer"], last["last_layer"]),
                f"{first['parameters_per_rank']:,}",
                _ends(first) + each,
            ]
        )
    return ["Stages: layers, and parameters of one rank", *table(rows, right={2, 4}, indent=2)]


def _ends(stage: dict[str, Any]) -> str:
    return " and ".join(name for name in ("embedding", "head") if stage[name])


def _layer_range(first: int, stop: int) -> str:
    """Return the layers `first <= i < stop` as text."""
    return "none" if first == stop else _range(first, stop - 1)


def _alike(stages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group consecutive stages with equal numbers of layers and parameters, on consecutive pipeline ranks."""
    runs: list[list[dict[str, Any]]] = []
    for row in stages:
        same = bool(runs) and all(runs[-1][-1][key] == row[key] for key in ("layers", "parameters", "embedding"))
        if same and row["pipeline_rank"] == runs[-1][-1]["pipeline_rank"] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _memory(memory: dict[str, Any]) -> list[str]:
    rows = memory["pipeline_ranks"]
    fullest = rows[memory["fullest_pipeline_rank"]]
    shown = rows if len(rows) <= 8 else [rows[0], *([fullest] if fullest not in (rows[0], rows[-1]) else []), rows[-1]]
    return [
        "Memory per rank (estimate, without fragmentation and kernel workspaces)",
        *_memory_table(shown),
        f"  fullest: rank {memory['fullest_rank']} with {format_bytes(memory['fullest_bytes'])}",
    ]


def _memory_table(rows: Sequence[dict[str, int]]) -> list[str]:
    parts = ["parameter", "gradient", "optimizer", "activation", "workspace", "total"]
    cells = [["", "parameters", "gradients", "optimizer", "activations", "workspace", "total"]]
    if any(row["host_bytes"] for row in rows):
        parts.append("host")
        cells[0].append("host memory")
    for row in rows:
        name = f"pipeline rank {row['pipeline_rank']}" if "pipeline_rank" in row else ""
        cells.append([name, *(format_bytes(row[f"{part}_bytes"]) for part in parts)])
    return table(cells, right=range(1, len(cells[0])), indent=2)


def _communication(rows: list[dict[str, Any]], pipeline_rank: int | None = None) -> list[str]:
    cells = [
        [
            row["group"],
            f"of {row['size']}",
            row["operation"],
            f"{format_bytes(row['volume_bytes'])},",
            f"{format_bytes(row['sent_bytes'])} sent{', ' + row['basis'] if row['basis'] else ''}",
        ]
        for row in rows
        if pipeline_rank in (None, row["pipeline_rank"])
    ]
    which = "" if pipeline_rank is None else f" of a rank of pipeline rank {pipeline_rank}"
    title = f"Communication{which} per step (see docs/parallelism.md)"
    return [title, *table(cells, right={3}, indent=2)] if cells else []


def _schedule(schedule: dict[str, Any]) -> list[str]:
    peaks = schedule["peak_activations"]
    shown = ", ".join(map(str, peaks if len(peaks) <= _SHOWN else [*peaks[: _SHOWN // 2], "..."]))
    least, limit = schedule["device_bytes"], []
    if least is not None:
        limit = [
            f"  built without a memory limit: a run builds another on GPUs with less than {format_bytes(least)}; set "
            "--pipeline-memory-limit to see it"
        ]
    grid = schedule["grid"] or "(the grid is drawn up to 8 virtual stages and 16 microbatches)"
    return [
        f"Schedule: {schedule['name']}, {schedule['virtual_stages']} virtual stages, {schedule['microbatches']} "
        f"microbatches; bubble {schedule['bubble_fraction']:.1%} of the step by {schedule['costs']}",
        *limit,
        f"  live activations at the peak, by pipeline rank (stages x microbatches): {shown}",
        textwrap.indent(grid, "  "),
    ]


def _batch(batch: dict[str, Any]) -> list[str]:
    lines = [
        f"Batch: {batch['micro_batch_size']} sequences x {batch['dp']} data-parallel x {batch['microbatches']} microbatches "
        f"= {batch['global_batch_size']} sequences = {batch['tokens_per_step']:,} tokens per step"
    ]
    sizes = batch["batch_sizes"]
    if len(sizes) > 1:
        lines.append(f"  {ramp_in_words(sizes, batch['rampup_samples'])}")
    if batch["seq_length_warmup"] is not None:
        start, steps = batch["seq_length_warmup"]
        lines.append(
            f"  sequences: {start:,} tokens at first, {batch['seq_length']:,} after {steps:,} steps; sizes are for the latter"
        )
    if batch["train_steps"] is not None:
        steps, samples, tokens = (batch[f"train_{what}"] for what in ("steps", "samples", "tokens"))
        lines.append(f"  run: {steps:,} steps, {samples:,} samples, {tokens:,} tokens")
    return lines


def _model(model: dict[str, Any]) -> list[str]:
    flops, step = model["flops_per_token"], model["flops_per_step_with_recompute"]
    recomputed = f"  with recompute {flops['with_recompute']:.4g} (F of Narayanan et al. 2021); a step: {step:.4g}"
    return [
        f"Model: {model['parameters']:,} parameters (vocabulary padded to {model['padded_vocab_size']:,})",
        f"  FLOPs per token: {flops['palm']:.4g} (PaLM convention, full attention), {flops['megatron']:.4g} (Megatron-LM, "
        f"causal half); a step: {model['flops_per_step']:.4g}",
        *([recomputed] if step > model["flops_per_step"] else []),
    ]


def _groups(report: dict[str, Any]) -> list[str]:
    at, groups = report["coordinate"], report["groups"]
    dense = ", ".join(f"{axis} {at[axis]}" for axis in ("tp", "cp", "dp", "pp"))
    experts = ", ".join(f"{axis} {at[axis]}" for axis in ("ep", "etp", "edp"))
    apart = groups["ep"]["size"] > 1 or groups["expert-tp"]["ranks"] != groups["tp"]["ranks"]
    rows = [
        [kind, str(group["index"]), f"of {group['size']}", _rank_list(group["ranks"])]
        for kind, group in groups.items()
        if group["size"] > 1
    ]
    alone = [kind for kind, group in groups.items() if group["size"] == 1]
    return [
        f"Rank {report['rank']} of {report['world_size']}: {dense}{f'; of the experts {experts}' if apart else ''}",
        *table(rows, right={1}, indent=2),
        *([f"  alone in: {', '.join(alone)}"] if alone else []),
    ]


def _chunks(stages: list[dict[str, Any]]) -> list[str]:
    rows = []
    for row in stages:
        layers = f"layers {_layer_range(row['first_layer'], row['last_layer'])}"
        rows.append([f"chunk {row['chunk']}: stage {row['stage']}", layers, _ends(row)])
    return ["Stages", *table(rows, indent=2)]


def _parameters(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per parameter. Parameters of a stage that differ only in the layer number share a line."""
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["stage"], NUMBER.sub("", row["name"]), str(row["slice"]), str(row["global_shape"]))
        alike.setdefault(key, []).append(row)
    cells = []
    for members in alike.values():
        row, count = members[0], len(members)
        [(name, _)] = folded(member["name"] for member in members)
        words = [
            f"[{start}:{stop}] of {extent} along {dim}"
            for dim, ((start, stop), extent) in enumerate(zip(row["slice"], row["global_shape"], strict=True))
            if stop - start < extent
        ]
        words += [f"each of {count} layers"] if count > 1 else []
        shape = " x ".join(map(str, row["shape"]))
        cells.append([name, shape, row["dtype"], format_bytes(row["bytes"]), ", ".join(words)])
    total = format_bytes(sum(row["bytes"] for row in rows))
    return [f"Parameters: {len(rows)}, {total}", *table(cells, right={3}, indent=2)]


def _buckets(rows: list[dict[str, Any]]) -> list[str]:
    cells = []
    for row in rows:
        replicas = f"{row['index']} of {row['size']} in {row['group']}" if row["size"] > 1 else "no replica"
        sizes = ", ".join(format_bytes(row[f"{part}_bytes"]) for part in ("parameter", "gradient", "optimizer"))
        names = row["parameters"]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        elements = f"{row['elements']:,} elements, {replicas}: {sizes}; {names[0]}{more}"
        cells.append([f"stage {row['stage']}", elements])
    title = f"Buckets: {len(rows)}; bytes of parameters, gradients and optimizer state on this rank"
    return [title, *table(cells, indent=2)]


def _actions(report: dict[str, Any]) -> list[str]:
    actions, schedule = report["actions"], report["schedule"]
    kinds = Counter(re.sub(r"\d", "", action) for action in actions)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    shown = actions
    if len(actions) > 2 * _SHOWN:
        hidden = len(actions) - _SHOWN - _SHOWN // 2
        shown = [*actions[:_SHOWN], f"... {hidden} more ...", *actions[-(_SHOWN // 2) :]]
    return [
        f"Actions per step: {schedule['name']}, {schedule['microbatches']} microbatches: {counts}",
        *textwrap.wrap(" ".join(shown), _LINE, initial_indent="  ", subsequent_indent="  "),
    ]

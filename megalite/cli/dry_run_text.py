"""The report of a dry run as text."""

from collections.abc import Sequence
from typing import Any

_SHOWN_RANKS = 16
_SHOWN_GROUPS = 8
_SHOWN_STAGES = 16


def format_report(report: dict[str, Any]) -> str:
    """The dict of `dry_run.report` in sections, for a terminal about 110 columns wide."""
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
    return "\n\n".join(part for part in parts if part)


def _layout(report: dict[str, Any]) -> str:
    axes, layout = report["layout"]["axes"], report["layout"]
    experts = f"; experts: ep {axes['ep']}, etp {axes['etp']}" if axes["ep"] > 1 or axes["etp"] != axes["tp"] else ""
    lines = [
        f"Layout: {report['world_size']} ranks = tp {axes['tp']} x cp {axes['cp']} x dp {axes['dp']} x pp {axes['pp']}, "
        f"order {layout['order']}{experts}"
    ]
    alone = []
    for kind, groups in layout["groups"].items():
        if groups["size"] == 1 and kind != "position-embedding":
            alone.append(kind)
            continue
        shown = [rank_list(ranks) for ranks in groups["ranks"][:_SHOWN_GROUPS]]
        more = " ..." if groups["count"] > len(shown) else ""
        lines.append(f"  {kind:<18} {groups['count']:>4} of {groups['size']:<4} {' '.join(shown)}{more}")
    if alone:
        lines.append(f"  each rank alone: {', '.join(alone)}")
    return "\n".join(lines)


def rank_list(ranks: Sequence[int]) -> str:
    """The ranks of a group, shortened."""
    words = [str(rank) for rank in ranks]
    if len(words) > 8:
        words = [*words[:4], "...", words[-1]]
    return f"[{' '.join(words)}]"


def _ranks(ranks: list[dict[str, int]]) -> str:
    if not 1 < len(ranks) <= _SHOWN_RANKS:
        return ""
    header = "Rank    " + " ".join(f"{row['rank']:>3}" for row in ranks)
    return "\n".join(
        [header] + [f"  {axis:<5} " + " ".join(f"{row[axis]:>3}" for row in ranks) for axis in ("tp", "cp", "dp", "pp")]
    )


def _stages(stages: list[dict[str, Any]]) -> str:
    lines = ["Stages: layers, and parameters of one rank"]
    runs = [[row] for row in stages] if len(stages) <= _SHOWN_STAGES else _alike(stages)
    for run in runs:
        first, last = run[0], run[-1]
        ends = [name for name in ("embedding", "head") if first[name]]
        layers = layer_range(first["first_layer"], last["last_layer"])
        each = f" in {len(run)} stages" if len(run) > 1 else ""
        lines.append(
            f"  stage {_range(first['stage'], last['stage']):<6} on pipeline rank "
            f"{_range(first['pipeline_rank'], last['pipeline_rank']):<6} {first['layers']:>3} layers "
            f"{layers:<9} {first['parameters_per_rank']:>16,}  {' and '.join(ends)}{each}".rstrip()
        )
    return "\n".join(lines)


def layer_range(first: int, stop: int) -> str:
    """Layers `first <= i < stop` in words."""
    if first == stop:
        return "none"
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def _alike(stages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Neighbours with the same number of layers and parameters, together; a run ends where the pipeline turns round."""
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


def _memory(memory: dict[str, Any]) -> str:
    rows = memory["pipeline_ranks"]
    lines = [
        "Memory per rank (estimate, without fragmentation and kernel workspaces)",
        f"  {'':<18}{memory_cells(rows[0])[0]}",
    ]
    fullest = rows[memory["fullest_pipeline_rank"]]
    shown = rows if len(rows) <= 8 else [rows[0], *([fullest] if fullest not in (rows[0], rows[-1]) else []), rows[-1]]
    for row in shown:
        lines.append(f"  pipeline rank {row['pipeline_rank']:<4}{memory_cells(row)[1]}")
    lines.append(f"  fullest: rank {memory['fullest_rank']} with {size(memory['fullest_bytes'])}")
    return "\n".join(lines)


def memory_cells(row: dict[str, int]) -> tuple[str, str]:
    """The names of the parts of a rank's memory, and below them their sizes."""
    parts = ("parameter", "gradient", "optimizer", "activation", "workspace", "total")
    names = "".join(f"{part if part in ('workspace', 'total') else part + 's':>13}" for part in parts)
    return names, "".join(f"{size(row[part + '_bytes']):>13}" for part in parts)


def _communication(rows: list[dict[str, Any]], pipeline_rank: int) -> str:
    mine = [row for row in rows if row["pipeline_rank"] == pipeline_rank]
    if not mine:
        return ""
    lines = [f"Communication of a rank of pipeline rank {pipeline_rank} in a step (see docs/parallelism.md)"]
    return "\n".join([*lines, *map(volume_line, mine)])


def volume_line(row: dict[str, Any]) -> str:
    """What one kind of collective moves."""
    return (
        f"  {row['group']:<10} of {row['size']:<4} {row['operation']:<15} {size(row['volume_bytes']):>11}, "
        f"{size(row['sent_bytes']):>11} sent{', ' + row['basis'] if row['basis'] else ''}"
    )


def _schedule(schedule: dict[str, Any]) -> str:
    peaks = schedule["peak_activations"]
    shown = ", ".join(map(str, peaks if len(peaks) <= 16 else peaks[:8])) + (", ..." if len(peaks) > 16 else "")
    lines = [
        f"Schedule: {schedule['name']}, {schedule['virtual_stages']} virtual stages, {schedule['microbatches']} "
        f"microbatches; bubble {schedule['bubble_fraction']:.1%} of the step by {schedule['costs']}",
        f"  live activations at the peak, by pipeline rank (stages x microbatches): {shown}",
    ]
    if schedule["grid"]:
        lines += ["  " + line for line in schedule["grid"].splitlines()]
    else:
        lines.append("  (the grid is drawn up to 8 virtual stages and 16 microbatches)")
    return "\n".join(lines)


def _batch(batch: dict[str, Any]) -> str:
    lines = [
        f"Batch: {batch['micro_batch_size']} sequences x {batch['dp']} data-parallel x {batch['microbatches']} microbatches "
        f"= {batch['global_batch_size']} sequences = {batch['tokens_per_step']:,} tokens a step"
    ]
    sizes = batch["batch_sizes"]
    if len(sizes) > 1:
        lines.append(
            f"  ramp-up: {sizes[0]}, {sizes[1]}, ... {sizes[-1]} sequences over {batch['rampup_samples']:,} samples"
        )
    if batch["train_steps"] is not None:
        lines.append(
            f"  run: {batch['train_steps']:,} steps, {batch['train_samples']:,} samples, {batch['train_tokens']:,} tokens"
        )
    return "\n".join(lines)


def _model(model: dict[str, Any]) -> str:
    flops = model["flops_per_token"]
    return (
        f"Model: {model['parameters']:,} parameters (vocabulary padded to {model['padded_vocab_size']:,})\n"
        f"  FLOPs a token: {flops['palm']:.4g} (PaLM convention, full attention), {flops['megatron']:.4g} (Megatron-LM, "
        f"causal half); a step: {model['flops_per_step']:.4g}"
    )


def size(number: int) -> str:
    """Bytes in words: `1.50 GiB`."""
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"

"""A plan as one dict (what `megalite plan --json` prints), for a terminal, and as files that training and sweep read."""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megalite.config.byte_size import format_bytes
from megalite.config.describe import settings, values_of
from megalite.config.errors import ConfigError
from megalite.models.shapes import parameter_count
from megalite.planner.search.search import Candidate, Plan, describe

PARTS: Mapping[str, str] = {
    "products": "matrix products",
    "memory": "operations that move bytes",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "exchange between experts",
    "host": "operations started late",
    "bubble": "bubble",
    "given": "cores left to others while waiting",
    "pipeline": "pipeline messages",
    "gradients": "gradients that nothing hides",
    "parameters": "parameters that nothing hides",
    "optimizer": "optimizer",
    "step": "constants of a step",
}
"""Part of a step -> what it is."""
_NAMED = 2  # parts that a comparison names


def plan_data(plan: Plan, tokens: float) -> dict[str, Any]:
    """Keys: `model`, `cluster`, `space`, `tokens`, `layouts` (fastest first), `frontier` ([bytes, seconds] in closed form).

    Args:
        tokens: of the training whose length is told.
    """
    request, config = plan.request, plan.request.config
    best = plan.candidates[0]
    return {
        "model": {
            "parameters": parameter_count(config.model),
            "seq_length": config.training.seq_length,
            "global_batch_size": config.training.global_batch_size,
            "precision": config.training.precision,
        },
        "cluster": {
            "name": plan.cluster.name,
            "stack": plan.stack.name,
            "ranks": request.world_size,
            "memory_limit_bytes": request.memory_limit,
            "provenance": {**plan.cluster.provenance, **plan.stack.provenance},
        },
        "constraints": {name: list(values) for name, values in request.fixed.items()},
        "space": {"layouts": len(plan.survey.space), "fitting": plan.survey.fitting},
        "tokens": tokens,
        "layouts": [_layout(each, best, tokens) for each in plan.candidates],
        "frontier": [list(point) for point in plan.survey.frontier()],
    }


def _layout(candidate: Candidate, best: Candidate, tokens: float) -> dict[str, Any]:
    found = candidate.prediction
    rank, memory = candidate.fullest
    parts = {name: float(value) for name, value in found.parts.items()}
    return {
        "settings": dict(candidate.settings),
        "words": describe(candidate.layout),
        "microbatches": candidate.layout.pipeline.microbatches,
        "step_seconds": float(found.step_seconds),
        "estimated_step_seconds": candidate.estimate,
        "tokens_per_second": float(found.tokens_per_second),
        "mfu": {"palm": float(found.mfu), "megatron": float(found.mfu_causal)},
        "bubble": float(found.bubble),
        "exposed_seconds": {name: float(value) for name, value in found.exposed.items()},
        "parts": parts,
        "memory": {"pipeline_rank": rank, **asdict(memory), "total_bytes": memory.total_bytes},
        "training_seconds": tokens / float(found.tokens_per_second),
        "layers": layers_in_words(candidate),
        "why": "" if candidate is best else why_slower(candidate, best),
    }


def layers_in_words(candidate: Candidate) -> str:
    """`12 x 8`, or `11, 12 x 6, 13` if stages differ; nothing where the default cut is kept."""
    layers = candidate.settings.get("pipeline_layers")
    if layers is None:
        return ""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(layers)]
    return ", ".join(f"{count} x {times}" if times > 1 else str(count) for count, times in runs)


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """Which parts of the step are longer than the best one's: one line."""
    mine, other = candidate.prediction.parts, best.prediction.parts
    slower = candidate.prediction.step_seconds - best.prediction.step_seconds
    if slower <= 1e-9 * best.prediction.step_seconds:
        held, least = candidate.fullest[1].total_bytes, best.fullest[1].total_bytes
        return f"as fast, with {format_bytes(held)} a rank instead of {format_bytes(least)}"
    longer = {name: mine.get(name, 0.0) - other.get(name, 0.0) for name in {*mine, *other}}
    ranked = sorted(longer, key=lambda name: (-longer[name], name))
    named = [name for name in ranked[:_NAMED] if longer[name] > 0.1 * longer[ranked[0]]]
    parts = " and ".join(f"{PARTS.get(name, name)} (+{seconds_in_words(longer[name])})" for name in named)
    return f"{slower / best.prediction.step_seconds:.1%} slower: more {parts}"


def seconds_in_words(seconds: float) -> str:
    """`1.25 s`, `3.1 ms`."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def duration_in_words(seconds: float) -> str:
    """`34.2 days`, `5.1 hours`, `2.0 years`."""
    for unit, length in (("years", 365.25 * 86400.0), ("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60.0:.1f} minutes"


def count_in_words(number: float) -> str:
    """`300B`, `1.5T`, `175B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


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


def training_config(plan: Plan, tokens: float) -> dict[str, Any]:
    """Settings of the best layout, flat: `pretrain_gpt.py --config` runs it as it is, on that number of ranks only.

    dp is among them, so that another world size is refused. Without a length of its own the run gets that of `tokens`.
    """
    best = plan.candidates[0]
    found = {
        name: value
        for name, value in values_of(best.config).items()
        if value is not None and value != settings()[name].default
    }
    training = best.config.training
    if training.train_iters is None and training.train_samples is None:
        assert training.global_batch_size is not None
        found["train_iters"] = math.ceil(tokens / (training.global_batch_size * training.seq_length))
    return {**_chosen(best), **found}


def alternatives(plan: Plan) -> dict[str, Any]:
    """`plans:` the searched settings of all layouts, best first: what `megalite sweep` reads."""
    return {"plans": [_chosen(candidate) for candidate in plan.candidates]}


def _chosen(candidate: Candidate) -> dict[str, Any]:
    """The searched settings without what would have no effect there."""
    found = dict(candidate.settings)
    for name in ("shard_gradients", "sequence_parallel"):
        if not found[name]:
            del found[name]
    return found


def write_files(plan: Plan, path: Path, tokens: float) -> list[Path]:
    """Writes plan.yaml and, beside it, NAME-alternatives.yaml; returns both. Raises ConfigError: a file cannot be
    written."""
    best = plan.candidates[0].prediction
    head = (
        f"# For {plan.request.world_size} ranks of {plan.cluster.name}, stack {plan.stack.name}: predicted "
        f"{seconds_in_words(best.step_seconds)} a step, MFU {best.mfu:.1%}.\n"
    )
    others = path.with_name(f"{path.stem}-alternatives{path.suffix or '.yaml'}")
    # A line a setting; a layout a line or two.
    written = ((path, training_config(plan, tokens), False), (others, alternatives(plan), None))
    for target, tree, flow in written:
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=flow)
        write_text(target, head + text)
    return [path, others]


def write_text(path: Path, text: str) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a path in a folder that exists") from None


def launch_lines(plan: Plan, path: Path) -> list[str]:
    """How to start plan.yaml: with torchrun on each node, and with sbatch."""
    config, world = plan.candidates[0].config, plan.request.world_size
    most = plan.cluster.node.accelerators
    each = next(count for count in range(min(most, world), 0, -1) if world % count == 0)
    nodes = world // each
    data = config.data
    given = data.data_path or data.train_data_path or data.mock_data
    program = f"pretrain_gpt.py --config {shlex.quote(str(path))}" + ("" if given else " --data-path PREFIX")
    if nodes == 1:
        local = f"torchrun --standalone --nproc-per-node {each} {program}"
        return [local, f"sbatch --nodes 1 --gpus-per-node {each} --wrap {shlex.quote(local)}"]
    shape = f"--nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d"
    first = '"$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500"'
    wrapped = f"srun torchrun {shape} --rdzv-endpoint {first} {program}"
    return [
        f"torchrun {shape} --rdzv-endpoint HOST:29500 {program}",
        f"sbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {each} --wrap {shlex.quote(wrapped)}",
    ]

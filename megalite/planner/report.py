"""Present a plan as a dict (printed by `megalite plan --json`), as text, as an HTML page, and as files for training."""

import itertools
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.config.describe import settings, values_of
from megalite.config.numbers import format_bytes
from megalite.config.reading import as_yaml, write_text
from megalite.config.run import RunConfig
from megalite.models.shapes import parameter_count
from megalite.partition.pipeline import Clock
from megalite.pipeline.ir.draw import Panel, draw_svg
from megalite.pipeline.ir.simulate import Timeline
from megalite.planner.cost.rates import links_of
from megalite.planner.cost.stage import simulator_costs
from megalite.planner.hardware import Cluster, assumed_figures
from megalite.planner.page import Dot, Row, Section, Table, page, scatter
from megalite.planner.search.search import Candidate, Plan, describe
from megalite.planner.whole_run import WholeRun

# Part of a step -> description.
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
    "gradients": "exposed gradient communication",
    "parameters": "exposed parameter communication",
    "overlap": "computation slowed by overlapped communication",
    "stragglers": "waiting for the slowest device",
    "optimizer": "optimizer",
    "step": "constant time of a step",
}


def plan_data(plan: Plan, whole: WholeRun, sizes: Mapping[int, float] = MappingProxyType({})) -> dict[str, Any]:
    """Keys: `model`, `cluster`, `space`, `objective`, `tokens`, `layouts` (best first), `sizes` (of `find_cheapest`),
    `frontier` ([bytes, seconds] in closed form). `whole` describes the training run to predict."""
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
            "spread": plan.stack.spread,
            "provenance": {**plan.cluster.provenance, **plan.stack.provenance},
        },
        "constraints": {name: list(values) for name, values in request.fixed.items()},
        "space": {
            "layouts": len(plan.survey.space),
            "fitting": plan.survey.fitting,
            "by_host_memory": plan.survey.by_host_memory,
        },
        "objective": plan.objective,
        "tokens": whole.tokens,
        "layouts": [_layout(each, best, plan, whole) for each in plan.candidates],
        "sizes": [
            {"ranks": ranks, "step_seconds": each, "step_gpu_seconds": ranks * each} for ranks, each in sizes.items()
        ],
        "frontier": [list(point) for point in plan.survey.frontier()],
    }


TIE = 0.05
"""Relative difference up to which layouts are a tie: of pairs measured on A100 within this, a third had the other order
(benchmarks/planner/step_times.py)."""


def _is_tie(candidate: Candidate, plan: Plan) -> bool:
    seconds, least = candidate.prediction.step_seconds, plan.candidates[0].prediction.step_seconds
    return plan.objective != "memory" and bool(seconds <= (1 + TIE) * least)


def _layout(candidate: Candidate, best: Candidate, plan: Plan, whole: WholeRun) -> dict[str, Any]:
    found, spread = candidate.prediction, plan.stack.spread
    run = whole.of(candidate.config, plan.request.world_size, float(found.step_seconds), plan.cluster, plan.stack)
    rank, memory = candidate.fullest
    return {
        "settings": dict(candidate.settings),
        "words": describe(candidate.layout),
        "microbatches": candidate.layout.pipeline.microbatches,
        "step_seconds": float(found.step_seconds),
        "step_seconds_interval": [float(found.step_seconds) / (1 + spread), float(found.step_seconds) * (1 + spread)],
        "tie": _is_tie(candidate, plan),
        "estimated_step_seconds": candidate.estimate,
        "tokens_per_second": float(found.tokens_per_second),
        "mfu": {"palm": float(found.mfu), "megatron": float(found.mfu_causal)},
        "bubble": float(found.bubble),
        "exposed_seconds": _floats(found.exposed),
        "parts": _floats(found.parts),
        "memory": {"pipeline_rank": rank, **asdict(memory), "total_bytes": memory.total_bytes},
        "training_seconds": run["seconds"],
        "training": run,
        "layers": layers_in_words(candidate),
        "why": "" if candidate is best else why_slower(candidate, best),
    }


def _floats(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in parts.items()}


def layers_in_words(candidate: Candidate) -> str:
    """Format stages as `12 x 8`, or `11, 12 x 6, 13` if they differ; empty for the default cut."""
    layers = candidate.settings.get("pipeline_layers")
    if layers is None:
        return ""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(layers)]
    return ", ".join(f"{count} x {times}" if times > 1 else str(count) for count, times in runs)


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """Name the parts of the step that are longer than the best layout's, in one line."""
    own, other = candidate.prediction.parts, best.prediction.parts
    least = best.prediction.step_seconds
    slower = candidate.prediction.step_seconds - least
    if slower <= 1e-9 * least:
        speed = "as fast" if slower >= -1e-9 * least else f"{-slower / least:.1%} faster"
        own_bytes, best_bytes = candidate.fullest[1].total_bytes, best.fullest[1].total_bytes
        return f"{speed}, with {format_bytes(own_bytes)} per rank instead of {format_bytes(best_bytes)}"
    longer = {name: own.get(name, 0.0) - other.get(name, 0.0) for name in {*own, *other}}
    ranked = sorted(longer, key=lambda name: (-longer[name], name))
    named = [name for name in ranked[:2] if longer[name] > 0.1 * longer[ranked[0]]]
    parts = " and ".join(f"{PARTS.get(name, name)} (+{seconds_in_words(longer[name])})" for name in named)
    return f"{slower / least:.1%} slower: more {parts}"


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
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


_MEMORY = ("parameters", "gradients", "optimizer", "activations", "workspace")
COLUMNS = (
    *("tp", "pp", "vpp", "cp", "ep", "dp", "mbs", "schedule", "recompute", "strategy", "sp"),
    *("step", "tokens/s", "MFU", "causal", "bubble", "exposed", "memory", "time"),
)


def format_plan(data: dict[str, Any]) -> str:
    layouts = data["layouts"]
    rows = [COLUMNS, *map(cells, layouts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip((str(number or ""), *row), (2, *widths)))
        for number, row in enumerate(rows)
    ]
    sections = [_question(data), table, _best(data)]
    if len(layouts) > 1:
        losers = (
            f"{rank:>2}  {'a tie, ' * layout['tie']}{layout['why']}" for rank, layout in enumerate(layouts[1:], start=2)
        )
        sections.append(["Why the others lose:", *losers])
        if any(layout["tie"] for layout in layouts[1:]):
            sections.append(
                [f"A tie is within {TIE:.0%} of the best: measure ties (megalite sweep) before you decide."]
            )
    return "\n\n".join("\n".join(lines) for lines in sections)


def _question(data: dict[str, Any]) -> list[str]:
    model, cluster, space = data["model"], data["cluster"], data["space"]
    by_host = f", {space['by_host_memory']:,} of them with host memory" if space["by_host_memory"] else ""
    lines = [
        f"{count_in_words(model['parameters'])} parameters, sequence {model['seq_length']}, batch "
        f"{model['global_batch_size']}, {model['precision']} on {cluster['ranks']} ranks of {cluster['name']}, stack "
        f"{cluster['stack']}",
        f"{space['layouts']:,} layouts are legal, {space['fitting']:,} fit into "
        f"{format_bytes(cluster['memory_limit_bytes'])} per rank{by_host}",
    ]
    if data["constraints"]:
        words = (f"{name} {' or '.join(map(str, values))}" for name, values in data["constraints"].items())
        lines.append(f"constraints: {', '.join(words)}")
    if assumed := assumed_figures(cluster["provenance"]):
        lines.append(f"assumed, not measured or fitted: {', '.join(assumed)}")
    return lines


def cells(layout: dict[str, Any]) -> Sequence[str]:
    """Format one row of the table: the texts of COLUMNS."""
    chosen = layout["settings"]
    strategy = "zero-2" if chosen["shard_gradients"] else chosen["dp_strategy"]
    if "dp_instances" in chosen:
        strategy += f" x {chosen['dp_instances']}"
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
        format_bytes(layout["memory"]["total_bytes"]) + _on_host(layout["memory"], " + {} host"),
        duration_in_words(layout["training_seconds"]),
    )


def _on_host(memory: Mapping[str, Any], text: str) -> str:
    return text.format(format_bytes(memory["host_bytes"])) if memory["host_bytes"] else ""


def _best(data: dict[str, Any]) -> list[str]:
    best = data["layouts"][0]
    memory = best["memory"]
    sizes = {name: memory[f"{name.removesuffix('s')}_bytes"] for name in _MEMORY}
    contents = (f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    layers = [f"  layers      {best['layers']} per stage, cut by predicted seconds"] if best["layers"] else []
    return [
        f"Best: {best['words']}; {best['microbatches']} microbatches",
        *layers,
        f"  interval    {' to '.join(map(seconds_in_words, best['step_seconds_interval']))} per step: {_known(data['cluster'])}",
        f"  step        {_shares(best['parts'], best['step_seconds'], 5e-4)}",
        f"  exposed     {_shares(best['exposed_seconds'], best['step_seconds'], 0.0) or 'no communication'}",
        f"  memory      {format_bytes(memory['total_bytes'])} on pipeline rank {memory['pipeline_rank']}: {', '.join(contents)}"
        + _on_host(memory, "; {} in host memory"),
        *(f"  {line}" for line in whole_run_lines(data)),
    ]


def whole_run_lines(data: dict[str, Any]) -> list[str]:
    """Describe the training with the best layout: time; failures, cost and energy if known; steps on fewer ranks."""
    best, ranks = data["layouts"][0], data["cluster"]["ranks"]
    run = best["training"]
    lines = [
        f"{count_in_words(data['tokens'])} tokens take {duration_in_words(run['seconds'])}, "
        f"{run['gpu_hours']:,.0f} GPU hours"
    ]
    if "failures" in run:
        found = run["failures"]
        lines.append(
            f"goodput     {found['goodput']:.1%}: of {ranks} GPUs one fails every "
            f"{duration_in_words(found['mean_seconds_between'])}; save every "
            f"{duration_in_words(found['save_interval_seconds'])} (--save-interval {found['save_interval']})"
        )
    if "cost" in run:
        cost = run["cost"]
        lines.append(
            f"cost        {cost['whole']:,.0f}, {cost['million_tokens']:.3g} per million tokens, at "
            f"{cost['gpu_hour_price']:g} per GPU hour"
        )
    if "energy" in run:
        energy = run["energy"]
        lines.append(
            f"energy      {energy['kilowatt_hours'] / 1e3:,.3g} MWh, {energy['token_joules']:.3g} J per token, at "
            f"{energy['watts']:g} W per GPU; hosts, network and cooling are not counted"
        )
    for size in data["sizes"]:
        lines.append(
            f"on {size['ranks']:>5}    {seconds_in_words(size['step_seconds'])} per step, {size['step_gpu_seconds']:,.1f} GPU "
            "seconds"
        )
    return lines


def _known(cluster: Mapping[str, Any]) -> str:
    if cluster["provenance"].get("spread", "assumed").startswith("assumed"):
        return f"stack {cluster['stack']} is assumed to be right within {cluster['spread']:.0%}"
    return f"of measured steps, 8 of 10 were within {cluster['spread']:.0%} of stack {cluster['stack']}"


def _shares(parts: Mapping[str, float], whole: float, least: float) -> str:
    """Format the parts above a fraction of the whole, longest first."""
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{PARTS.get(name, name)} {seconds_in_words(value)} ({value / whole:.1%})"
        for name, value in ranked
        if value > least * whole
    )


_ACTIONS = 1200  # forwards and backwards that a picture can still distinguish
_GIB = 1024.0**3


def drawn_timeline(candidate: Candidate, cluster: Cluster) -> Timeline:
    """Simulate the step, or a shorter one: whole rounds of the pipeline, at least three."""
    pipeline, config = candidate.layout.pipeline, candidate.config
    rounds = max(3, _ACTIONS // (2 * pipeline.pp * pipeline.pp * pipeline.vpp))
    count = min(pipeline.microbatches, rounds * pipeline.pp)
    costs = list(candidate.prediction.stages)
    timing = simulator_costs(costs, config, links_of(config, cluster))
    return Clock(config, len(costs), count).run(timing).timeline


def html_page(data: dict[str, Any], timeline: Timeline) -> str:
    """Render the dict of `plan_data`, its frontier, and the timeline of the best layout's step."""
    model, cluster, layouts = data["model"], data["cluster"], data["layouts"]
    best = layouts[0]
    rows = [Row(cells(layout), "" if number else "best") for number, layout in enumerate(layouts)]
    losses = [Row((layout["words"], layout["why"])) for layout in layouts[1:]]
    parts = [
        Row((PARTS.get(name, name), seconds_in_words(value), f"{value / best['step_seconds']:.1%}"))
        for name, value in sorted(best["parts"].items(), key=lambda part: -part[1])
        if value > 0
    ]
    batch = model["global_batch_size"] * model["seq_length"]
    dots = [
        Dot(
            layout["memory"]["total_bytes"] / _GIB,
            layout["tokens_per_second"],
            f"{number}: {layout['words']}, {format_bytes(layout['memory']['total_bytes'])}",
            "best" if layout is best else "",
        )
        for number, layout in enumerate(layouts, start=1)
    ]
    frontier = [(size / _GIB, batch / seconds) for size, seconds in data["frontier"]]
    picture = scatter(dots[::-1], x_label="GiB on the fullest rank", y_label="tokens/s", frontier=frontier)
    about = "Line: the fastest layout per amount of memory, in closed form. Dots: the layouts above, simulated."
    sources = [Row(source) for source in cluster["provenance"].items()]
    return page(
        f"{count_in_words(model['parameters'])} on {cluster['ranks']} ranks of {cluster['name']}",
        [
            Section(texts=[*_question(data), f"Time is that of {count_in_words(data['tokens'])} tokens."]),
            Section(heading="The whole training with the best layout", texts=whole_run_lines(data)),
            Section(heading="Layouts", table=Table(COLUMNS, rows, left=(7, 8, 9, 10))),
            Section(heading="Why the others lose", table=Table(("layout", "why it loses"), losses, left=(0, 1))),
            Section(heading="Speed against memory", figures=[(picture, about)]),
            Section(
                heading="The step of the best layout",
                texts=[best["words"]],
                figures=[(_timeline_svg(timeline, best), "")],
                table=Table(("part", "seconds", "share"), parts, left=(0,)),
            ),
            Section(heading="Where the figures are from", table=Table(("figure", "source"), sources, left=(0, 1))),
        ],
    )


def _timeline_svg(timeline: Timeline, layout: dict[str, Any]) -> str:
    peaks = tuple(str(peak) for peak in timeline.peak_activations)
    count = timeline.schedule.num_microbatches
    shown = "" if count == layout["microbatches"] else f", the first {count} of {layout['microbatches']} microbatches"
    panel = Panel(timeline, peaks, f"bubble {layout['bubble']:.1%}{shown}")
    return draw_svg([panel], unit="s", peak="activations alive, in microbatches x stages")


def training_config(plan: Plan, tokens: float) -> dict[str, Any]:
    """Return the best layout's settings, flat, for `pretrain_gpt.py --config`. They contain dp, so that another world
    size is an error, and if the config sets no length, the length of `tokens`."""
    found, training = _settings(plan.candidates[0]), plan.candidates[0].config.training
    if training.train_iters is None and training.train_samples is None:
        assert training.global_batch_size is not None
        found["train_iters"] = math.ceil(tokens / (training.global_batch_size * training.seq_length))
    return found


def _settings(candidate: Candidate) -> dict[str, Any]:
    """Return the settings that the plan chose and all others that differ from their default."""
    values, default = values_of(candidate.config), settings()
    found = {name: value for name, value in values.items() if value is not None and value != default[name].default}
    return {**_chosen(candidate), **found}


def _chosen(candidate: Candidate) -> dict[str, Any]:
    """Return the searched settings without those that would have no effect."""
    dropped = ("shard_gradients", "sequence_parallel")
    return {name: value for name, value in candidate.settings.items() if name not in dropped or value}


def write_files(plan: Plan, path: Path, tokens: float) -> list[Path]:
    """Write plan.yaml and NAME-alternatives.yaml beside it (the searched settings of all layouts for `megalite
    sweep`)."""
    best = plan.candidates[0].prediction
    head = (
        f"# For {plan.request.world_size} ranks of {plan.cluster.name}, stack {plan.stack.name}: predicted "
        f"{seconds_in_words(best.step_seconds)} per step, MFU {best.mfu:.1%}.\n"
    )
    others = path.with_name(f"{path.stem}-alternatives{path.suffix or '.yaml'}")
    alternatives = {"plans": [_chosen(candidate) for candidate in plan.candidates]}
    # One line per setting; one or two lines per layout.
    written = ((path, training_config(plan, tokens), False), (others, alternatives, None))
    for target, tree, flow in written:
        write_text(target, head + as_yaml(tree, default_flow_style=flow))
    return [path, others]


def tie_breaking_sweep(plan: Plan, cluster: str, stack: str, ignored: Collection[str]) -> dict[str, Any] | None:
    """Return a sweep file's content (`megalite sweep`) that runs all tied layouts, or None without a tie. `cluster` and
    `stack` are the names of their files. Settings in `ignored` are left out; without data, mock data are used, which take
    the same time."""
    tied = [
        {name: value for name, value in _settings(each).items() if name not in ignored}
        for each in plan.candidates
        if _is_tie(each, plan)
    ]
    if len(tied) < 2:
        return None
    shared = {name: value for name, value in tied[0].items() if all(each.get(name) == value for each in tied)}
    data = {} if _has_data(plan.candidates[0].config) else {"mock_data": True}
    return {
        "settings": {**shared, **data},
        "ranks": plan.request.world_size,
        "list": [{name: value for name, value in each.items() if name not in shared} for each in tied],
        "cluster": cluster,
        "stack": stack,
    }


def _has_data(config: RunConfig) -> bool:
    return bool(config.data.data_path or config.data.train_data_path or config.data.mock_data)


def launch_lines(plan: Plan, path: Path) -> list[str]:
    """Return commands that start plan.yaml, with torchrun on each node and with sbatch."""
    config, world = plan.candidates[0].config, plan.request.world_size
    most = plan.cluster.node.accelerators
    each = next(count for count in range(min(most, world), 0, -1) if world % count == 0)
    nodes = world // each
    program = f"pretrain_gpt.py --config {shlex.quote(str(path))}" + " --data-path PREFIX" * (not _has_data(config))
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

"""`megalite plan`: find the fastest layouts; `plan-fit`: fit the cost model to measured steps; `plan-chain`: place a chain of
layers on a hierarchical cluster.

Speed and memory of a plan are predictions. plan-fit calibrates them to a machine."""

import json
import math
import re
import shutil
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.cli.display import number_ranges, table, working
from megalite.cli.dry_run import with_vocabulary
from megalite.cli.output import json_text, show
from megalite.config.describe import replace as with_settings
from megalite.config.errors import ConfigError, nearest
from megalite.config.numbers import format_bytes
from megalite.config.reading import as_yaml, write_text
from megalite.partition.memory import USUAL_MEMORY
from megalite.pipeline.ir.draw import Panel, draw_svg, render_grid
from megalite.pipeline.ir.simulate import Timeline
from megalite.planner.chain.inputs import ChainCluster, ChainProfile, find_profile, read_cluster
from megalite.planner.chain.plan import Judged, device_ids, plan_costs, timeline
from megalite.planner.chain.plan import run as run_plan
from megalite.planner.chain.planning import Planned, plan_chain
from megalite.planner.cost.calibrate import PRIORS, TIMES, Calibration, Machine, Row, fit, read_rows
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack, load_cluster, load_stack, require_new_file, save_machine
from megalite.planner.report import (
    drawn_timeline,
    format_plan,
    html_page,
    launch_lines,
    plan_data,
    tie_breaking_sweep,
    write_files,
)
from megalite.planner.search.search import Plan, find, find_cheapest
from megalite.planner.search.space import Request, fixed_settings, parse_constraint, refuse_not_searched, request_for
from megalite.planner.whole_run import WholeRun
from megalite.sweep.spec import ignored

_WIDTH = 160  # columns of a timeline without a terminal
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def run(flags: Namespace) -> int:
    request, cluster, stack = search_inputs(flags)
    tokens = _tokens(flags.tokens)
    figures = {
        name: getattr(flags, name) for name in ("gpu_hour_price", "mtbf_hours", "save_seconds", "restart_seconds")
    }
    whole = WholeRun(tokens=tokens, **figures)
    sizes: dict[int, float] = {}
    with working(f"searching layouts for {request.world_size} ranks of {cluster.name}"):
        if flags.objective == "cost":
            plan, sizes = find_cheapest(request, cluster, stack, top=flags.top)
        else:
            plan = find(request, cluster, stack, top=flags.top, objective=flags.objective)
    data = plan_data(plan, whole, sizes)
    written = [] if flags.output is None else write_files(plan, flags.output, tokens)
    if flags.html is not None:
        write_text(flags.html, html_page(data, drawn_timeline(plan.candidates[0], cluster)))
        written.append(flags.html)
    deciding = None
    if flags.resolve is not None:
        cluster_file, stack_file = map(_absolute, (flags.cluster, flags.stack))
        deciding = tie_breaking_sweep(plan, cluster_file, stack_file, ignored(plan.candidates[0].config))
    if deciding is not None:
        write_text(flags.resolve, as_yaml(deciding))
        written.append(flags.resolve)
    lines = [] if flags.output is None else launch_lines(plan, flags.output)
    if flags.json:
        show(json_text({**data, "written": list(map(str, written)), "launch": lines}))
        return 0
    parts = [format_plan(data)]
    if flags.explain:
        parts.append(_drawn(plan, data))
    if written:
        parts.append("\n".join(f"wrote {path}" for path in written))
    if flags.resolve is not None:
        parts.append(
            "No other layout ties with the best: there is nothing to resolve."
            if deciding is None
            else f"Run the {len(deciding['list'])} tied layouts: megalite sweep {flags.resolve} --output FOLDER"
        )
    if lines:
        parts.append("\n".join(["Start it on each node with the first line, or with the second:", *lines]))
    show("\n\n".join(parts))
    return 0


def _absolute(name_or_path: str) -> str:
    """Return the absolute path of a file, since the sweep may be in another folder; return a name unchanged."""
    path = Path(name_or_path)
    return str(path.absolute()) if path.is_file() else name_or_path


def _drawn(plan: Plan, data: dict[str, Any]) -> str:
    timeline = drawn_timeline(plan.candidates[0], plan.cluster)
    count, whole = timeline.schedule.num_microbatches, data["layouts"][0]["microbatches"]
    note = "" if count == whole else f" (with {count} microbatches instead of {whole})"
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    return f"The step of the best layout{note}, in seconds:\n{render_grid(timeline, width=width)}"


def _tokens(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMBT]?)", text, re.ASCII | re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--tokens is {text}; give a number above 0 such as 300B or 1.5T")
    return float(match[1]) * _UNITS[match[2].upper()]


def search_inputs(flags: Namespace) -> tuple[Request, Cluster, SoftwareStack]:
    """Build the search: given settings that the search decides become constraints, the others apply to all layouts."""
    cluster, stack = load_cluster(flags.cluster), load_stack(flags.stack)
    limit = flags.max_memory or cluster.accelerator.memory_bytes * USUAL_MEMORY
    invocation, config = flags.invocation, flags.invocation.config
    refuse_not_searched(config, invocation.explicit)
    fixed = fixed_settings(config, invocation.explicit)
    for text in flags.fix or ():
        name, values = parse_constraint(text)
        if fixed.get(name, values) != values:
            raise ConfigError(f"--fix {text} and {name} {','.join(map(str, fixed[name]))} contradict; keep one of them")
        fixed[name] = values
    if config.training.global_batch_size is None:
        raise ConfigError("the batch is not set; add --global-batch-size, e.g. 1536")
    if invocation.provenance["precision"] == "default":
        peaks = cluster.accelerator.peak_flops
        order = [precision for precision in ("bf16", "fp16", "fp32", "fp64") if precision in peaks]
        best = max(order, key=lambda precision: peaks[precision])  # of equal peaks the first
        config = with_settings(config, precision=best)
    config = with_vocabulary(config)
    request = request_for(config, world_size=flags.gpus, fixed=fixed, memory_limit=limit, cluster=cluster)
    return request, cluster, stack


def run_fit(flags: Namespace) -> int:
    before = Machine(load_cluster(flags.cluster), load_stack(flags.stack))
    rows = read_rows(flags.rows)
    if flags.output is not None:
        require_new_file(flags.output, "--output")
    source = f"steps of {flags.rows.name}"
    more = {"only": flags.fit} if flags.fit else {}

    def fitted(chosen: Sequence[Row]) -> Machine:
        found: Calibration = fit([row.measured for row in chosen], *before, source=source, **more)
        return Machine(found.cluster, found.stack)

    with working(f"fitting {len(rows)} steps"):
        cross_errors = _cross_validate(rows, flags.leave_out, fitted) if flags.leave_out else None
        after = fitted(rows)
    changed = {
        name: (before.value(name), after.value(name)) for name in PRIORS if before.value(name) != after.value(name)
    }
    errors = {"before": _errors(rows, before), "after": _errors(rows, after)}
    if cross_errors is not None:
        errors["left out"] = cross_errors
    written = []
    if flags.output is not None:
        stack = after.stack
        if cross_errors is not None:
            spread = sorted(map(abs, cross_errors))[math.ceil(0.8 * len(cross_errors)) - 1]
            where = f"measured: {source}, those of each {flags.leave_out} left out of the fit once"
            stack = replace(stack, spread=spread, provenance={**stack.provenance, "spread": where})
        written = [flags.output, save_machine(after.cluster, stack, flags.output)]
    if flags.json:
        summary = {name: _summary(each) for name, each in errors.items()}
        lines = [
            {"line": row.number, **{name: each[at] for name, each in errors.items()}} for at, row in enumerate(rows)
        ]
        data = {"constants": changed, "errors": summary, "rows": lines, "written": list(map(str, written))}
        show(json_text(data))
    else:
        show("\n\n".join([*_fit_text(rows, errors, changed, flags.leave_out), *(f"wrote {path}" for path in written)]))
    return 0


def _cross_validate(rows: Sequence[Row], column: str, fitted: Any) -> list[float]:
    """Return the error of each row, predicted by constants fitted to the rows with other values of the column."""
    values = [row.cells.get(column, "") for row in rows]
    different = list(dict.fromkeys(values))
    if not any(values):
        names = list(dict.fromkeys(name for row in rows for name in row.cells))
        raise ConfigError(
            f"--leave-out: no column is named {column}{nearest(column, names)}; there are {', '.join(names)}"
        )
    if len(different) < 2:
        raise ConfigError(f"--leave-out {column}: all rows have {different[0]}; nothing is left to fit on")
    errors = [0.0] * len(rows)
    for value in different:
        machine = fitted([row for row, other in zip(rows, values) if other != value])
        chosen = [at for at, other in enumerate(values) if other == value]
        for at, error in zip(chosen, _errors([rows[at] for at in chosen], machine)):
            errors[at] = error
    return errors


def _errors(rows: Sequence[Row], machine: Machine) -> list[float]:
    """Return predicted / measured - 1 of each row."""
    predicted = [predict(row.measured.config, *machine).step_seconds for row in rows]
    return [found / row.measured.seconds - 1.0 for found, row in zip(predicted, rows)]


def _summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "mean": statistics.fmean(sizes),
        "median": statistics.median(sizes),
        "worst": sizes[-1],
        "bias": statistics.fmean(errors),
    }


def _fit_text(
    rows: Sequence[Row], errors: dict[str, list[float]], changed: dict[str, tuple[float, float]], column: str | None
) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.cells if name not in TIMES)
    varying = [name for name in names if len({row.cells.get(name, "") for row in rows}) > 1]
    lines = [["line", "seconds", *errors, *varying]]
    for at, row in enumerate(rows):
        shown = [f"{each[at]:+.1%}" for each in errors.values()]
        cells = [row.cells.get(name, "") for name in varying]
        lines.append([str(row.number), f"{row.measured.seconds:.4g}", *shown, *cells])
    kinds = [["error", "mean", "median", "worst", "bias"]]
    for name, each in errors.items():
        s = _summary(each)
        kinds.append(
            [name if name != "left out" else f"each {column} left out", *(f"{s[key]:.1%}" for key in kinds[0][1:])]
        )
    constants = [["constant", "before", "after"], *([name, f"{a:.4g}", f"{b:.4g}"] for name, (a, b) in changed.items())]
    return ["\n".join(table(part, right=range(1, 99))) for part in (lines, kinds, constants)]


def run_chain(flags: Namespace) -> int:
    profile, cluster = find_profile(flags.profile), read_cluster(flags.cluster)
    memory = flags.memory or cluster.memory_gb * 1e9
    planned = plan_chain(profile, cluster, flags.global_batch_size, memory=memory)
    answer = _Answer(planned, profile, cluster, flags.global_batch_size, memory)
    if flags.svg is not None:
        samples = f"{planned.best.seconds:.4g} s per step of {flags.global_batch_size} samples"
        panel = Panel(
            timeline=answer.drawing(),
            peaks=tuple(map(format_bytes, planned.best.memory)),
            summary=f"{profile.name} on {cluster.name}: {samples}; each rank is a stage",
        )
        write_text(flags.svg, draw_svg([panel], unit="ms", peak="peak memory of a device of the stage"))
    text = json.dumps(answer.data()) if flags.json else "\n".join(answer.lines(details=flags.compare))
    show(text if flags.json or flags.svg is None else f"{text}\nwrote {flags.svg}")
    return 0


@dataclass(frozen=True)
class _Answer:
    planned: Planned
    profile: ChainProfile
    cluster: ChainCluster
    samples: int
    memory: float

    def drawing(self) -> Timeline:
        """Return the timeline of the best plan's step, in milliseconds."""
        plan = self.planned.best.plan
        costs = plan_costs(plan, self.profile, self.cluster)
        return timeline(plan, costs, run_plan(plan, costs, self.cluster))

    def lines(self, *, details: bool) -> Iterator[str]:
        """Yield the plan, the comparison with the baselines and the timeline; with `details` the baselines' stages."""
        planned, cluster = self.planned, self.cluster
        devices = f"{cluster.num_gpus} devices of {format_bytes(self.memory)}"
        yield f"{self.profile.name} on {cluster.name} ({devices}), {self.samples} samples per step"
        yield f"profile: {self.profile.provenance}\n"
        yield from self._stages(planned.best)
        yield ""
        yield from self._comparison()
        end = "the search is complete" if planned.complete else "the search stopped at its limit"
        yield f"\nsearched {planned.nodes} partial plans, simulated {planned.simulations}; {end}"
        for name, other in planned.baselines.items() if details else ():
            yield f"\n{name}:"
            yield from self._stages(other)
        yield "\ntimes in ms:"
        yield render_grid(self.drawing(), width=_WIDTH)

    def _stages(self, judged: Judged) -> Iterator[str]:
        plan, costs = judged.plan, plan_costs(judged.plan, self.profile, self.cluster)
        ids = device_ids(plan.stages, self.cluster.gpus_per_machine)
        rows = [["stage", "layers", "from", "to", "replicas", "devices", "F ms", "B ms", "reduce ms", "memory"]]
        for number, stage in enumerate(plan.stages):
            first, last = self.profile.layers[stage.first].name, self.profile.layers[stage.last - 1].name
            times = [f"{1e3 * seconds[number]:.4g}" for seconds in (costs.forward, costs.backward, costs.reduce)]
            row = [
                str(number),
                str(stage.last - stage.first),
                first,
                last,
                str(stage.replicas),
                number_ranges(map(str, ids[number]), "-"),
            ]
            rows.append([*row, *times, format_bytes(judged.memory[number])])
        ahead = f", warm-up {plan.warm_up}" if len(plan.stages) > 1 else ""
        unused = f", idle devices: {idle}" if (idle := self.cluster.num_gpus - sum(map(len, ids))) else ""
        yield f"{plan.microbatches} microbatches of {plan.microbatch_size} samples{ahead}{unused}"
        yield from table(rows, right={0, 1, 4, 6, 7, 8, 9})

    def _comparison(self) -> list[str]:
        best = self.planned.best
        rows = [["plan", "s per step", "samples/s", "of the best", "stages", "fullest device", ""]]
        for name, judged in {"this plan": best, **self.planned.baselines}.items():
            fullest = max(judged.memory)
            speed = [f"{judged.seconds:.4g}", f"{self.samples / judged.seconds:.4g}"]
            fits = "" if fullest <= self.memory else "does not fit"
            stages = str(len(judged.plan.stages))
            rows.append([name, *speed, f"{judged.seconds / best.seconds:.2f}", stages, format_bytes(fullest), fits])
        return table(rows, right=range(1, 6))

    def data(self) -> dict[str, Any]:
        """Return the answer with stable keys, for JSON."""
        planned = self.planned
        return {
            "profile": self.profile.name,
            "provenance": self.profile.provenance,
            "cluster": self.cluster.name,
            "devices": self.cluster.num_gpus,
            "global_batch_size": self.samples,
            "memory_bytes": None if self.memory == float("inf") else self.memory,
            "plan": self._plan_data(planned.best),
            "baselines": {name: self._plan_data(other) for name, other in planned.baselines.items()},
            "search": {"nodes": planned.nodes, "complete": planned.complete, "simulations": planned.simulations},
        }

    def _plan_data(self, judged: Judged) -> dict[str, Any]:
        plan, costs = judged.plan, plan_costs(judged.plan, self.profile, self.cluster)
        ids = device_ids(plan.stages, self.cluster.gpus_per_machine)
        return {
            "step_seconds": judged.seconds,
            "samples_per_second": self.samples / judged.seconds,
            "microbatches": plan.microbatches,
            "microbatch_size": plan.microbatch_size,
            "warm_up": plan.warm_up,
            "fits": max(judged.memory) <= self.memory,
            "stages": [
                {
                    "first_layer": stage.first,
                    "last_layer": stage.last,
                    "replicas": stage.replicas,
                    "devices": list(ids[number]),
                    "forward_seconds": costs.forward[number],
                    "backward_seconds": costs.backward[number],
                    "all_reduce_seconds": costs.reduce[number],
                    "memory_bytes": judged.memory[number],
                }
                for number, stage in enumerate(plan.stages)
            ],
        }

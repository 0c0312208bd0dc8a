"""`megalite plan`: which layout to use, how fast it is and how much memory it takes, before a device is rented."""

import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megalite.cli.display import working
from megalite.cli.dry_run import with_vocabulary
from megalite.cli.output import json_text, show
from megalite.cli.tool_commands import PLAN
from megalite.config.byte_size import parse_byte_size
from megalite.config.describe import replace as with_settings
from megalite.config.errors import ConfigError
from megalite.config.flags import Invocation
from megalite.config.reading import write_text
from megalite.pipeline.ir.render import render_grid
from megalite.planner.hardware import Cluster, SoftwareStack, load_cluster, load_stack
from megalite.planner.report import (
    deciding_sweep,
    drawn_timeline,
    format_plan,
    html_page,
    launch_lines,
    plan_data,
    write_files,
)
from megalite.planner.search.search import Plan, find, find_cheapest
from megalite.planner.search.space import (
    USUAL_MEMORY,
    Request,
    fixed_settings,
    parse_constraint,
    refuse_not_searched,
    request_for,
)
from megalite.planner.whole_run import WholeRun
from megalite.sweep.spec import ignored

_WIDTH = 160  # of a timeline where there is no terminal
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

main = PLAN


def run(flags: Namespace) -> int:
    request, cluster, stack = asked(flags)
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
        write_text(flags.html, html_page(data, drawn_timeline(plan.candidates[0], cluster, stack)))
        written.append(flags.html)
    deciding = None
    if flags.resolve is not None:
        cluster_file, stack_file = map(_from_anywhere, (flags.cluster, flags.stack))
        deciding = deciding_sweep(plan, cluster_file, stack_file, ignored(plan.candidates[0].config))
    if deciding is not None:
        write_text(flags.resolve, yaml.safe_dump(deciding, sort_keys=False, allow_unicode=True))
        written.append(flags.resolve)
    lines = [] if flags.output is None else launch_lines(plan, flags.output)
    if flags.json:
        show(json_text({**data, "written": list(map(str, written)), "launch": lines}))
        return 0
    parts = [format_plan(data)]
    if flags.explain:
        parts.append(_drawn(plan, data, cluster, stack))
    if written:
        parts.append("\n".join(f"wrote {path}" for path in written))
    if flags.resolve is not None:
        parts.append(
            "No other layout is a tie: there is nothing to resolve."
            if deciding is None
            else f"Run the {len(deciding['list'])} layouts that are a tie: megalite sweep {flags.resolve} --output FOLDER"
        )
    if lines:
        parts.append("\n".join(["Start it on each node with the first line, or with the second:", *lines]))
    show("\n\n".join(parts))
    return 0


def _from_anywhere(name_or_path: str) -> str:
    """A file by its whole path, since a sweep may lie elsewhere; a name as it is."""
    path = Path(name_or_path)
    return str(path.absolute()) if path.is_file() else name_or_path


def _drawn(plan: Plan, data: dict[str, Any], cluster: Cluster, stack: SoftwareStack) -> str:
    timeline = drawn_timeline(plan.candidates[0], cluster, stack)
    count, whole = timeline.schedule.num_microbatches, data["layouts"][0]["microbatches"]
    note = "" if count == whole else f" (with {count} microbatches instead of {whole})"
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    return f"The step of the best layout{note}, in seconds:\n{render_grid(timeline, width=width)}"


class Asked(NamedTuple):
    """What to search, on which machines and with which software."""

    request: Request
    cluster: Cluster
    stack: SoftwareStack


def asked(flags: Namespace) -> Asked:
    """What the flags ask for."""
    cluster, stack = load_cluster(flags.cluster), load_stack(flags.stack)
    limit: float | None = cluster.accelerator.memory_bytes * USUAL_MEMORY
    if flags.max_memory is not None:
        limit = parse_byte_size(flags.max_memory)
    if limit is None:
        raise ConfigError(f"--max-memory is {flags.max_memory}; it is a size with its unit, e.g. 70GB or 64GiB")
    request = request_of(flags.invocation, cluster, flags.gpus, flags.fix or (), limit)
    return Asked(request, cluster, stack)


def _tokens(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMBT]?)", text, re.ASCII | re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--tokens is {text}; it is a number above 0 such as 300B or 1.5T")
    return float(match[1]) * _UNITS[match[2].upper()]


def request_of(
    invocation: Invocation, cluster: Cluster, ranks: int, constraints: Sequence[str], limit: float
) -> Request:
    """Settings that are searched become constraints, the others the config that every layout shares."""
    refuse_not_searched(invocation.config, invocation.explicit)
    fixed = fixed_settings(invocation.config, invocation.explicit)
    for text in constraints:
        name, values = parse_constraint(text)
        if fixed.get(name, values) != values:
            raise ConfigError(f"--fix {text} and {name} {','.join(map(str, fixed[name]))} contradict; keep one of them")
        fixed[name] = values
    config = invocation.config
    if config.training.global_batch_size is None:
        raise ConfigError("the batch is not set; add --global-batch-size, e.g. 1536")
    if invocation.provenance["precision"] == "default":
        peaks = cluster.accelerator.peak_flops
        order = [precision for precision in ("bf16", "fp16", "fp32", "fp64") if precision in peaks]
        best = max(order, key=lambda precision: peaks[precision])  # the first of equals
        config = with_settings(config, precision=best)
    config = with_vocabulary(config)
    return request_for(config, world_size=ranks, fixed=fixed, memory_limit=limit, cluster=cluster)

"""`megalite plan-fit`: a machine's constants from a table of measured steps, and how well they predict."""

import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megalite.cli.display import table, working
from megalite.cli.output import json_text, show
from megalite.cli.tool_commands import PLAN_FIT
from megalite.config.errors import ConfigError
from megalite.config.values import nearest
from megalite.planner.cost.calibrate import Calibration, Machine, fit
from megalite.planner.cost.rows import TIMES, Row, read_rows
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, load_stack, refuse_taken, save_machine

main = PLAN_FIT


def run(flags: Namespace) -> int:
    before = Machine(load_cluster(flags.cluster), load_stack(flags.stack))
    rows = read_rows(flags.rows)
    if flags.output is not None:
        refuse_taken(flags.output, "--output")
    source = f"steps of {flags.rows.name}"
    more = {"only": flags.fit} if flags.fit else {}

    def fitted(chosen: Sequence[Row]) -> Machine:
        found: Calibration = fit([row.measured for row in chosen], *before, source=source, **more)
        return Machine(found.cluster, found.stack)

    with working(f"fitting {len(rows)} steps"):
        after = fitted(rows)
        kept = _left_out(rows, flags.leave_out, fitted) if flags.leave_out else None
    changed = {
        name: (before.value(name), after.value(name))
        for name in after.names()
        if before.value(name) != after.value(name)
    }
    errors = {"before": _errors(rows, before), "after": _errors(rows, after)} | (
        {} if kept is None else {"left out": kept}
    )
    written = []
    if flags.output is not None:
        stack = after.stack
        if kept is not None:
            spread = sorted(map(abs, kept))[math.ceil(0.8 * len(kept)) - 1]
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
        show("\n\n".join([*_text(rows, errors, changed, flags.leave_out), *(f"wrote {path}" for path in written)]))
    return 0


def _left_out(rows: Sequence[Row], column: str, fitted: Any) -> list[float]:
    """Errors of the rows with each value of a column, by constants that are fitted on the others."""
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
    """Predicted over measured, less 1."""
    predicted = [predict(row.measured.config, *machine, with_memory=False).step_seconds for row in rows]
    return [found / row.measured.seconds - 1.0 for found, row in zip(predicted, rows)]


def _summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "mean": statistics.fmean(sizes),
        "median": statistics.median(sizes),
        "worst": sizes[-1],
        "bias": statistics.fmean(errors),
    }


def _text(
    rows: Sequence[Row], errors: dict[str, list[float]], changed: dict[str, tuple[float, float]], column: str | None
) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.cells if name not in TIMES)
    apart = [name for name in names if len({row.cells.get(name, "") for row in rows}) > 1]
    lines = [["line", "seconds", *errors, *apart]]
    for at, row in enumerate(rows):
        shown = [f"{each[at]:+.1%}" for each in errors.values()]
        cells = [row.cells.get(name, "") for name in apart]
        lines.append([str(row.number), f"{row.measured.seconds:.4g}", *shown, *cells])
    kinds = [["error", "mean", "median", "worst", "bias"]]
    for name, each in errors.items():
        s = _summary(each)
        kinds.append(
            [name if name != "left out" else f"each {column} left out", *(f"{s[key]:.1%}" for key in kinds[0][1:])]
        )
    constants = [["constant", "before", "after"], *([name, f"{a:.4g}", f"{b:.4g}"] for name, (a, b) in changed.items())]
    return ["\n".join(table(part, right=range(1, 99))) for part in (lines, kinds, constants)]

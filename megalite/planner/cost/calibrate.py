"""`fit` efficiencies and host constants to measured steps; `read_rows` reads such steps from a table.

The objective is the sum of absolute logarithms of predicted / measured, which is robust against outliers, plus a prior
around each constant's present value. It is minimised by iteratively reweighted Gauss-Newton steps in the constants'
logarithms. Between simulations a step is approximated from its parts: computation by the cost formulas over all rows,
other parts by the power with which a constant enters."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.batch import microbatch_counts
from megalite.config.errors import ConfigError, nearest
from megalite.config.files import level_from_text, read_preset
from megalite.config.merge import merge
from megalite.config.reading import number, read_input
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.pipeline import plan_stages
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import data_stride, members_within, slowest_share, stacked, workload_of
from megalite.planner.cost.stage import StageKind, stage_cost, stage_kind
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack

Array = npt.NDArray[np.float64]

# Fitted constants -> standard deviation of the logarithm around the present value. Steps are monotonic in each of them.
_EFFICIENCIES = {"gemm": 0.3, "memory": 0.15, "link": 0.1, "small_groups": 0.5, "network": 0.7, "device_deviation": 1.0}
_SHARES = {"attention_efficiency": 0.3, "attention_backward": 0.15, "overlap_cost": 1.0}
_FACTORS = {"product_rate": 0.3, "elementwise_slowdown": 0.5, "optimizer_slowdown": 0.7}
_SECONDS = {"operation_seconds": 1.0, "collective_seconds": 1.0, "microbatch_seconds": 1.0, "step_seconds": 1.0}
_CONSTANTS = {**_SHARES, **_FACTORS, **_SECONDS}
PRIORS = {**_EFFICIENCIES, **_CONSTANTS}
DEFAULT = tuple(name for name in PRIORS if name not in ("attention_backward", "product_rate"))
"""All constants but two, each a second factor of another one: fit such a factor only if the other is fixed."""
PRIOR_WEIGHT = 0.013  # twice the cost of one standard deviation from the prior, in mean logarithmic error
ROUNDS, STEPS = 3, 5  # simulations of all rows, and steps per value of `SMOOTH` between two simulations
SMOOTH = (0.1, 0.03, 0.01)  # errors below this value count by their squares
MOVE = 1e-3  # change of a logarithm for finite differences


@dataclass(frozen=True)
class Measured:
    """A timed step; its config is validated and has a vocabulary."""

    config: RunConfig
    seconds: float


@dataclass(frozen=True)
class Calibration:
    cluster: Cluster
    stack: SoftwareStack
    predicted: tuple[float, ...]  # seconds of each row with the fitted constants
    errors: tuple[float, ...]  # predicted / measured - 1 of each row


class Machine(NamedTuple):
    cluster: Cluster
    stack: SoftwareStack

    def value(self, name: str) -> float:
        return float(getattr(self.cluster.efficiency if name in _EFFICIENCIES else self.stack, name))

    def replaced(self, names: Sequence[str], logarithms: Array) -> "Machine":
        """Return a machine with the constants exp(logarithms)."""
        values = dict(zip(names, map(float, np.exp(logarithms))))
        values |= {name: min(1.0, value) for name, value in values.items() if name in _EFFICIENCIES or name in _SHARES}
        rest: dict[str, Any] = {name: value for name, value in values.items() if name in _CONSTANTS}
        shares = {name: value for name, value in values.items() if name in _EFFICIENCIES}
        efficiency = replace(self.cluster.efficiency, **shares)
        return Machine(replace(self.cluster, efficiency=efficiency), replace(self.stack, **rest))


def fit(
    rows: Sequence[Measured],
    cluster: Cluster,
    stack: SoftwareStack,
    *,
    source: str = "measured steps",
    only: Sequence[str] = DEFAULT,
) -> Calibration:
    """Fit the cluster's efficiencies and the stack's host constants to the rows.

    A constant that no row depends on keeps its value. `source` describes the rows in the provenance; `only` names the
    constants to fit, from `PRIORS`. Raises ConfigError if there are no rows, or a constant is unknown."""
    if not rows:
        raise ConfigError("there is nothing to fit: at least one measured step is required")
    for name in only:
        if name not in PRIORS:
            raise ConfigError(f"cannot fit {name}{nearest(name, PRIORS)} (constants are {', '.join(PRIORS)})")
    machine = Machine(cluster, stack)
    names = [name for name in PRIORS if name in only and machine.value(name) > 0]
    start = np.log([machine.value(name) for name in names])
    measured = np.log([row.seconds for row in rows])
    tried: list[tuple[float, Array, list[float]]] = []
    best = start
    for _ in range(ROUNDS):
        model = _Approximation(rows, machine.replaced(names, best), names)
        tried.append((_loss(model.seconds, measured), best, model.seconds))
        best = _steps(model.at, names, best, start, measured)
    now = machine.replaced(names, best)
    last = [predict(row.config, *now).step_seconds for row in rows]
    _, best, seconds = min([*tried, (_loss(last, measured), best, last)], key=lambda each: each[0])
    cluster, stack = machine.replaced(names, best)
    where = f"fitted on {len(rows)} {source}"
    on_cluster = {f"efficiency.{name}": where for name in names if name in _EFFICIENCIES}
    on_stack = {name: where for name in names if name in _CONSTANTS}
    return Calibration(
        replace(cluster, provenance={**cluster.provenance, **on_cluster}),
        replace(stack, provenance={**stack.provenance, **on_stack}),
        tuple(seconds),
        tuple(found / row.seconds - 1.0 for found, row in zip(seconds, rows)),
    )


def _loss(seconds: Sequence[float], measured: Array) -> float:
    return float(np.abs(np.log(seconds) - measured).mean())


def _steps(
    predicted: Callable[[Array], Array], names: Sequence[str], begin: Array, prior: Array, measured: Array
) -> Array:
    """Run reweighted Gauss-Newton from `begin`, in logarithms of the constants; efficiencies stay at most 1."""
    at = begin.copy()
    deviation = np.array([PRIORS[name] for name in names])
    shares = np.array([name in _EFFICIENCIES or name in _SHARES for name in names])
    lower, upper = prior - 4.0 * deviation, prior + 4.0 * deviation
    upper = np.where(shares, np.minimum(upper, 0.0), upper)
    weight = PRIOR_WEIGHT * len(measured)

    def residuals(point: Array) -> Array:
        return np.log(predicted(point)) - measured

    def cost(errors: Array, point: Array, smooth: float) -> float:
        pull = 0.5 * weight * (((point - prior) / deviation) ** 2).sum()
        return float(np.sqrt(errors**2 + smooth**2).sum() + pull)

    for smooth in np.repeat(SMOOTH, STEPS):
        now = residuals(at)
        # Each constant moves inwards, to stay in its range.
        moves = np.where(at + MOVE <= upper, MOVE, -MOVE)
        slopes = np.stack(
            [(residuals(at + move * unit) - now) / move for move, unit in zip(moves, np.eye(len(at)))], axis=1
        )
        weights = 1.0 / np.sqrt(now**2 + smooth**2)
        pull = weight / deviation**2
        matrix = slopes.T @ (weights[:, None] * slopes) + np.diag(pull)
        step = np.linalg.solve(matrix, slopes.T @ (weights * now) + pull * (at - prior))
        for share in (1.0, 0.5, 0.25, 0.1):
            tried = np.clip(at - share * step, lower, upper)
            if cost(residuals(tried), tried, smooth) < cost(now, at, smooth):
                at = tried
                break
    return at


class _Approximation:
    """Approximates the time of all rows, near the constants that they were simulated with."""

    def __init__(self, rows: Sequence[Measured], machine: Machine, names: Sequence[str]) -> None:
        self._machine, self._names = machine, names
        found = [predict(row.config, *machine) for row in rows]
        self.seconds = [each.step_seconds for each in found]
        per_row = [workload_of(row.config) for row in rows]
        stages = [plan_stages(row.config) for row in rows]
        self._work = stacked([work for work, plans in zip(per_row, stages) for _ in plans])  # over (row, stage)
        kinds = [stage_kind(row.config, plan) for row, plans in zip(rows, stages) for plan in plans]
        self._counts: Mapping[str, Any] = dict(zip(StageKind._fields, np.array(kinds).T))
        # (row, pipeline rank) pairs are numbered: the number per (row, stage), and the row of each number.
        sizes = [row.config.parallel.pp for row in rows]
        firsts = np.cumsum([0, *sizes[:-1]])
        self._rank = np.array([first + plan.rank for first, plans in zip(firsts, stages) for plan in plans])
        self._row_of_rank = np.repeat(np.arange(len(rows)), sizes)
        self._chunks = np.array([float(row.config.parallel.vpp) for row in rows])
        self._microbatches = np.array([float(microbatch_counts(row.config)[-1]) for row in rows])
        names = ("pipeline", "gradients", "parameters", "overlap", "optimizer", "step")
        self._parts = {name: np.array([each.parts[name] for each in found]) for name in names}
        works = stacked(per_row)
        self._ranks = works.tp * works.cp * works.dp * works.pp
        size = works.dp * works.cp
        # Whether the replicas are on several nodes.
        self._across = members_within(machine.cluster.node.accelerators, size, data_stride(works)) < size
        # Per row: simulated computation / computation in closed form.
        self._factor = (np.array(self.seconds) - sum(self._parts.values())) / self._computation(machine)

    def _computation(self, machine: Machine) -> Array:
        """Sum the busiest rank over all microbatches, and the other ranks once per chunk."""
        total = stage_cost(Pricing.of(self._work, *machine), **self._counts).total
        busy = np.bincount(self._rank, weights=total)
        most = np.zeros(len(self._chunks))
        np.maximum.at(most, self._row_of_rank, busy)
        summed = np.bincount(self._row_of_rank, weights=busy)
        slowest = np.array([slowest_share(ranks, machine.cluster) for ranks in self._ranks])
        return self._microbatches * most * (1.0 + slowest) + (summed - most) / self._chunks

    def at(self, logarithms: Array) -> Array:
        """Return the seconds of each row with other constants."""
        machine = self._machine.replaced(self._names, logarithms)
        old, new, parts = self._machine.cluster.efficiency, machine.cluster.efficiency, self._parts
        before, after = self._machine.stack, machine.stack
        overlap = after.overlap_cost / before.overlap_cost if before.overlap_cost else 0.0
        network = np.where(self._across, old.network / new.network, old.link / new.link)
        return (
            self._factor * self._computation(machine)
            + parts["pipeline"]
            + (parts["gradients"] + parts["parameters"] + parts["overlap"] * overlap) * network
            + parts["optimizer"] * (old.memory / new.memory) * (after.optimizer_slowdown / before.optimizer_slowdown)
            + parts["step"]
            + (after.step_seconds - before.step_seconds)
        )


RANKS = "gpus"
TIMES = ("seconds", "tokens_per_second", "tokens_per_second_per_gpu")
_OTHERS = ("preset", "source", RANKS, *TIMES)
_HOW = f"the first line has names: {RANKS}, one of {', '.join(TIMES)}, and settings such as tp or hidden_size"


@dataclass(frozen=True)
class Row:
    """A line of the table. `cells` are those that are not empty."""

    number: int
    cells: Mapping[str, str]
    measured: Measured


def read_rows(path: Path) -> list[Row]:
    """Read a table with the columns `gpus`; `seconds` of a step, or its tokens per second over all ranks or per rank;
    `preset`; and any settings. Column `source` is ignored. Empty cells use the preset or default. Raises ConfigError."""
    reader = csv.DictReader(io.StringIO(read_input(path, "table")), skipinitialspace=True)
    names = [name or "" for name in reader.fieldnames or ()]
    if RANKS not in names or not any(name in names for name in TIMES):
        raise ConfigError(f"table {path} has columns {', '.join(names)[:200] or 'no names'}; {_HOW}")
    rows = []
    for line in reader:
        where = f"table {path}, line {reader.line_num}"
        if None in line or None in line.values():
            raise ConfigError(f"{where} has more or fewer cells than the {len(names)} names of the first line")
        rows.append(_row(reader.line_num, {name: cell.strip() for name, cell in line.items() if cell.strip()}, where))
    return rows


def _row(line: int, cells: Mapping[str, str], where: str) -> Row:
    ranks = number(int, cells.get(RANKS), f"{where}: {RANKS}", {})
    settings = "".join(f"{name}: {cell}\n" for name, cell in cells.items() if name not in _OTHERS)
    level = level_from_text(settings or "{}", where)
    try:
        levels = [read_preset(cells["preset"])] if "preset" in cells else []
        merged = merge([*levels, level])
        config = validate(merged.config, int(ranks), merged.explicit)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if config.model.vocab_size is None:
        raise ConfigError(f"{where} has no vocab_size; add the column, e.g. 50257")
    times = [name for name in TIMES if name in cells]
    if len(times) != 1:
        raise ConfigError(f"{where} has {' and '.join(times) or 'no time'}; use one of {', '.join(TIMES)}")
    value = number(float, cells[times[0]], f"{where}: {times[0]}", {})
    if times[0] == "seconds":
        return Row(line, cells, Measured(config, value))
    assert config.training.global_batch_size is not None, "validate() resolves it"
    tokens = config.training.global_batch_size * config.training.seq_length
    return Row(line, cells, Measured(config, tokens / value / (ranks if times[0].endswith("per_gpu") else 1.0)))

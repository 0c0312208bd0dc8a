"""`fit`: efficiencies and host constants from measured steps.

Least absolute logarithms of predicted over measured (robust: outliers weigh by their sign alone), with a prior about
each constant's present value, found by iteratively reweighted Gauss-Newton steps in the constants' logarithms. Between
simulations the step is followed by its parts: computation by the cost formulas over all rows at once, the rest by the
power that a constant enters with.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config.batch import microbatch_counts
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.values import nearest
from megalite.partition.pipeline import plan_stages
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import data_stride, members_in_node
from megalite.planner.cost.stage import StageKind, stage_cost, stage_kind
from megalite.planner.cost.step import predict
from megalite.planner.cost.workload import Workload, stacked, workload_of
from megalite.planner.hardware import Cluster, SoftwareStack

Array = npt.NDArray[np.float64]

PRIORS = {
    "gemm": 0.3,
    "memory": 0.15,
    "link": 0.1,
    "small_groups": 0.5,
    "network": 0.7,
    "operation_seconds": 1.0,
    "collective_seconds": 1.0,
    "microbatch_seconds": 1.0,
    "step_seconds": 1.0,
}
"""Constants that are fitted -> standard deviation of the logarithm about the present value. All enter monotonously."""
PRIOR_WEIGHT = 0.013
"""Twice what one standard deviation from the prior costs, in the mean logarithm of the rows' errors."""
ROUNDS, STEPS = 3, 5  # times that all rows are simulated, and steps for each of `SMOOTH` between two such times
SMOOTH = (0.1, 0.03, 0.01)  # errors below this count by their squares: less and less of them
MOVE = 1e-3  # of a logarithm, to see what it changes


@dataclass(frozen=True)
class Measured:
    """A step that was timed."""

    config: RunConfig  # validated, vocabulary known
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """What a fit found."""

    cluster: Cluster
    stack: SoftwareStack
    predicted: tuple[float, ...]  # seconds of each row with the fitted constants
    errors: tuple[float, ...]  # predicted / measured - 1 of each row


def fit(
    rows: Sequence[Measured],
    cluster: Cluster,
    stack: SoftwareStack,
    *,
    source: str = "measured steps",
    only: Sequence[str] = tuple(PRIORS),
) -> Calibration:
    """The cluster's efficiencies and the stack's host constants that explain the rows.

    Args:
        rows: measured steps; a constant that they say nothing of stays where it is.
        cluster: whose vendor's figures are kept, and whose efficiencies are where the search begins.
        stack: likewise.
        source: what the rows are, for the provenance.
        only: the constants to fit, of `PRIORS`.

    Raises ConfigError: there are no rows, one is not a positive time, or there is no such constant.
    """
    if not rows:
        raise ConfigError("there is nothing to fit: give at least one measured step")
    for row in rows:
        if not (row.seconds > 0 and np.isfinite(row.seconds)):
            raise ConfigError(f"a measured step takes {row.seconds} s; times are above 0 and finite")
    for name in only:
        if name not in PRIORS:
            raise ConfigError(f"cannot fit {name}{nearest(name, PRIORS)} (constants are {', '.join(PRIORS)})")
    names = [name for name in PRIORS if name in only and _value(name, cluster, stack) > 0]
    start = np.array([_value(name, cluster, stack) for name in names])
    deviation = np.array([PRIORS[name] for name in names])
    measured = np.log([row.seconds for row in rows])
    best = np.log(start)
    kept = (np.inf, best, [0.0] * len(rows))
    for _ in range(ROUNDS):
        now = _with(names, np.exp(best), cluster, stack)
        follow = _Followed.of(rows, *now)
        kept = min(kept, (_loss(follow.seconds, measured), best, follow.seconds), key=lambda each: each[0])
        best = _steps(follow, names, best, np.log(start), deviation, measured, cluster, stack)
    now = _with(names, np.exp(best), cluster, stack)
    last = [_step_seconds(row.config, *now) for row in rows]
    _, best, seconds = min(kept, (_loss(last, measured), best, last), key=lambda each: each[0])
    cluster, stack = _with(names, np.exp(best), cluster, stack)
    cluster, stack = _with_provenance(names, cluster, stack, f"fitted on {len(rows)} {source}")
    errors = tuple(found / row.seconds - 1.0 for found, row in zip(seconds, rows))
    return Calibration(cluster, stack, tuple(seconds), errors)


def _step_seconds(config: RunConfig, cluster: Cluster, stack: SoftwareStack) -> float:
    return predict(config, cluster, stack, with_memory=False).step_seconds


def _loss(seconds: Sequence[float], measured: Array) -> float:
    return float(np.abs(np.log(seconds) - measured).mean())


def _steps(
    follow: "_Followed",
    names: list[str],
    begin: Array,
    prior: Array,
    deviation: Array,
    measured: Array,
    cluster: Cluster,
    stack: SoftwareStack,
) -> Array:
    """Reweighted Gauss-Newton from `begin`, in logarithms."""
    at = begin.copy()
    shares = np.array([name in _efficiencies(cluster) for name in names])
    lower, upper = prior - 4.0 * deviation, prior + 4.0 * deviation
    upper = np.where(shares, np.minimum(upper, 0.0), upper)

    def residuals(point: Array) -> Array:
        return np.log(follow.at(*_with(names, np.exp(point), cluster, stack))) - measured

    weight = PRIOR_WEIGHT * len(measured)

    def cost(errors: Array, point: Array, smooth: float) -> float:
        pull = 0.5 * weight * (((point - prior) / deviation) ** 2).sum()
        return float(np.sqrt(errors**2 + smooth**2).sum() + pull)

    for smooth in np.repeat(SMOOTH, STEPS):
        now = residuals(at)
        # Each constant is moved inwards, so that none leaves its range.
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


@dataclass(frozen=True, eq=False)
class _Followed:
    """All rows at once, near the constants that they were simulated with."""

    seconds: list[float]
    work: Workload  # over (row, stage)
    counts: dict[str, Array]  # arguments of `stage_cost`, over (row, stage)
    rank: npt.NDArray[np.int64]  # (row, pipeline rank) of each (row, stage), numbered
    row_of_rank: npt.NDArray[np.int64]
    chunks: Array
    microbatches: Array
    factor: Array  # of each row, simulated computation over the closed form's
    parts: dict[str, Array]  # of each row, what else the step is made of
    across: Array  # replicas are on several nodes
    cluster: Cluster
    stack: SoftwareStack

    @classmethod
    def of(cls, rows: Sequence[Measured], cluster: Cluster, stack: SoftwareStack) -> "_Followed":
        found = [predict(row.config, cluster, stack, with_memory=False) for row in rows]
        works: list[Workload] = []
        kinds: list[StageKind] = []
        rank: list[int] = []
        row_of_rank: list[int] = []
        for number, row in enumerate(rows):
            first, work = len(row_of_rank), workload_of(row.config)
            for plan in plan_stages(row.config):
                works.append(work)
                rank.append(first + plan.rank)
                kinds.append(stage_kind(row.config, plan))
            row_of_rank += [number] * row.config.parallel.pp
        names = ("pipeline", "gradients", "parameters", "optimizer", "step")
        per_row = stacked([workload_of(row.config) for row in rows])
        size, stride = per_row.dp * per_row.cp, data_stride(per_row)
        self = cls(
            seconds=[each.step_seconds for each in found],
            work=stacked(works),
            counts=dict(zip(StageKind._fields, np.array(kinds).T)),
            rank=np.array(rank),
            row_of_rank=np.array(row_of_rank),
            chunks=np.array([float(row.config.parallel.vpp) for row in rows]),
            microbatches=np.array([float(microbatch_counts(row.config)[-1]) for row in rows]),
            factor=np.ones(len(rows)),
            parts={name: np.array([each.parts[name] for each in found]) for name in names},
            across=members_in_node(size, stride, cluster) < size,
            cluster=cluster,
            stack=stack,
        )
        simulated = np.array(self.seconds) - sum(self.parts.values())
        return dataclasses.replace(self, factor=simulated / self._computation(cluster, stack))

    def _computation(self, cluster: Cluster, stack: SoftwareStack) -> Array:
        """Busiest rank for all microbatches, and the others once for each chunk."""
        counts: dict[str, Any] = self.counts
        total = stage_cost(Pricing.of(self.work, cluster, stack), **counts).total
        busy = np.bincount(self.rank, weights=total)
        most = np.zeros(len(self.chunks))
        np.maximum.at(most, self.row_of_rank, busy)
        together = np.bincount(self.row_of_rank, weights=busy)
        return self.microbatches * most + (together - most) / self.chunks

    def at(self, cluster: Cluster, stack: SoftwareStack) -> Array:
        """Seconds of each row with other constants."""
        old, new = self.cluster.efficiency, cluster.efficiency
        network = np.where(self.across, old.network / new.network, old.link / new.link)
        return (
            self.factor * self._computation(cluster, stack)
            + self.parts["pipeline"]
            + (self.parts["gradients"] + self.parts["parameters"]) * network
            + self.parts["optimizer"] * (old.memory / new.memory)
            + self.parts["step"]
            + (stack.step_seconds - self.stack.step_seconds)
        )


def _efficiencies(cluster: Cluster) -> dict[str, float]:
    return dataclasses.asdict(cluster.efficiency)


def _value(name: str, cluster: Cluster, stack: SoftwareStack) -> float:
    return _efficiencies(cluster)[name] if name in _efficiencies(cluster) else getattr(stack, name)


def _with(names: Sequence[str], values: Array, cluster: Cluster, stack: SoftwareStack) -> tuple[Cluster, SoftwareStack]:
    pairs = dict(zip(names, map(float, values)))
    known = _efficiencies(cluster)
    shares = {name: min(1.0, value) for name, value in pairs.items() if name in known}
    rest: dict[str, Any] = {name: value for name, value in pairs.items() if name not in known}
    efficiency = dataclasses.replace(cluster.efficiency, **shares)
    return dataclasses.replace(cluster, efficiency=efficiency), dataclasses.replace(stack, **rest)


def _with_provenance(
    names: Sequence[str], cluster: Cluster, stack: SoftwareStack, text: str
) -> tuple[Cluster, SoftwareStack]:
    known = _efficiencies(cluster)
    on_cluster = {f"efficiency.{name}": text for name in names if name in known}
    on_stack = {name: text for name in names if name not in known}
    return (
        dataclasses.replace(cluster, provenance={**cluster.provenance, **on_cluster}),
        dataclasses.replace(stack, provenance={**stack.provenance, **on_stack}),
    )

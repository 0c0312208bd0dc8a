"""Compare two trajectories in all numbers that a layout must not change, and format the result as a table and as data."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megalite.config.batch import batch_size, samples_after
from megalite.config.describe import sectioned
from megalite.config.errors import ConfigError, plural
from megalite.config.run import RunConfig
from megalite.parity.pool import RankFailure, RankPool
from megalite.parity.shrink import Shrunk
from megalite.parity.trajectory import CopiesDifferError, Trajectory, one_rank_trajectory, rank_trajectory, whole
from megalite.training.non_finite import NonFiniteError

NEGLIGIBLE = {"gradient": 1e-5, "weight": 1e-3}
"""Tensors with all elements below this fraction of the largest element of any tensor are measured relative to that
fraction: a tensor that is zero except for rounding (the gradient of a bias that softmax cancels, and Adam's update of it)
has no digits that must agree."""


@dataclass(frozen=True, kw_only=True)
class Line:
    what: str  # `loss`, `gradient norm`, `load balancing loss`, ..., `gradient`, `weight` or `evaluation loss`
    step: int | None  # from 1; None after the last step
    one_rank: float  # the number, or the size of the worst tensor (see `worst_tensor`)
    layout: float
    difference: float  # relative
    tensor: str | None = None  # name of the worst tensor
    rounding: float = 0.0  # difference of one rank from itself if the weights' last bits change; measured if needed

    def __str__(self) -> str:
        tensor = f" of {self.tensor}" if self.tensor else ""
        return f"{self.what}{tensor}, {f'step {self.step}' if self.step else 'after the steps'}"


def relative_difference(ours: float, reference: float) -> float:
    """Return |ours - reference| / |reference|; infinite if only one is finite, 0 if neither is."""
    finite = math.isfinite(ours), math.isfinite(reference)
    if not all(finite):
        return math.inf if any(finite) else 0.0
    return abs(ours - reference) / max(abs(reference), 1e-30)


def _size(tensor: np.ndarray, by_elements: bool) -> float:
    return float(np.abs(tensor).max() if by_elements else np.sqrt(np.mean(np.square(tensor, dtype=np.float64))))


def worst_tensor(
    ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], *, negligible: float, by_elements: bool = True
) -> tuple[float, str, float, float]:
    """Return (difference, name, size in the reference, size in ours) of the tensor that differs most.

    The difference is the size of (ours - reference) divided by the tensor's size in the reference, or by `negligible`
    times the largest size of any tensor if that is more. A size is the largest magnitude, or the root mean square
    unless `by_elements`, as single elements say little if both runs round."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    sizes = {name: _size(tensor, by_elements) for name, tensor in reference.items()}
    least = max(negligible * max(sizes.values()), 1e-30)

    def difference(name: str) -> float:
        worst = _size(ours[name] - reference[name], by_elements)
        return worst / max(sizes[name], least) if math.isfinite(worst) else math.inf

    found = {name: difference(name) for name in reference}
    name = max(found, key=lambda name: found[name])
    return found[name], name, sizes[name], _size(ours[name], by_elements)


def compare(ours: Trajectory, reference: Trajectory, *, by_elements: bool = True) -> list[Line]:
    """Compare losses, norms and all gradients of each step, then weights and evaluation. Gradients are left out if
    neither run's loss and norm are finite (fp16 overflow, which skips the step)."""
    assert len(ours.steps) == len(reference.steps)
    lines = []

    def number(what: str, step: int | None, own: float, other: float) -> None:
        difference = relative_difference(own, other)
        lines.append(Line(what=what, step=step, one_rank=other, layout=own, difference=difference))

    def tensors(what: str, step: int | None, own: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
        difference, name, size, own_size = worst_tensor(
            own, other, negligible=NEGLIGIBLE[what], by_elements=by_elements
        )
        lines.append(Line(what=what, step=step, one_rank=size, layout=own_size, difference=difference, tensor=name))

    for index, (own, other) in enumerate(zip(ours.steps, reference.steps, strict=True)):
        step = index + 1
        number("loss", step, own.loss, other.loss)
        assert own.auxiliary.keys() == other.auxiliary.keys()
        for name, value in other.auxiliary.items():
            number(name.replace("_", " "), step, own.auxiliary[name], value)
        number("gradient norm", step, own.grad_norm, other.grad_norm)
        if own.is_finite or other.is_finite:
            tensors("gradient", step, ours.gradients[index], reference.gradients[index])
    tensors("weight", None, ours.weights, reference.weights)
    number("evaluation loss", None, ours.evaluation, reference.evaluation)
    return lines


MOST_ROUNDING = 1e-7
"""Largest difference that can count as rounding."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed relative difference of a loss or norm, and of a tensor."""

    number: float
    tensor: float

    def allows(self, line: Line) -> bool:
        rounding = min(line.rounding, MOST_ROUNDING)
        return line.difference <= max(rounding, self.number if line.tensor is None else self.tensor)

    def __str__(self) -> str:
        one = f"{self.number:g}"
        return one if self.number == self.tensor else f"{one} (tensors {self.tensor:g})"


TOLERANCES = {
    "fp64": Tolerance(number=1e-9, tensor=1e-9),
    "fp32": Tolerance(number=1e-4, tensor=1e-3),
    "bf16": Tolerance(number=2e-2, tensor=0.3),
    "fp16": Tolerance(number=1e-2, tensor=0.3),
}
"""By precision. In fp64, faults are far above and rounding is far below the tolerance. In other precisions both runs
round differently, and tensors are compared by their root mean square; a missing or doubled sum is still far above
it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    shrunk: Shrunk
    steps: int
    tolerance: Tolerance
    lines: list[Line]  # empty if the layout failed or its ranks disagree
    failure: str | None = None  # why there are no lines

    @property
    def same(self) -> bool:
        return self.failure is None and all(map(self.tolerance.allows, self.lines))

    @property
    def verdict(self) -> str:
        if self.failure is not None:
            return f"DIFFERENT: {self.failure}"
        worst = max(self.lines, key=lambda line: line.difference)
        found = f"worst difference {worst.difference:.1e} ({worst}), tolerance {self.tolerance}"
        if self.same:
            rounds = f"; rounding alone changes one rank by {worst.rounding:.1e}" if worst.rounding else ""
            return f"SAME: {found}{rounds}"
        first = next(line for line in self.lines if not self.tolerance.allows(line))
        return f"DIFFERENT: first the {first}, by {first.difference:.1e}; {found}"


def run_parity(shrunk: Shrunk, *, steps: int, tolerance: float | None, pool: RankPool) -> Report:
    """Run one rank in this process and the layout on the pool, and compare. `tolerance`: largest relative difference;
    default: by precision, or what rounding alone changes in fp64 on one rank, if that is more, up to `MOST_ROUNDING`: some
    models multiply a difference by 1e5 per step. Raises ConfigError if one rank has no step with a finite gradient, which would prove
    nothing."""
    config = shrunk.config
    precision = config.training.precision
    allowed = TOLERANCES[precision] if tolerance is None else Tolerance(number=tolerance, tensor=tolerance)
    lines: list[Line] = []
    failure = None
    reference = _reference(config, steps)
    try:
        ranks = pool.run(shrunk.world_size, rank_trajectory, config, steps)
        lines = compare(whole(ranks), reference, by_elements=precision == "fp64")
        if tolerance is None and precision == "fp64" and not all(map(allowed.allows, lines)):
            nudged = compare(one_rank_trajectory(config, steps, nudged=True), reference)
            lines = [replace(line, rounding=own.difference) for line, own in zip(lines, nudged, strict=True)]
    except (RankFailure, CopiesDifferError) as error:
        failure = str(error)
    return Report(shrunk=shrunk, steps=steps, tolerance=allowed, lines=lines, failure=failure)


def _reference(config: RunConfig, steps: int) -> Trajectory:
    try:
        reference = one_rank_trajectory(config, steps)
    except NonFiniteError as error:
        raise ConfigError(f"the model does not train on one rank, so no layout can be compared: {error}") from error
    if not any(step.is_finite for step in reference.steps):
        scale = config.training.initial_loss_scale
        raise ConfigError(f"one rank overflows in {steps} steps at loss scale {scale:g}; try --initial-loss-scale 1024")
    return reference


def format_report(report: Report) -> str:
    """Format the table of `megalite parity`; docs/parity.md explains it."""
    config = report.shrunk.config
    p, t = config.parallel, config.training
    count = report.shrunk.world_size
    rows = [
        f"{plural(count, 'rank')} = tp {p.tp} x cp {p.cp} x dp {p.dp} x pp {p.pp} (vpp {p.vpp}"
        + (f", ep {p.ep}, etp {p.expert_tp}" if config.model.num_experts else "")
        + f") against one rank; {t.precision}, {report.steps} steps of {_batch(report)} samples"
    ]
    changes = [f"{name} {_shown(old)} -> {_shown(new)}" for name, (old, new) in report.shrunk.changes.items()]
    rows += [f"shrunk: {', '.join(changes)}"] if changes else []
    if report.lines:
        rows += ["", f"{'':<32}{'one rank':>18}{'layout':>18}{'difference':>12}"]
    step: int | None = 0
    for line in report.lines:
        label = "" if line.step == step else f"step {line.step}" if line.step else "after"
        step = line.step
        mark = "" if report.tolerance.allows(line) else "  <--"
        numbers = f"{line.one_rank:>18.11g}{line.layout:>18.11g}{line.difference:>12.1e}"
        rows.append(f"{label:<8}{line.what:<24}{numbers}  {line.tensor or ''}{mark}".rstrip())
    return "\n".join([*rows, "", report.verdict])


def as_data(report: Report) -> dict[str, Any]:
    """Return the data that `--json` prints."""
    return {
        "same": report.same,
        "verdict": report.verdict,
        "world_size": report.shrunk.world_size,
        "steps": report.steps,
        "tolerance": asdict(report.tolerance),
        "shrunk": {name: list(pair) for name, pair in report.shrunk.changes.items()},
        "lines": [asdict(line) for line in report.lines],
        "failure": report.failure,
        "config": sectioned(report.shrunk.config),
    }


def _batch(report: Report) -> str:
    config, steps = report.shrunk.config, report.steps
    first = batch_size(config, 0)
    last = samples_after(config, steps) - samples_after(config, steps - 1)
    return str(first) if first == last else f"{first} to {last}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

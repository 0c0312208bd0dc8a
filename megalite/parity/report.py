"""One comparison of a layout with one rank, as a table and as data."""

from dataclasses import asdict, dataclass
from typing import Any

from megalite.config.batch import batch_size, samples_after
from megalite.config.describe import sectioned
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.parity.compare import Line, compare
from megalite.parity.pool import RankFailure, RankPool
from megalite.parity.shrink import Shrunk
from megalite.parity.tensors import CopiesDifferError
from megalite.parity.trajectory import Trajectory, one_rank_trajectory, rank_trajectory, whole
from megalite.training.non_finite import NonFiniteError


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest relative difference of a loss or norm, and of a tensor."""

    number: float
    tensor: float

    def allows(self, line: Line) -> bool:
        """The line is within it."""
        return line.difference <= (self.number if line.tensor is None else self.tensor)

    def __str__(self) -> str:
        one = f"{self.number:g}"
        return one if self.number == self.tensor else f"{one} (tensors {self.tensor:g})"


TOLERANCES = {
    "fp64": Tolerance(number=1e-9, tensor=1e-9),
    "fp32": Tolerance(number=1e-4, tensor=1e-3),
    "bf16": Tolerance(number=2e-2, tensor=0.3),
    "fp16": Tolerance(number=1e-2, tensor=0.3),
}
"""By precision. In fp64 any fault is far above it and rounding far below. In the others both runs round, in other places,
and tensors are compared by their root mean square; a sum left out or counted twice still is far above it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `megalite parity` says."""

    shrunk: Shrunk
    steps: int
    tolerance: Tolerance
    lines: list[Line]
    """Empty if the layout did not run to its end, or its ranks do not agree among themselves."""
    failure: str | None = None
    """Why there are no lines."""

    @property
    def same(self) -> bool:
        """Every number is within the tolerance."""
        return self.failure is None and all(map(self.tolerance.allows, self.lines))

    @property
    def verdict(self) -> str:
        """The last line of the table."""
        if self.failure is not None:
            return f"DIFFERENT: {self.failure}"
        worst = max(self.lines, key=lambda line: line.difference)
        place = f"{worst.what}{f' of {worst.tensor}' if worst.tensor else ''}"
        place += f", step {worst.step}" if worst.step else ", after the steps"
        if self.same:
            return f"SAME: worst difference {worst.difference:.1e} ({place}), tolerance {self.tolerance}"
        first = next(line for line in self.lines if not self.tolerance.allows(line))
        where = f" of {first.tensor}" if first.tensor else ""
        when = f" in step {first.step}" if first.step else " after the steps"
        return (
            f"DIFFERENT: first the {first.what}{where}{when}, by {first.difference:.1e}; worst {worst.difference:.1e} "
            f"({place}), tolerance {self.tolerance}"
        )


def run_parity(shrunk: Shrunk, *, steps: int, tolerance: float | None, pool: RankPool) -> Report:
    """Run one rank in this process and the layout on the pool, and compare.

    Args:
        tolerance: largest relative difference; default: that of the precision.

    Raises:
        ConfigError: one rank makes no step with a finite gradient: whatever the layout does, nothing would be proven.
    """
    config = shrunk.config
    precision = config.training.precision
    allowed = TOLERANCES[precision] if tolerance is None else Tolerance(number=tolerance, tensor=tolerance)
    lines: list[Line] = []
    failure = None
    reference = _reference(config, steps)
    try:
        ranks = pool.run(shrunk.world_size, rank_trajectory, config, steps)
        lines = compare(whole(ranks), reference, by_elements=precision == "fp64")
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
        raise ConfigError(
            f"on one rank all {steps} steps overflow, from loss scale {scale:g} on, so no layout can be compared; use "
            f"--initial-loss-scale 1024 with a --min-loss-scale below it, or more --steps than {steps}"
        )
    return reference


def format_report(report: Report) -> str:
    """The table that `megalite parity` prints; docs/parity.md explains it."""
    config = report.shrunk.config
    p, t = config.parallel, config.training
    count = report.shrunk.world_size
    rows = [
        f"{count} rank{'s' if count > 1 else ''} = tp {p.tp} x cp {p.cp} x dp {p.dp} x pp {p.pp} (vpp {p.vpp}"
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
    """What `--json` prints."""
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
    """Sizes of the first and the last step."""
    config, steps = report.shrunk.config, report.steps
    first = batch_size(config, 0)
    last = samples_after(config, steps) - samples_after(config, steps - 1)
    return str(first) if first == last else f"{first} to {last}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

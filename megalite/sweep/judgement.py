"""How good the predictions were: error, rank correlation, and what following them would have cost."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.sweep.check import Run
from megalite.sweep.results import OK, Result


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run that was predicted and measured."""

    run: Run
    result: Result
    predicted_seconds: float
    measured_seconds: float

    @property
    def predicted_speed(self) -> float:
        """Tokens a second."""
        return self.run.tokens_per_step / self.predicted_seconds

    @property
    def measured_speed(self) -> float:
        """Tokens a second."""
        return self.run.tokens_per_step / self.measured_seconds

    @property
    def error(self) -> float:
        """predicted / measured - 1, of the seconds of a step."""
        return self.predicted_seconds / self.measured_seconds - 1.0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Of all runs that were predicted and measured; None where there are too few."""

    pairs: tuple[Pair, ...]
    pick: Pair | None
    """Predicted fastest among those that ran, in tokens a second."""
    best: Pair | None
    """Measured fastest."""
    regret: float | None
    """Speed of the best over that of the pick, - 1: the share of time lost by following the plan."""
    correlation: float | None
    """Spearman's, between predicted and measured speed."""
    mean_error: float | None
    """Of the seconds of a step, absolute and relative."""
    missed: tuple[Run, ...]
    """Predicted faster than the pick, and did not run: out of memory, refused on start, ..."""


def judge(runs: Sequence[Run], results: Mapping[str, Result]) -> Judgement:
    """Compare what was predicted with what was measured."""
    pairs, failed = [], []
    for run in runs:
        result = results.get(run.key)
        predicted = run.predicted.step_seconds if run.predicted is not None else None
        if result is None or predicted is None or run.refused is not None:
            continue
        if result.status == OK and result.step_seconds:
            pairs.append(
                Pair(
                    run=run,
                    result=result,
                    predicted_seconds=predicted,
                    measured_seconds=result.step_seconds,
                )
            )
        else:
            failed.append((run.tokens_per_step / predicted, run))
    pick = max(pairs, key=lambda pair: pair.predicted_speed, default=None)
    best = max(pairs, key=lambda pair: pair.measured_speed, default=None)
    return Judgement(
        pairs=tuple(pairs),
        pick=pick,
        best=best,
        regret=best.measured_speed / pick.measured_speed - 1.0 if best and pick else None,
        correlation=spearman(
            [pair.predicted_speed for pair in pairs], [pair.measured_speed for pair in pairs]
        ),
        mean_error=statistics.fmean(abs(pair.error) for pair in pairs) if pairs else None,
        missed=tuple(run for speed, run in failed if pick is None or speed > pick.predicted_speed),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlation of the ranks, equal values sharing theirs; None below two values or if all of one are equal."""
    if len(first) < 2 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(order)))}
    return [first[value] + (order.count(value) - 1) / 2.0 for value in values]

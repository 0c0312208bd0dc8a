"""Report a sweep: summary, table, errors of predictions, pictures, and constants fitted to the measurements."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.numbers import duration, format_bytes
from megalite.planner.cost.calibrate import Machine, Measured, fit
from megalite.planner.hardware import save_machine
from megalite.planner.page import Dot, Row, Section, Table, page, scatter
from megalite.sweep.candidates import Run
from megalite.sweep.results import OK, Result


@dataclass(frozen=True)
class Pair:
    run: Run
    predicted_seconds: float
    measured_seconds: float

    @property
    def predicted_speed(self) -> float:
        return self.run.tokens_per_step / self.predicted_seconds

    @property
    def measured_speed(self) -> float:
        return self.run.tokens_per_step / self.measured_seconds

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1.0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    pairs: tuple[Pair, ...]
    pick: Pair | None  # predicted fastest of those that ran, by tokens per second
    best: Pair | None  # measured fastest
    regret: float | None  # speed of the best / speed of the pick - 1: the loss from following the plan
    correlation: float | None  # Spearman's, of predicted and measured speed
    mean_error: float | None  # mean absolute relative error of the seconds per step
    missed: tuple[Run, ...]  # predicted faster than the pick, but failed: out of memory, refused, ...


def judge(runs: Sequence[Run], results: Mapping[str, Result]) -> Judgement:
    pairs, failed = [], []
    for run in runs:
        result = results.get(run.key)
        predicted = run.predicted.step_seconds if run.predicted is not None else None
        if result is None or predicted is None or run.refused is not None:
            continue
        if result.status == OK and result.step_seconds:
            pairs.append(Pair(run, predicted, result.step_seconds))
        else:
            failed.append((run.tokens_per_step / predicted, run))
    pick = max(pairs, key=lambda pair: pair.predicted_speed, default=None)
    best = max(pairs, key=lambda pair: pair.measured_speed, default=None)
    return Judgement(
        pairs=tuple(pairs),
        pick=pick,
        best=best,
        regret=best.measured_speed / pick.measured_speed - 1.0 if best and pick else None,
        correlation=spearman([pair.predicted_speed for pair in pairs], [pair.measured_speed for pair in pairs]),
        mean_error=statistics.fmean(abs(pair.error) for pair in pairs) if pairs else None,
        missed=tuple(run for speed, run in failed if pick is None or speed > pick.predicted_speed),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the rank correlation (ties share a rank); None for fewer than two values or equal values."""
    if len(first) < 2 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(order)))}
    return [first[value] + (order.count(value) - 1) / 2.0 for value in values]


FEWEST = 3  # runs that a fit requires


def calibrate(runs: Sequence[Run], results: Mapping[str, Result], machine: Machine, path: Path, *, source: str) -> str:
    """Fit constants, write the cluster to `path` and the stack beside it, and return a summary. `source` describes the
    measurements in the provenance. Raises ConfigError if too few runs were measured."""
    pairs = judge(runs, results).pairs
    if len(pairs) < FEWEST:
        raise ConfigError(f"--calibrate requires {FEWEST} successful runs, got {len(pairs)}; run more")
    rows = [Measured(pair.run.config, pair.measured_seconds) for pair in pairs]
    found = fit(rows, machine.cluster, machine.stack, source=source)
    stack_path = save_machine(found.cluster, found.stack, path)
    before = statistics.fmean(abs(pair.error) for pair in pairs)
    after = statistics.fmean(map(abs, found.errors))
    return (
        f"Fitted to {len(rows)} runs: mean error of the seconds per step {100 * before:.1f} % before, {100 * after:.1f} % "
        f"after, on the same runs.\nwrote {path}\nwrote {stack_path}"
    )


REPORT = "report.html"


def report(title: str, runs: Sequence[Run], results: Mapping[str, Result]) -> str:
    """Return an HTML page with the summary, two pictures and a row per run."""
    judgement = judge(runs, results)
    kinds = {judgement.pick.run.key: "pick"} if judgement.pick is not None else {}
    fastest = _fastest(runs, results)
    if fastest is not None:
        kinds[fastest.key] = "best"
    figures = _figures(runs, results, judgement, kinds)
    legend = ["Green: measured fastest. Orange: predicted fastest."] if figures else []
    table = _table(runs, results, judgement, kinds)
    return page(title, [Section(texts=[*summary(runs, results), *legend], figures=figures), Section(table=table)])


def _fastest(runs: Sequence[Run], results: Mapping[str, Result]) -> Run | None:
    """Return the run with the most tokens per second."""
    good = [run for run in runs if run.key in results and results[run.key].status == OK]
    return max(good, key=lambda run: results[run.key].tokens_per_second or 0.0, default=None)


def summary(runs: Sequence[Run], results: Mapping[str, Result]) -> list[str]:
    """Return a few lines about the sweep, also printed at its end."""
    counts = Counter(results[run.key].status if run.key in results else "not run yet" for run in runs)
    lines = [f"{len(runs)} configurations: {', '.join(f'{n} {status}' for status, n in counts.items())}."]
    fastest = _fastest(runs, results)
    if fastest is None:
        return lines
    result = results[fastest.key]
    lines.append(
        f"Fastest: {fastest.label} with {result.tokens_per_second:.0f} tokens/s, {duration(result.step_seconds)} per step."
    )
    found = judge(runs, results)
    if found.pick is None or found.regret is None or found.mean_error is None:
        return lines
    correlation = "not defined" if found.correlation is None else f"{found.correlation:.3f}"
    lines.append(
        f"Predicted fastest: {found.pick.run.label}; regret {100 * found.regret:.1f} %. Rank correlation (Spearman) of "
        f"predicted and measured speed {correlation} over {len(found.pairs)} runs; mean error of the seconds per step "
        f"{100 * found.mean_error:.1f} %."
    )
    if found.missed:
        names = "; ".join(f"{run.label} ({results[run.key].status})" for run in found.missed)
        lines.append(f"Predicted to be faster, but failed: {names}.")
    return lines


def _figures(
    runs: Sequence[Run], results: Mapping[str, Result], judgement: Judgement, kinds: Mapping[str, str]
) -> list[tuple[str, str]]:
    found = []
    measured = [
        Dot(result.memory_bytes / 2**30, result.tokens_per_second or 0.0, run.label, kinds.get(run.key, ""))
        for run in runs
        if (result := results.get(run.key)) is not None and result.status == OK and result.memory_bytes
    ]
    if measured:
        picture = scatter(measured, x_label="peak memory of rank 0, measured, GiB", y_label="tokens/s")
        found.append((picture, "Speed against memory"))
    if judgement.pairs:
        dots = [
            Dot(
                pair.measured_seconds,
                pair.predicted_seconds,
                f"{pair.run.label}: {100 * pair.error:+.1f} %",
                kinds.get(pair.run.key, ""),
            )
            for pair in judgement.pairs
        ]
        picture = scatter(dots, x_label="measured, s per step", y_label="predicted, s per step", diagonal=True)
        found.append((picture, "Predicted against measured"))
    return found


_COLUMNS = (
    *("ranks", "predicted s/step", "measured s/step", "slowest – fastest step", "error", "tokens/s"),
    *("predicted memory, fullest rank", "of rank 0", "measured, rank 0", "status"),
)


def _table(runs: Sequence[Run], results: Mapping[str, Result], judgement: Judgement, kinds: Mapping[str, str]) -> Table:
    varying = list(runs[0].settings) if runs else []
    errors = {pair.run.key: pair.error for pair in judgement.pairs}
    rows = []
    for run in runs:
        result, predicted = results.get(run.key), run.predicted
        low, high = (result.step_seconds_low, result.step_seconds_high) if result else (None, None)
        status = result.status if result else "not run yet"
        cells = [
            *map(str, run.settings.values()),
            str(run.ranks),
            duration(predicted.step_seconds if predicted else None),
            duration(result.step_seconds if result else None),
            f"{duration(high)} – {duration(low)}" if result and result.step_seconds else "",
            f"{100 * errors[run.key]:+.1f} %" if run.key in errors else "",
            f"{result.tokens_per_second:.0f}" if result and result.tokens_per_second else "",
            format_bytes(predicted.memory_bytes) if predicted else "",
            format_bytes(predicted.first_rank_bytes) if predicted else "",
            format_bytes(result.memory_bytes) if result and result.memory_bytes else "",
            f"{status}: {result.error}" if result and result.error else status,
        ]
        speed = result.tokens_per_second if result else None
        rows.append((-(speed or 0.0), Row(cells, kinds.get(run.key, ""), run.key, status)))
    rows.sort(key=lambda row: row[0])  # fastest first, runs without a speed last
    left = (*range(len(varying)), len(varying) + len(_COLUMNS) - 1)
    return Table((*varying, *_COLUMNS), [row for _, row in rows], left=left)

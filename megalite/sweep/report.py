"""What a sweep tells: tables, judgement of predictions, a picture, constants fitted on what was measured."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megalite.checkpoint.files import replace_durably
from megalite.config.byte_size import format_bytes
from megalite.config.errors import ConfigError
from megalite.planner.cost.calibrate import Measured, fit
from megalite.planner.hardware import save_cluster, save_stack
from megalite.sweep.candidates import Machine, Run
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
    pick: Pair | None  # predicted fastest among those that ran, in tokens a second
    best: Pair | None  # measured fastest
    regret: float | None  # speed of the best over that of the pick, - 1: the share of time lost by following the plan
    correlation: float | None  # spearman's, between predicted and measured speed
    mean_error: float | None  # of the seconds of a step, absolute and relative
    missed: tuple[Run, ...]  # predicted faster than the pick, and did not run: out of memory, refused on start, ..


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
                Pair(run=run, result=result, predicted_seconds=predicted, measured_seconds=result.step_seconds)
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
        correlation=spearman([pair.predicted_speed for pair in pairs], [pair.measured_speed for pair in pairs]),
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


_WIDTH, _HEIGHT = 460, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 14, 46
_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One run."""

    x: float
    y: float
    title: str  # shown where the mouse rests
    kind: str = "ran"  # `ran`, `best` or `pick`: its class in the style sheet


def scatter(dots: Sequence[Dot], *, x_label: str, y_label: str, diagonal: bool = False) -> str:
    """Dots over linear axes that start at 0.

    Args:
        diagonal: draw x = y, with the same scale on both axes.
    """
    top_x, top_y = _top(dot.x for dot in dots), _top(dot.y for dot in dots)
    if diagonal:
        top_x = top_y = max(top_x, top_y)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + width * x / top_x, _TOP + height * (1.0 - y / top_y)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} over {escape(x_label)}">'
    ]
    for tick in range(_TICKS + 1):
        x, bottom = place(top_x * tick / _TICKS, 0.0)
        left, y = place(0.0, top_y * tick / _TICKS)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom:.1f}M{left} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" class="middle">{top_x * tick / _TICKS:.3g}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" class="end">{top_y * tick / _TICKS:.3g}</text>')
    if diagonal:
        (x0, y0), (x1, y1) = place(0.0, 0.0), place(top_x, top_y)
        parts.append(f'<path class="diagonal" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>')
    for dot in dots:
        x, y = place(dot.x, dot.y)
        parts.append(
            f'<circle class="{escape(dot.kind)}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(dot.title)}</title></circle>'
        )
    parts.append(
        f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" class="middle">{escape(x_label)}</text>'
        f'<text transform="translate(14 {_TOP + height / 2}) rotate(-90)" class="middle">{escape(y_label)}</text></svg>'
    )
    return "".join(parts)


def _top(values: Iterable[float]) -> float:
    """A round number, none of the values above it."""
    most = max(values, default=1.0) or 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0) if step * power >= most)


FEWEST = 3  # runs that a fit needs


def stack_file(cluster: Path) -> Path:
    """Where the fitted stack goes: beside the cluster's file, `mine.yaml` -> `mine-stack.yaml`."""
    return cluster.with_name(f"{cluster.stem}-stack.yaml")


def refuse_taken(path: Path) -> None:
    """Raise ConfigError if a fit could not be written to `path`: known before hours of runs, not after them."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--calibrate: {path} must end in .yaml, e.g. {path.name or 'mine'}.yaml")
    for each in (path, stack_file(path)):
        if each.exists():
            raise ConfigError(f"--calibrate: {each} is there already; give the name of a new file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--calibrate: there is no folder {path.parent}; give a file in one that exists")


def calibrate(runs: Sequence[Run], results: Mapping[str, Result], machine: Machine, path: Path, *, source: str) -> str:
    """Fit, and write the cluster to `path` and the stack to `stack_file(path)`; returns what it did, for people.

    Args:
        source: what the measurements are, for the provenance of the figures.

    Raises ConfigError: too few runs were measured, or a file cannot be written.
    """
    pairs = judge(runs, results).pairs
    if len(pairs) < FEWEST:
        raise ConfigError(
            f"--calibrate needs {FEWEST} runs or more that ended well, there are {len(pairs)}; run more configurations"
        )
    rows = [Measured(pair.run.config, pair.measured_seconds) for pair in pairs]
    found = fit(rows, machine.cluster, machine.stack, source=source)
    stack_path = stack_file(path)
    save_cluster(dataclasses.replace(found.cluster, name=path.stem), path)
    save_stack(dataclasses.replace(found.stack, name=stack_path.stem), stack_path)
    before = statistics.fmean(abs(pair.error) for pair in pairs)
    after = statistics.fmean(map(abs, found.errors))
    return (
        f"Fitted to {len(rows)} runs: mean error of the seconds of a step {100 * before:.1f} % before, {100 * after:.1f} % "
        f"after, on the same runs.\nwrote {path}\nwrote {stack_path}"
    )


REPORT = "report.html"
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}tr.best td{background:#e8f4ea}tr.pick td{font-weight:600}
.refused,.failed,.oom,.timeout{color:#a33}.grid{stroke:#e4e4e4;fill:none}.diagonal{stroke:#999;stroke-dasharray:4}
svg text{font:11px system-ui,sans-serif;fill:#444}.middle{text-anchor:middle}.end{text-anchor:end}
circle{fill:#4878a8;fill-opacity:.75}circle.best{fill:#2c8c47}circle.pick{fill:#c26a1a}figure{display:inline-block;margin:1em 2em 1em 0}
"""


def write_report(path: Path, title: str, runs: Sequence[Run], results: Mapping[str, Result]) -> None:
    """Write `report` to a file, so that there is at every instant the old one or the new one."""
    replace_durably(path, report(title, runs, results).encode())


def report(title: str, runs: Sequence[Run], results: Mapping[str, Result]) -> str:
    """HTML: what the sweep says in short, two pictures and a row for each run."""
    judgement = judge(runs, results)
    fastest = _fastest(runs, results)
    return "".join(
        [
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
            "".join(f"<p>{escape(line)}</p>" for line in summary(runs, results)),
            _pictures(runs, results, judgement, fastest),
            _table(runs, results, judgement, fastest),
            "</body></html>\n",
        ]
    )


def _fastest(runs: Sequence[Run], results: Mapping[str, Result]) -> str | None:
    """Key of the run with the most tokens a second."""
    speeds = {
        run.key: results[run.key].tokens_per_second or 0.0
        for run in runs
        if run.key in results and results[run.key].status == OK
    }
    return max(speeds, key=lambda key: speeds[key]) if speeds else None


def summary(runs: Sequence[Run], results: Mapping[str, Result]) -> list[str]:
    """The sweep in a few lines; also what the terminal shows at its end."""
    counts: dict[str, int] = {}
    for run in runs:
        status = results[run.key].status if run.key in results else "not run yet"
        counts[status] = counts.get(status, 0) + 1
    lines = [f"{len(runs)} configurations: {', '.join(f'{n} {status}' for status, n in counts.items())}."]
    fastest = _fastest(runs, results)
    if fastest is None:
        return lines
    run, result = next(run for run in runs if run.key == fastest), results[fastest]
    assert result.tokens_per_second is not None
    lines.append(
        f"Fastest: {run.label} with {result.tokens_per_second:.0f} tokens/s, {_seconds(result.step_seconds)} a step."
    )
    found = judge(runs, results)
    if found.pick is None or found.regret is None or found.mean_error is None:
        return lines
    correlation = "not defined" if found.correlation is None else f"{found.correlation:.3f}"
    lines.append(
        f"Predicted fastest: {found.pick.run.label}; regret {100 * found.regret:.1f} %. Rank correlation (Spearman) of "
        f"predicted and measured speed {correlation} over {len(found.pairs)} runs; mean error of the seconds of a step "
        f"{100 * found.mean_error:.1f} %."
    )
    if found.missed:
        names = "; ".join(f"{run.label} ({results[run.key].status})" for run in found.missed)
        lines.append(f"Predicted to be faster still, but did not run: {names}.")
    return lines


def _kind(key: str, judgement: Judgement, fastest: str | None) -> str:
    if key == fastest:
        return "best"
    return "pick" if judgement.pick is not None and key == judgement.pick.run.key else "ran"


def _pictures(runs: Sequence[Run], results: Mapping[str, Result], judgement: Judgement, fastest: str | None) -> str:
    measured = [
        (run, result)
        for run in runs
        if (result := results.get(run.key)) is not None and result.status == OK and result.memory_bytes
    ]
    figures = []
    if measured:
        dots = [
            Dot(
                x=(result.memory_bytes or 0) / 2**30,
                y=result.tokens_per_second or 0.0,
                title=run.label,
                kind=_kind(run.key, judgement, fastest),
            )
            for run, result in measured
        ]
        picture = scatter(dots, x_label="peak memory of rank 0, measured, GiB", y_label="tokens/s")
        figures.append(f"<figure>{picture}<figcaption>Speed against memory</figcaption></figure>")
    if judgement.pairs:
        dots = [
            Dot(
                x=pair.measured_seconds,
                y=pair.predicted_seconds,
                title=f"{pair.run.label}: {100 * pair.error:+.1f} %",
                kind=_kind(pair.run.key, judgement, fastest),
            )
            for pair in judgement.pairs
        ]
        picture = scatter(dots, x_label="measured, s a step", y_label="predicted, s a step", diagonal=True)
        figures.append(f"<figure>{picture}<figcaption>Predicted against measured</figcaption></figure>")
    legend = "<p>Green: measured fastest. Orange: predicted fastest.</p>" if figures else ""
    return "".join(figures) + legend


_COLUMNS = (
    *("ranks", "predicted s/step", "measured s/step", "slowest – fastest step", "error", "tokens/s"),
    *("predicted memory, fullest rank", "of rank 0", "measured, rank 0"),
)


def _table(runs: Sequence[Run], results: Mapping[str, Result], judgement: Judgement, fastest: str | None) -> str:
    apart = list(runs[0].settings) if runs else []
    errors = {pair.run.key: pair.error for pair in judgement.pairs}
    head = "".join(f"<th>{escape(name)}</th>" for name in apart)
    head += "".join(f'<th class="number">{name}</th>' for name in _COLUMNS)
    rows = [f"<table><thead><tr>{head}<th>status</th></tr></thead><tbody>"]
    for run in sorted(runs, key=lambda run: _order(results.get(run.key))):
        result, predicted = results.get(run.key), run.predicted
        numbers = [
            str(run.ranks),
            _seconds(predicted.step_seconds if predicted else None),
            _seconds(result.step_seconds if result else None),
            f"{_seconds(result.step_seconds_high)} – {_seconds(result.step_seconds_low)}"
            if result and result.step_seconds
            else "",
            f"{100 * errors[run.key]:+.1f} %" if run.key in errors else "",
            f"{result.tokens_per_second:.0f}" if result and result.tokens_per_second else "",
            format_bytes(predicted.memory_bytes) if predicted else "",
            format_bytes(predicted.first_rank_bytes) if predicted else "",
            format_bytes(result.memory_bytes) if result and result.memory_bytes else "",
        ]
        status = result.status if result else "not run yet"
        why = f": {result.error}" if result and result.error else ""
        rows.append(
            f'<tr class="{_kind(run.key, judgement, fastest)}" id="{escape(run.key)}">'
            + "".join(f"<td>{escape(str(value))}</td>" for value in run.settings.values())
            + "".join(f'<td class="number">{escape(number)}</td>' for number in numbers)
            + f'<td class="{escape(status)}">{escape(status + why)}</td></tr>'
        )
    return "".join([*rows, "</tbody></table>"])


def _order(result: Result | None) -> tuple[bool, float]:
    """Fastest first, what has no speed last."""
    speed = result.tokens_per_second if result else None
    return speed is None, -(speed or 0.0)


def _seconds(value: float | None) -> str:
    """`1.23 s`, `45.6 ms`."""
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"

"""The report of a sweep: one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megalite.checkpoint.files import replace_durably
from megalite.config.byte_size import format_bytes
from megalite.sweep.check import Run
from megalite.sweep.judgement import Judgement, judge
from megalite.sweep.results import OK, Result
from megalite.sweep.scatter import Dot, scatter

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


def _pictures(
    runs: Sequence[Run], results: Mapping[str, Result], judgement: Judgement, fastest: str | None
) -> str:
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


def _table(
    runs: Sequence[Run], results: Mapping[str, Result], judgement: Judgement, fastest: str | None
) -> str:
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

"""Studies of pipeline schedules as text: the grid in colours, and the table that compares several."""

from collections.abc import Mapping, Sequence

from megalite.cli.display import table
from megalite.cli.schedule_study import Study
from megalite.config.byte_size import format_bytes
from megalite.pipeline.ir.actions import Kind
from megalite.pipeline.ir.render import render_grid, render_lists

_SHOWN_RANKS = 64
_LIVE = "live activations, in microbatches x stages"
_BACKGROUNDS = {Kind.F: 153, Kind.B: 215, Kind.I: 222, Kind.W: 150, Kind.R: 183}
"""Of xterm's 256 colours those nearest to the pictures'."""


def format_study(study: Study, *, unit: str, width: int, colour: bool, lowered: bool) -> str:
    """The grid, what the step takes, and with `lowered` the lists of the program."""
    columns = {}
    if any(study.peak_deferred):
        columns["for W"] = [str(peak) for peak in study.peak_deferred]
    if study.peak_bytes is not None:
        columns["memory"] = [format_bytes(round(peak)) for peak in study.peak_bytes]
    grid = render_grid(
        study.timeline,
        width=width,
        max_ranks=_SHOWN_RANKS,
        wrap=True,
        columns=columns,
        paint=_paint if colour else None,
    )
    if "for W" in columns:
        grid += "; for W: those whose W has yet to run"
    parts = [grid, f"{summary(study, unit)}\nsends a step, by rank: {' '.join(map(str, study.sends))}"]
    if lowered:
        actions = study.program.actions
        longest = max(sum(len(str(action)) + 1 for action in row) for row in actions)
        parts.append("program:\n" + render_lists(actions, {}, width=longest + 40, max_ranks=study.schedule.num_ranks))
    return "\n\n".join(parts)


def summary(study: Study, unit: str) -> str:
    """Length and losses of the step in a line."""
    timeline = study.timeline
    name = f" {unit}" if unit else ""
    return (
        f"makespan {timeline.makespan:.6g}{name} ({timeline.makespan / study.ideal:.3f} of the ideal {study.ideal:.6g}), "
        f"bubble {timeline.bubble_fraction:.1%}, without a barrier between steps {timeline.span_bubble_fraction:.1%}"
    )


def peak_texts(study: Study) -> tuple[str, ...]:
    """Per rank its peak memory: bytes if they are known, else live activations."""
    if study.peak_bytes is not None:
        return tuple(format_bytes(round(peak)) for peak in study.peak_bytes)
    return tuple(map(str, study.timeline.peak_activations))


def meaning_of_peaks(studies: Sequence[Study]) -> str:
    """What `peak_texts` gives for these studies, which share their costs."""
    return _LIVE if studies[0].peak_bytes is None else "memory of one step's activations and messages"


def format_comparison(studies: Sequence[Study], refused: Mapping[str, str], *, unit: str) -> str:
    """A row a schedule, then those that could not be had with the reason."""
    bytes_known = any(study.peak_bytes is not None for study in studies)
    heading = ["schedule", "vpp", f"makespan{f' ({unit})' if unit else ''}", "of ideal", "bubble", "no barrier"]
    heading += ["peak", "for W", *(["memory"] if bytes_known else []), "sends"]
    rows = [heading]
    for study in studies:
        timeline = study.timeline
        chunks = study.schedule.num_chunks
        row = [study.schedule.name, str(chunks), f"{timeline.makespan:.6g}"]
        row += [f"{timeline.makespan / study.ideal:.3f}", f"{timeline.bubble_fraction:.1%}"]
        row += [f"{timeline.span_bubble_fraction:.1%}", f"{study.peak_shares:.4g}"]
        row.append(f"{max(study.peak_deferred) / chunks:.4g}")
        if study.peak_bytes is not None:
            row.append(format_bytes(round(max(study.peak_bytes))))
        rows.append([*row, str(max(study.sends))])
    lines = table(rows, right=range(1, len(heading))) if studies else []
    if studies:
        lines += [
            "",
            "no barrier: the bubble if the next step may start at once; of the fullest rank: peak, microbatches whose",
            "activations are alive, and for W, those whose W has yet to run, in whole shares of a rank; its sends a step",
        ]
    if refused:
        lines += [""] if lines else []
        lines += [f"{name}: not possible: {reason}" for name, reason in refused.items()]
    return "\n".join(lines)


def _paint(text: str, kind: Kind | None) -> str:
    if kind is None:
        return f"\x1b[2m{text}\x1b[0m"
    return f"\x1b[30;48;5;{_BACKGROUNDS[kind]}m{text}\x1b[0m"

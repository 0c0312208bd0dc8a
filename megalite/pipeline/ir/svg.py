"""Draw timelines as one SVG picture without scripts: a row per rank, time to scale, colour by kind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.sax.saxutils import escape, quoteattr

from megalite.pipeline.ir.actions import MEANINGS, Kind
from megalite.pipeline.ir.simulate import Event, Timeline

_COLOURS: Mapping[Kind, tuple[str, str]] = {
    Kind.F: ("#c6dcf5", "#6fa5de"),
    Kind.B: ("#fad0a0", "#ef9d4b"),
    Kind.I: ("#fdecb0", "#f2cb4a"),
    Kind.W: ("#c4e6c2", "#79c077"),
    Kind.R: ("#e0d0f1", "#b08bd8"),
}
"""Fill of a rank's first and last stage; stages between are mixed. Dark text is readable on all of them."""
_STYLE = """
  text { font: 12px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
  .number { font-size: 11px; text-anchor: middle; }
  .end { text-anchor: end; }
  .title { font-size: 14px; font-weight: 600; }
  .quiet { fill: #57606a; }
  .idle { fill: #e6e9ed; }
  .axis { stroke: #8c959f; stroke-width: 1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .number { fill: #1f2328; }
    .quiet { fill: #9da7b3; }
    .idle { fill: #30363d; }
    .axis { stroke: #6e7681; }
  }
"""

_MARGIN, _ROW, _BAR = 16.0, 30.0, 26.0
_LETTER = 6.8  # approximate width of a digit
_NARROW, _WIDE = 640.0, 1800.0
"""Minimum and maximum width of the time axis."""


@dataclass(frozen=True)
class Panel:
    timeline: Timeline
    peaks: tuple[str, ...]  # per rank, the text at the right edge: its peak memory
    summary: str  # a line under the name


def draw_svg(panels: Sequence[Panel], *, unit: str = "", peak: str) -> str:
    """Draw schedules below each other on one time scale.

    Numbers in the boxes are microbatches, left out if they do not fit; the tooltip of a box names its action. Equal
    panels give equal bytes. `peak` describes the numbers at the right edge.
    """
    assert panels
    longest = max(panel.timeline.makespan for panel in panels)
    scale = _scale(panels, longest)
    left = _MARGIN + _LETTER * max(len(f"rank {panel.timeline.schedule.num_ranks - 1}") + 1 for panel in panels)
    # Right edges of the two columns to the right of the bars.
    idle = left + longest * scale + 56
    peaks = idle + 16 + _LETTER * max(len("peak"), *(len(text) for panel in panels for text in panel.peaks))
    right = peaks + _MARGIN
    body: list[str] = []
    y = _MARGIN
    for panel in panels:
        body.extend(_panel(panel, left, y, scale, idle, peaks))
        y += 56 + panel.timeline.schedule.num_ranks * _ROW
        body.extend(_axis(left, y, longest, scale, unit))
        y += 48
    chunks = max(panel.timeline.schedule.num_chunks for panel in panels)
    used = {event.action.kind for panel in panels for event in panel.timeline.events}
    kinds = [kind for kind in MEANINGS if kind in used]
    legend, y = _legend(kinds, chunks, y, right, peak)
    body.extend(legend)
    names = ", ".join(panel.timeline.schedule.name for panel in panels)
    fills = "".join(
        f"  .{kind}{chunk} {{ fill: {_fill(kind, chunk, chunks)}; }}\n" for kind in kinds for chunk in range(chunks)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(right)}" height="{_n(y)}" '
        f'viewBox="0 0 {_n(right)} {_n(y)}" role="img">\n'
        f"<title>{escape(f'Pipeline schedules on a clock: {names}')}</title>\n"
        f"<style>{_STYLE}{fills}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _scale(panels: Sequence[Panel], longest: float) -> float:
    """Return the pixels per unit of time: wide enough for most numbers, within limits."""
    lengths = sorted(
        event.end - event.start for panel in panels for event in panel.timeline.events if event.end > event.start
    )
    short = lengths[len(lengths) // 10]
    return min(max(17 * longest / short, _NARROW), _WIDE) / longest


def _panel(panel: Panel, left: float, y: float, scale: float, idle: float, peaks: float) -> Iterator[str]:
    timeline = panel.timeline
    schedule = timeline.schedule
    stages = f", {schedule.num_stages} stages" if schedule.num_chunks > 1 else ""
    title = f"{schedule.name}: {schedule.num_ranks} ranks{stages}, {schedule.num_microbatches} microbatches"
    yield _text(_MARGIN, y + 14, title, "title")
    yield _text(_MARGIN, y + 34, panel.summary, "quiet")
    yield _text(idle, y + 34, "idle", "quiet end")
    yield _text(peaks, y + 34, "peak", "quiet end")
    top = y + 44
    for rank in range(schedule.num_ranks):
        row = top + rank * _ROW
        share = timeline.idle[rank] / timeline.makespan
        yield _text(_MARGIN, row + 17, f"rank {rank}")
        yield _box("idle", left, row, timeline.makespan * scale, _BAR)
        yield _text(idle, row + 17, f"{share:.1%}", "end")
        yield _text(peaks, row + 17, panel.peaks[rank], "end")
    for event in timeline.events:
        chunk = schedule.placement[: event.action.stage].count(event.rank)
        yield from _action(event, chunk, left, top + event.rank * _ROW, scale)


def _action(event: Event, chunk: int, left: float, y: float, scale: float) -> Iterator[str]:
    x, width = left + event.start * scale, (event.end - event.start) * scale
    # A small gap between neighbours, unless the box is very narrow.
    gap = 0.5 if width > 3 else 0.0
    about = f"{event.action}: {event.start:.6g} to {event.end:.6g}"
    yield _box(f"{event.action.kind}{chunk}", x + gap, y, width - 2 * gap, _BAR, about)
    number = str(event.action.microbatch)
    if _LETTER * len(number) + 2 <= width:
        yield _text(x + width / 2, y + 17, number, "number")


def _axis(left: float, y: float, longest: float, scale: float, unit: str) -> Iterator[str]:
    end = left + longest * scale
    yield f'<path class="axis" d="M{_n(left)} {_n(y)}H{_n(end)}"/>'
    yield _text(_MARGIN, y + 18, f"time, {unit}" if unit else "time", "quiet")
    step = _round_step(longest / 8)
    for tick in range(floor(longest / step + 1e-9) + 1):
        x = left + tick * step * scale
        yield f'<path class="axis" d="M{_n(x)} {_n(y)}v4"/>'
        if x > left or not unit:
            yield _text(x, y + 18, f"{tick * step:.6g}", "quiet", anchor="middle")


def _round_step(least: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def _legend(kinds: Sequence[Kind], chunks: int, y: float, right: float, peak: str) -> tuple[list[str], float]:
    """Return the elements of the legend, wrapped at the right edge, and its lower edge."""
    drawn: list[str] = []
    shown = min(chunks, 4)
    x = _MARGIN
    for kind in (*kinds, None):
        name = "idle" if kind is None else f"{kind} {MEANINGS[kind]}"
        shades = [index * (chunks - 1) // max(shown - 1, 1) for index in range(shown)]
        styles = ["idle"] if kind is None else [f"{kind}{chunk}" for chunk in shades]
        size = 17 * len(styles) + 4 + _LETTER * len(name) + 12
        if x > _MARGIN and x + size > right:
            x, y = _MARGIN, y + 22
        drawn += [_box(style, x + 17 * index, y, 16, 14) for index, style in enumerate(styles)]
        drawn.append(_text(x + 17 * len(styles) + 4, y + 11, name))
        x += size
    note = "the number is the microbatch"
    if chunks > 1:
        note += "; light to strong: the stages of a rank, from the first to the last"
    drawn += [_text(_MARGIN, y + 34, note, "quiet"), _text(_MARGIN, y + 52, f"peak: {peak}", "quiet")]
    return drawn, y + 68


def _fill(kind: Kind, chunk: int, chunks: int) -> str:
    light, strong = _COLOURS[kind]
    share = chunk / (chunks - 1) if chunks > 1 else 0.5
    mixed = (
        round(int(light[at : at + 2], 16) * (1 - share) + int(strong[at : at + 2], 16) * share) for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _box(style: str, x: float, y: float, width: float, height: float, about: str = "") -> str:
    shape = f'<rect class="{style}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="2"'
    return f"{shape}><title>{escape(about)}</title></rect>" if about else f"{shape}/>"


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "") -> str:
    attributes = f" class={quoteattr(style)}" if style else ""
    attributes += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{attributes} x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>'


def _n(number: float) -> str:
    """Format to a hundredth of a pixel, without trailing zeros."""
    return f"{number:.2f}".rstrip("0").rstrip(".")

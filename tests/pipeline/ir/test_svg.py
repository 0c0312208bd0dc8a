"""The drawing of a schedule, parsed as XML."""

import re
import xml.etree.ElementTree as ET

import pytest

from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.generators.registry import build_schedule, with_recompute_ahead
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate
from megalite.pipeline.ir.svg import Panel, draw_svg

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, ranks: int, chunks: int, count: int, scale: float = 1.0) -> Timeline:
    schedule = build_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=count)
    return on_clock(schedule, scale)


def on_clock(schedule: Schedule, scale: float = 1.0) -> Timeline:
    costs = Costs.uniform(schedule.num_stages, forward=scale, backward=2 * scale, recompute=scale, p2p=0.1 * scale)
    return simulate(lower(schedule), costs)


def panel(found: Timeline) -> Panel:
    return Panel(found, tuple(f"{peak} GiB" for peak in found.peak_activations), "a summary")


def picture(panels: list[Panel], unit: str = "") -> str:
    return draw_svg(panels, unit=unit, peak="what it is")


def boxes(root: ET.Element) -> dict[Action, ET.Element]:
    """Return the boxes of actions by their tooltips."""
    found = {}
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None:
            assert title.text is not None
            action = Action.parse(title.text.partition(":")[0])
            assert action not in found
            found[action] = box
    return found


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def number(box: ET.Element, name: str) -> float:
    return float(box.attrib[name])


@pytest.mark.parametrize(("name", "chunks"), [("zb-v", 2), ("interleaved", 3)])
def test_boxes_show_the_events_to_scale(name: str, chunks: int) -> None:
    found = timeline(name, 3, chunks, 6)
    drawn = boxes(ET.fromstring(picture([panel(found)])))
    assert len(drawn) == len(found.events)
    first = drawn[found.events[0].action]
    last = max(found.events, key=lambda event: event.end)
    scale = (number(drawn[last.action], "x") - number(first, "x")) / (last.start - found.events[0].start)
    rows = [number(drawn[row[0]], "y") for row in found.schedule.actions]
    assert rows == sorted(set(rows))
    for event in found.events:
        box = drawn[event.action]
        assert box.attrib["class"].startswith(event.action.kind)
        assert number(box, "y") == rows[event.rank]
        assert number(box, "x") == pytest.approx(number(first, "x") + event.start * scale, abs=0.02)
        assert number(box, "width") == pytest.approx((event.end - event.start) * scale - 1, abs=0.02)
    # A shade per stage of the rank.
    stages = {
        (event.action.stage, drawn[event.action].attrib["class"][1:]) for event in found.events if event.rank == 1
    }
    assert [shade for _, shade in sorted(stages)] == [str(chunk) for chunk in range(chunks)]


def test_texts() -> None:
    found = timeline("zb-h1", 3, 1, 5)
    words = texts(ET.fromstring(picture([panel(found)], unit="ms")))
    assert "zb-h1: 3 ranks, 5 microbatches" in words
    assert "a summary" in words
    assert [text for text in words if text.endswith("GiB")] == [f"{peak} GiB" for peak in found.peak_activations]
    shares = [f"{idle / found.makespan:.1%}" for idle in found.idle]
    assert [text for text in words if text.endswith("%")] == shares
    assert {"time, ms", "F forward", "W weight gradient", "idle", "rank 2"} <= set(words)
    assert "R forward again" not in words
    ahead = with_recompute_ahead(build_schedule("1f1b", num_ranks=3, num_chunks=1, num_microbatches=4))
    root = ET.fromstring(picture([panel(on_clock(ahead))]))
    assert "R forward again" in texts(root)
    assert any(box.attrib["class"] == "R0" for box in boxes(root).values())
    assert "peak: what it is" in words


def test_svg_is_standalone_and_reproducible() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n", name='<a "b" & c>')
    text = picture([panel(on_clock(schedule))])
    assert text == picture([panel(on_clock(schedule))])
    root = ET.fromstring(text)  # the name is escaped
    assert any('<a "b" & c>' in words for words in texts(root))
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|<image|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text

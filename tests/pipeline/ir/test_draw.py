"""Drawings of schedules and timelines: text, SVG pictures and traces."""

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from megalite.pipeline.ir.draw import Panel, draw_svg, merge_traces, render_grid
from megalite.pipeline.ir.generators import build_schedule, interleaved, looped_bfs, one_f_one_b, with_recompute_ahead
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Action, Schedule, dependencies
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate
from megalite.pipeline.ir.table import render_lists


def test_expected_grid_of_1f1b() -> None:
    assert render_grid(one_f_one_b(3, 4)) == (
        "schedule 1f1b: 3 ranks, one stage each, 4 microbatches; one slot = any one action\n"
        "        0  1  2  3  4  5  6  7  8  9 10 11  bubble  peak\n"
        "rank 0 F0 F1 F2  .  . B0 F3 B1  . B2  . B3   33.3%     3\n"
        "rank 1  . F0 F1  . B0 F2 B1 F3 B2  . B3  .   33.3%     2\n"
        "rank 2  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .   33.3%     1\n"
        "F2 forward of microbatch 2, B its backward, . idle; peak: live activations, in microbatches x stages"
    )


def test_chunks_name_stages_and_timelines_show_durations() -> None:
    timeline = simulate(lower(looped_bfs(2, 2, 1)), Costs.uniform(4, forward=0.5, backward=1.0))
    assert render_grid(timeline) == (
        "schedule looped-bfs: 2 ranks, 4 stages, 1 microbatches; one slot = 0.5\n"
        "         0   1   2   3   4   5   6   7   8   9  10  11  bubble  peak\n"
        "rank 0 0F0   . 2F0   .   .   . 2B0 ---   .   . 0B0 ---   50.0%     2\n"
        "rank 1   . 1F0   . 3F0 3B0 ---   .   . 1B0 ---   .   .   50.0%     2\n"
        "5F2 forward of microbatch 2 through stage 5, B its backward, . idle; peak: live activations, in microbatches "
        "x stages"
    )


def test_wide_and_tall_grids_are_truncated() -> None:
    grid = render_grid(interleaved(24, 2, 48), width=100, max_ranks=8)
    lines = grid.split("\n")
    assert max(map(len, lines[1:-3])) <= 100
    names = [line[:7].strip() for line in lines[2:-3]]
    assert names == [f"rank {rank}" for rank in range(4)] + ["…"] + [f"rank {rank}" for rank in (21, 22, 23)]
    header = lines[1].split()
    cut = header.index("…")
    first, last = int(header[cut - 1]) + 1, int(header[cut + 1]) - 1
    assert lines[-2:] == [f"… slots {first} to {last} are left out", "… ranks 4 to 20 are left out"]
    num_slots = 2 * 48 * 2 + 2 * 23
    assert int(header[-3]) == num_slots - 1  # before the headings "bubble" and "peak"


def test_lists_are_truncated_around_the_mark() -> None:
    actions = [[Action.parse(f"{rank}F{i}") for i in range(60)] for rank in range(20)]
    text = render_lists(actions, {17: 30, 2: 0}, width=60, max_ranks=4)
    lines = text.split("\n")
    assert [line.split(":")[0] for line in lines] == [
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 17",
        "… 16 ranks are left out",
    ]
    assert lines[2].startswith("rank 2:  >2F0< 2F1 ") and lines[2].endswith(" …")
    assert " … 17F" in lines[3] and " 17F29 >17F30< 17F31 " in lines[3] and lines[3].endswith(" …")
    assert max(map(len, lines)) <= 60
    assert render_lists([[], actions[0][:2]], {1: 1}) == "rank 0: (nothing)\nrank 1: 0F0 >0F1<"


def test_wide_grids_can_wrap() -> None:
    schedule = one_f_one_b(2, 12)
    whole = render_grid(schedule).split("\n")
    lines = render_grid(schedule, width=60, wrap=True).split("\n")
    assert max(map(len, lines[1:-1])) <= 60
    assert lines[0] == whole[0] and lines[-1] == whole[-1]
    panels = [lines[1 + 3 * index : 4 + 3 * index] for index in range((len(lines) - 2) // 3)]
    assert len(panels) >= 2
    for row in range(3):
        joined = " ".join(" ".join(panel[row].removeprefix(f"rank {row - 1}").split()) for panel in panels)
        assert joined == " ".join(whole[1 + row].removeprefix(f"rank {row - 1}").split())
    # After some screens the rest is omitted.
    long = render_grid(one_f_one_b(2, 2000), width=60, wrap=True).split("\n")
    assert len(long) < 70 and "slots" in long[-1]


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


Trace = dict[str, Any]


def traced(name: str = "zb-v", ranks: int = 3, chunks: int = 2, count: int = 6) -> Timeline:
    schedule = build_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=count)
    costs = Costs.uniform(schedule.num_stages, forward=1 / 3, backward=0.7, weight_grad=0.31, p2p=0.05)
    return simulate(lower(schedule), costs)


def of_phase(trace: Trace, phase: str) -> list[Trace]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def slice_around(trace: Trace, end: Trace) -> Trace:
    (found,) = [
        each
        for each in of_phase(trace, "X")
        if (each["pid"], each["tid"]) == (end["pid"], end["tid"]) and each["ts"] < end["ts"] < each["ts"] + each["dur"]
    ]
    return found


@pytest.mark.parametrize(("name", "chunks"), [("zb-v", 2), ("1f1b", 1)])
def test_slices_equal_the_events(name: str, chunks: int) -> None:
    found = traced(name, chunks=chunks)
    trace = json.loads(json.dumps(merge_traces({"found": found.events})))
    slices = of_phase(trace, "X")
    assert [(each["tid"], each["name"]) for each in slices] == [
        (event.rank, str(event.action)) for event in found.events
    ]
    for each, event in zip(slices, found.events, strict=True):
        assert each["ts"] == pytest.approx(event.start * 1e6, abs=1e-3)
        assert each["ts"] + each["dur"] == pytest.approx(event.end * 1e6, abs=2e-3)
        assert each["args"] == {"stage": event.action.stage, "microbatch": event.action.microbatch}
    kinds = {each["name"].strip("0123456789"): each["cat"] for each in slices}
    meanings = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    assert kinds == {kind: meanings[kind] for kind in kinds}


@pytest.mark.parametrize(("name", "chunks"), [("zb-v", 2), ("zb-h1", 1)])
def test_arrow_per_message(name: str, chunks: int) -> None:
    found = traced(name, chunks=chunks)
    schedule = found.schedule
    trace = merge_traces({"found": found.events})
    starts = {event["id"]: event for event in of_phase(trace, "s")}
    ends = {event["id"]: event for event in of_phase(trace, "f")}
    assert len(starts) == len(of_phase(trace, "s"))
    assert starts.keys() == ends.keys()
    drawn = set()
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        drawn.add((slice_around(trace, start)["name"], slice_around(trace, end)["name"]))
    wanted = {
        (str(producer), str(action))
        for row in schedule.actions
        for action in row
        for producer in dependencies(action, schedule)
        if schedule.placement[producer.stage] != schedule.placement[action.stage]
    }
    assert drawn == wanted
    program = lower(schedule)
    assert len(starts) == sum(action.kind in ("SEND_F", "SEND_B") for row in program.actions for action in row)


def test_names_of_processes_and_tracks() -> None:
    found = traced()
    late = [event._replace(start=event.start * 1.1, end=event.end * 1.1) for event in found.events]
    trace = merge_traces({"measured": late, "ideal": found.events})
    names = [
        (event["name"], event["pid"], event["tid"], event["args"]["name"])
        for event in of_phase(trace, "M")
        if event["name"] in ("process_name", "thread_name")
    ]
    assert names == [
        entry
        for process, name in enumerate(("measured", "ideal"))
        for entry in [
            ("process_name", process, 0, name),
            *[("thread_name", process, rank, f"rank {rank}") for rank in range(3)],
        ]
    ]
    slices = of_phase(trace, "X")
    assert len(slices) == 2 * len(found.events)
    flows = of_phase(trace, "s") + of_phase(trace, "f")
    assert len({(flow["id"], flow["ph"]) for flow in flows}) == len(flows), "ids are shared by processes"
    for flow in flows:
        slice_around(trace, flow)

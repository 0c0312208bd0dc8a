"""Chrome traces: what a viewer needs to draw tracks, slices and arrows."""

import json
from typing import Any

import pytest

from megalite.pipeline.ir.generators.registry import build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.perfetto import merge_traces
from megalite.pipeline.ir.schedule import dependencies
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate

Trace = dict[str, Any]


def timeline(name: str = "zb-v", ranks: int = 3, chunks: int = 2, count: int = 6) -> Timeline:
    schedule = build_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=count)
    costs = Costs.uniform(schedule.num_stages, forward=1 / 3, backward=0.7, weight_grad=0.31, p2p=0.05)
    return simulate(lower(schedule), costs)


def of_phase(trace: Trace, phase: str) -> list[Trace]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def slice_around(trace: Trace, end: Trace) -> Trace:
    """The slice of the track that contains an end of a flow."""
    (found,) = [
        each
        for each in of_phase(trace, "X")
        if (each["pid"], each["tid"]) == (end["pid"], end["tid"]) and each["ts"] < end["ts"] < each["ts"] + each["dur"]
    ]
    return found


@pytest.mark.parametrize(("name", "chunks"), [("zb-v", 2), ("1f1b", 1)])
def test_slices_equal_the_events(name: str, chunks: int) -> None:
    found = timeline(name, chunks=chunks)
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
    found = timeline(name, chunks=chunks)
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
    found = timeline()
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

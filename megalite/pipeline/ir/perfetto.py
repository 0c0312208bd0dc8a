"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: a track per rank, arrows for messages."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megalite.pipeline.ir.actions import MEANINGS, Action
from megalite.pipeline.ir.schedule import Schedule, dependencies
from megalite.pipeline.ir.simulate import Event

_INSIDE = 0.01
"""How far inside its slice, as a share of it, an arrow begins or ends: viewers bind it to the slice around it."""


def merge_traces(sources: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Several timelines in one trace, e.g. {"measured": ..., "ideal": ...}: a process each, in the order given.

    A slice is named as its action (`2F0`), its category is the kind, its arguments are stage and microbatch. Arrows
    lead from each result to the computation on another rank that needs it. A source may hold several steps one after
    the other: the k-th time of an action then belongs to the k-th times of the others.

    `sources`: name -> events with times in seconds from a start that all sources share. `json.dump` writes the result,
    with times in microseconds, to the nanosecond.
    """
    events: list[dict[str, Any]] = []
    flow = 0
    for process, (name, timed) in enumerate(sources.items()):
        events.append(_meta("process_name", process, 0, name=name))
        events.append(_meta("process_sort_index", process, 0, sort_index=process))
        for rank in sorted({event.rank for event in timed}):
            events.append(_meta("thread_name", process, rank, name=f"rank {rank}"))
            events.append(_meta("thread_sort_index", process, rank, sort_index=rank))
        events.extend(_slice(process, event) for event in timed)
        for producer, consumer in _messages(timed):
            shared = {"name": str(producer.action), "cat": "message", "id": flow, "pid": process}
            begin = producer.end - _INSIDE * (producer.end - producer.start)
            arrive = consumer.start + _INSIDE * (consumer.end - consumer.start)
            events.append({**shared, "ph": "s", "tid": producer.rank, "ts": _nanoseconds(begin) / 1e3})
            events.append({**shared, "ph": "f", "bp": "e", "tid": consumer.rank, "ts": _nanoseconds(arrive) / 1e3})
            flow += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(what: str, process: int, rank: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": rank, "args": arguments}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(process: int, event: Event) -> dict[str, Any]:
    kind, stage, microbatch = event.action
    # Both ends are rounded before the length is taken: slices that touch then still touch and never overlap.
    start, end = _nanoseconds(event.start), _nanoseconds(event.end)
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": MEANINGS[kind],
        "pid": process,
        "tid": event.rank,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"stage": stage, "microbatch": microbatch},
    }


def _messages(timed: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Each pair of events of which the second reads, on another rank, what the first has made."""
    times: dict[Action, list[Event]] = defaultdict(list)
    for event in sorted(timed, key=lambda event: event.start):
        times[event.action].append(event)
    # The schedule of these actions, as far as `dependencies` asks for it: sizes, splits and recomputation.
    num_stages = max((action.stage for action in times), default=-1) + 1
    num_microbatches = max((action.microbatch for action in times), default=-1) + 1
    schedule = Schedule("trace", num_microbatches, (0,) * num_stages, (tuple(times),))
    for action, occurrences in times.items():
        for needed in dependencies(action, schedule):
            # A measured step may lack events that its recorder has not seen; their arrows are left out.
            for producer, consumer in zip(times.get(needed, ()), occurrences, strict=False):
                if producer.rank != consumer.rank:
                    yield producer, consumer

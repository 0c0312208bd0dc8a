"""Write timelines as a Chrome trace for ui.perfetto.dev or chrome://tracing: a track per rank, arrows for messages."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megalite.pipeline.ir.actions import MEANINGS, Action
from megalite.pipeline.ir.schedule import Schedule, dependencies
from megalite.pipeline.ir.simulate import Event

_INSIDE = 0.01
"""Distance of an arrow's end from the edge of its slice, as a fraction of the slice: viewers bind an arrow to the slice
around its end."""


def merge_traces(sources: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Merge timelines into one trace, e.g. {"measured": ..., "ideal": ...}: one process per timeline, in dict order.

    The name of a slice is its action (`2F0`), the category is the kind, the arguments are stage and microbatch. Arrows
    lead from each result to the computation on another rank that needs it. A source may contain several consecutive
    steps: the k-th occurrences of all actions belong together.

    `sources`: name -> events, in seconds since a common start. The result, in microseconds with a resolution of a
    nanosecond, can be written with `json.dump`.
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
    # Both ends are rounded before the duration is computed, so that adjacent slices still touch and never overlap.
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
    """Yield pairs (producer, consumer) on different ranks."""
    times: dict[Action, list[Event]] = defaultdict(list)
    for event in sorted(timed, key=lambda event: event.start):
        times[event.action].append(event)
    # A schedule with what `dependencies` reads: sizes, splits and recomputation.
    num_stages = max((action.stage for action in times), default=-1) + 1
    num_microbatches = max((action.microbatch for action in times), default=-1) + 1
    schedule = Schedule("trace", num_microbatches, (0,) * num_stages, (tuple(times),))
    for action, occurrences in times.items():
        for needed in dependencies(action, schedule):
            # A measured step may lack events that were not recorded; their arrows are left out.
            for producer, consumer in zip(times.get(needed, ()), occurrences, strict=False):
                if producer.rank != consumer.rank:
                    yield producer, consumer

"""What the pipeline really did in a step, beside what the simulator says it could do."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megalite.config.run import RunConfig
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.perfetto import merge_traces
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, Event, simulate
from megalite.topology.topology import Topology

SHOWN_PIPELINES = 8
"""A trace has the first few pipelines of a run: data-parallel ones look alike, and viewers have their limits."""

_Mark = float | torch.cuda.Event


class ActionTimer:
    """Notes when the computations of one rank run, without making the host wait for the device.

    Times count from `begin`. Outside `begin` and `take` it notes nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin: _Mark | None = None
        self._open: _Mark = 0.0
        self._marks: list[tuple[Action, _Mark, _Mark]] = []

    def begin(self) -> None:
        """Start the clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks.clear()
        self._origin = self._now()

    def start(self, action: Action) -> None:
        """The action runs from here."""
        if self._origin is not None:
            self._open = self._now()

    def end(self, action: Action) -> None:
        """It has ended."""
        if self._origin is not None:
            self._marks.append((action, self._open, self._now()))

    def take(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) in seconds since `begin`, which it stops."""
        origin, self._origin = self._origin, None
        assert origin is not None, "take without begin"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [(action, _seconds(origin, start), _seconds(origin, end)) for action, start, end in self._marks]

    def _now(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(origin: _Mark, mark: _Mark) -> float:
    if isinstance(origin, float):
        assert isinstance(mark, float)
        return mark - origin
    assert not isinstance(mark, float)
    return origin.elapsed_time(mark) / 1e3


class TraceWriter:
    """Traces chosen steps: one file each, with a track per pipeline rank, measured and simulated.

    Args:
        steps: numbers of the steps to trace.
        folder: of the run; rank 0 writes there.
        log: prints a line; called on rank 0 alone.
    """

    def __init__(self, topology: Topology, *, steps: Sequence[int], folder: Path, log: Callable[[str], None]) -> None:
        self._topology, self._folder, self._log = topology, folder, log
        self.steps = frozenset(steps)
        self.timer = ActionTimer(topology.device)

    def begin(self, step: int) -> None:
        """Before a step; every rank calls it.

        Collectives: if the step is to be traced an all-reduce of one number over the world: all clocks start there.
        """
        if step in self.steps:
            self._topology.world.all_reduce(torch.zeros(1, device=self._topology.device))
            self.timer.begin()

    def finish(self, step: int, schedule: Schedule) -> float | None:
        """After a step; every rank calls it. Returns the measured bubble fraction of the first pipeline, on rank 0.

        Collectives: if the step is to be traced a gather of all ranks' times.
        """
        if step not in self.steps:
            return None
        mine = [(str(action), start, end) for action, start, end in self.timer.take()]
        gathered = self._topology.world.gather_json(mine, self._topology.device)
        if self._topology.rank != 0:
            return None
        pipelines = self._pipelines(gathered)
        first = next(iter(pipelines.values()))
        costs = measured_costs(first, schedule)
        ideal = simulate(lower(schedule), costs)
        path = self._folder / f"trace-{step}.json"
        try:
            path.write_text(json.dumps(merge_traces({**pipelines, "simulated": ideal.events})))
            written = f"wrote {path} for ui.perfetto.dev"
        except OSError as error:
            written = f"warning: cannot write {path}: {error.strerror}"
        bubble = bubble_fraction(first)
        self._log(
            f"step {step}: measured bubble {bubble:.1%}, simulated with the measured times of each action "
            f"{ideal.bubble_fraction:.1%}; {written}"
        )
        return bubble

    def _pipelines(self, gathered: Sequence[Sequence[tuple[str, float, float]]]) -> dict[str, list[Event]]:
        """Events of the first pipelines, by what tells them apart."""
        layout = self._topology.layout
        found: dict[str, list[Event]] = {}
        for ranks in layout.groups("pp")[:SHOWN_PIPELINES]:
            place = layout.coordinate(ranks[0])
            name = f"measured: tp {place.tp} cp {place.cp} dp {place.dp}"
            found[name] = [
                Event(index, Action.parse(text), start, end)
                for index, rank in enumerate(ranks)
                for text, start, end in gathered[rank]
            ]
        return found


def trace_writer(
    config: RunConfig, topology: Topology, *, first: int, log: Callable[[str], None]
) -> TraceWriter | None:
    """What a run traces with, if it does.

    Args:
        first: the step that this start goes on from, from which `trace_steps` counts.
    """
    logging = config.logging
    if not logging.trace:
        return None
    assert logging.run_dir is not None, "validate() asks for it"
    steps = [first + step for step in logging.trace_steps]
    return TraceWriter(topology, steps=steps, folder=Path(logging.run_dir), log=log)


def bubble_fraction(events: Sequence[Event]) -> float:
    """1 - (time that the busiest rank computes) / (first start to last end) of one pipeline."""
    busy: dict[int, float] = defaultdict(float)
    for event in events:
        busy[event.rank] += event.end - event.start
    makespan = max(event.end for event in events) - min(event.start for event in events)
    return 1.0 - max(busy.values()) / makespan


def measured_costs(events: Sequence[Event], schedule: Schedule) -> Costs:
    """The mean time of each kind of action on each stage, with messages that take none."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for event in events:
        times[event.action.kind, event.action.stage].append(event.end - event.start)

    def mean(kind: Kind, stage: int) -> float:
        found = times.get((kind, stage))
        return sum(found) / len(found) if found else 0.0

    stages = range(schedule.num_stages)
    weight = [mean(Kind.W, stage) for stage in stages]
    # Where a stage has both halves and whole backwards, the halves speak for it.
    backward = [(mean(Kind.I, stage) + weight[stage]) or mean(Kind.B, stage) for stage in stages]
    return Costs(
        forward=tuple(mean(Kind.F, stage) for stage in stages),
        backward=tuple(backward),
        weight_grad=tuple(weight),
        recompute=tuple(mean(Kind.R, stage) for stage in stages),
    )

"""The measured pipeline beside the simulated one."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Schedules
from megalite.partition.pipeline import schedule_of
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.training.step import Stepper
from megalite.training.trace import TraceWriter, bubble_fraction, measured_costs
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_costs_and_bubble_come_back_from_events(name: str) -> None:
    """Events of a simulated run give its costs and its bubble again."""
    config = tiny_config(4, pp=4, pipeline_schedule=name)
    schedule = build_schedule(config)
    costs = Costs(forward=(1.0, 2.0, 1.5, 1.0), backward=(3.0, 3.0, 2.0, 2.5), weight_grad=(1.0, 1.5, 0.5, 1.0))
    timeline = simulate(lower(schedule), costs)
    found = measured_costs(timeline.events, schedule)
    assert found.forward == pytest.approx(costs.forward)
    assert found.backward == pytest.approx(costs.backward)
    if name == "zb-h1":
        # No one waits for the first stage: its backwards are whole, and say nothing of their halves.
        assert costs.weight_grad is not None
        assert found.weight_grad == pytest.approx((0.0, *costs.weight_grad[1:]))
    assert bubble_fraction(timeline.events) == pytest.approx(timeline.bubble_fraction)
    late = [event._replace(start=event.start + 7, end=event.end + 7) for event in timeline.events]
    assert bubble_fraction(late) == pytest.approx(timeline.bubble_fraction)


def traced(context: RankContext, folder: Path, settings: dict[str, Any]) -> tuple[list[float | None], list[str]]:
    """Three steps of which the second is traced."""
    config = tiny_config(4, **settings)
    replica = build(context, config)
    lines: list[str] = []
    writer = TraceWriter(replica.topology, steps=[2], folder=folder, log=lines.append)
    runner = Runner(replica)
    runner.stepper = Stepper(replica, Schedules(config), tracer=writer.timer)
    bubbles = []
    for step in (1, 2, 3):
        writer.begin(step)
        runner.step()
        bubbles.append(writer.finish(step, replica.schedule_of(8)))
    return bubbles, lines


def test_a_step_on_four_ranks(tmp_path: Path) -> None:
    """Two pipelines of a zero-bubble V: every computation is in the file once a pipeline, none overlaps its neighbour."""
    settings = {"pp": 2, "vpp": 2, "dp": 2, "pipeline_schedule": "zb-v"}
    (first, lines), *others = run_ranks(4, traced, tmp_path, settings)
    assert first[0] is None and first[2] is None and first[1] is not None and 0.0 <= first[1] < 1.0
    assert all(bubbles == [None] * 3 and not said for bubbles, said in others)
    (line,) = lines
    assert line.startswith("step 2: measured bubble ") and str(tmp_path / "trace-2.json") in line
    trace = json.loads((tmp_path / "trace-2.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert names == ["measured: tp 0 cp 0 dp 0", "measured: tp 0 cp 0 dp 1", "simulated"]
    config = tiny_config(4, **settings)
    planned = [sorted(map(str, row)) for row in build_schedule(config).actions]
    for process in range(3):
        for rank in range(2):
            slices = [e for e in trace if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, rank)]
            assert sorted(e["name"] for e in slices) == planned[rank]
            slices.sort(key=lambda e: e["ts"])
            for before, after in itertools.pairwise(slices):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def build_schedule(config: RunConfig) -> Schedule:
    assert config.parallel.dp is not None
    return schedule_of(config, 8 // config.parallel.dp)

"""Phase times of one rank: each computation and phase counts once, under its name."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite.training.trace as trace_module
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Schedules
from megalite.partition.pipeline import schedule_of
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Action, Schedule
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.training import instruments
from megalite.training.instruments import Timings, compare, units
from megalite.training.step import Stepper
from megalite.training.trace import PHASES, PhaseClock, TraceWriter, bubble_fraction, measured_costs
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(trace_module.time, "perf_counter", lambda: now[0])
    return now


def run_action(clock: PhaseClock, hand: list[float], text: str, seconds: float) -> None:
    action = Action.parse(text)
    clock.start(action)
    hand[0] += seconds
    clock.end(action)


def test_each_action_and_phase_counts_once(hand: list[float]) -> None:
    clock = PhaseClock(CPU)
    for text, seconds in (("0F0", 1.0), ("0F1", 2.0), ("0R0", 4.0), ("0B0", 8.0), ("1I0", 16.0), ("1W0", 32.0)):
        run_action(clock, hand, text, seconds)
        hand[0] += 1000.0  # waiting time between computations
    with clock.phase("reduce"):
        hand[0] += 64.0
    clock.add("save", 3.0)
    clock.add("save", 4.0)
    expected = {"forward": 3.0, "backward": 60.0, "reduce": 64.0, "save": 7.0}
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), **expected}
    assert clock.take() == dict.fromkeys(PHASES, 0.0)


def report(
    context: RankContext, axes: dict[str, int], forward: list[float], independent: bool = False, tell: bool = True
) -> Any:
    """Run an interval of two steps with given computing times; return (report, collectives)."""
    topology = context.topology(**axes)
    gathers: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instruments.platform, "node", lambda: f"host{context.rank}")
        patch.setattr(instruments, "peak_memory_bytes", lambda device: (context.rank + 1) << 20)
        clock = PhaseClock(topology.device)
        timings = Timings(clock, topology, independent=independent, threshold=1.5, log_phases=tell)
        gather = Group.all_gather

        def counted(self: Group, *arguments: Any) -> None:
            gathers.append(self.name)
            gather(self, *arguments)

        patch.setattr(Group, "all_gather", counted)
        clock.add("forward", 2 * forward[context.rank])
        clock.add("optimizer", 0.004)
        clock.add("save", 0.5)
        assert gathers == []
        found = timings.interval(steps=2, seconds=4.0)
    return *found, gathers


def test_minimum_and_maximum_over_ranks() -> None:
    results = run_ranks(2, report, {"dp": 2}, [1.0, 1.25])
    assert results[1] == ({}, [], ["world"]), "rank 0 reports"
    fields, lines, gathers = results[0]
    assert gathers == ["world"], "one small gather per interval"
    assert (fields["forward_ms"], fields["forward_ms_min"]) == pytest.approx((1250.0, 1000.0))
    assert fields["optimizer_ms"] == pytest.approx(2.0)
    assert fields["other_ms"] == pytest.approx(998.0)  # two seconds per step
    assert (fields["save_seconds"], fields["evaluation_seconds"]) == (0.5, 0.0)
    assert fields["memory_bytes_max"] == 2 << 20
    assert fields["straggler_factor"] == pytest.approx(1.25)
    assert lines == [
        "  ms/step of 2 ranks: forward 1000.0–1250.0  optimizer 2.0  other 748.0–998.0  mem 1–2 MiB  save 0.50 s"
    ]


def test_phases_are_logged_on_request_or_with_a_straggler() -> None:
    for forward, asked, expected in (([1.0, 1.25], False, 0), ([1.0, 1.8], False, 2), ([1.0, 1.8], True, 2)):
        _, lines, _ = run_ranks(2, report, {"dp": 2}, forward, False, asked)[0]
        assert len(lines) == expected


@pytest.mark.parametrize(
    ("axes", "seconds", "said"),
    [
        (
            {"dp": 4},
            [1.0, 1.1, 1.8, 0.9],
            "rank 2 (host host2) took 1800.0 ms per step for forward and backward, 1.80 times the median of its peers "
            "(ranks 0 1 3)",
        ),
        (
            {"tp": 2, "dp": 2},
            [1.0, 1.0, 2.0, 1.9],
            "ranks 2 3 (host host2 host3), which wait for each other in every layer, took 2000.0 ms per step for forward "
            "and backward, 2.00 times the median of their peers (ranks 0 1)",
        ),
    ],
)
def test_straggler_is_named_with_its_host(axes: dict[str, int], seconds: list[float], said: str) -> None:
    _, lines, _ = run_ranks(4, report, axes, seconds)[0]
    assert lines[1:] == [f"straggler: {said}"]


def test_independent_ranks_exchange_no_times() -> None:
    first, second = run_ranks(2, report, {"dp": 2}, [1.0, 3.0], independent=True)
    assert first[2] == second[2] == []
    assert first[0]["forward_ms"] == first[0]["forward_ms_min"] == pytest.approx(1000.0)
    assert first[1] == ["  ms/step: forward 1000.0  optimizer 2.0  other 998.0  mem 1 MiB  save 0.50 s"]


@pytest.mark.parametrize(
    "axes, expected",
    [
        ({"dp": 2, "pp": 2}, [[(0,), (1,)], [(2,), (3,)]]),
        ({"tp": 2, "dp": 2}, [[(0, 1), (2, 3)]]),
        ({"cp": 2, "dp": 2}, [[(0, 1), (2, 3)]]),
        ({"dp": 4, "ep": 2}, [[(0, 1), (2, 3)]]),
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, [[(0, 1, 2, 3)]]),
    ],
)
def test_units_of_comparison(axes: dict[str, int], expected: list[list[tuple[int, ...]]]) -> None:
    assert units(ParallelLayout(**axes)) == expected


def test_stages_are_not_compared_with_each_other() -> None:
    """The last stage has the head: it takes longer, but is no straggler."""
    places = units(ParallelLayout(dp=3, pp=2))
    assert compare([1.0, 1.0, 1.0, 5.0, 5.0, 5.1], places, 1.2) == []
    (found,) = compare([1.0, 1.0, 1.0, 5.0, 7.5, 5.0], places, 1.2)
    assert (found.ranks, found.factor, found.peers) == ((4,), 1.5, (3, 5))
    assert compare([1.0, 9.0], units(ParallelLayout(pp=2)), 1.2) == [], "without peers there is no straggler"
    # The median excludes the rank itself; otherwise one of two ranks could never take twice the median.
    assert compare([1.0, 3.0, 30.0, 2.0], units(ParallelLayout(dp=4)), 2.0)[0].factor == 15.0
    (found,) = compare([1.0, 3.0], units(ParallelLayout(dp=2)), 1.2)
    assert (found.ranks, found.factor, found.peers) == ((1,), 3.0, (0,))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_costs_and_bubble_are_recovered_from_events(name: str) -> None:
    """Events of a simulated run reproduce its costs and its bubble."""
    config = tiny_config(4, pp=4, pipeline_schedule=name)
    schedule = build_schedule(config)
    costs = Costs(forward=(1.0, 2.0, 1.5, 1.0), backward=(3.0, 3.0, 2.0, 2.5), weight_grad=(1.0, 1.5, 0.5, 1.0))
    timeline = simulate(lower(schedule), costs)
    found = measured_costs(timeline.events, schedule)
    assert found.forward == pytest.approx(costs.forward)
    assert found.backward == pytest.approx(costs.backward)
    if name == "zb-h1":
        # No rank waits for the first stage: its backwards are not split, so there are no times of halves.
        assert costs.weight_grad is not None
        assert found.weight_grad == pytest.approx((0.0, *costs.weight_grad[1:]))
    assert bubble_fraction(timeline.events) == pytest.approx(timeline.bubble_fraction)
    late = [event._replace(start=event.start + 7, end=event.end + 7) for event in timeline.events]
    assert bubble_fraction(late) == pytest.approx(timeline.bubble_fraction)


def traced(
    context: RankContext, folder: Path, settings: dict[str, Any]
) -> tuple[list[float | None], list[str], dict[str, float]]:
    config = tiny_config(4, **settings)
    replica = build(context, config)
    lines: list[str] = []
    clock = PhaseClock(CPU)
    writer = TraceWriter(clock, replica.topology, steps=[2], folder=folder, log=lines.append)
    runner = Runner(replica)
    runner.stepper = Stepper(replica, Schedules(config), tracer=clock, phase=clock.phase)
    bubbles = []
    for step in (1, 2, 3):
        writer.begin(step)
        runner.step()
        bubbles.append(writer.finish(step, replica.schedule_of(8)))
    return bubbles, lines, clock.take()


def test_trace_of_a_step_on_four_ranks(tmp_path: Path) -> None:
    """Two pipelines of a zero-bubble V: every computation is in the file once per pipeline, without overlaps."""
    settings = {"pp": 2, "vpp": 2, "dp": 2, "pipeline_schedule": "zb-v"}
    (first, lines, seconds), *others = run_ranks(4, traced, tmp_path, settings)
    assert first[0] is None and first[2] is None and first[1] is not None and 0.0 <= first[1] < 1.0
    assert all(bubbles == [None] * 3 and not said for bubbles, said, _ in others)
    for taken in (seconds, *(rest[2] for rest in others)):
        assert all(taken[name] > 0.0 for name in ("forward", "backward", "reduce", "optimizer"))
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

"""Where a step's time goes on one rank: each computation and phase is counted once, under its name."""

import time
from typing import Any

import pytest
import torch

import megalite.training.phases as phases_module
from megalite.optimizers.schedules import Schedules
from megalite.pipeline.ir.actions import Action
from megalite.training.phases import PHASES, PhaseClock, Together
from megalite.training.step import Stepper
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is moved by hand."""
    now = [100.0]
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: now[0])
    return now


def run_action(clock: PhaseClock, hand: list[float], text: str, seconds: float) -> None:
    action = Action.parse(text)
    clock.start(action)
    hand[0] += seconds
    clock.end(action)


def test_actions_and_phases_add_up(hand: list[float]) -> None:
    clock = PhaseClock(CPU)
    for text, seconds in (("0F0", 1.0), ("0F1", 2.0), ("0R0", 4.0), ("0B0", 8.0), ("1I0", 16.0), ("1W0", 32.0)):
        run_action(clock, hand, text, seconds)
        hand[0] += 1000.0  # waiting lies between computations
    with clock.phase("reduce"):
        hand[0] += 64.0
    clock.add("save", 3.0)
    clock.add("save", 4.0)
    expected = {"forward": 3.0, "backward": 60.0, "reduce": 64.0, "save": 7.0}
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), **expected}
    assert clock.take() == dict.fromkeys(PHASES, 0.0)


class Notes:
    """A tracer that notes what it is told."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def start(self, action: Action) -> None:
        self.said.append(f"{self.name} starts {action}")

    def end(self, action: Action) -> None:
        self.said.append(f"{self.name} ends {action}")


def test_several_tracers_are_told_inside_out() -> None:
    said: list[str] = []
    both, action = Together(Notes("a", said), Notes("b", said)), Action.parse("0F0")
    both.start(action)
    both.end(action)
    assert said == ["a starts 0F0", "b starts 0F0", "b ends 0F0", "a ends 0F0"]


def test_names_for_the_profiler() -> None:
    clock = PhaseClock(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        for named in (False, True):
            clock.named = named
            clock.start(Action.parse("2F1"))
            clock.end(Action.parse("2F1"))
            with clock.phase("reduce"):
                pass
    names = [event.name for event in profile.events()]
    assert names.count("2F1 stage 2 microbatch 1") == names.count("reduce") == 1


class Slow:
    """A tracer: each backward takes longer."""

    def start(self, action: Action) -> None:
        pass

    def end(self, action: Action) -> None:
        if str(action).startswith("1B"):
            time.sleep(0.01)


def timed(context: RankContext, settings: dict[str, Any]) -> tuple[dict[str, float], float]:
    config = tiny_config(2, **settings)
    replica = build(context, config)
    runner, clock = Runner(replica), PhaseClock(CPU)
    runner.step()
    runner.stepper = Stepper(replica, Schedules(config), tracer=Together(clock, Slow()), phase=clock.phase)
    started = time.perf_counter()
    runner.step()
    return clock.take(), time.perf_counter() - started


def test_a_step_of_two_stages_knows_its_phases() -> None:
    """Eight backwards of the last stage are held up; the first stage waits for them, which is no phase of its."""
    (first, whole), (last, _) = run_ranks(2, timed, {"pp": 2, "num_layers": 2})
    for taken in (first, last):
        assert all(taken[name] > 0.0 for name in ("forward", "backward", "reduce", "optimizer"))
    assert last["backward"] >= 0.08
    assert first["backward"] < whole - 0.05
    assert sum(first.values()) < whole - 0.05

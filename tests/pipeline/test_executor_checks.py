"""The executor's checks, traces and errors on one rank."""

from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Action, Schedule
from megalite.tensor_parallel.parameter import DeferredWeightGradients
from megalite.topology.group import Group, Work
from tests.pipeline.stages import Rank, Watched


def test_split_program_needs_deferred_weight_gradients() -> None:
    program = lower(Schedule.from_csv("0F0,1F0,1I0,0B0,1W0\n", name="mine"))
    for deferred, given in ((None, "none"), ({0: DeferredWeightGradients()}, r"\[0\]")):
        with pytest.raises(
            ConfigError,
            match=rf"schedule mine splits the backward of stages \[1\] on pipeline rank 0, but deferred has {given}: pass weight gradients",
        ):
            Rank(program, 0, {}, deferred=deferred)
    Rank(program, 0, {}, deferred={1: DeferredWeightGradients()})


class Leaky(DeferredWeightGradients):
    """Keeps a microbatch that has run."""

    @property
    def pending(self) -> int:
        return 1 if self.ran else super().pending

    ran = False

    def run(self, microbatch: int) -> None:
        super().run(microbatch)
        self.ran = True


def test_unpredicted_memory_is_an_error_naming_the_action() -> None:
    program = lower(Schedule.from_csv("0F0,0I0,0W0\n"))
    me = Rank(program, 0, {}, deferred={0: Leaky()})
    with pytest.raises(
        AssertionError,
        match=r"after 0W0 rank 0 holds LiveUnits\(activations=0, inputs=0, deferred=1\); the program predicts LiveUnits\(activations=0, inputs=0, deferred=0\)",
    ):
        me.executor.run()
    Rank(program, 0, {}, deferred={0: Leaky()}, check_memory=False).executor.run()


class Notes:
    """A tracer that stores all events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, action: Action) -> None:
        self.events.append(f"start {action}")

    def end(self, action: Action) -> None:
        self.events.append(f"end {action}")


class Wire(Group):
    """An edge without a peer: messages arrive when they are waited for."""

    def send_async(self, tensor: torch.Tensor, *, to: int) -> Work:
        return Message(self.name, lambda: None)

    def receive_async(self, tensor: torch.Tensor, *, source: int) -> Work:
        return Message(self.name, lambda: tensor.fill_(1.0))


class Message:
    def __init__(self, name: str, arrive: Any) -> None:
        self.name, self.arrive = name, arrive

    def wait(self) -> None:
        self.arrive()
        NOTES.events.append(f"wait {self.name}")


NOTES = Notes()


def traced(csv: str, rank: int) -> list[str]:
    NOTES.events.clear()
    edges: dict[tuple[int, int], Group] = {
        (one, one ^ 1): Wire(f"{one}->{one ^ 1}", (one, one ^ 1), int(one != rank)) for one in range(2)
    }
    Rank(lower(Schedule.from_csv(csv)), rank, edges, tracer=NOTES).executor.run()
    return list(NOTES.events)


def test_tracer_starts_after_the_wait_for_a_message() -> None:
    csv = "0F0,0R0,0I0,0W0\n1F0,1B0\n"
    assert traced(csv, 0) == [
        *("start 0F0", "end 0F0", "start 0R0", "end 0R0"),
        *("wait 1->0", "start 0I0", "end 0I0", "start 0W0", "end 0W0"),
        "wait 0->1",  # its own send, at the end of the step
    ]
    assert traced(csv, 1) == [*("wait 0->1", "start 1F0", "end 1F0", "start 1B0", "end 1B0"), "wait 1->0"]


def test_reduction_is_enabled_right_before_the_last_backward() -> None:
    """On each stage of the rank, after its last forward and all but one of its backwards."""
    me = Watched(lower(Schedule.from_csv("0F0,0F1,0F2,0B1,0B0,0B2\n")), 0, {})
    me.step()
    assert me.events == ["B1", "B0", "enable 0", "B2", "start 0"]


def test_error_shows_the_grid_with_the_failing_action() -> None:
    me = Rank(lower(Schedule.from_csv("0F0,1F0,2F0,0F1,2B0,1B0,1F1,2F1,0B0,2B1,1B1,0B1\n")), 0, {})
    plain = me.forward

    def forward(stage: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        if (stage, microbatch) == (1, 1):
            raise ValueError("boom")
        return plain(stage, microbatch, x)

    me.executor._forward = forward
    with pytest.raises(ValueError, match="boom") as caught:
        me.executor.run()
    (note,) = caught.value.__notes__
    assert note.startswith("in 1F1 on pipeline rank 0 of:\n")
    assert "rank 0" in note and "0F0 1F0 2F0" in note


def test_weight_gradient_error_shows_the_grid() -> None:
    me = Rank(lower(Schedule.from_csv("0F0,0I0,0W0\n")), 0, {})

    def fail(microbatch: int) -> None:
        raise ValueError("boom")

    run = me.deferred[0].run
    me.deferred[0].run = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="boom") as caught:
        me.executor.run()
    (note,) = caught.value.__notes__
    assert note.startswith("in 0W0 on pipeline rank 0 of:\n")
    # The failed step's deferred gradients are dropped: the next step starts without any.
    assert me.deferred[0].pending == 1
    me.deferred[0].run = run  # type: ignore[method-assign]
    me.executor.run()
    assert me.deferred[0].pending == 0

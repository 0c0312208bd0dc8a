"""The executor on stages that are no GPT: gradients, memory and order, for schedules that it knows nothing of."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megalite.pipeline.executor import Executor
from megalite.pipeline.ir.generators.one_chunk import loop_placement
from megalite.pipeline.ir.generators.registry import build_schedule, forward_only, with_recompute_ahead
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.ir.validate import validate
from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks

WIDTH, ROWS = 4, 3

V_SHAPE = """0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1
1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1
"""
"""Down the ranks and up again: stages 1 and 2 are neighbours on rank 1."""

EARLY = """0F0,0F1,0R0,0R1,0B0,0B1
1F0,1B0,1F1,1R1,1B1
"""
"""Two graphs at once that come from second forwards."""

ONE_RANK = "0F0,1F0,2F0,0F1,2B0,1B0,1F1,2F1,0B0,2B1,1B1,0B1\n"


def schedule_of(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    if name.startswith("ahead "):
        return with_recompute_ahead(schedule_of(name.removeprefix("ahead "), ranks, chunks, microbatches))
    if name == "forward_only":
        return forward_only(loop_placement(ranks, chunks), microbatches)
    if name in ("v", "early"):
        return Schedule.from_csv({"v": V_SHAPE, "early": EARLY}[name])
    if name == "one rank":
        return Schedule.from_csv(ONE_RANK)
    return build_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)


SCHEDULES = [
    ("1f1b", 2, 1, 5),
    ("1f1b", 3, 1, 4),
    ("1f1b", 4, 1, 6),
    ("1f1b", 4, 1, 2),
    ("gpipe", 2, 1, 4),
    ("gpipe", 4, 1, 3),
    ("looped-bfs", 2, 2, 3),
    ("interleaved", 2, 2, 4),
    ("interleaved", 2, 3, 6),
    ("interleaved", 4, 2, 4),
    ("v", 2, 2, 2),
    ("one rank", 1, 3, 2),
    ("ahead gpipe", 4, 1, 3),
    ("ahead 1f1b", 4, 1, 6),
    ("ahead interleaved", 2, 2, 4),
    ("ahead v", 2, 2, 2),
    ("ahead one rank", 1, 3, 2),
    ("early", 2, 1, 2),
]


class Live:
    """Counts graphs: one comes with each forward that makes one and goes when its backward frees it."""

    now = peak = 0


class _Token:
    def __init__(self, live: Live) -> None:
        self.live = live
        live.now += 1
        live.peak = max(live.peak, live.now)

    def __del__(self) -> None:
        self.live.now -= 1


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, live: Live | None) -> torch.Tensor:
        ctx.token = None if live is None else _Token(live)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@dataclass
class Reducer:
    """Notes what it is told, between the forwards and backwards."""

    events: list[str] = field(default_factory=list)

    def enable_grad_sync(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        assert pending is None, "backwards are whole here"
        self.events.append(f"enable {stage}")

    def start_grad_sync(self, stage: int) -> None:
        self.events.append(f"start {stage}")


def make_stage(stage: int) -> torch.nn.Module:
    module = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return module


def data(microbatch: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(99 + microbatch))


class Rank:
    """One pipeline rank with its stages."""

    def __init__(self, program: Program, rank: int, edges: dict[tuple[int, int], Group]) -> None:
        schedule = program.schedule
        self.last = schedule.num_stages - 1
        self.modules = {stage: make_stage(stage) for stage in schedule.stages_of(rank)}
        self.live, self.reducer = Live(), Reducer()
        self.placement = schedule.placement
        self.sent: list[weakref.ref[torch.Tensor]] = []
        """Outputs that leave this rank or come from a second forward; their graphs live until the backward."""
        self.most_held = self.most_full = 0
        self.executor = Executor(
            program,
            rank=rank,
            edges=edges,
            forward=self.forward,
            activation_shape=(ROWS, WIDTH),
            dtype=torch.float64,
            device=torch.device("cpu"),
            reducer=None if schedule.forward_only else self.reducer,
            check_memory=True,
        )
        self.recomputed = schedule.recomputed

    def forward(self, stage: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        held = [output for ref in self.sent if (output := ref()) is not None]
        full = [output for output in held if output.untyped_storage().nbytes() > output.element_size()]
        self.most_held, self.most_full = max(self.most_held, len(held)), max(self.most_full, len(full))
        del held, full
        x = data(microbatch) if x is None else x
        has_graph = torch.is_grad_enabled()
        y = _Hold.apply(torch.tanh(self.modules[stage](x)), self.live if has_graph else None)
        if stage == self.last:
            return (y**2).sum() * (microbatch + 1)
        leaves = self.placement[stage + 1] != self.placement[stage]
        if leaves or (has_graph and (stage, microbatch) in self.recomputed):
            self.sent.append(weakref.ref(y))
        return y


def run_program(context: RankContext | None, arguments: tuple[str, int, int, int]) -> dict[str, Any]:
    program = lower(schedule_of(*arguments))
    report = validate(program)
    rank = 0 if context is None else context.rank
    edges = {} if context is None else context.topology(pp=arguments[1]).edges
    me = Rank(program, rank, edges)
    found: dict[str, Any] = {"losses": [[loss.item() for loss in me.executor.run()] for _ in range(2)]}
    return found | {
        "grads": {
            stage: [None if p.grad is None else p.grad / 2 for p in module.parameters()]
            for stage, module in me.modules.items()
        },
        "outputs": (me.most_held, me.most_full),
        "live": (me.live.peak, me.live.now),
        "reported": report.peak_activations[rank],
        "events": me.reducer.events[: len(me.reducer.events) // 2],
        "stages": program.schedule.stages_of(rank),
    }


def reference(stages: int, microbatches: int) -> tuple[list[float], list[list[torch.Tensor]]]:
    """One process, no pipeline."""
    modules, losses = [make_stage(stage) for stage in range(stages)], []
    for microbatch in range(microbatches):
        x = data(microbatch)
        for module in modules:
            x = torch.tanh(module(x))
        loss = (x**2).sum() * (microbatch + 1)
        loss.backward()
        losses.append(loss.item())
    grads = [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]
    return losses, grads


@pytest.mark.parametrize("arguments", SCHEDULES, ids=lambda a: f"{a[0]}-pp{a[1]}-vpp{a[2]}-m{a[3]}")
def test_gradients_memory_and_order(arguments: tuple[str, int, int, int]) -> None:
    _, ranks, chunks, microbatches = arguments
    found = [run_program(None, arguments)] if ranks == 1 else run_ranks(ranks, run_program, arguments)
    losses, grads = reference(ranks * chunks, microbatches)
    for rank in found:
        if ranks * chunks - 1 in rank["stages"]:
            # The last stage may take microbatches in any order; both runs give the same.
            for once in rank["losses"]:
                assert sorted(once) == pytest.approx(sorted(losses), rel=1e-12)
        else:
            assert rank["losses"] == [[], []]
        for stage, ours in rank["grads"].items():
            for one, other in zip(ours, grads[stage], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        # One send may be pending; the memory of those before it is gone, although their graphs are needed still.
        assert rank["outputs"][1] <= 1
        assert rank["live"] == (rank["reported"], 0)
        for stage in rank["stages"]:
            assert rank["events"].count(f"enable {stage}") == rank["events"].count(f"start {stage}") == 1
            assert rank["events"].index(f"enable {stage}") < rank["events"].index(f"start {stage}")
    if arguments[0] in ("gpipe", "looped-bfs"):
        assert found[0]["outputs"][0] > 1, "no output was held: nothing is proven"


@pytest.mark.parametrize("arguments", [("forward_only", 2, 1, 3), ("forward_only", 4, 1, 2), ("forward_only", 2, 2, 5)])
def test_forward_only_keeps_nothing(arguments: tuple[str, int, int, int]) -> None:
    _, ranks, chunks, microbatches = arguments
    found = run_ranks(ranks, run_program, arguments)
    losses, _ = reference(ranks * chunks, microbatches)
    assert found[-1]["losses"][0] == pytest.approx(losses, rel=1e-12)
    for rank in found:
        assert all(grad is None for grads in rank["grads"].values() for grad in grads)
        assert rank["live"][1] == 0
        assert rank["events"] == []


def test_reduction_is_armed_right_before_the_last_backward() -> None:
    """Of the stage on a rank: after its last forward and all but one of its backwards."""
    program = lower(Schedule.from_csv("0F0,0F1,0F2,0B1,0B0,0B2\n"))
    me = Rank(program, 0, {})

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, microbatch: int) -> torch.Tensor:
            ctx.microbatch = microbatch
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            me.reducer.events.append(f"B{ctx.microbatch}")
            return grad, None

    plain = me.forward
    me.executor._forward = lambda stage, microbatch, x: Note.apply(plain(stage, microbatch, x), microbatch)
    me.executor.run()
    assert me.reducer.events == ["B1", "B0", "enable 0", "B2", "start 0"]


def test_an_error_shows_the_grid_with_the_failing_action() -> None:
    program = lower(Schedule.from_csv(ONE_RANK))
    me = Rank(program, 0, {})
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

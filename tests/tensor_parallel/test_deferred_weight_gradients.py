"""A split backward: its messages, reports and memory. `tests/models` shows that the bits are the same."""

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.live_bytes import LiveBytes
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, linear
from megalite.tensor_parallel.parameter import (
    DeferredWeightGradients,
    ParameterFactory,
    ShardedParameter,
    attach_deferred,
)
from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks
from tests.support.traffic import counted

S, B, H, F_SIZE, V = 8, 2, 12, 20, 24


class Stack(torch.nn.Module):
    """A table, a gated MLP with biases, and a head; table and head may be one parameter."""

    def __init__(self, factory: ParameterFactory, *, tied: bool) -> None:
        super().__init__()
        self.tp, self.sp = factory.tp, factory.sequence_parallel
        self.table = VocabParallelEmbedding("table", (V, H), std=1.0, factory=factory, uses=2 if tied else 1)
        self.up = ColumnParallelLinear("up", (2, F_SIZE, H), std=0.5, bias=True, factory=factory, shard_dim=1)
        self.down = RowParallelLinear("down", (H, F_SIZE), std=0.5, bias=True, factory=factory)
        self.head = self.table.weight if tied else factory.parameter("head", (V, H), shard_dim=0, std=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        gate, up = self.up(x).chunk(2, dim=-1)
        x = x + self.down(gate.sigmoid() * up)
        logits = linear(x, self.head, None, tp=self.tp, sequence_parallel=self.sp)
        return logits.double().logsumexp(-1).sum()


def sharded(module: torch.nn.Module) -> dict[str, ShardedParameter]:
    found = {}
    for parameter in module.parameters():
        found[parameter.info.spec.name] = parameter
    return found


def build(tp: Group, *, sp: bool = False, tied: bool) -> Stack:
    factory = ParameterFactory(tp=tp, seed=3, dtype=torch.float32, device=torch.device("cpu"), sequence_parallel=sp)
    stack = Stack(factory, tied=tied)
    for name, parameter in sharded(stack).items():
        if "bias" not in name:
            parameter.main_grad = torch.zeros(parameter.shape)
    return stack


def tokens(microbatch: int) -> Tensor:
    return torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(microbatch))


def gradients(stack: Stack) -> dict[str, Tensor]:
    made = {}
    for name, parameter in sharded(stack).items():
        assert (parameter.grad is None) == (parameter.main_grad is not None), name
        grad = parameter.grad if parameter.main_grad is None else parameter.main_grad
        assert grad is not None and not grad.requires_grad
        made[name] = grad
    return made


def traffic(context: RankContext) -> dict[str, int]:
    tp = context.topology(tp=2).tp
    stack, deferred = (build(tp, sp=True, tied=False), DeferredWeightGradients())
    attach_deferred(stack, deferred)
    found = {}
    for kind in ("B", "I", "W"):
        loss = None if kind == "W" else stack(tokens(0))
        with counted() as (volumes, _):
            if loss is None:
                deferred.run(0)
            elif kind == "B":
                loss.backward()
            else:
                with deferred.deferring(0):
                    loss.backward()
        found.update({f"{kind} {operation}": volume for (_, operation), volume in volumes.items()})
    return found


def test_inputs_are_gathered_again_for_weight_gradients() -> None:
    """Column-parallel layers (up, head) gather their input only in W; I keeps what it needs."""
    gathered = S * B * H * 4
    for found in run_ranks(2, traffic):
        assert found["W all-gather"] == 2 * gathered
        assert found["I all-gather"] == found["B all-gather"] - 2 * gathered > 0
        assert found["I reduce-scatter"] == found["B reduce-scatter"] > 0
        assert "W reduce-scatter" not in found


class RecordedGradient:
    """A gradient that records its calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.parameter = torch.nn.Parameter(torch.zeros(2))

    def start(self) -> None:
        self.events.append(f"start {self.name}")

    def compute(self) -> Tensor | None:
        self.events.append(f"compute {self.name}")
        return None


def test_next_gather_overlaps_with_the_product() -> None:
    deferred, events = DeferredWeightGradients(), list[str]()
    gradient = [RecordedGradient(name, events) for name in "abc"]
    with deferred.deferring(4):
        for each in gradient:
            deferred.append(each)
    assert all(one is each.parameter for one, each in zip(deferred.parameters(4), gradient, strict=True))
    deferred.run(4)
    assert events == ["start a", "start b", "compute a", "start c", "compute b", "compute c"]


def test_inputs_and_output_gradients_are_freed_after_the_run() -> None:
    rows, width = 50, 16
    factory = ParameterFactory(tp=Group.solo("tp"), seed=1, dtype=torch.float32, device=torch.device("cpu"))
    layers = [RowParallelLinear(f"{i}", (width, width), std=1.0, bias=False, factory=factory) for i in range(2)]
    model, deferred = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1]), DeferredWeightGradients()
    for layer in layers:
        layer.weight.main_grad = torch.zeros(width, width)
    attach_deferred(model, deferred)
    x = torch.randn(rows, width)  # old: not counted
    with LiveBytes() as live:
        loss = (model(x) ** 2).sum()
        with deferred.deferring(0):
            loss.backward()
        del loss
        # tanh's output, and the gradients of both layers' outputs
        assert live.now == 3 * rows * width * 4
        deferred.run(0)
        assert live.now == 0
    assert deferred.pending == 0


def test_gradients_are_freed_before_the_next_product() -> None:
    deferred, freed = DeferredWeightGradients(), list[bool]()

    class Last(RecordedGradient):
        def compute(self) -> Tensor | None:
            freed.append(first() is None)
            return None

    gradient = RecordedGradient("first", [])
    first = weakref.ref(gradient)
    with deferred.deferring(0):
        deferred.append(gradient)
        del gradient
        deferred.append(Last("last", []))
    deferred.run(0)
    assert freed == [True]


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_backwards_in_other_threads_are_recorded() -> None:
    """Autograd runs the backward of CUDA tensors in a separate thread."""
    stacks = [build(Group.solo("tp"), tied=True) for _ in range(2)]
    deferred = DeferredWeightGradients()
    attach_deferred(stacks[0], deferred)
    loss = stacks[0](tokens(0))
    with deferred.deferring(0):
        in_a_thread(loss.backward)
    down, up, table = stacks[0].down.weight, stacks[0].up.weight, stacks[0].head
    assert list(map(id, deferred.parameters(0))) == list(map(id, (table, down, up, table)))
    deferred.run(0)
    stacks[1](tokens(0)).backward()
    for ours, theirs in zip(*(gradients(stack).values() for stack in stacks), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_reported_in_the_second_half() -> None:
    stack = build(Group.solo("tp"), tied=True)
    calls: list[str] = []
    for name, parameter in sharded(stack).items():
        parameter.grad_ready = lambda name=name: calls.append(name)  # type: ignore[misc]
    deferred = DeferredWeightGradients()
    attach_deferred(stack, deferred)
    loss = stack(tokens(0))
    with deferred.deferring(0):
        loss.backward()
    assert calls == []
    assert stack.up.bias is not None and stack.up.bias.grad is not None, "bias gradients are not deferred"
    deferred.run(0)
    assert calls == ["table.weight", "down.weight", "up.weight", "table.weight"]

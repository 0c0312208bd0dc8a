"""Test the rules of bounded staleness; compare the asynchronous parameter server with one process that replays its log of events."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megalite.data_parallel.parameter_server import AsyncParameterServer
from megalite.data_parallel.server import Event, Kind, Ledger, Order, Report, by_arrival, by_rank, divisor
from megalite.optimizers.base import Update
from megalite.topology.topology import Topology
from tests.data_parallel.scripted import Scripted
from tests.data_parallel.toy import SHAPES, ToyRun, adam, assert_same, gradient
from tests.support.ranks import RankContext, run_ranks

Weights = dict[str, torch.Tensor]
Script = Sequence[Event]
LR, DECAY = 0.05, 0.1
BF16 = torch.bfloat16


class Recorded:
    """Serves by arrival and records the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, waiting: Sequence[Event], ledger: Ledger) -> Event:
        self.events.append(waiting[0])
        return waiting[0]


def workers_steps(
    context: RankContext, dp: int, settings: dict[str, Any], steps: int, script: Script = ()
) -> dict[str, Any]:
    run = ToyRun(context.topology(dp=dp), {"dp_strategy": "async-parameter-server", **settings})
    strategy = run.strategy
    assert isinstance(strategy, AsyncParameterServer)
    recorded = Recorded()
    if script:
        strategy.order = Scripted(script)
    elif settings["max_staleness"] > 0:
        strategy.order = recorded
    pulled = []
    for _ in range(steps):
        run.step(lr=LR)
        pulled.append(run.weights())  # an update changes none of them
    with strategy.consensus():
        met = run.weights()
    strategy.finish()
    return {"pulled": pulled, "met": met, "events": recorded.events, "notes": strategy.notes}


def simulated(
    workers: int, events: Script, *, aware: bool, wire: torch.dtype | None = None, precision: str = "fp32"
) -> tuple[list[list[Weights]], Weights, Counter[int]]:
    """Simulate server and workers in one process; return the pulled weights, the final ones, and the staleness."""
    # Use the same flat buckets: the rounding of a fused kernel depends on an element's position.
    server = ToyRun(Topology.solo(), {"dp_strategy": "all-reduce", "precision": precision})
    pulled: list[list[Weights]] = [[] for _ in range(workers)]
    held, steps, ages = [0] * workers, [0] * workers, Counter[int]()
    for event in events:
        worker = event.worker
        if event.kind is Kind.PULL:
            pulled[worker].append(server.weights())
            held[worker] = sum(steps)
            continue
        steps[worker] += 1
        age = sum(steps) - 1 - held[worker]
        ages[age] += 1
        server.strategy.zero_grad()
        for name in SHAPES:
            part = gradient(name, steps[worker], worker) * workers
            getattr(server.toy, name).main_grad.copy_(part.to(wire or torch.float32))
        lr = LR / (max(workers, age + 1) if aware else workers)
        server.optimizer.step(Update(step=steps[worker], lr=lr, weight_decay=DECAY))
        server.strategy.publish_parameters()
    return pulled, server.weights(), ages


def random_script(workers: int, steps: int, bound: int, seed: int) -> Script:
    """Return an order of events in which no worker starts a step more than `bound` ahead of the slowest."""
    dice, clocks, computing = random.Random(seed), [0] * workers, [False] * workers
    script: list[Event] = []
    while min(clocks) < steps:
        worker = dice.randrange(workers)
        if computing[worker]:
            clocks[worker] += 1
        elif clocks[worker] == steps or clocks[worker] - min(clocks) > bound:
            continue
        script.append(Event(Kind.PUSH if computing[worker] else Kind.PULL, worker))
        computing[worker] = not computing[worker]
    return script


def assert_simulated(found: list[dict[str, Any]], events: Script, *, aware: bool = True, **types: Any) -> Counter[int]:
    pulled, met, ages = simulated(len(found), events, aware=aware, **types)
    for worker, one in enumerate(found):
        assert_same(one["pulled"], pulled[worker])
        assert_same([one["met"]], [met])
    return ages


CASES: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
    (4, 1, {}, {}),
    (3, 2, {}, {}),
    (4, 1, {"staleness_aware_lr": False}, {"aware": False}),
    (2, 2, {"wire_dtype": "bf16", "server_chunk_mb": 0.0005}, {"wire": BF16}),
    (3, 1, {"precision": "bf16"}, {"precision": "bf16"}),
]


@pytest.mark.parametrize(("workers", "bound", "settings", "simulation"), CASES)
def test_scripted_run_equals_its_simulation(
    workers: int, bound: int, settings: dict[str, Any], simulation: dict[str, Any]
) -> None:
    script = random_script(workers, 4, bound, seed=workers + bound)
    settings = {"max_staleness": bound, **settings}
    ages = assert_simulated(run_ranks(workers, workers_steps, workers, settings, 4, script), script, **simulation)
    assert max(ages) >= workers > min(ages), "the script must cause some staleness"


def test_run_equals_the_simulation_of_its_log() -> None:
    found = run_ranks(4, workers_steps, 4, {"max_staleness": 1}, 5)
    events = [event for event in found[0]["events"] if event.kind in (Kind.PULL, Kind.PUSH)]
    ages = assert_simulated(found, events)
    counts = ", ".join(f"{age}: {count}" for age, count in sorted(ages.items()))
    _, note = found[0]["notes"]
    assert f"20 updates, staleness {sum(ages.elements()) / 20:.2f} on average ({counts})" in note
    assert all(len(one["notes"]) == 1 for one in found[1:]), "the deciding rank reports"


def test_pushes_are_applied_in_rank_order_without_staleness() -> None:
    events = [Event(kind, rank) for _ in range(3) for kind in (Kind.PULL, Kind.PUSH) for rank in range(4)]
    assert_simulated(run_ranks(4, workers_steps, 4, {"max_staleness": 0}, 3), events)


def test_one_worker_equals_the_optimizer() -> None:
    (found,) = run_ranks(1, workers_steps, 1, {"max_staleness": 1}, 3)
    assert_same(found["pulled"], adam(1))
    assert not found["notes"]


def late_worker(context: RankContext, bound: int, steps: int) -> Script:
    """Let worker 1 run ahead; worker 0 starts when worker 1 has requested a pull that must wait."""
    run = ToyRun(context.topology(dp=2), {"dp_strategy": "async-parameter-server", "max_staleness": bound})
    assert isinstance(run.strategy, AsyncParameterServer)
    recorded = run.strategy.order = Recorded()
    if context.rank == 0:
        run.strategy.begin_step(1)
        server = run.strategy._server
        assert server is not None
        ahead, changed = server._ledger.clocks, server._changed
        with changed:
            changed.wait_for(lambda: ahead[1] > bound and bool(server._workers[1].requests))
            assert ahead[1] == bound + 1 and server._chosen() is None
    for _ in range(steps):
        run.step()
    run.strategy.finish()
    return recorded.events


def early_worker(context: RankContext) -> bool:
    """Let worker 1 leave a meeting and continue at once, while worker 0 is still in it."""
    run = ToyRun(context.topology(dp=2), {"dp_strategy": "async-parameter-server", "max_staleness": 1})
    strategy = run.strategy
    assert isinstance(strategy, AsyncParameterServer)
    run.step()
    rested = True
    with strategy.consensus():
        server = strategy._server
        if server is not None:
            before = [shard.main_param.detach().clone() for shard in strategy.shards]
            with server._changed:
                server._changed.wait_for(lambda: bool(server._workers[1].requests) or server._ledger.clocks[1] > 1)
                rested = server._chosen() is None and server._ledger.clocks == [1, 1]
            for shard, values in zip(strategy.shards, before, strict=True):
                rested &= torch.equal(shard.main_param, values)
    run.step()
    strategy.finish()
    return rested


def test_server_waits_until_its_own_worker_leaves_a_meeting() -> None:
    assert run_ranks(2, early_worker) == [True, True]


def test_worker_that_is_too_far_ahead_waits() -> None:
    bound, steps = 2, 5
    events, _ = run_ranks(2, late_worker, bound, steps)
    first = events.index(Event(Kind.PUSH, 0))
    assert Counter(events[:first])[Event(Kind.PUSH, 1)] == bound + 1
    clocks = [0, 0]
    for event in events:
        if event.kind is Kind.PULL:
            assert clocks[event.worker] - min(clocks) <= bound
        elif event.kind is Kind.PUSH:
            clocks[event.worker] += 1
    assert clocks == [steps, steps]


def step(ledger: Ledger, worker: int) -> int:
    ledger.pulled(worker)
    staleness = ledger.staleness(worker)
    ledger.pushed(worker)
    return staleness


def test_worker_waits_if_more_than_max_staleness_ahead() -> None:
    ledger = Ledger(3, max_staleness=1)
    step(ledger, 0)
    assert ledger.may_pull(0)
    step(ledger, 0)
    assert [ledger.may_pull(worker) for worker in range(3)] == [False, True, True]
    step(ledger, 1)
    assert not ledger.may_pull(0), "worker 2 is still at 0"
    step(ledger, 2)
    assert ledger.may_pull(0)


@pytest.mark.parametrize(("workers", "bound"), [(1, 2), (2, 0), (3, 1), (4, 2)])
def test_staleness_is_bounded(workers: int, bound: int) -> None:
    worst, ledger, dice = 0, Ledger(workers, bound), random.Random(workers)
    computing: set[int] = set()
    for _ in range(5_000):
        worker = dice.randrange(workers)
        if worker in computing:
            worst = max(worst, ledger.staleness(worker))
            ledger.pushed(worker)
            computing.remove(worker)
        elif ledger.may_pull(worker):
            ledger.pulled(worker)
            computing.add(worker)
    assert worst <= (workers - 1) * (2 * bound + 1)


@pytest.mark.parametrize(("workers", "bound"), [(2, 0), (3, 1), (4, 2)])
def test_the_bound_on_staleness_is_reached(workers: int, bound: int) -> None:
    ledger = Ledger(workers, bound)
    while ledger.clocks[0] < bound:
        step(ledger, 0)
    ledger.pulled(0)
    while any(ledger.may_pull(worker) for worker in range(1, workers)):
        for worker in range(1, workers):
            if ledger.may_pull(worker):
                step(ledger, worker)
    assert ledger.staleness(0) == (workers - 1) * (2 * bound + 1)


def test_learning_rate_of_a_push() -> None:
    assert [divisor(age, workers=4, aware=True) for age in (0, 3, 4, 11)] == [4, 4, 5, 12]
    assert [divisor(age, workers=4, aware=False) for age in (0, 3, 4, 11)] == [4, 4, 4, 4]
    assert divisor(0, workers=1, aware=True) == 1


PULL_0, PUSH_0, PUSH_1 = Event(Kind.PULL, 0), Event(Kind.PUSH, 0), Event(Kind.PUSH, 1)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (by_arrival, [PUSH_1, PULL_0]),
        (by_rank, [PULL_0, None]),
        (Scripted([PULL_0, PUSH_0, PUSH_1]), [PULL_0, None]),
        (Scripted([]), [PUSH_1, PULL_0]),
    ],
)
def test_orders_of_events(order: Order, expected: list[Event | None]) -> None:
    waiting, found = [PUSH_1, PULL_0], []
    for _ in range(2):
        chosen = order(waiting, Ledger(2, max_staleness=0))
        found.append(chosen)
        if chosen is not None:
            waiting.remove(chosen)
    assert found == expected


def test_by_rank_waits_for_all_pushes_of_a_clock() -> None:
    ledger, order, served = Ledger(3, max_staleness=0), by_rank, []
    waiting = [Event(Kind.PUSH, 2), Event(Kind.PUSH, 0)]
    assert order(waiting, ledger) is None, "worker 1 may not have pulled yet"
    waiting.append(Event(Kind.PUSH, 1))
    while waiting:
        event = order(waiting, ledger)
        assert event is not None
        waiting.remove(event)
        ledger.pushed(event.worker)
        served.append(event.worker)
    assert served == [0, 1, 2]


def test_report_line() -> None:
    report = Report()
    report.staleness.update([3, 3, 5, 1])
    report.waited[0] += 240_000_000
    report.waited[2] += 1_000_000_000
    assert report.line() == (
        "async-parameter-server: 4 updates, staleness 3.00 on average (1: 1, 3: 2, 5: 1); "
        "workers waited for weights 0: 0.2 s, 2: 1.0 s"
    )

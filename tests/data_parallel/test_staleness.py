"""Test the rules of bounded staleness, without tensors."""

import random

import pytest

from megalite.data_parallel.server import Event, Kind, Ledger, Order, Report, by_arrival, by_rank, divisor
from tests.data_parallel.scripted import Scripted


def step(ledger: Ledger, worker: int) -> int:
    """Run a whole step of one worker alone; return the staleness of its push."""
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

"""Test the background thread: order, errors, and a close that does not wait for stuck work."""

import threading
from functools import partial

import pytest
import torch

from megalite.data_parallel.wire import Background

CPU = torch.device("cpu")


def test_tasks_run_in_order() -> None:
    background, done, gate = Background(CPU), list[int](), threading.Event()

    def note(number: int) -> None:
        gate.wait(10)
        done.append(number)

    works = [background.run(partial(note, number)) for number in range(5)]
    assert done == [], "the caller must not wait"
    gate.set()
    for work in works:
        work.wait()
    assert done == [0, 1, 2, 3, 4]
    background.close()


def test_error_is_raised_by_wait_and_stops_later_tasks() -> None:
    background, done = Background(CPU), list[str]()

    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    works = [background.run(work) for work in (lambda: done.append("before"), fail, lambda: done.append("after"))]
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
    with pytest.raises(RuntimeError, match="closed by peer"):
        background.run(lambda: done.append("later")).wait()
    assert done == ["before"]
    background.close()


def test_close_ends_the_thread() -> None:
    background = Background(CPU)
    background.close()
    background.run(lambda: None).wait()
    assert "megalite-dp" in {thread.name for thread in threading.enumerate()}
    background.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "megalite-dp" and thread.is_alive()]
    background.close()


def test_close_does_not_wait_for_a_stuck_task() -> None:
    background, gate, started = Background(CPU), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def stay() -> None:
        threads.append(threading.current_thread())
        started.set()
        gate.wait(60)

    work = background.run(stay)
    started.wait(10)
    background.close()
    assert not gate.is_set()
    gate.set()
    work.wait()
    (mine,) = threads
    assert mine.daemon, "neither does the end of the process"
    mine.join()


@pytest.mark.gpu
def test_task_on_cuda_is_ordered_with_the_main_stream() -> None:
    device = torch.device("cuda", 0)
    background, x = Background(device), torch.ones(1 << 24, device=device)
    for _ in range(50):
        x.mul_(1.0)
    x.mul_(3.0)
    work = background.run(lambda: x.add_(1.0))
    beside = torch.ones(1 << 20, device=device).sum()  # may overlap
    work.wait()
    x.mul_(2.0)
    assert torch.equal(x, torch.full_like(x, 8.0)) and beside.item() == 1 << 20

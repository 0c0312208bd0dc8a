"""Test sums, gathers and messages in a wire format, by how much they round, and the background thread."""

import functools
import threading
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.data_parallel.wire import Background, Channel, WireCounter
from tests.data_parallel.toy import STEPS, ToyRun, adam, assert_same, gradient
from tests.support.ranks import RankContext, run_ranks

RANKS, SIZE = 3, 3 * 64


def part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SIZE, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def through(context: RankContext, dtype: torch.dtype, wire: torch.dtype | None, piece: int) -> dict[str, object]:
    with mock.patch("megalite.data_parallel.wire.PIECE_BYTES", piece):
        return every_collective(context, dtype, wire)


def every_collective(context: RankContext, dtype: torch.dtype, wire: torch.dtype | None) -> dict[str, object]:
    group, counter, background = context.topology(dp=RANKS).dp, WireCounter(), Background(torch.device("cpu"))
    channel = Channel(group, counter, background, wire_dtype=wire, by_rank=True)
    found: dict[str, object] = {}
    summed = part(context.rank, dtype)
    channel.all_reduce_async(summed).wait()
    found["sum"], found["sum sent"] = summed, counter.take()
    whole = part(context.rank, dtype)
    own = whole.view(RANKS, -1)[context.rank]
    channel.reduce_scatter_async(own, whole).wait()
    found["part"], found["part sent"] = own, counter.take()
    received, work = channel.exchange_raw_async(part(context.rank, dtype))
    work.wait()
    found["exchanged"], found["exchange sent"] = received, counter.take()
    message = torch.empty(SIZE, dtype=dtype)
    following, before = (context.rank + 1) % RANKS, (context.rank - 1) % RANKS
    works = channel.receive_async(message, source=before), channel.send_async(whole, to=following)
    for each in works:
        each.wait()
    found["message sent"] = counter.take()
    background.close()
    return found


@pytest.mark.parametrize(
    ("dtype", "wire", "piece"),
    [(torch.float32, torch.bfloat16, 80), (torch.float64, None, 80), (torch.float32, torch.float16, 1 << 20)],
    ids=str,
)
def test_each_collective(dtype: torch.dtype, wire: torch.dtype | None, piece: int) -> None:
    on_wire = wire or dtype
    wanted = torch.zeros(SIZE, dtype=dtype)
    for rank in range(RANKS):
        wanted = wanted + part(rank, dtype).to(on_wire).to(dtype)
    share, width, raw = (RANKS - 1) / RANKS * SIZE, on_wire.itemsize, dtype.itemsize
    for rank, found in enumerate(run_ranks(RANKS, through, dtype, wire, piece)):
        assert torch.equal(found["sum"], wanted.to(on_wire).to(dtype))
        assert found["sum sent"] == 2 * share * width
        assert torch.equal(found["part"], wanted.view(RANKS, -1)[rank])
        assert found["part sent"] == share * width
        theirs = [part(other, dtype).view(RANKS, -1)[rank] for other in range(RANKS)]
        assert torch.equal(found["exchanged"], torch.cat(theirs)), "exchange and messages are not rounded"
        assert found["exchange sent"] == share * raw
        assert found["message sent"] == SIZE * raw


def test_one_rank_does_not_round() -> None:
    (found,) = run_ranks(1, alone)
    assert torch.equal(found, part(0, torch.float32))


def alone(context: RankContext) -> torch.Tensor:
    group = context.topology(dp=1).dp
    channel = Channel(group, WireCounter(), Background(torch.device("cpu")), wire_dtype=torch.bfloat16)
    tensor = part(0, torch.float32)
    channel.all_reduce_async(tensor).wait()
    channel.reduce_scatter_async(tensor, tensor).wait()
    return channel.exchange_raw(tensor)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(values: torch.Tensor, wire: str, scale: float) -> torch.Tensor:
    return (values * scale).to(DTYPES[wire]).float() / scale


def on_the_wire(name: str, step: int, ranks: int, *, wire: str, scale: float, twice: bool) -> torch.Tensor:
    """Each rank's part is rounded, and the sum made in fp32 by rank. An all-reduce rounds the sum too, on its way back;
    owners and servers use it as it is."""
    total = rounded(gradient(name, step, 0), wire, scale)
    for rank in range(1, ranks):
        total = total + rounded(gradient(name, step, rank), wire, scale)
    return rounded(total, wire, scale) if twice else total


STRATEGIES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "distributed-optimizer": {},
    # Chunks and pieces have a few hundred elements: several per bucket.
    "fused-all-reduce": {"fusion_threshold_mb": 0.002, "reduction_order": "rank"},
    "parameter-server": {"server_chunk_mb": 0.0006},
    "sharded-parameter-server": {"server_chunk_mb": 0.0003},
}


def runs(
    context: RankContext, settings: dict[str, Any], loss_scales: list[float]
) -> list[list[dict[str, torch.Tensor]]]:
    found = [list[dict[str, torch.Tensor]]() for _ in loss_scales]
    for loss_scale, weights in zip(loss_scales, found, strict=True):
        run = ToyRun(context.topology(dp=RANKS), settings)
        for _ in range(STEPS):
            run.step(loss_scale=loss_scale)
            weights.append(run.weights())
        run.strategy.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("precision", "wire"), [("fp32", "fp16"), ("fp16", "bf16")])
def test_only_sent_values_are_rounded(strategy: str, precision: str, wire: str) -> None:
    """This includes very large loss scales: bf16 has the range of fp32, and powers of 2 are exact."""
    settings = {"dp_strategy": strategy, "wire_dtype": wire, "precision": precision, **STRATEGIES[strategy]}
    scales = [1.0, 2.0**-12, 2.0**12] if wire == "fp16" else [1.0, 2.0**32, 2.0**100] if precision == "fp16" else [1.0]
    twice = strategy.endswith("all-reduce")
    for rank in run_ranks(RANKS, runs, settings, scales):
        for scale, found in zip(scales, rank, strict=True):
            total = functools.partial(on_the_wire, wire=wire, scale=scale, twice=twice)
            assert_same(found, adam(RANKS, total=total, dtype=DTYPES[precision]))
            assert all(values.dtype == DTYPES[precision] for values in found[0].values())


def overflowing(context: RankContext, wire: str, too_large: float) -> list[float]:
    """Return the norm terms of a step with gradients beyond the wire's range on one rank, and of a good step."""
    found = []
    for scale in (too_large, 1.0):
        run = ToyRun(context.topology(dp=2), {"wire_dtype": wire, "precision": "fp16"})
        found += run.gradients(scale=scale if context.rank == 1 else 1.0)
        run.strategy.close()
    return found


@pytest.mark.parametrize(("wire", "too_large"), [("bf16", 3e38), ("fp16", 65504.0)])
def test_infinite_values_stay_infinite_on_all_ranks(wire: str, too_large: float) -> None:
    for bad, good in run_ranks(2, overflowing, wire, too_large):
        assert not torch.tensor(bad).isfinite()
        assert torch.tensor(good).isfinite()


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
    overlapping = torch.ones(1 << 20, device=device).sum()  # may overlap
    work.wait()
    x.mul_(2.0)
    assert torch.equal(x, torch.full_like(x, 8.0)) and overlapping.item() == 1 << 20

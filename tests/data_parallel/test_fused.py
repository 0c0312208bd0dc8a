"""Test which slices the ready queue returns, and when, and that ranks with different orders are detected."""

import random
from collections import Counter

import pytest
import torch

from megalite.config.parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket, make_buckets
from megalite.data_parallel.facts import ALIGNMENT
from megalite.data_parallel.fused_all_reduce import FusedAllReduce, ReadyQueue
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import DONE, Group
from tests.data_parallel.toy import SHAPES, ToyRun, bare
from tests.support.ranks import RankContext, run_ranks

FACTORY = ParameterFactory(tp=Group.solo("tp"), seed=1, dtype=torch.float32, device=torch.device("cpu"))


def bucket_of(sizes: list[int], *, replicas: int = 1, uses: int = 1) -> Bucket:
    parameters = [
        FACTORY.parameter(f"p{index}", (size,), uses=uses) for index, size in reversed(list(enumerate(sizes)))
    ]
    (bucket,) = make_buckets(parameters, bucket_size=10**9, replicas=lambda kind: replicas, grad_dtype=torch.float32)
    return bucket


def test_adjacent_gradients_start_at_the_threshold() -> None:
    queue = ReadyQueue(bucket_of([100, 100, 100, 100]), threshold=150, align=64)
    assert queue.start_counting(None) == []
    assert queue.note(0) == []
    assert queue.note(2) == [], "200 are ready, but not adjacent"
    assert queue.note(1) == [(0, 256)], "300 adjacent ones, rounded to a multiple of 64"
    assert queue.note(3) == [(256, 448)], "the remainder, the last one and the padding"
    assert queue.rest() == []


def test_rest_is_returned_once() -> None:
    queue = ReadyQueue(bucket_of([100, 100, 100, 100]), threshold=150, align=64)
    queue.start_counting(None)
    assert [queue.note(index) for index in (1, 2, 0)] == [[], [], [(0, 256)]]
    assert queue.rest() == [(256, 448)]
    assert queue.rest() == []
    queue.clear()
    assert queue.note(0) == []
    assert queue.rest() == [(0, 448)], "never armed: all of it"


def test_gradient_is_ready_after_its_pending_contributions() -> None:
    bucket = bucket_of([640, 640], uses=2)
    first, second = (placed.parameter for placed in bucket.placed)
    queue = ReadyQueue(bucket, threshold=640, align=64)
    assert queue.note(0) == [], "not armed"
    assert queue.start_counting(None) == []
    assert queue.note(0) == []
    assert queue.note(0) == [(0, 640)]
    assert queue.note(0) == [], "already started"
    queue.clear()
    assert queue.start_counting(Counter([second])) == [(0, 640)], "the first has no pending contributions"
    assert queue.note(1) == [(640, 1280)]
    assert isinstance(first, ShardedParameter)


@pytest.mark.parametrize("seed", range(8))
def test_each_element_is_reduced_once_and_after_it_is_ready(seed: int) -> None:
    choose = random.Random(seed)
    replicas = choose.choice((1, 3, 4))
    align = ALIGNMENT * replicas
    bucket = bucket_of([choose.choice((3, 10, 64, 500, 3000)) for _ in range(12)], replicas=replicas)
    threshold = choose.choice((1, 200, 1500, 10**9))
    queue = ReadyQueue(bucket, threshold=threshold, align=align)
    size = bucket.grad.numel()
    is_ready, gone = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    is_ready[bucket.placed[-1].stop :] = True
    queue.start_counting(None)
    for index in choose.sample(range(12), 12):
        placed = bucket.placed[index]
        is_ready[placed.start : placed.stop] = True
        for start, stop in queue.note(index):
            assert stop - start >= threshold and start % align == stop % align == 0
            assert is_ready[start:stop].all()
            gone[start:stop] += 1
    for start, stop in queue.rest():
        assert start % align == stop % align == 0
        gone[start:stop] += 1
    assert (gone == 1).all()


class Stage(torch.nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(FACTORY.parameter(f"w{index}", (20, 32), std=1.0) for index in range(3))


def test_slices_start_inside_the_backward() -> None:
    stage = Stage()
    settings = DataParallelConfig(fusion_threshold_mb=1200 * 4 / 1e6)
    strategy = bare(FusedAllReduce, {0: stage}, bucket_size=10**9, settings=settings)
    (bucket,) = strategy.all_buckets()
    started: list[tuple[int, int]] = []

    def all_reduce(tensor: torch.Tensor) -> object:
        start = (tensor.data_ptr() - bucket.grad.data_ptr()) // 4
        started.append((start, start + tensor.numel()))
        return DONE

    strategy.channel(bucket).all_reduce_async = all_reduce  # type: ignore[method-assign, assignment]
    for _ in range(2):  # and a second step
        started.clear()
        strategy.begin_step(1)
        last, middle, first = reversed(list(stage.layers))
        last.accumulate(torch.ones(20, 32))
        assert started == [], "not the last microbatch"
        strategy.enable_grad_sync(0)
        last.accumulate(torch.ones(20, 32))
        assert started == []
        middle.accumulate(torch.ones(20, 32))
        assert started == [(0, 1280)]
        first.accumulate(torch.ones(20, 32))
        assert started == [(0, 1280)], "640 are not enough"
        strategy.start_grad_sync(0)
        assert started == [(0, 1280), (1280, 1920)]
        strategy.finish_grad_sync()
        assert len(started) == 2


def out_of_order(context: RankContext, different: bool) -> str:
    """Return the error if rank 1's gradients arrive in another order; no all-reduce runs, as sizes would differ."""
    run = ToyRun(context.topology(dp=2), {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 0.0001})
    for bucket in run.strategy.all_buckets():
        run.strategy.channel(bucket).all_reduce_async = lambda tensor: DONE  # type: ignore[method-assign]
    run.strategy.begin_step(1)
    run.strategy.enable_grad_sync(0)
    names = sorted(SHAPES, reverse=different and context.rank == 1)
    for name in names:
        getattr(run.toy, name).accumulate(torch.ones(SHAPES[name]))
    run.strategy.start_grad_sync(0)
    run.strategy.finish_grad_sync()
    terms = run.strategy.norm_terms()
    run.topology.world.all_reduce(terms)
    try:
        return str(run.strategy.norms(terms.tolist()).logged)
    except RuntimeError as error:
        return str(error)


def test_different_orders_on_ranks_are_an_error_before_the_update() -> None:
    for said in run_ranks(2, out_of_order, True):
        assert "step 1: gradients became ready in different orders" in said
    for said in run_ranks(2, out_of_order, False):
        assert float(said) > 0

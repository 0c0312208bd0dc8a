"""Test which parameters share a bucket, their offsets, and when a bucket is full."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.data_parallel.buckets import Bucket, make_buckets
from megalite.data_parallel.facts import ALIGNMENT
from megalite.data_parallel.strategy import AllReduce
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import DONE, Group, Work
from tests.data_parallel.toy import bare

FACTORY = ParameterFactory(
    tp=Group("tp", (0, 1), 0), seed=1, dtype=torch.bfloat16, device=torch.device("cpu"), sequence_parallel=True
)


def parameters() -> list[ShardedParameter]:
    made = []
    for layer in range(2):
        made += [
            FACTORY.parameter(f"{layer}.split", (6, 5), shard_dim=0, std=1.0),
            FACTORY.parameter(f"{layer}.split.bias", (6,), shard_dim=0, decay=False, value=0.5),
            FACTORY.parameter(f"{layer}.whole", (4, 5), std=1.0),
            FACTORY.parameter(f"{layer}.norm", (5,), decay=False, in_sequence_region=True, value=1.0),
            FACTORY.parameter(f"{layer}.router", (3, 5), std=1.0, always_partial=True),
            FACTORY.parameter(f"{layer}.experts", (3, 4, 5), shard_dim=1, std=1.0, expert=True),
        ]
    return [FACTORY.parameter("word", (10, 5), shard_dim=0, std=1.0, tied=True), *made]


def names(bucket: Bucket) -> list[str]:
    return [placed.parameter.info.spec.name for placed in bucket.placed]


def buckets(bucket_size: int = 10**6, replicas: int = 1) -> list[Bucket]:
    return make_buckets(parameters(), bucket_size=bucket_size, replicas=lambda kind: replicas, grad_dtype=torch.float32)


def test_buckets_have_one_kind_and_the_order_of_the_backward() -> None:
    assert sorted(map(names, buckets())) == [
        ["1.experts", "0.experts"],
        ["1.norm", "0.norm"],
        ["1.router", "0.router"],
        ["1.split", "0.split"],
        ["1.split.bias", "0.split.bias"],
        ["1.whole", "0.whole"],
        ["word"],
    ]
    for bucket in buckets():
        for placed in bucket.placed:
            info = placed.parameter.info
            kind = (info.decay, info.shard_dim is not None, info.partial_over_tp, info.tied, info.expert)
            assert tuple(bucket.kind) == (*kind, info.orthogonal, info.learning_rate, info.fp8)


def test_bucket_is_closed_at_its_size() -> None:
    # 3·5 = 15 elements of a split matrix here, 20 of a whole one.
    found = list(map(names, buckets(bucket_size=20)))
    assert ["1.whole"] in found and ["0.whole"] in found
    assert ["1.split", "0.split"] in found, "15 elements do not fill it, 30 do"
    assert found.index(["1.whole"]) < found.index(["0.whole"]), "gradients of the last layer come first"


@pytest.mark.parametrize("replicas", [1, 4])
def test_offsets_and_alignment(replicas: int) -> None:
    align = ALIGNMENT * replicas
    for bucket in buckets(replicas=replicas):
        assert bucket.data.numel() == bucket.grad.numel()
        assert bucket.data.numel() % align == 0
        end = 0
        for placed in bucket.placed:
            assert (placed.start, placed.stop) == (end, end + placed.parameter.numel())
            end = placed.stop
        assert 0 <= bucket.data.numel() - end < align
        assert not bucket.data[end:].any()


def test_values_and_gradients_are_views_of_the_buffers() -> None:
    before = {parameter.info.spec.name: parameter.detach().clone() for parameter in parameters()}
    for bucket in buckets():
        assert bucket.data.dtype == torch.bfloat16
        assert bucket.grad.dtype == torch.float32
        for placed in bucket.placed:
            parameter = placed.parameter
            assert torch.equal(parameter, before[parameter.info.spec.name])
            bucket.data[placed.start] = 3.0
            assert parameter.view(-1)[0] == 3.0
            assert parameter.main_grad is not None
            parameter.main_grad.view(-1)[-1] = 7.0
            assert bucket.grad[placed.stop - 1] == 7.0


@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_of_autograd_accumulate_in_the_buffer(at_once: bool) -> None:
    (bucket,) = (bucket for bucket in buckets() if names(bucket)[0] == "1.norm")
    norm = bucket.placed[0].parameter
    if at_once:
        bucket.take_at_once()
    for _ in range(3):
        (norm.float() * torch.arange(5.0)).sum().backward()
        assert (norm.grad is None) is at_once
        bucket.collect()
        assert norm.grad is None
    assert bucket.grad[:5].tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert not bucket.grad[5:].any()


class Additions(TorchDispatchMode):
    """Counts in-place additions and concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.cat.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_vector_gradients_are_added_in_one_operation() -> None:
    """Neighbours need one addition; a matrix is added separately during the backward; full is reported last."""
    vectors = [FACTORY.parameter(f"norm{index}", (5,), decay=False, value=1.0) for index in range(5)]
    matrix = FACTORY.parameter("learned", (2, 5), decay=False, value=1.0)
    given = [vectors[4], vectors[3], matrix, *vectors[2::-1]]  # the bucket has the reverse order
    (bucket,) = make_buckets(given, bucket_size=10**6, replicas=lambda kind: 1, grad_dtype=torch.float32)
    full: list[float] = []
    for microbatch in range(2):
        if microbatch == 1:
            bucket.start_counting(lambda: full.append(float(bucket.grad.sum())))
        with Additions() as mode:
            loss = sum((index + 1) * vector.float().sum() for index, vector in enumerate(vectors))
            (loss + matrix.float().sum()).backward()
            bucket.collect()
        joined = ["aten.cat.default", "aten.add_.Tensor"]
        assert mode.found == ["aten.add_.Tensor", *joined, *joined]
    for index, vector in enumerate(vectors):
        assert vector.main_grad is not None and vector.main_grad.tolist() == [2.0 * (index + 1)] * 5
    assert full == [2.0 * (5 * 15 + 10)]


def test_matrix_added_by_its_layer_keeps_no_hook() -> None:
    """If autograd still gives it a gradient, `collect` moves it."""
    matrix = FACTORY.parameter("weight", (2, 5), decay=False, value=1.0)
    (bucket,) = make_buckets([matrix], bucket_size=10**6, replicas=lambda kind: 1, grad_dtype=torch.float32)
    assert matrix._post_accumulate_grad_hooks
    matrix.after_autograd()  # as torch 2.13 does if a backward returns None
    bucket.collect()
    assert not matrix._post_accumulate_grad_hooks
    matrix.float().sum().backward()
    bucket.collect()
    assert matrix.grad is None and bucket.grad[:10].tolist() == [1.0] * 10


def test_failed_backward_leaves_no_gradients() -> None:
    """Its gradients are discarded with the step's."""
    norm = FACTORY.parameter("norm", (5,), decay=False, value=1.0)
    (bucket,) = make_buckets([norm], bucket_size=10**6, replicas=lambda kind: 1, grad_dtype=torch.float32)
    broken = torch.ones(5, requires_grad=True)
    broken.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (norm.float().sum() + (broken * 2.0).sum() * 1.0).backward()
    bucket.stop_counting()
    bucket.grad.zero_()
    norm.float().sum().backward()
    bucket.collect()
    assert bucket.grad[:5].tolist() == [1.0] * 5


def test_bucket_is_full_after_the_last_gradient_of_each_parameter() -> None:
    """A tied embedding gets two gradients, and only the second is its last."""
    word = FACTORY.parameter("word", (4, 5), std=1.0, uses=2)
    other = FACTORY.parameter("other", (4, 5), std=1.0)
    (bucket,) = make_buckets([word, other], bucket_size=10**6, replicas=lambda kind: 1, grad_dtype=torch.float32)
    calls: list[str] = []
    grad = torch.ones(4, 5)
    word.accumulate(grad)
    other.accumulate(grad)
    word.accumulate(grad)
    assert calls == [], "not armed: these were other microbatches"
    bucket.start_counting(lambda: calls.append("full"))
    word.accumulate(grad)
    other.accumulate(grad)
    assert calls == []
    word.accumulate(grad)
    assert calls == ["full"]
    word.accumulate(grad)
    assert calls == ["full"], "the next step's gradients are not awaited until it is armed again"
    assert [bucket.grad[placed.start].item() for placed in bucket.placed] == [2.0, 5.0], "other, then word"


ARMED = ParameterFactory(
    tp=Group("tp", (0, 1), 0), seed=1, dtype=torch.float32, device=torch.device("cpu"), sequence_parallel=True
)
SHAPE = (4, 5)


class Stage(torch.nn.Module):
    """Two matrices in separate buckets, one that is table and head at once, a norm summed over tp, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ARMED.parameter("first", SHAPE, shard_dim=0, std=1.0)
        self.second = ARMED.parameter("second", SHAPE, shard_dim=0, std=1.0)
        self.table = ARMED.parameter("table", SHAPE, shard_dim=0, std=1.0, uses=2)
        self.norm = ARMED.parameter("norm", (5,), decay=False, in_sequence_region=True)
        self.bias = ARMED.parameter("bias", (4,), shard_dim=0, decay=False)


class Armed:
    """A strategy of one stage that records each reduction that starts."""

    def __init__(self, *, overlap: bool = True) -> None:
        self.stage, self.started = Stage(), list[str]()
        self.strategy = bare(AllReduce, {3: self.stage}, overlap=overlap)
        self.strategy._reduce = self._reduce  # type: ignore[method-assign]

    def _reduce(self, bucket: Bucket) -> Work:
        self.started += [placed.parameter.info.spec.name for placed in bucket.placed]
        return DONE

    def give(self, *names: str) -> list[str]:
        """Add gradients to these parameters, in order; return the reductions started since the last call."""
        for name in names:
            parameter = getattr(self.stage, name)
            assert isinstance(parameter, ShardedParameter)
            parameter.accumulate(torch.ones_like(parameter))
        started, self.started[:] = list(self.started), []
        return started


def test_reductions_start_during_a_whole_backward() -> None:
    me = Armed()
    me.strategy.enable_grad_sync(3)
    assert me.give() == []
    assert me.give("bias", "table") == ["bias"]
    assert me.give("second", "table", "first", "norm") == ["second", "table", "first"]
    me.strategy.start_grad_sync(3)
    assert me.give() == [], "the norm's bucket is summed over tp first"
    me.strategy.finish_grad_sync()
    assert me.give() == ["norm"]


def test_pending_matrices_are_reduced_when_full() -> None:
    me = Armed()
    stage = me.stage
    assert me.give("norm", "bias", "first") == []
    me.strategy.enable_grad_sync(3, [stage.table, stage.second, stage.table])
    assert sorted(me.give()) == ["bias", "first"]
    assert me.give("table") == []
    assert me.give("second") == ["second"]
    assert me.give("table") == ["table"]
    me.strategy.start_grad_sync(3)
    assert me.give() == []


@pytest.mark.parametrize("pending", [None, ["second"], []], ids=str)
def test_no_reduction_before_the_launch_without_overlap(pending: list[str] | None) -> None:
    me = Armed(overlap=False)
    me.strategy.enable_grad_sync(3, None if pending is None else [getattr(me.stage, name) for name in pending])
    assert me.give("norm", "bias", "table", "second", "table", "first") == []
    me.strategy.start_grad_sync(3)
    assert sorted(me.give()) == ["bias", "first", "second", "table"]


def test_bucket_is_freed_after_a_backward() -> None:
    """torch stores its parameters' hooks where Python's collector does not look: they must not reference it."""
    norm = FACTORY.parameter("norm", (5,), decay=False, value=1.0)
    (bucket,) = make_buckets([norm], bucket_size=1, replicas=lambda kind: 1, grad_dtype=torch.float32)
    bucket.take_at_once()
    (norm * 2.0).sum().backward()
    assert bucket.grad[:5].tolist() == [2.0] * 5
    left = weakref.ref(bucket)
    del bucket, norm
    gc.collect()
    assert left() is None

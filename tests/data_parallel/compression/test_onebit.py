"""Test the mean by signs: bits of its simulation, errors, corner cases."""

from typing import Any

import pytest
import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.facts import BucketKind
from megalite.data_parallel.onebit import OneBit, Signs
from megalite.data_parallel.wire import Background, Channel, WireCounter
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group
from tests.data_parallel.onebit_oracles import Layout, Means
from tests.data_parallel.toy import SHAPES
from tests.support.ranks import RankContext, run_ranks

Rows = list[torch.Tensor]


def codec_of(context: RankContext, ranks: int, scale: str, dtype: torch.dtype) -> tuple[OneBit, WireCounter]:
    factory = ParameterFactory(tp=Group.solo("tp"), seed=5, dtype=dtype, device=torch.device("cpu"))
    parameters = [factory.parameter(name, shape, std=1.0) for name, shape in SHAPES.items()]
    bucket = Bucket(BucketKind(True, False, False, False, False), parameters, replicas=ranks, grad_dtype=dtype)
    group = Group.solo("dp") if ranks == 1 else context.topology(dp=ranks).dp
    counter = WireCounter()
    return OneBit(bucket, Channel(group, counter, Background(torch.device("cpu"))), scale=scale), counter


def means(context: RankContext, ranks: int, scale: str, rows: list[Rows], dtype: torch.dtype) -> dict[str, Any]:
    """Return the means of each rank's values, call by call, and the final errors."""
    codec, counter = codec_of(context, ranks, scale, dtype)
    size = codec.bucket.grad.numel()
    found = []
    for call in rows:
        values = torch.full((size,), 7.0, dtype=dtype)
        values[: call[context.rank].numel()] = call[context.rank]
        codec.mean(values)
        found.append(values)
    assert counter.take() == len(rows) * codec.wire_bytes
    return {
        "means": found,
        "error": codec.error,
        "server": codec.server_error,
        "states": [(state.name, state.start, state.stop) for state in codec.states()],
        "used": codec.bucket.placed[-1].stop,
    }


USED = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def values_of_call(ranks: int, calls: int, *, seed: int = 1, tails: bool = False) -> list[Rows]:
    """Return values of one call and rank: with some zeros of both signs, or 95 % zeros and large others."""
    make = torch.Generator().manual_seed(seed)
    rows = [[torch.randn(USED, generator=make) for _ in range(ranks)] for _ in range(calls)]
    for call in rows:
        for row in call:
            row[5:20], row[20:40] = 0.0, -0.0
            if tails:
                row *= torch.rand(USED, generator=make) > 0.95
                row.mul_(row.abs() ** 3)
    return rows


def simulated(ranks: int, scale: str, rows: list[Rows], size: int) -> tuple[Rows, Means]:
    places, at = {}, 0
    for name, shape in SHAPES.items():
        places[name] = (at, at + torch.Size(shape).numel())
        at = places[name][1]
    oracle = Means([Layout(size, places)], ranks, scale)
    out = []
    for call in rows:
        split = [{name: row[start:stop].view(SHAPES[name]) for name, (start, stop) in places.items()} for row in call]
        found = oracle.mean(split)
        out.append(torch.cat([found[name].flatten() for name in SHAPES]))
    return out, oracle


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("scale", ["tensor", "bucket"])
def test_means_equal_the_simulation(ranks: int, scale: str) -> None:
    rows = values_of_call(ranks, 4)
    runs = run_ranks(ranks, means, ranks, scale, rows, torch.float32)
    size = runs[0]["means"][0].numel()
    wanted, oracle = simulated(ranks, scale, rows, size)
    for rank, run in enumerate(runs):
        for found, mean in zip(run["means"], wanted, strict=True):
            assert torch.equal(found[:USED], mean)
            assert not found[USED:].any(), "padding stays 0"
        assert torch.equal(run["error"], oracle.errors[0][rank])
        chunk = size // ranks
        part = slice(rank * chunk, (rank + 1) * chunk)
        assert torch.equal(run["server"], oracle.server[0][part])
        assert run["states"] == [("onebit_error", 0, size), ("onebit_server_error", part.start, part.stop)]


@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_and_errors_sum_to_the_true_means(tails: bool, dtype: torch.dtype) -> None:
    """With constant values: means plus errors sum to the true ones, and the mean over time converges as 1/t."""
    calls = 40
    rows = values_of_call(3, 1, tails=tails) * calls
    runs = run_ranks(3, means, 3, "tensor", [[row.to(dtype) for row in call] for call in rows], dtype)
    total = torch.stack(runs[0]["means"]).double().sum(dim=0)
    owed = torch.stack([run["error"] for run in runs]).double().mean(dim=0)
    owed += torch.cat([run["server"] for run in runs]).double()
    true = torch.stack(rows[0]).double().mean(dim=0)
    tolerance = (1e-4 if dtype == torch.float32 else 1e-11) * float(true.abs().max())
    assert float((total + owed)[:USED].sub(calls * true).abs().max()) < tolerance
    first, last = (
        float((torch.stack(runs[0]["means"][:count]).double().mean(dim=0)[:USED] - true).norm() / true.norm())
        for count in (1, calls)
    )
    assert last < first / 4
    assert not torch.equal(runs[0]["means"][0], runs[0]["means"][1]), "later outputs contain the omitted part"


def test_zeros_stay_zeros() -> None:
    """One tensor has zeros of both signs; the others do not."""
    rows = values_of_call(2, 3)
    table = torch.Size(SHAPES["table"]).numel()
    for call in rows:
        for row in call:
            row[:table] = -0.0
    for run in run_ranks(2, means, 2, "tensor", rows, torch.float32):
        for found in run["means"]:
            assert not found[:table].any()
        assert not run["error"][:table].any()
        assert run["means"][0][table:USED].all()


def test_each_tensor_has_its_own_scale() -> None:
    rows = values_of_call(2, 1)
    table = torch.Size(SHAPES["table"]).numel()
    for row in rows[0]:
        row[:table] *= 1e4
    ours, whole = (run_ranks(2, means, 2, scale, rows, torch.float32)[0]["means"][0] for scale in ("tensor", "bucket"))
    assert float(ours[table:USED].abs().max()) < 2.0
    assert float(whole[table : table + 100].abs().min()) > 100.0


def test_one_rank_changes_nothing() -> None:
    rows = values_of_call(1, 2)
    run = means(RankContext(0, {}), 1, "tensor", rows, torch.float32)
    for found, call in zip(run["means"], rows, strict=True):
        assert torch.equal(found[:USED], call[0])
    assert run["states"] == []


def test_bytes_on_the_wire() -> None:
    """826 values, padded to 1024, need 2 bits each times 3/4; at most 3 tensors overlap a chunk of 256."""
    codec, _ = codec_of(RankContext(0, {}), 1, "tensor", torch.float32)
    assert codec.wire_bytes == 0
    assert run_ranks(4, wire_of)[0] == 2 * 3 * (256 // 8 + 4 * 3)


def wire_of(context: RankContext) -> int:
    codec, _ = codec_of(context, 4, "tensor", torch.float32)
    return codec.wire_bytes


def test_signs_of_values() -> None:
    signs = Signs(16, torch.float32, torch.device("cpu"))
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, float("nan"), float("inf"), -1e-45, 2.0] * 2)
    packed, out = torch.empty(2, dtype=torch.uint8), torch.empty(16)
    signs.pack(values, packed)
    assert packed.tolist() == [0b10110101] * 2
    signs.unpack(packed, out)
    assert out.tolist() == [1, -1, 1, 1, -1, 1, -1, 1] * 2

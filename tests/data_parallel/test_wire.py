"""Test sums, gathers and messages in a wire format: exact values, equal bits on all ranks, and the byte counts."""

from unittest import mock

import pytest
import torch

from megalite.data_parallel.wire import Background, Channel, WireCounter
from tests.support.ranks import RankContext, run_ranks

RANKS, SIZE = 3, 3 * 64


def part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return one rank's values."""
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

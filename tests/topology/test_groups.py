"""Test collectives over real gloo ranks, the identities of a solo group, and sums in rank order."""

import sys
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.manifest import CheckpointMissing
from megalite.data.indexed_dataset import DatasetFault
from megalite.data_parallel.wire import Background, Channel, WireCounter
from megalite.parity.pool import RankPool
from megalite.topology.group import Group, add_in_order
from tests.support.ranks import RankContext, RankFailure, forked_pools, run_ranks


def collectives(context: RankContext) -> dict[str, object]:
    topology = context.topology(tp=2, dp=2)
    me = float(topology.rank)
    summed = torch.tensor([me, 1.0])
    topology.world.all_reduce(summed)
    gathered = torch.empty(4, 2)
    topology.world.all_gather(gathered, torch.full((1, 2), me))
    whole = torch.arange(8.0).view(4, 2) + me
    part = torch.empty(1, 2)
    topology.world.reduce_scatter(part, whole)
    in_place = torch.arange(4.0) * (topology.dp.rank + 1)
    mine = in_place[topology.dp.rank * 2 : topology.dp.rank * 2 + 2]
    topology.dp.reduce_scatter_async(mine, in_place).wait()
    return {
        "sum": summed.tolist(),
        "gathered": gathered[:, 0].tolist(),
        "part": part.tolist(),
        "mine": mine.tolist(),
        "json": topology.tp.gather_json({"rank": topology.rank, "text": "é" * topology.rank}),
    }


def test_collectives_over_four_ranks() -> None:
    results = run_ranks(4, collectives)
    for rank, result in enumerate(results):
        assert result["sum"] == [6.0, 4.0]
        assert result["gathered"] == [0.0, 1.0, 2.0, 3.0]
        assert result["part"] == [[4 * 2 * rank + 6.0, 4 * (2 * rank + 1) + 6.0]]
        pair = [0, 1] if rank < 2 else [2, 3]
        assert result["json"] == [{"rank": other, "text": "é" * other} for other in pair]
        assert result["mine"] == ([0.0, 3.0] if rank // 2 == 0 else [6.0, 9.0])


def exchange(context: RankContext) -> list[float]:
    topology = context.topology(pp=3)
    here = topology.pp.rank
    sent = torch.full((5,), float(here))
    received = torch.empty(5)
    pending = [
        topology.edges[here, (here + 1) % 3].send_async(sent, to=1),
        topology.edges[(here - 1) % 3, here].receive_async(received, source=0),
    ]
    for work in pending:
        work.wait()
    return received.tolist()


def test_messages_around_a_ring() -> None:
    assert run_ranks(3, exchange) == [[2.0] * 5, [0.0] * 5, [1.0] * 5]


def kinds_of_faults(context: RankContext) -> list[tuple[str, str]]:
    """Return (type, message) of errors if only rank 1 has an error of some kind, and if both ranks have one."""
    topology = context.topology(dp=2)
    faults: list[list[Exception | None]] = [
        [None, DatasetFault("x.bin is truncated", "x.bin", 8)],
        [None, CheckpointMissing("no checkpoint")],
        [None, KeyError("boom")],
        [DatasetFault("here"), DatasetFault("there")],
    ]
    found = []
    for of_ranks in faults:
        try:
            topology.world.raise_on_all_ranks(of_ranks[topology.rank])
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_agree_distinguishes_user_errors() -> None:
    first, second = run_ranks(2, kinds_of_faults)
    assert first == [
        ("ConfigError", "x.bin is truncated"),
        ("CheckpointError", "no checkpoint"),
        ("RemoteError", "rank 1 failed: KeyError: 'boom'"),
        ("DatasetFault", "here"),
    ]
    assert second == [
        ("DatasetFault", "x.bin is truncated"),
        ("CheckpointMissing", "no checkpoint"),
        ("KeyError", "'boom'"),
        ("ConfigError", "here"),
    ]


def fail_on_rank_one(context: RankContext) -> None:
    topology = context.topology(dp=2)
    if context.rank == 1:
        raise ValueError("boom on purpose")
    topology.world.all_reduce(torch.ones(1))


def test_pool_names_the_failing_rank() -> None:
    # A separate pool: the shared one would have to restart all its ranks.
    with (
        forked_pools(),
        RankPool(2, strict=True) as pool,
        pytest.raises(RankFailure, match=r"rank 1 of 2 failed first:(.|\n)*boom on purpose"),
    ):
        pool.run(2, fail_on_rank_one)


def groups_and_threads(context: RankContext) -> tuple[int, int]:
    before, held = len(context.groups), [context.topology(dp=2)]
    held[0].world.all_reduce(torch.ones(1))
    held.append(held)  # type: ignore[arg-type]  # a reference cycle, like modules and their hooks
    return before, len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pool_replaces_process_groups_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo has threads for each group, which wake up all the time."""
    monkeypatch.setattr("megalite.parity.pool._MOST_GROUPS", 1)
    with forked_pools(), RankPool(2, strict=True) as pool:
        found = [pool.run(2, groups_and_threads)[0] for _ in range(4)]
    assert len(set(found)) == 1 and found[0][0] == 0


SENT = [[1, 0, 2], [0, 0, 0], [3, 1, 0]]
"""Rows from rank i to rank j: one rank sends nothing, one receives almost nothing."""


def unequal(context: RankContext, dtype: torch.dtype) -> list[list[float]]:
    world = context.topology(dp=3).world
    sent = SENT[world.rank]
    received = [row[world.rank] for row in SENT]
    to = [float(10 * world.rank + rank) for rank, count in enumerate(sent) for _ in range(count)]
    rows = torch.tensor(to, dtype=dtype)[:, None].expand(-1, 2).contiguous().view(-1, 2)
    output = torch.full((sum(received), 2), -1.0, dtype=dtype)
    world.all_to_all(output, rows, received, sent)
    assert torch.equal(output[:, 0], output[:, 1])
    return output[:, 0].tolist()


def test_all_to_all_with_unequal_parts() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert run_ranks(3, unequal, dtype) == [[0.0, 20.0, 20.0, 20.0], [21.0], [2.0, 2.0]]


def nothing_at_all(context: RankContext) -> list[int]:
    world = context.topology(dp=2).world
    output = torch.empty(0, 4)
    world.all_to_all(output, torch.empty(0, 4), [0, 0], [0, 0])
    return list(output.shape)


def test_all_to_all_without_rows() -> None:
    assert run_ranks(2, nothing_at_all) == [[0, 4], [0, 4]]


def rotated(context: RankContext, cp: int) -> list[list[float]]:
    """Run two exchanges of different sizes concurrently, then a third."""
    group = context.topology(cp=cp).cp
    first, wait_first = group.rotate_async(torch.tensor([float(group.rank)]))
    second, wait_second = group.rotate_async(torch.tensor([group.rank + 0.5, group.rank + 0.25]))
    wait_first.wait()
    wait_second.wait()
    third, wait_third = group.rotate_async(first)
    wait_third.wait()
    return [first.tolist(), second.tolist(), third.tolist()]


@pytest.mark.parametrize("cp", [2, 3])
def test_rotate_sends_to_the_next_rank(cp: int) -> None:
    for rank, found in enumerate(run_ranks(cp, rotated, cp)):
        one, two = (rank - 1) % cp, (rank - 2) % cp
        assert found == [[one], [one + 0.5, one + 0.25], [two]]


def exchanged(context: RankContext, cp: int) -> list[list[float]]:
    group = context.topology(cp=cp).cp
    parts = torch.tensor([[group.rank * 10.0 + to, 0.5] for to in range(cp)])
    output = torch.empty_like(parts)
    group.all_to_all_equal(output, parts)
    return output.tolist()


@pytest.mark.parametrize("cp", [2, 3])
def test_all_to_all_sends_part_i_to_rank_i(cp: int) -> None:
    for rank, found in enumerate(run_ranks(cp, exchanged, cp)):
        assert found == [[source * 10.0 + rank, 0.5] for source in range(cp)]


def test_solo_group_is_the_identity() -> None:
    solo = Group.solo("tp")
    tensor = torch.arange(4.0)
    solo.all_reduce(tensor)
    output = torch.empty(4)
    solo.all_gather(output, tensor)
    assert output.tolist() == tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    solo.reduce_scatter(output, tensor + 1)
    assert output.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert solo.gather_json([1]) == [[1]]
    solo.all_to_all(output, tensor, [4], [4])
    assert torch.equal(output, tensor)
    solo.all_to_all_equal(output, tensor + 2)
    assert torch.equal(output, tensor + 2)
    received, work = solo.rotate_async(tensor)
    work.wait()
    assert received is tensor


LENGTH = (1 << 16) + 640  # a whole piece and a partial one


def parts_of(ranks: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(ranks, length, generator=torch.Generator().manual_seed(ranks))


def one_after_the_other(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for row in parts[1:]:
        total = total + row
    return total


@pytest.mark.parametrize("ranks", [2, 3, 18, 33])
def test_rows_are_added_in_order(ranks: int) -> None:
    parts = parts_of(ranks)
    wanted, found = one_after_the_other(parts), torch.full((LENGTH,), torch.nan)
    add_in_order(found, parts)
    assert torch.equal(found, wanted)
    table = torch.empty(LENGTH // 2, 2)
    add_in_order(table, parts.view(ranks, *table.shape))
    assert torch.equal(table.view(-1), wanted)


def test_narrow_parts_are_added_in_the_wider_dtype() -> None:
    parts = parts_of(18).bfloat16()
    wanted = one_after_the_other(parts.float())
    wide, narrow = torch.empty(LENGTH), torch.empty(LENGTH, dtype=torch.bfloat16)
    add_in_order(wide, parts)
    add_in_order(narrow, parts)
    assert torch.equal(wide, wanted)
    assert torch.equal(narrow, wanted.bfloat16())


def reduce_scattered(context: RankContext, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    group, background = context.topology(dp=ranks).dp, Background(torch.device("cpu"))
    whole = parts_of(ranks, 64 * ranks)[context.rank]
    plain, by_rank = torch.empty(64), torch.empty(64)
    group.reduce_scatter(plain, whole)
    channel = Channel(group, WireCounter(), background, by_rank=True)
    channel.reduce_scatter_async(by_rank, whole).wait()
    background.close()
    return plain, by_rank


def test_reduce_scatters_add_in_rank_order() -> None:
    ranks = 5
    wanted = one_after_the_other(parts_of(ranks, 64 * ranks)).view(ranks, 64)
    for rank, found in enumerate(run_ranks(ranks, reduce_scattered, ranks)):
        for each in found:
            assert torch.equal(each, wanted[rank])

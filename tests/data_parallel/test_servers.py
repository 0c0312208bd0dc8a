"""Several processes do what one does that plays them all, to the bit: sums in the order of ranks; and what each sends."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.data_parallel.toy import SHAPES, STEPS, ToyRun, adam, assert_same, trajectory
from tests.support.ranks import RankContext, run_ranks

BY_RANK = {"reduction_order": "rank"}
# Chunks and pieces of a few hundred elements: several in each bucket.
FUSED = {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 0.002, **BY_RANK}
SERVER = {"dp_strategy": "parameter-server", "server_chunk_mb": 0.0006}
SHARDED = {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.0003}
EACH = {"fused": FUSED, "server": SERVER, "sharded": SHARDED}
WAYS = {
    **EACH,
    "all-reduce": {"dp_strategy": "all-reduce", **BY_RANK},
    "distributed-optimizer": {"dp_strategy": "distributed-optimizer"},
    "fused late": {**FUSED, "overlap_grad_reduce": False},
    "server late": {**SERVER, "overlap_param_gather": False, "overlap_grad_reduce": False},
    "sharded late": {**SHARDED, "overlap_param_gather": False, "overlap_grad_reduce": False},
    "fused, all at once": {**FUSED, "fusion_threshold_mb": 1.0},
    "server, all at once": {**SERVER, "server_chunk_mb": 1.0},
    "sharded, all at once": {**SHARDED, "server_chunk_mb": 1.0},
}


@pytest.mark.parametrize("name", WAYS)
def test_four_ranks(name: str) -> None:
    for found in run_ranks(4, trajectory, 4, WAYS[name], STEPS):
        assert_same(found, adam(4))


@pytest.mark.parametrize("name", EACH)
def test_three_ranks(name: str) -> None:
    for found in run_ranks(3, trajectory, 3, EACH[name], STEPS):
        assert_same(found, adam(3))


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_one_rank_is_the_optimizer_alone(name: str, wire: str) -> None:
    (found,) = run_ranks(1, trajectory, 1, {**EACH[name], "wire_dtype": wire}, STEPS)
    assert_same(found, adam(1))


def fp16_trajectory(context: RankContext, settings: Mapping[str, Any]) -> dict[str, Any]:
    """With a loss scale, and one step that overflows on one rank: nothing of it may stay."""
    torch.set_num_threads(1)
    run = ToyRun(context.topology(dp=4), {**settings, "precision": "fp16"})
    run.step(loss_scale=1024.0)
    first = run.weights()
    held = {
        name: state.clone()
        for shard in run.strategy.shards
        for name, state in run.optimizer.state(shard.main_param).items()
    }
    norm = run.gradients(scale=float("inf") if context.rank == 2 else 1.0, loss_scale=1024.0)
    skipped = run.weights()
    same = all(torch.equal(first[name], skipped[name]) for name in SHAPES) and all(
        torch.equal(held[name], state)
        for shard in run.strategy.shards[-1:]
        for name, state in run.optimizer.state(shard.main_param).items()
    )
    run.step(loss_scale=512.0)
    return {"norm": norm[0], "same": same, "weights": [first, run.weights()], "dtype": run.toy.up.dtype}


@pytest.mark.parametrize("name", EACH)
def test_fp16_with_a_loss_scale_and_an_overflow(name: str) -> None:
    exact = adam(4, 2)
    for found in run_ranks(4, fp16_trajectory, EACH[name]):
        assert not torch.tensor(found["norm"]).isfinite()
        assert found["same"] and found["dtype"] is torch.float16
        for ours, wanted in zip(found["weights"], exact, strict=True):
            for tensor in SHAPES:
                # Scales are powers of 2: what differs is the rounding of the weights (and of the first ones).
                torch.testing.assert_close(ours[tensor].float(), wanted[tensor], rtol=2e-3, atol=2e-3)


def bytes_sent(context: RankContext, settings: Mapping[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = ToyRun(context.topology(dp=4), settings)
    run.strategy.wire()
    run.step()
    run.strategy.wait_for_parameters()
    return {
        "sent": run.strategy.wire(),
        "elements": sum(bucket.data.numel() for bucket in run.strategy.all_buckets()),
        "buckets": len(run.strategy.all_buckets()),
        "owned": [(shard.start, shard.stop, shard.bucket.data.numel()) for shard in run.strategy.shards],
    }


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EACH)
def test_what_is_sent(name: str, wire: str) -> None:
    each = 2 if wire == "bf16" else 4
    for rank, found in enumerate(run_ranks(4, bytes_sent, {**EACH[name], "wire_dtype": wire})):
        size, owned = found["elements"], sum(stop - start for start, stop, _ in found["owned"])
        expected = {
            "fused": 2 * 3 / 4 * size * each,
            "server": 3 * size * 4 if rank == 0 else size * each,
            "sharded": 3 / 4 * size * each + 3 / 4 * size * 4,
        }
        assert found["sent"] == expected[name]
        assert owned == {"fused": size, "server": size if rank == 0 else 0, "sharded": size // 4}[name]
        assert found["buckets"] >= (2 if name != "sharded" else 3)

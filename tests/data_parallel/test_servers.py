"""Several processes do what one does that plays them all, to the bit: sums in the order of ranks; and what each sends."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.data_parallel.toy import STEPS, ToyRun, adam, assert_same, trajectory
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


@pytest.mark.parametrize(
    ("ranks", "name", "wire"), [*((3, name, "fp32") for name in WAYS), *((1, name, "bf16") for name in EACH)]
)
def test_weights_are_those_of_one_process(ranks: int, name: str, wire: str) -> None:
    for found in run_ranks(ranks, trajectory, ranks, {**WAYS[name], "wire_dtype": wire}, STEPS):
        assert_same(found, adam(ranks))


def bytes_sent(context: RankContext, settings: Mapping[str, Any]) -> dict[str, Any]:
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

"""Compare servers, bit by bit, with one process that simulates all ranks; test sums in rank order and bytes."""

import pytest

from tests.data_parallel.toy import STEPS, adam, assert_same, trajectory
from tests.support.ranks import run_ranks

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
def test_weights_equal_the_simulation(ranks: int, name: str, wire: str) -> None:
    for found in run_ranks(ranks, trajectory, ranks, {**WAYS[name], "wire_dtype": wire}, STEPS):
        assert_same(found, adam(ranks))

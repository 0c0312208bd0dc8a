"""The torch-free statements of what strategies cut and keep are what the strategies do."""

import sys
from typing import Any

import pytest
import torch

from megalite.data_parallel.facts import SHARDED, bucket_size, state_elements, strategy_states
from tests.data_parallel.toy import ToyRun
from tests.support.ranks import RankContext, run_ranks

RANKS = 2
SGD = {"optimizer": "sgd"}
FROZEN = {"freeze_step": 1}
CASES: list[dict[str, Any]] = [
    {},
    *({"grad_compression": name} for name in ("onebit", "uint8", "topk", "powersgd")),
    *({"optimizer": name, **FROZEN} for name in ("onebit-adam", "onebit-lamb", "zero-one-adam")),
    *({"dp_strategy": name} for name in SHARDED),
    {"dp_strategy": "local-sgd"},
    {"dp_strategy": "local-sgd", "wire_dtype": "bf16"},
    {"dp_strategy": "diloco", "sync_interval": 4},
    {"dp_strategy": "diloco", "sync_interval": 4, "sync_delay": 1},
    {"dp_strategy": "gossip"},
    {"dp_strategy": "gossip", "gossip_algorithm": "decentlam", **SGD},
]
MAIN = ("replica_param", "main_param")
"""Main parameters, which are there anyway."""


def kept(context: RankContext) -> list[tuple[set[str], float, set[str], float]]:
    """For each case: names and elements of the states, as the strategy has them and as they are stated."""
    torch.set_num_threads(1)
    found = []
    for settings in CASES:
        run = ToyRun(context.topology(dp=RANKS), {"ddp_bucket_size": 10**4, **settings})
        states = [state for state in run.strategy.states() if state.name not in MAIN]
        buckets = {state.bucket for state in states}
        stated = strategy_states(run.config)
        elements = state_elements(stated, RANKS) * sum(bucket.data.numel() for bucket in buckets)
        mine = float(sum(state.values.numel() for state in states))
        found.append(({state.name for state in states}, mine, set(stated), elements))
        parts = RANKS if run.config.parallel.dp_strategy in SHARDED else 1
        for shard in run.strategy.shards:
            assert shard.main_param.numel() * parts == shard.bucket.data.numel(), settings
        run.strategy.close()
    return found


def test_states_are_those_that_are_stated() -> None:
    for rank in run_ranks(RANKS, kept):
        for settings, (names, elements, stated, wanted) in zip(CASES, rank, strict=True):
            assert (names, elements) == (stated, wanted), settings


SERVER = {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.0006}


@pytest.mark.parametrize(
    ("settings", "size", "buckets"),
    [
        ({}, 300, 4),
        ({"dp_strategy": "fused-all-reduce"}, sys.maxsize, 2),
        (SERVER, 128, 4),
        ({**SERVER, "wire_dtype": "bf16"}, 256, 4),
    ],
    ids=str,
)
def test_buckets_are_closed_at_the_stated_size(settings: dict[str, Any], size: int, buckets: int) -> None:
    """Gradients come in the order norm, down (330), bias, up (330), table (240)."""
    run = ToyRun(RankContext(0, {}).topology(dp=1), settings)
    assert bucket_size(run.config, 1) == run.strategy.options.bucket_size == size
    assert len(run.strategy.all_buckets()) == buckets
    for bucket in run.strategy.all_buckets():
        assert bucket.placed[-1].start < size, "it was still open when the last one came"

"""Compare the torch-free facts of strategies (bucket sizes, states) with the strategies themselves."""

import sys
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.strategies import STRATEGIES
from megalite.config.validate import validate
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.facts import STATES, Placement, StateFact, bucket_size, state_elements, strategy_states
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.optimizers.base import Update
from megalite.partition.buckets import strategy_bytes
from megalite.planner.communication import step_volumes
from megalite.topology.group import Work
from tests.data_parallel.toy import ToyRun
from tests.support.plugins import registered
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import build, tiny_config

RANKS = 2
SGD = {"optimizer": "sgd"}
FROZEN = {"freeze_step": 1}
CASES: list[dict[str, Any]] = [
    {},
    *({"grad_compression": name} for name in ("onebit", "uint8", "topk", "powersgd")),
    *({"optimizer": name, **FROZEN} for name in ("onebit-adam", "onebit-lamb", "zero-one-adam")),
    *({"dp_strategy": name} for name in STRATEGIES if STRATEGIES.facts(name).shards_states),
    {"dp_strategy": "local-sgd"},
    {"dp_strategy": "local-sgd", "wire_dtype": "bf16"},
    {"dp_strategy": "local-sgd", "sync_interval": 4, "sync_delay": 1},
    {"dp_strategy": "diloco", "sync_interval": 4},
    {"dp_strategy": "diloco", "sync_interval": 4, "sync_delay": 1},
    {"dp_strategy": "gossip"},
    {"dp_strategy": "gossip", "gossip_algorithm": "decentlam", **SGD},
    {"dp_strategy": "gossip", "gossip_algorithm": "choco-sgd"},
]
MAIN = ("replica_param", "main_param")  # main parameters, which exist anyway


def kept(context: RankContext) -> list[tuple[set[str], float, set[str], float]]:
    """Return, for each case, names and elements of the states, from the strategy and from the facts."""
    found = []
    for settings in CASES:
        run = ToyRun(context.topology(dp=RANKS), {"dp": RANKS, "ddp_bucket_size": 10**4, **settings})
        states = [state for state in run.strategy.states() if state.name not in MAIN]
        buckets = {state.bucket for state in states}
        stated = strategy_states(run.config)
        elements = state_elements(stated, RANKS) * sum(bucket.data.numel() for bucket in buckets)
        mine = float(sum(state.values.numel() for state in states))
        found.append(({state.name for state in states}, mine, set(stated), elements))
        parts = RANKS if run.config.parallel.strategy.shards_states else 1
        if "optimizer" not in settings:
            assert run.strategy.replicas_agree == (run.config.parallel.strategy.weights == "equal"), settings
        for shard in run.strategy.shards:
            assert shard.main_param.numel() * parts == shard.bucket.data.numel(), settings
        run.strategy.close()
    return found


def test_states_equal_the_facts() -> None:
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
def test_bucket_sizes_equal_the_facts(settings: dict[str, Any], size: int, buckets: int) -> None:
    """Gradients arrive in the order norm, down (330), bias, up (330), table (240)."""
    run = ToyRun(RankContext(0, {}).topology(dp=1), settings)
    assert bucket_size(run.config, 1) == run.strategy.options.bucket_size == size
    assert len(run.strategy.all_buckets()) == buckets
    for bucket in run.strategy.all_buckets():
        assert bucket.placed[-1].start < size, "the last bucket was still open"


class Tripled(DataParallelStrategy):
    """Sums the replicas' gradients, and multiplies them by three."""

    def _reduce(self, bucket: Bucket) -> Work:
        return self.channel(bucket).all_reduce_async(bucket.grad.mul_(3))


def tripled() -> AbstractContextManager[None]:
    facts = {"settings": "ddp_bucket_size", "traffic": lambda t: [("all-reduce", 3 * t.elements * t.wire)]}
    return registered(STRATEGIES, "tripled", Tripled, **facts)


class Keeping(Tripled):
    """A strategy with a state per element."""

    def states(self) -> list[FlatState]:
        return [
            FlatState("seen", bucket, torch.zeros_like(bucket.data), Placement.REPLICATED)
            for bucket in self.all_buckets()
        ]


def built_with(context: RankContext, states: tuple[str, ...]) -> str:
    """Return the error of a run with a strategy that has the state `seen`, registered with `states`."""
    facts = {"traffic": lambda t: [("all-reduce", t.elements * t.wire)], "states": lambda config: states}
    with registered(STRATEGIES, "keeping", Keeping, **facts):
        try:
            replica = build(context, tiny_config(RANKS, dp=RANKS, dp_strategy="keeping"))
        except ConfigError as error:
            return str(error)
        replica.strategy.close()
    return ""


def test_states_must_equal_the_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(RANKS, built_with, ("seen",)) == [""] * RANKS
    for said in run_ranks(RANKS, built_with, ()):
        assert said.startswith(
            "dp_strategy keeping keeps the states seen, but is registered with none, by which memory"
        )
    facts = {"traffic": lambda t: [], "states": lambda config: ("seen",)}
    with registered(STRATEGIES, "keeping", Keeping, **facts):
        config = tiny_config(RANKS, dp=RANKS, dp_strategy="keeping", precision="fp32")
        with pytest.raises(
            ConfigError, match=r"keeps a state seen, which is not in megalite.*\.STATES; add STATES\['seen'\]"
        ):
            strategy_bytes(config, RANKS)
        monkeypatch.setitem(STATES, "seen", StateFact(Placement.REPLICATED, "zeros"))
        assert strategy_bytes(config, RANKS) == 4


def weights_of(context: RankContext) -> list[dict[str, torch.Tensor]]:
    """Return the weights after a step of SGD by this file's strategy, and by an all-reduce of tripled gradients."""
    found = []
    with tripled():
        for name, scale in (("tripled", 1.0), ("all-reduce", 3.0)):
            run = ToyRun(
                context.topology(dp=RANKS), {"dp_strategy": name, "weight_decay": 0.0, **SGD, "sgd_momentum": 0.0}
            )
            run.gradients(scale=scale)
            run.strategy.update(run.optimizer, Update(step=1, lr=0.01, weight_decay=0.0, factor=1.0))
            found.append(run.weights())
            run.strategy.close()
    return found


def test_registered_strategy_trains_and_is_planned() -> None:
    for mine, usual in run_ranks(RANKS, weights_of):
        for name, values in mine.items():
            torch.testing.assert_close(values, usual[name])

    with tripled():
        what_is_planned_of_it()


def what_is_planned_of_it() -> None:
    line = "--dp-strategy tripled --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 64 --mock-data"
    words = [
        *line.split(),
        *["--seq-length", "64", "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "3"],
    ]
    config = validate(parse_arguments(words).config, 2)
    usual = validate(parse_arguments([*words, "--dp-strategy", "all-reduce"][2:]).config, 2)
    key = "dp-cp", "all-reduce"
    tokens = 8
    assert step_volumes(config, 0, 2)[key] - tokens == 3 * (step_volumes(usual, 0, 2)[key] - tokens)
    with pytest.raises(ConfigError, match="shard_gradients has no effect with dp_strategy tripled"):
        validate(parse_arguments([*words, "--shard-gradients"]).config, 2, frozenset({"shard_gradients"}))

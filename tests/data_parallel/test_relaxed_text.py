"""Compare replicas with different weights with all-reduce, on the same samples of real text."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.optimizers.schedules import Progress
from megalite.training.replica import consensus
from megalite.training.setup import make_loader
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

TEXT = np.frombuffer(Path(__file__).parents[2].joinpath("LICENSE").read_bytes(), np.uint8)
STEPS = 50
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 128,
    "seq_length": 32,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "train_iters": STEPS,
    "lr": 1e-2,
    "lr_warmup_iters": 10,
    "precision": "fp32",
    "eod_mask_loss": False,
    "dp": 4,
}


class Windows:
    """A dataset of random windows of Python's licence text, as bytes."""

    seq_length, vocab_size = SETTINGS["seq_length"], SETTINGS["vocab_size"]

    def sample(self, k: int) -> np.ndarray:
        first = np.random.Generator(np.random.Philox(key=k)).integers(len(TEXT) - self.seq_length - 1)
        return TEXT[first : first + self.seq_length + 1].astype(np.int64)


def learned(context: RankContext, settings: dict[str, Any]) -> tuple[float, float]:
    runner = Runner(build(context, tiny_config(4, **SETTINGS, **settings)))
    runner.loader = make_loader(runner.replica, Windows(), eod_token=None)
    first = runner.step().loss
    for _ in range(STEPS - 1):
        runner.step()
    with consensus(runner.replica):
        losses = []
        for _ in range(4):
            losses.append(runner.evaluate())
            runner.progress = Progress(STEPS, runner.progress.samples + 16)
    runner.replica.strategy.close()
    return first, sum(losses) / 4


EIGHT = {"dp_strategy": "gossip", "gossip_algorithm": "choco-sgd"}
LATE = {"dp_strategy": "local-sgd", "sync_interval": 4, "sync_delay": 3, "sync_warmup_steps": 10}
RELAXED: dict[str, dict[str, Any]] = {
    "gossip": {"dp_strategy": "gossip"},
    "gossip in 8 bits": EIGHT,
    "asynchronous averages": LATE,
}


@functools.cache
def last_loss(name: str) -> float:
    first, last = run_ranks(4, learned, RELAXED.get(name, {}))[0]
    print(f"{name}: {last:.3f}")
    assert last < 0.6 * first
    return last


@pytest.mark.parametrize("name", RELAXED)
def test_loss_on_text_is_close_to_all_reduce(name: str) -> None:
    assert last_loss(name) == pytest.approx(last_loss("all-reduce"), rel=0.06)


def test_loss_with_8_bits_is_close_to_full_precision() -> None:
    assert last_loss("gossip in 8 bits") == pytest.approx(last_loss("gossip"), rel=0.005)

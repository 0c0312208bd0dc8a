"""Resuming needs no more memory than a new start, and each rank reads only what it needs."""

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.config.run import RunConfig
from megalite.parity.pool import RankPool
from megalite.training.resume import load
from tests.support.ranks import RankContext, forked_pools, run_ranks
from tests.support.state import continued, save_run, silent
from tests.support.tiny import Z1, Runner, build, tiny_config, words

Settings = dict[str, Any]

CLEAR = Path("/proc/self/clear_refs")

LARGE: Settings = words(
    "num_layers=3 hidden_size=512 num_attention_heads=8 vocab_size=6144 seq_length=16 global_batch_size=2 "
    "ddp_bucket_size=4000000"
)
"""12.6 million parameters, a quarter of them in one tensor; activations of a megabyte."""


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def growth(work: Callable[[], Runner]) -> int:
    gc.collect()
    CLEAR.write_text("5")
    before = resident("VmRSS")
    held = work()
    grown = resident("VmHWM") - before
    del held
    return grown


def fresh(context: RankContext, config: RunConfig) -> Runner:
    runner = Runner(build(context, config))
    runner.step()
    return runner


def resumed(context: RankContext, config: RunConfig, folder: Path) -> Runner:
    runner = continued(context, config, folder)
    runner.step()
    return runner


def peaks(context: RankContext, world: int, settings: Settings, folder: str) -> tuple[int, int]:
    """Return the growth of memory until the end of the first step: after a new start, and after a load."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: free memory at once
    config = tiny_config(world, **{**LARGE, **settings})
    # Exclude imports and other work at first use.
    first = fresh(context, config)
    save_run(first, folder)
    del first
    return growth(lambda: fresh(context, config)), growth(lambda: resumed(context, config, Path(folder)))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with forked_pools(), RankPool(2, strict=True) as ranks:
        yield ranks


CASES = [
    pytest.param(2, {"precision": "fp32", **Z1}, id="dp2-zero-fp32"),
    pytest.param(2, {"precision": "bf16", "tp": 2}, id="tp2-bf16"),
]


@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="the peak of resident memory cannot be reset here")
@pytest.mark.parametrize(("world", "settings"), CASES)
def test_resume_needs_no_more_memory_than_start(world: int, settings: Settings, pool: RankPool, tmp_path: Path) -> None:
    for first, again in pool.run(world, peaks, world, settings, str(tmp_path)):
        assert first > 100_000_000, "the model must be large enough to measure"
        assert again <= 1.05 * first


WIDE: Settings = words(
    "num_layers=2 hidden_size=256 ffn_hidden_size=2048 vocab_size=512 ddp_bucket_size=300000 precision=fp32"
)
"""Rows of a row-parallel MLP weight over tp 2 are a page long; those of attention, 2 % of the model, are shorter."""

QUARTERS: Settings = {"tp": 2, "pp": 2, "sequence_parallel": True}


def write(context: RankContext, world: int, settings: Settings, folder: str) -> None:
    runner = Runner(build(context, tiny_config(world, **WIDE, **settings)))
    runner.step()
    save_run(runner, folder)


def bytes_read(context: RankContext, world: int, settings: Settings, folder: str) -> tuple[int, int]:
    """Return (bytes of tensors that a load reads on this rank, bytes of this rank's tensors)."""
    replica = build(context, tiny_config(world, **WIDE, **settings))
    read, count = os.preadv, []

    def counted(*arguments: Any) -> int:
        count.append(read(*arguments))
        return count[-1]

    unverified = mock.patch("megalite.checkpoint.load.entry_fault", return_value=None)  # hashing reads files too
    with mock.patch.object(os, "preadv", counted), unverified:
        load(replica, Path(folder), tokenizer=None, log=silent)
    held = 0
    for shard in replica.strategy.shards:
        weights = sum(placed.parameter.numel() for placed in shard.bucket.placed)
        owned = sum(stop - start for _, start, stop in shard.bucket.within(shard.start, shard.stop))
        held += 4 * weights + 8 * owned
    return sum(count), held


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints of the wide model by one rank and by four."""
    folder = tmp_path_factory.mktemp("wide")
    for name, (world, settings) in {"one": (1, {}), "quarters": (4, QUARTERS)}.items():
        run_ranks(world, write, world, settings, str(folder / name))
    return folder


# A load reads more than it keeps: whole rows of the attention output projection, which are shorter than a page.
@pytest.mark.parametrize(("source", "more"), [("quarters", 1.0), ("one", 1.05)])
def test_four_ranks_read_each_part_of_a_checkpoint_once(source: str, more: float, written: Path) -> None:
    ranks = run_ranks(4, bytes_read, 4, QUARTERS, str(written / source))
    for read, held in ranks:
        assert held <= read <= more * held
    size = sum(path.stat().st_size for path in written.glob(f"{source}/step-*/*.safetensors"))
    # The first and the last stage both read the tied embedding, 5 % of the model; all else is read once.
    assert sum(read for read, _ in ranks) < (more + 0.05) * size


def test_distributed_optimizer_reads_only_its_shard(written: Path) -> None:
    ranks = run_ranks(2, bytes_read, 2, Z1, str(written / "quarters"))
    assert [read for read, _ in ranks] == [held for _, held in ranks]
    parameters = sum(held for _, held in ranks) // 16  # 4 bytes of weight on both ranks, 8 of states on one of the two
    size = sum(path.stat().st_size for path in written.glob("quarters/step-*/*.safetensors"))
    assert size == pytest.approx(12 * parameters, rel=0.01)

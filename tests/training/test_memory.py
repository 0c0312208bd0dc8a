"""Out of memory is one error with rank, size, the planner's memory and remedies."""

import platform
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.cli.output import report_error
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.topology.topology import Launch
from megalite.training import trainer
from megalite.training.memory import (
    OutOfMemoryError,
    explaining_out_of_memory,
    keep_freed_memory,
    oom_error,
    predicted,
    remedies,
)
from tests.e2e.forked import train_forked
from tests.support.tiny import TINY

CPU_ERROR = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096000000 bytes. Error code 12 (Cannot allocate memory)"
)
CONFIG = replace(RunConfig(), **{**TINY, "micro_batch_size": 4, "precision": "fp32", "mock_data": True})


LAUNCH = Launch(rank=0, world_size=1, local_rank=0)


def test_out_of_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutOfMemoryError) as raised, explaining_out_of_memory(CONFIG, frozenset(), LAUNCH):
        raise RuntimeError(CPU_ERROR)
    said = str(raised.value)
    assert said.startswith("rank 0 (host ")
    assert ") ran out of host memory when it asked for 4096000000 bytes; the planner counts " in said
    assert "--micro-batch-size 2" in said and said.endswith("megalite plan finds layouts that fit")
    assert report_error(raised.value, "x") == 2 and capsys.readouterr().err == f"error: {said}\n"


def test_other_errors_are_unchanged() -> None:
    for error in (RuntimeError("shapes differ"), ConfigError("bad"), KeyError("x")):
        with pytest.raises(type(error)) as raised, explaining_out_of_memory(CONFIG, frozenset(), LAUNCH):
            raise error
        assert raised.value is error


def test_out_of_gpu_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The error contains CUDA's message, and the history is written to the run folder."""
    properties = type("Properties", (), {"total_memory": 80 << 30})()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 79 << 30)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    config = replace(CONFIG, record_memory_history=True, run_dir=str(tmp_path), device="auto")
    launch = Launch(rank=1, world_size=2, local_rank=1)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of")
    said = str(oom_error(error, config, frozenset(), launch))
    history = tmp_path / "out-of-memory-rank-1.pickle"
    assert "rank 1 (host " in said and " ran out of GPU memory when it asked for 2.50 GiB; " in said
    assert "; the device has 80.00 GiB, at most 79.00 GiB were allocated; the planner counts " in said
    assert said.endswith(f"wrote its allocations to {history} for pytorch.org/memory_viz") and history.exists()


def test_prediction_is_the_planner_s_for_this_rank() -> None:
    config = replace(CONFIG, pp=2)
    first, last = (predicted(config, frozenset(), Launch(rank=rank, world_size=2, local_rank=rank)) for rank in (0, 1))
    assert first is not None and last is not None
    assert first.activation_bytes > last.activation_bytes > 0  # 1F1B keeps more on the first stage
    assert predicted(replace(config, vocab_size=None), frozenset(), Launch(rank=0, world_size=2, local_rank=0)) is None


def test_remedies_exclude_settings_already_in_use() -> None:
    assert remedies(CONFIG)[:2] == ["--dp-strategy distributed-optimizer (with dp above 1)", "--micro-batch-size 2"]
    tight = replace(
        CONFIG,
        micro_batch_size=1,
        dp_strategy="distributed-optimizer",
        recompute_granularity="full",
        tp=2,
        sequence_parallel=True,
    )
    assert remedies(tight) == ["a larger --tp or --pp"]


def test_memory_history_needs_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    config = replace(CONFIG, record_memory_history=True, run_dir=str(tmp_path), device="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^record_memory_history has no effect on cpu: only CUDA's allocator keeps"):
        trainer.Trainer(config, explicit=frozenset(), log=print).fit()


def page_faults(words: list[str]) -> int:
    """Print page faults of ten large tensors, before and after `keep_freed_memory`."""
    for keep in (lambda: True, keep_freed_memory):
        assert keep()
        for _ in range(20):
            torch.ones(1 << 24)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(1 << 24)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another allocator")
def test_freed_memory_is_reused_without_page_faults() -> None:
    # Ten times 64 MiB: a few hundred faults with huge pages, otherwise 164,000.
    ended = train_forked(1, command=f"{__name__}:page_faults").require_success()
    given_back, kept = map(int, ended.out.split())
    assert given_back > 300
    assert kept < 0.1 * given_back

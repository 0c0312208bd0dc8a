"""Test the start of ranks: backends, the scheduling policy of CPU ranks, and torch's flight recorder."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.topology.topology import Launch, check_backend, start_distributed
from tests.e2e.forked import train_forked
from tests.support.ranks import RankContext, run_ranks


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "cuda")])
def test_backend_that_does_not_fit_is_refused(backend: str, device: str) -> None:
    fits = {"cpu": "gloo", "cuda": "nccl"}[device]
    with pytest.raises(ConfigError, match=f"{backend} but the run is on {device}; use {fits} or auto"):
        check_backend(backend, torch.device(device))
    for other in ("auto", fits):
        check_backend(other, torch.device(device))


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NAMES = (
    *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Remove the variables, now and after the test."""
    with mock.patch.dict(os.environ):
        for name in NAMES:
            os.environ.pop(name, None)
        yield


def found() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def launch(world_size: int = 2) -> Launch:
    return Launch(rank=0, world_size=world_size, local_rank=0)


@pytest.mark.parametrize(("backend", "device"), [("auto", CUDA), ("nccl", CUDA)])
def test_recorder_is_on_with_nccl_and_writes_to_the_run_folder(
    tmp_path: Path, backend: str, device: torch.device
) -> None:
    assert launch().recorded(backend, device, str(tmp_path)).flight_recorder
    assert found() == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight-rank-"),
    }


def test_files_of_a_run_without_a_folder() -> None:
    assert launch().recorded("auto", CUDA, None).flight_recorder
    assert set(found()) == {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}


@pytest.mark.parametrize("size", NAMES[:2])
@pytest.mark.parametrize("file", NAMES[3:])
def test_user_variables_are_kept(size: str, file: str) -> None:
    """This includes the older names of the variables."""
    mine = {size: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", file: "/x/mine"}
    os.environ.update(mine)
    assert not launch().recorded("auto", CUDA, "run").flight_recorder
    assert found() == mine


@pytest.mark.parametrize(("world_size", "backend", "device"), [(1, "auto", CUDA), (2, "auto", CPU), (2, "gloo", CPU)])
def test_nothing_is_set_without_nccl(world_size: int, backend: str, device: torch.device) -> None:
    assert launch(world_size).recorded(backend, device, "run") == launch(world_size) and found() == {}


@pytest.mark.parametrize("name", NAMES[:2])
def test_active_recorder_is_detected(name: str) -> None:
    os.environ[name] = "100"
    assert Launch.from_environment().flight_recorder
    os.environ[name] = "0"
    assert not Launch.from_environment().flight_recorder


batch = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")


def start(words: list[str]) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for size, chosen in ((1, None), (2, None), (2, os.SCHED_IDLE)):
        if os.fork() == 0:
            if chosen is not None:
                os.sched_setscheduler(0, chosen, os.sched_param(0))
            os.environ |= {"WORLD_SIZE": str(size), "RANK": "0"}
            launch = Launch(rank=0, world_size=size, local_rank=0)
            with suppress(Exception):  # no other rank joins
                start_distributed(launch, torch.device("cpu"), backend="gloo", timeout_minutes=0.001)
            print(os.sched_getscheduler(0), flush=True)
            os._exit(0)
        os.wait()
    return 0


@batch
def test_only_several_ranks_with_the_default_policy_are_batch_jobs() -> None:
    made = train_forked(1, command=f"{__name__}:start")
    assert made.out.split() == [str(policy) for policy in (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE)]


def _policies(context: RankContext) -> set[int]:
    """Return the policies of all threads of this rank, after gloo has started its threads."""
    context.topology(dp=2).world.all_reduce(torch.zeros(1))
    return {os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").iterdir()}


@batch
def test_gloo_threads_inherit_the_policy() -> None:
    for policies in run_ranks(2, _policies):
        assert policies == {os.SCHED_BATCH}

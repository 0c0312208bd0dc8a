"""Test that torch's flight recorder is enabled with NCCL, and that the user's variables are kept."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megalite.topology.topology import Launch

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

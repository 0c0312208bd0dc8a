"""In a step the host waits for the device once, for the loss and norm on which ranks decide."""

import sys
import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.optimizers.schedules import Schedules
from megalite.parity.trajectory import Runner
from megalite.topology.group import Group
from megalite.topology.host_memory import HostCopy
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology
from megalite.training.evaluation import read_batches
from megalite.training.replica import build_replica
from megalite.training.step import Stepper
from megalite.training.trace import PhaseClock
from megalite.watchdog.heartbeat import Heartbeat
from tests.support.tiny import LLAMA, tiny_config

READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__float__", "__int__", "__bool__", "__index__")
"""Operations that copy numbers of a tensor to the host."""
FAMILIES = {"gpt": {"hidden_dropout": 0.1}, "llama": {**LLAMA, "hidden_dropout": 0.1}}


def runner(device: torch.device, family: str, **changes: Any) -> Runner:
    settings = {**LLAMA, "num_experts": 4} if family == "experts" else FAMILIES[family]
    config = tiny_config(**settings, device=device.type, num_layers=2, **changes)
    run = Runner(build_replica(config, Topology.solo(device)))
    # Timers are on by default, and must not wait either.
    clock = PhaseClock(device)
    run.stepper = Stepper(run.replica, Schedules(config), tracer=clock, phase=clock.phase)
    return run


@pytest.mark.parametrize("whole", [True, False], ids=["world", "part"])
def test_ranks_agree_on_a_batch_without_the_device(whole: bool) -> None:
    """Otherwise reading a batch would wait until the device has finished the previous step."""
    asked: list[tuple[str, str]] = []

    class Agreement(Group):
        def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum") -> None:
            asked.append((self.name, tensor.device.type))
            if tensor.is_meta:
                raise Reached

    def group(name: str, size: int, device: str = "meta") -> Group:
        return Agreement(name, ranks=tuple(range(size)), rank=0, process_group=None, device=torch.device(device))

    scope = group("scope", 4 if whole else 2)
    topology = replace(Topology.solo(torch.device("meta")), world=group("world", 4), host=group("host", 4, "cpu"))
    with nullcontext() if whole else pytest.raises(Reached):
        assert read_batches(None, 0, 4, topology=topology, scope=scope) == ([], 0.0)
    assert asked == [("host", "cpu") if whole else ("scope", "meta")]


class Reached(Exception):
    """Raised by an all-reduce of a device tensor."""


@pytest.mark.parametrize("family", FAMILIES)
def test_step_reads_numbers_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """megalite's reads, on any device. Masks are counted on the host."""
    run = runner(torch.device("cpu"), family, global_batch_size=3)
    run.step()
    seen: Counter[tuple[str, str]] = Counter()

    def counted(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            place = Path(sys._getframe(1).f_code.co_filename)
            if "megalite" in place.parts and "site-packages" not in place.parts:
                seen[name, place.name] += 1
            return read(tensor, *args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    run.step()
    del seen["__float__", "step.py"], seen["numpy", "layer_ops.py"]  # tensors that are always on the host
    assert {**seen} == {("tolist", "step.py"): 1}


class Noted(Heartbeat):
    """Counts the waits that the watch process can see."""

    waits = 0

    def synchronise(self) -> AbstractContextManager[None]:
        self.waits += 1
        return nullcontext()


def test_watch_sees_the_read_of_a_step() -> None:
    """The host waits once, for loss and norm."""
    config = tiny_config(**LLAMA, device="cpu", num_layers=2, global_batch_size=3)
    heartbeat = Noted()
    topology = Topology.create(ParallelLayout(), rank=0, device=torch.device("cpu"), heartbeat=heartbeat)
    run = Runner(build_replica(config, topology))
    run.step()
    heartbeat.waits = 0
    run.step()
    assert heartbeat.waits == 1


class PendingEvent:
    """A CUDA event that completes when a thread waits for it."""

    happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def test_watch_sees_a_wait_for_a_copy() -> None:
    heartbeat = Noted()
    copy = HostCopy(torch.ones(1), heartbeat)
    assert copy.read().item() == 1.0 and heartbeat.waits == 0
    copy.done = PendingEvent()  # type: ignore[assignment]
    for _ in range(2):
        assert copy.read().item() == 1.0 and heartbeat.waits == 1


def test_watch_sees_the_device_reads_of_a_group() -> None:
    heartbeat = Noted()
    group = Group("world", (0,), 0, heartbeat=heartbeat)
    assert group._read(torch.ones(1)).item() == 1.0 and heartbeat.waits == 0
    with pytest.raises(NotImplementedError):  # meta tensors have no contents
        group._read(torch.ones(1, device="meta"))
    assert heartbeat.waits == 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, "experts"])
def test_step_on_cuda_waits_once(family: str) -> None:
    """All waits that CUDA's check reports, also inside torch."""
    run = runner(torch.device("cuda", 0), family, precision="bf16")
    for _ in range(2):
        run.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in said if "synchronizing CUDA operation" in str(one.message)]
    assert len(waits) == 1, [f"{one.filename}:{one.lineno}" for one in waits]

"""Test offloaded parts: copies wait for the right events, even if they run as late as possible."""

from collections.abc import Callable, Iterable

import pytest
import torch

from megalite.topology import host_memory
from megalite.topology.host_memory import HostMemory


class Late:
    """An event that happens only when it is waited for."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do

    def synchronize(self) -> None:
        if self._do is not None:
            do, self._do = self._do, None
            do()


class LateStream:
    """Runs copies in order, each only when its event is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._queue: list[Late] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, after: Iterable[Late | None]) -> Late:
        pairs, after, before = list(pairs), list(after), self._queue[-1:]

        def do() -> None:
            for event in (*before, *after):
                self.await_on_device(event)
            for target, source in pairs:
                target.copy_(source)

        self._queue.append(Late(do))
        return self._queue[-1]

    def now(self) -> None:
        """Return no event, as computation is synchronous here."""

    def await_on_device(self, event: Late | None) -> None:
        if event is not None:
            event.synchronize()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("slots", [2, 3])
def test_every_part_is_copied_in_and_out(late: bool, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        monkeypatch.setattr(host_memory, "CopyStream", LateStream)
    memory = HostMemory(torch.device("cpu"), slots=slots)
    memory.reserve(64 * 4 + 64 * 2)
    first = torch.arange(300, dtype=torch.float32)
    second = torch.arange(300, dtype=torch.int16)
    wanted = [first * 4 + 3, second * 4 + 3]
    parts = [[first[at : at + 60], second[at : at + 60]] for at in range(0, 300, 60)]
    parts.insert(2, [])
    for _ in range(2):  # the second round reads the results of the first
        for here, there in zip(memory.stream(parts), parts, strict=True):
            assert [one.shape for one in here] == [one.shape for one in there]
            for values in here:
                values.mul_(2).add_(1)
    memory.wait()
    assert torch.equal(first, wanted[0]) and torch.equal(second, wanted[1])


def test_read_only_parts_are_not_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CopyStream", LateStream)
    memory = HostMemory(torch.device("cpu"), slots=3)
    memory.reserve(64 * 4)
    values = torch.arange(320.0)
    found = []
    for (here,) in memory.stream([[part] for part in values.split(64)], back=False):
        found.append(here.clone())
        here.zero_()
    assert torch.equal(torch.cat(found), values) and torch.equal(values, torch.arange(320.0))

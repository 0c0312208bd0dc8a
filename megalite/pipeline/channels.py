"""Messages between neighbouring stages: one process group per directed edge, matched by order alone."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from megalite.topology.group import Group, Work


class _Pending(NamedTuple):
    work: Work
    tensor: torch.Tensor
    sent: Callable[[], None] | None


class Channels:
    """Sends and receives of one pipeline rank.

    Args:
        edges: (sender, receiver) in pipeline ranks -> the pair's group, sender first.
        rank: this pipeline rank.
        send_window: sends that may be pending on one edge before the oldest is waited for.
    """

    def __init__(self, edges: dict[tuple[int, int], Group], *, rank: int, send_window: int) -> None:
        self._edges = edges
        self._rank = rank
        self._window = send_window
        self._pending: dict[int, deque[_Pending]] = {}

    def send(self, tensor: torch.Tensor, *, to: int, sent: Callable[[], None] | None = None) -> None:
        """Start a send to pipeline rank `to`; `sent` runs once it is complete. The tensor is kept until then."""
        pending = self._pending.setdefault(to, deque())
        while len(pending) >= self._window:
            self._finish(pending)
        work = self._edges[self._rank, to].send_async(tensor, to=1)
        pending.append(_Pending(work, tensor, sent))

    def receive(self, tensor: torch.Tensor, *, source: int) -> Work:
        """Post a receive into `tensor`; wait on the result before reading it."""
        return self._edges[source, self._rank].receive_async(tensor, source=0)

    def drain(self) -> None:
        """Wait for every send."""
        for pending in self._pending.values():
            while pending:
                self._finish(pending)

    @staticmethod
    def _finish(pending: deque[_Pending]) -> None:
        oldest = pending.popleft()
        oldest.work.wait()
        if oldest.sent is not None:
            oldest.sent()

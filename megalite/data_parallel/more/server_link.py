"""Define the rules of stale-synchronous parallelism (which worker may continue, how stale a gradient is), and the messages
between a worker and its server. The rules use no tensors, threads or ranks, so a simulation can use them too."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from megalite.topology.group import Group, Work, WorkList


class Kind(IntEnum):
    """The kind of a worker's request."""

    PULL = 1  # send the newest weights, as soon as the worker may start its next step
    PUSH = 2  # apply this gradient
    MEET = 3  # send the newest weights, the same to all workers, once all have requested it
    LEAVE = 4  # end, once all workers have requested it


JOINT = (Kind.MEET, Kind.LEAVE)  # requested by all workers and answered together


class Event(NamedTuple):
    """An action of the server: an entry in the order that all servers of a model follow."""

    kind: Kind
    worker: int  # its index; 0 for joint events


@dataclass
class Ledger:
    """Tracks the progress of each worker.

    The clock of a worker counts its applied pushes; the version of the weights counts all of them. Bounded staleness
    (SSP, Ho et al., NeurIPS 2013): a worker may start a step while clock <= min over workers of clock + max_staleness.
    The staleness of a push is the number of other workers' pushes that were applied since its worker pulled. With equally
    fast workers it is workers-1; it is never above (workers-1)·(2·max_staleness + 1).
    """

    workers: int
    max_staleness: int

    def __post_init__(self) -> None:
        self.clocks = [0] * self.workers
        self.pulled_versions = [0] * self.workers

    @property
    def version(self) -> int:
        return sum(self.clocks)

    def may_pull(self, worker: int) -> bool:
        return self.clocks[worker] <= min(self.clocks) + self.max_staleness

    def pulled(self, worker: int) -> None:
        self.pulled_versions[worker] = self.version

    def staleness(self, worker: int) -> int:
        return self.version - self.pulled_versions[worker]

    def pushed(self, worker: int) -> None:
        self.clocks[worker] += 1


def divisor(staleness: int, *, workers: int, aware: bool) -> int:
    """Return the number by which the learning rate of a step is divided for one push.

    One push is one of `workers` parts of a step. Staleness-aware (Zhang et al., arXiv 1511.05950): 1 + staleness, the age
    of the weights in updates, if that is more than `workers`.
    """
    return max(workers, 1 + staleness) if aware else workers


Order = Callable[[Sequence[Event], Ledger], Event | None]
"""Chooses the next event from those that could be served now, in order of arrival (at least one). None: wait for more."""


def by_arrival(waiting: Sequence[Event], ledger: Ledger) -> Event | None:
    return waiting[0]


def by_rank(waiting: Sequence[Event], ledger: Ledger) -> Event | None:
    """Choose other events before pushes, and pushes of one clock in the order of ranks once all have arrived.

    With max_staleness 0, workers wait for each other anyway; all then pull the same version for each step, and the run is
    deterministic.
    """
    pushes = [event for event in waiting if event.kind is Kind.PUSH]
    if len(pushes) < len(waiting):
        return next(event for event in waiting if event.kind is not Kind.PUSH)
    least = min(ledger.clocks)
    if max(ledger.clocks) == least and len(pushes) < ledger.workers:
        return None
    return next((event for event in pushes if event.worker == ledger.clocks.index(least)), None)


@dataclass
class Report:
    """Statistics since the last report."""

    staleness: Counter[int] = field(default_factory=Counter)  # staleness -> number of pushes
    waited: Counter[int] = field(default_factory=Counter)
    """Worker -> nanoseconds that its pulls waited."""

    def line(self) -> str:
        pushes = self.staleness.total()
        mean = sum(self.staleness.elements()) / pushes
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(self.staleness.items()))
        waits = ", ".join(f"{worker}: {1e-9 * each:.1f} s" for worker, each in sorted(self.waited.items()))
        return (
            f"async-parameter-server: {pushes} updates, staleness {mean:.2f} on average ({ages}); "
            f"workers waited for weights {waits}"
        )


SERVER, WORKER = 0, 1
"""Indices in the group of two."""

CLOSED = "Connection closed by peer"
"""Text of a broken connection's error, by which handlers recognize it."""

_REFUSED, _UNCHANGED, _NEWER = -1, 0, 1
"""Answers: the server cannot continue; the worker has the newest weights; newer weights follow."""


class Request(NamedTuple):
    """A worker's request, without the gradient."""

    kind: Kind
    step: int = 0
    lr: float = 0.0
    weight_decay: float = 0.0


class Link:
    """One end of a connection between a worker and its server, in a group of two; messages are in host memory."""

    def __init__(self, group: Group, *, chunk_bytes: int, wire_dtype: torch.dtype | None = None) -> None:
        self._group, self._chunk_bytes, self._wire_dtype = group, chunk_bytes, wire_dtype
        self._peer = WORKER if group.rank == SERVER else SERVER
        self._works: list[Work] = []
        self._sent: list[torch.Tensor] = []

    # ---- the worker's end

    def push(self, request: Request, gradients: Sequence[torch.Tensor]) -> None:
        """Start to send a push; the gradients must not change before `ask` returns."""
        self._post(torch.tensor(request, dtype=torch.float64))
        self._send(gradients, self._wire_dtype)

    def ask(self, request: Request, weights: Sequence[torch.Tensor]) -> None:
        """Send a request and wait for its answer; `weights` are then the newest. Raises RuntimeError: the connection to
        the server, or from the server to another rank, broke."""
        self._flush()
        self._post(torch.tensor(request, dtype=torch.float64))
        self._flush()
        answer = torch.zeros(1, dtype=torch.int64)
        self._group.receive_async(answer, source=self._peer).wait()
        if answer == _REFUSED:
            raise RuntimeError(f"{CLOSED}: the parameter server has lost a rank, or failed")
        if answer == _NEWER:
            self._receive(weights)

    # ---- the server's end

    def receive(self, gradients: Sequence[torch.Tensor]) -> Request:
        """Return the next request; a push writes the gradient to `gradients`."""
        header = torch.zeros(4, dtype=torch.float64)
        self._group.receive_async(header, source=self._peer).wait()
        kind, step, lr, weight_decay = header.tolist()
        request = Request(Kind(int(kind)), int(step), lr, weight_decay)
        if request.kind is Kind.PUSH:
            self._receive(gradients)
        return request

    def answer(self, weights: Sequence[torch.Tensor]) -> None:
        """Send an answer with weights, or an empty one if the worker has them."""
        self._post(torch.tensor([_NEWER if weights else _UNCHANGED]))
        self._send(weights, None)
        self._flush()

    def refuse(self) -> None:
        self._post(torch.tensor([_REFUSED]))
        self._flush()

    # ---- both ends

    def _post(self, tensor: torch.Tensor) -> None:
        self._works.append(self._group.send_async(tensor, to=self._peer))
        self._sent.append(tensor)

    def _send(self, values: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        for whole in values:
            for part in self._chunks(whole, dtype or whole.dtype):
                self._post(part.to(device="cpu", dtype=dtype or whole.dtype))

    def _flush(self) -> None:
        """Wait until everything is sent: the sent tensors may be written again."""
        WorkList(self._works, self._sent).wait()
        self._works, self._sent = [], []

    def _receive(self, values: Sequence[torch.Tensor]) -> None:
        arriving = []
        for part in (part for whole in values for part in self._chunks(whole, whole.dtype)):
            target = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
            arriving.append((part, target, self._group.receive_async(target, source=self._peer)))
        for part, target, work in arriving:
            work.wait()
            if target is not part:
                part.copy_(target)

    def _chunks(self, whole: torch.Tensor, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        return whole.split(max(1, self._chunk_bytes // dtype.itemsize))

"""The asynchronous parameter server of one (tp, pp) coordinate: its rules, its messages, and its threads in the process of
its first worker.

The rules are those of stale-synchronous parallelism: which worker may continue, and how stale a gradient is. They use no
tensors, threads or ranks, so a simulation can use them too.

One thread per worker on another rank receives its requests; one thread serves all requests, one by one. All servers of
a model serve in the same order; otherwise copies of one tensor would drift apart and a worker could get weights of
different versions. The first coordinate's server, the leader, decides the order and broadcasts it."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from megalite.data_parallel.shards import OptimizerShard
from megalite.optimizers.base import Optimizer, Update
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
    fast workers it is workers-1; it is never above (workers-1)·(2·max_staleness + 1)."""

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
    of the weights in updates, if that is more than `workers`."""
    return max(workers, 1 + staleness) if aware else workers


Order = Callable[[Sequence[Event], Ledger], Event | None]
"""Chooses the next event from those that could be served now, in order of arrival (at least one). None: wait for more."""


def by_arrival(waiting: Sequence[Event], ledger: Ledger) -> Event | None:
    return waiting[0]


def by_rank(waiting: Sequence[Event], ledger: Ledger) -> Event | None:
    """Choose other events before pushes, and pushes of one clock in the order of ranks once all have arrived.

    With max_staleness 0, workers wait for each other anyway; all then pull the same version for each step, and the run is
    deterministic."""
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
        self._peer = 1 - group.rank
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
            raise RuntimeError(f"{CLOSED}: the parameter server has lost one of its ranks, or failed")
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


LEADER = 0  # index of the leader among the servers of a model

_FAILED = 0  # in place of a `Kind`: the leader cannot continue


@dataclass
class _Worker:
    inbox: list[torch.Tensor]
    """The pushed gradient of each shard; a worker never pushes again before its push is applied."""
    link: Link | None  # None: the worker of this process
    requests: deque[tuple[Request, int]] = field(default_factory=deque)
    """Requests with their arrival times, in nanoseconds."""
    answer: Sequence[torch.Tensor] | None = None  # the newest weights; empty if the worker has them


class Server:
    """Owns the main parameters and the optimizer. The worker of this process calls its methods.

    Additional memory: one gradient in the wire's type for each worker, in host memory, and, while weights are sent, a
    copy of them for each version in flight.

    Args:
        shards: whole buckets; their `main_param` has separate memory.
        links: links to workers 1, 2, ...
        servers: servers of all coordinates, on gloo; the group has no other use.
        order: order in which the leader serves.
        wire_dtype: type of pushed gradients."""

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        optimizer: Optimizer,
        *,
        links: Sequence[Link],
        servers: Group,
        ledger: Ledger,
        order: Order,
        staleness_aware: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._shards, self._optimizer = shards, optimizer
        self.servers, self._ledger, self._order = servers, ledger, order
        self._staleness_aware = staleness_aware
        self._device = shards[0].main_param.device
        self._workers = [
            _Worker([torch.zeros_like(s.main_param.data, dtype=wire_dtype, device=device) for s in shards], link)
            for device, link in [(self._device, None), *((torch.device("cpu"), link) for link in links)]
        ]
        self._changed = threading.Condition()
        """Guards the following attributes, the ledger, and the requests and answers of workers."""
        self._failure: Exception | None = None
        self._paused = False
        self._report = Report()
        self._sent = 0
        self._snapshot: list[torch.Tensor] | None = None
        """The newest weights in the model's type, for sending."""
        # Daemon threads: after an error they may wait for a lost rank.
        self._threads = [threading.Thread(target=self._serve, name="megalite-server", daemon=True)]
        self._threads += [
            threading.Thread(target=self._listen, args=(index, link), name=f"megalite-worker-{index}", daemon=True)
            for index, link in enumerate(links, start=1)
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the worker of this process

    def push(self, request: Request, gradients: Sequence[torch.Tensor]) -> None:
        """Copy the gradients, which may change afterwards."""
        for target, gradient in zip(self._workers[0].inbox, gradients, strict=True):
            target.copy_(gradient)
        with self._changed:
            self._raise_failure()
            self._enter(0, request)

    def ask(self, request: Request, weights: Sequence[torch.Tensor]) -> None:
        """Wait until the request is served; the model's parameters, `weights`, are then up to date. Raises RuntimeError:
        the connection to a worker or to another server broke, or the server failed."""
        with self._changed:
            self._enter(0, request)
            self._answer_of(0)
            self._raise_failure()

    def resume(self) -> None:
        """Serve again after a meeting. During a meeting the main parameters and the optimizer do not change."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def take_report(self) -> Report:
        with self._changed:
            report, self._report = self._report, Report()
        return report

    def take_sent(self) -> int:
        """Return the bytes of weights that have been sent since the last call."""
        with self._changed:
            sent, self._sent = self._sent, 0
        return sent

    # ---- threads

    def _listen(self, index: int, link: Link) -> None:
        try:
            kind = None
            while kind is not Kind.LEAVE:
                request = link.receive(self._workers[index].inbox)
                kind = request.kind
                with self._changed:
                    self._enter(index, request)
                    answer = None if kind is Kind.PUSH else self._answer_of(index)
                if answer is not None:
                    link.answer(answer)
                elif kind is not Kind.PUSH:
                    return link.refuse()
        except Exception as error:
            self._fail(error)

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            with torch.no_grad():
                kind = None
                while kind is not Kind.LEAVE:
                    event = self._decide() if self.servers.rank == LEADER else self._follow()
                    kind = event.kind
                    if kind is Kind.PUSH:
                        self._apply(event.worker)
                    else:
                        self._answer(event)
        except Exception as error:
            self._fail(error)
            if self.servers.rank == LEADER:
                # If this fails too, the other servers have noticed the failure or are gone.
                with contextlib.suppress(RuntimeError):
                    self._broadcast(_FAILED, 0)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the parameter server of this worker: {self._failure}") from self._failure

    # ---- requests; under the lock

    def _enter(self, worker: int, request: Request) -> None:
        self._workers[worker].requests.append((request, time.monotonic_ns()))
        self._changed.notify_all()

    def _answer_of(self, worker: int) -> Sequence[torch.Tensor] | None:
        state = self._workers[worker]
        self._changed.wait_for(lambda: state.answer is not None or self._failure is not None)
        answer, state.answer = state.answer, None
        return answer

    def _decide(self) -> Event:
        with self._changed:
            while (event := self._chosen()) is None:
                self._changed.wait()
        self._broadcast(*event)
        return event

    def _chosen(self) -> Event | None:
        self._raise_failure()
        if self._paused:
            return None
        first = {index: worker.requests[0] for index, worker in enumerate(self._workers) if worker.requests}
        if len(first) == len(self._workers) and all(request.kind in JOINT for request, _ in first.values()):
            kinds = {request.kind for request, _ in first.values()}
            assert len(kinds) == 1, "workers are at different points of the run"
            return Event(kinds.pop(), 0)
        waiting = [
            Event(request.kind, index)
            for index, (request, _) in sorted(first.items(), key=lambda item: item[1][1])
            if request.kind is Kind.PUSH or (request.kind is Kind.PULL and self._ledger.may_pull(index))
        ]
        return self._order(waiting, self._ledger) if waiting else None

    def _broadcast(self, kind: int, worker: int) -> None:
        self.servers.broadcast(torch.tensor([kind, worker]), source=LEADER)

    def _follow(self) -> Event:
        """Return the leader's next event, once its requests have arrived here too."""
        decided = torch.zeros(2, dtype=torch.int64)
        self.servers.broadcast(decided, source=LEADER)
        kind, worker = decided.tolist()
        if kind == _FAILED:
            raise RuntimeError(f"{CLOSED}: the first parameter server of the model has lost a rank, or failed")
        event = Event(Kind(kind), worker)
        with self._changed:
            while self._paused or not all(self._requests(index, event.kind) for index in self._workers_of(event)):
                self._raise_failure()
                self._changed.wait()
        return event

    def _requests(self, worker: int, kind: Kind) -> bool:
        requests = self._workers[worker].requests
        return bool(requests) and requests[0][0].kind is kind

    def _workers_of(self, event: Event) -> Sequence[int]:
        return range(len(self._workers)) if event.kind in JOINT else (event.worker,)

    # ---- serving; only this thread uses the main parameters

    def _apply(self, worker: int) -> None:
        state, workers = self._workers[worker], len(self._workers)
        request, _ = state.requests[0]
        for shard, gradient in zip(self._shards, state.inbox, strict=True):
            shard.main_param.grad = gradient.to(device=self._device, dtype=shard.main_param.dtype)
        staleness = self._ledger.staleness(worker)
        lr = request.lr / divisor(staleness, workers=workers, aware=self._staleness_aware)
        self._optimizer.step(Update(step=request.step, lr=lr, weight_decay=request.weight_decay))
        self._snapshot = None
        with self._changed:
            state.requests.popleft()
            self._ledger.pushed(worker)
            self._report.staleness[staleness] += 1
            self._changed.notify_all()

    def _answer(self, event: Event) -> None:
        """Give each worker of the event the newest weights, unless it has them."""
        ledger = self._ledger
        weights = {
            index: self._weights(self._workers[index])
            for index in self._workers_of(event)
            if event.kind is not Kind.LEAVE and ledger.pulled_versions[index] < ledger.version
        }
        with self._changed:
            for index in self._workers_of(event):
                worker = self._workers[index]
                _, arrived = worker.requests.popleft()
                worker.answer = weights.get(index, [])
                ledger.pulled(index)
                if event.kind is Kind.PULL:
                    self._report.waited[index] += time.monotonic_ns() - arrived
                if worker.link is not None:
                    self._sent += sum(part.nbytes for part in worker.answer)
            self._paused = event.kind is Kind.MEET
            self._changed.notify_all()

    def _weights(self, worker: _Worker) -> list[torch.Tensor]:
        if worker.link is None:
            # The worker's thread waits for this answer, so nothing reads the parameters meanwhile.
            for shard in self._shards:
                shard.bucket.data.copy_(shard.main_param.data)
            return [shard.bucket.data for shard in self._shards]
        if self._snapshot is None:
            self._snapshot = [
                shard.main_param.data.to(device="cpu", dtype=shard.bucket.data.dtype, copy=True)
                for shard in self._shards
            ]
        return self._snapshot

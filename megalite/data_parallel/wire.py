"""Collectives of data parallelism with the number format of the wire, and a count of the bytes that they send."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from megalite.topology.group import DONE, Group, Work, add_in_order

T = TypeVar("T")
Job = tuple[Callable[[], None], "Future[None]"]


class Background:
    """One thread that runs what it is given, in that order; on CUDA a stream, so that sums run under the computation.

    All ranks ask for the same things in the same order; nothing else may use the group meanwhile. After something has
    failed nothing further is run, as the peers wait for what did not happen: all that is asked for fails with that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[None] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], None]) -> Work:
        """Start `work`; `wait()` on what is returned raises what it raised.

        On CUDA `work` comes after all that is queued now, and what it changes may be used after `wait()`. Memory that it
        takes may outlive it, but only what runs here may free that.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                work()
            return _Queued(self._stream.record_event(), self._device)
        if self._device.type != "cpu":
            work()
            return DONE
        if self._thread is None:
            # A daemon: a run that fails must be able to end while this waits for a peer that will never come.
            self._thread = threading.Thread(target=_work_through, args=(self._jobs,), name="megalite-dp", daemon=True)
            self._thread.start()
        self._last = Future()
        self._jobs.put((work, self._last))
        return _Waiting(self._last)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if self._last is None or self._last.done():
                thread.join()


def _work_through(jobs: "SimpleQueue[Job | None]") -> None:
    failed: BaseException | None = None
    while (job := jobs.get()) is not None:
        work, future = job
        if failed is None:
            try:
                work()
            except BaseException as error:  # it is raised where the work is waited for
                failed = error
        # What was queued holds tensors; they may go now.
        del work, job
        if failed is None:
            future.set_result(None)
        else:
            future.set_exception(failed)
        del future


@dataclass
class _Waiting:
    future: "Future[None]"

    def wait(self) -> Any:
        return self.future.result()


@dataclass
class _Queued:
    done: torch.cuda.Event
    device: torch.device

    def wait(self) -> Any:
        """The current stream waits; the host does not."""
        torch.cuda.current_stream(self.device).wait_event(self.done)


class WireCounter:
    """Payload bytes that this rank has sent: what its algorithms put on the wire, without headers.

    A ring all-reduce of B bytes over n ranks counts 2·(n-1)/n·B on each, a gather or exchange (n-1)/n, a message B.
    """

    def __init__(self) -> None:
        self._sent = 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: float) -> None:
        """Count bytes that a collective in flight will send; from any thread."""
        with self._lock:
            self._sent += nbytes

    def take(self) -> float:
        with self._lock:
            sent, self._sent = self._sent, 0.0
            return sent


@dataclass
class WorkList:
    """Works that started together, and the tensors that must stay alive until all are done."""

    works: Sequence[Work]
    kept: Sequence[torch.Tensor] = ()

    def wait(self) -> Any:
        for work in self.works:
            work.wait()
        self.works, self.kept = (), ()


def pipelined(started: Iterable[T], ahead: int = 2) -> Iterator[T]:
    """The items in their order, each once `ahead` are in flight with it: while one is worked on the next comes."""
    coming: deque[T] = deque()
    for item in started:
        coming.append(item)
        if len(coming) == ahead:
            yield coming.popleft()
    yield from coming


PIECE_BYTES = 1 << 20  # that one rank sends to another at a time in a sum that has two parts


class Channel:
    """The ranks that share a bucket, seen through a wire format. `counter`: gets the bytes. `background`: runs the
    local sums of collectives that have two parts. `wire_dtype`: of values that are summed or gathered; None leaves them
    as they are. `by_rank`: sums are made in the order of ranks, on every backend."""

    def __init__(
        self,
        group: Group,
        counter: WireCounter,
        background: Background,
        *,
        wire_dtype: torch.dtype | None = None,
        by_rank: bool = False,
    ) -> None:
        self.group = group
        self.size, self.rank = group.size, group.rank
        self._counter, self._background = counter, background
        self.wire_dtype = wire_dtype
        self._by_rank = by_rank

    def sums_in_parts(self, dtype: torch.dtype) -> bool:
        """Sums are an exchange and additions here, in the background, and not a collective of the backend."""
        return self._by_rank or self.wire_dtype not in (None, dtype)

    def all_reduce_async(self, tensor: torch.Tensor) -> Work:
        """In place: the sum over ranks. Flat; its size is a multiple of the number of ranks.

        With a narrow wire, or by rank: an exchange of parts, a local sum in full precision in rank order, and a gather
        of the rounded sums: as many bytes as a ring, and every rank gets the same bits.
        """
        if self.size == 1:
            return DONE
        if self.sums_in_parts(tensor.dtype):
            return self._background.run(lambda: self._sum_and_gather(tensor))
        self._counter.add(2 * (self.size - 1) / self.size * tensor.nbytes)
        return self.group.all_reduce_async(tensor)

    def all_reduce_after(self, work: Work, tensor: torch.Tensor) -> Work:
        """`all_reduce_async` in the background once `work`, which makes what `tensor` is, is done."""
        if self.size == 1:
            return work

        def reduce() -> None:
            work.wait()
            if self.sums_in_parts(tensor.dtype):
                self._sum_and_gather(tensor)
            else:
                self._counter.add(2 * (self.size - 1) / self.size * tensor.nbytes)
                self.group.all_reduce(tensor)

        return self._background.run(reduce)

    def _sum_and_gather(self, tensor: torch.Tensor) -> None:
        """Piece by piece: the next one is exchanged while one is summed and the one before is gathered."""
        assert tensor.numel() % self.size == 0, (tensor.numel(), self.size)
        pieces = tensor.view(self.size, -1).split(PIECE_BYTES // (self.wire_dtype or tensor.dtype).itemsize, dim=1)
        for piece, whole, gathering in pipelined(self._gathers(pieces), 3):
            gathering.wait()
            piece.copy_(whole.view_as(piece))

    def _gathers(self, pieces: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor, Work]]:
        """Each piece [ranks, n], its sum in flight to the returned tensor, and when that has come."""
        exchanges = ((piece, *self.exchange_raw_async(self.rounded(piece).contiguous().view(-1))) for piece in pieces)
        for piece, received, work in pipelined(exchanges):
            work.wait()
            part = piece.new_empty(received.numel() // self.size)
            add_in_order(part, received.view(self.size, -1))
            sent = self.rounded(part)
            whole = sent.new_empty(received.numel())
            yield piece, whole, WorkList([self.gather_raw_async(whole, sent)], [sent])

    def reduce_scatter_async(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """`output` becomes this rank's part of the sum of `tensor` over ranks; it may be its place inside `tensor`."""
        if self.size == 1:
            if output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            return DONE
        if self.sums_in_parts(tensor.dtype):
            return self._background.run(
                lambda: add_in_order(output, self.exchange_raw(self.rounded(tensor)).view(self.size, -1))
            )
        self._counter.add((self.size - 1) / self.size * tensor.nbytes)
        return self.group.reduce_scatter_async(output, tensor)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Values as they are sent; the tensor itself where it has that type already."""
        return tensor if self.wire_dtype is None else tensor.to(self.wire_dtype)

    def exchange_raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Part i of `tensor` goes to rank i, as it is; returns the parts of all ranks for this one, in rank order."""
        received, work = self.exchange_raw_async(tensor)
        work.wait()
        return received

    def exchange_raw_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """`exchange_raw` in flight: neither `tensor` may be written nor what is returned read before `wait()`."""
        if self.size == 1:
            return tensor, DONE
        received = torch.empty_like(tensor)
        self._counter.add((self.size - 1) / self.size * tensor.nbytes)
        parts, sent = received.view(self.size, -1), tensor.view(self.size, -1)
        return received, WorkList([self.group.all_to_all_equal_async(parts, sent)], [sent])

    def gather_raw(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """`output` becomes the parts of all ranks, as they are, in rank order."""
        self.gather_raw_async(output, part).wait()

    def gather_raw_async(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        """`gather_raw` in flight; `part` may be this rank's place inside `output`."""
        if self.size > 1:
            self._counter.add((self.size - 1) * part.nbytes)
        return self.group.all_gather_async(output, part)

    def send_async(self, tensor: torch.Tensor, *, to: int) -> Work:
        self._counter.add(tensor.nbytes)
        return self.group.send_async(tensor, to=to)

    def receive_async(self, tensor: torch.Tensor, *, source: int) -> Work:
        """A message from the rank with index `source`, into `tensor`."""
        return self.group.receive_async(tensor, source=source)

    def in_background(self, work: Callable[[], None]) -> Work:
        """Run something that uses this channel behind the computation, in order with what else does."""
        return self._background.run(work)

"""Run the collectives of data parallelism in the wire's number format, and count the bytes that they send."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from megalite.topology.group import DONE, Group, Work, WorkList, add_in_order

T = TypeVar("T")
Job = tuple[Callable[[], None], "Future[None]"]


class Background:
    """A thread (on CUDA, a stream) that runs functions in order, so that sums overlap with the computation.

    All ranks submit the same functions in the same order; nothing else may use the group meanwhile. After a failure no
    further function runs, as the peers wait for the failed one: all later ones fail with the same error."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[None] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], None]) -> Work:
        """Start `work`; `wait()` of the result raises the error of `work`.

        On CUDA `work` runs after everything queued so far, and its results may be used after `wait()`. Memory that it
        allocates may outlive it, but only functions that run here may free it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                work()
            return _Queued(self._stream.record_event(), self._device)
        if self._device.type != "cpu":
            work()
            return DONE
        if self._thread is None:
            # A daemon thread: a run that fails must be able to end while this thread waits for a lost peer.
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
            except BaseException as error:  # `wait` raises it
                failed = error
        # The job references tensors; release them now.
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
        """Make the current stream wait; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(self.done)


class WireCounter:
    """Counts the payload bytes that this rank sends, by the algorithms of its collectives, without headers.

    A ring all-reduce of B bytes over n ranks counts 2·(n-1)/n·B on each, a gather or exchange (n-1)/n, a message B."""

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


def pipelined(started: Iterable[T], ahead: int = 2) -> Iterator[T]:
    """Yield the items in order, each once `ahead` items have started: while one is processed, the next is in flight."""
    coming: deque[T] = deque()
    for item in started:
        coming.append(item)
        if len(coming) == ahead:
            yield coming.popleft()
    yield from coming


PIECE_BYTES = 1 << 20  # bytes that one rank sends to another at a time in a sum of two stages


class Channel:
    """Collectives between the ranks with the same bucket, in a wire format. `counter`: counts the bytes. `background`:
    runs the local sums of two-stage collectives. `wire_dtype`: type of values that are summed or gathered; None: their
    own type. `by_rank`: sums add in the order of ranks, on every backend."""

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
        """Whether sums are an exchange and local additions, in the background, instead of one collective."""
        return self._by_rank or self.wire_dtype not in (None, dtype)

    def all_reduce_async(self, tensor: torch.Tensor) -> Work:
        """Sum the flat `tensor` over ranks, in place; its size is a multiple of the number of ranks.

        With a narrow wire or `by_rank`: an exchange of parts, a local sum in full precision and rank order, and a gather
        of the rounded sums. That sends as many bytes as a ring, and every rank gets the same bits."""
        if self.size == 1:
            return DONE
        if self.sums_in_parts(tensor.dtype):
            return self._background.run(lambda: self._sum_and_gather(tensor))
        self._counter.add(2 * (self.size - 1) / self.size * tensor.nbytes)
        return self.group.all_reduce_async(tensor)

    def all_reduce_after(self, work: Work, tensor: torch.Tensor) -> Work:
        """Start `all_reduce_async` in the background after `work`, which writes `tensor`."""
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
        """Sum piece by piece: one piece is summed while the next is exchanged and the previous one gathered."""
        assert tensor.numel() % self.size == 0, (tensor.numel(), self.size)
        pieces = tensor.view(self.size, -1).split(PIECE_BYTES // (self.wire_dtype or tensor.dtype).itemsize, dim=1)
        for piece, whole, gathering in pipelined(self._gathers(pieces), 3):
            gathering.wait()
            piece.copy_(whole.view_as(piece))

    def _gathers(self, pieces: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor, Work]]:
        """Yield each piece [ranks, n], the tensor that receives its sum, and the work of the gather."""
        exchanges = ((piece, *self.exchange_raw_async(self.rounded(piece).contiguous().view(-1))) for piece in pieces)
        for piece, received, work in pipelined(exchanges):
            work.wait()
            part = piece.new_empty(received.numel() // self.size)
            add_in_order(part, received.view(self.size, -1))
            sent = self.rounded(part)
            whole = sent.new_empty(received.numel())
            yield piece, whole, WorkList([self.gather_raw_async(whole, sent)], [sent])

    def reduce_scatter_async(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Write this rank's part of the sum of `tensor` over ranks to `output`, which may be that part of `tensor`."""
        if self.size > 1 and self.sums_in_parts(tensor.dtype):
            return self._background.run(
                lambda: add_in_order(output, self.exchange_raw(self.rounded(tensor)).view(self.size, -1))
            )
        self._counter.add((self.size - 1) / self.size * tensor.nbytes)
        return self.group.reduce_scatter_async(output, tensor)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values in the wire's type; the tensor itself if it has that type."""
        return tensor if self.wire_dtype is None else tensor.to(self.wire_dtype)

    def exchange_raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send part i of `tensor` to rank i, unrounded; return the parts that all ranks sent here, in rank order."""
        received, work = self.exchange_raw_async(tensor)
        work.wait()
        return received

    def exchange_raw_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Start `exchange_raw`: before `wait()`, `tensor` must not be written and the result not be read."""
        if self.size == 1:
            return tensor, DONE
        received = torch.empty_like(tensor)
        self._counter.add((self.size - 1) / self.size * tensor.nbytes)
        parts, sent = received.view(self.size, -1), tensor.view(self.size, -1)
        return received, WorkList([self.group.all_to_all_equal_async(parts, sent)], [sent])

    def gather_raw(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """Gather the parts of all ranks, unrounded and in rank order, into `output`."""
        self.gather_raw_async(output, part).wait()

    def gather_raw_async(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        """Start `gather_raw`; `part` may be this rank's part of `output`."""
        if self.size > 1:
            self._counter.add((self.size - 1) * part.nbytes)
        return self.group.all_gather_async(output, part)

    def send_async(self, tensor: torch.Tensor, *, to: int) -> Work:
        self._counter.add(tensor.nbytes)
        return self.group.send_async(tensor, to=to)

    def receive_async(self, tensor: torch.Tensor, *, source: int) -> Work:
        """Start to receive a message from the rank with index `source` into `tensor`."""
        return self.group.receive_async(tensor, source=source)

    def in_background(self, work: Callable[[], None]) -> Work:
        """Run a function that uses this channel in the background, in order with the channel's other work."""
        return self._background.run(work)

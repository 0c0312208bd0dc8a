"""Messages between an asynchronous parameter server and one worker on another rank, over a gloo group of those two.

A request is a header of four fp64 numbers (kind, step, learning rate, weight decay) and, of a push, the gradient. Each
but a push is answered: a header (version, and whether weights follow) and the weights. Flat tensors travel in chunks, so
that the next is made ready (rounded, copied to the host) while one is under way. Each end belongs to one thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.data_parallel.staleness import Kind
from megalite.topology.group import Group, Work

SERVER, WORKER = 0, 1
"""Indices in the group of two."""

CLOSED = "Connection closed by peer"
"""What errors of a broken connection say; who catches one finds out whose it was."""

_REFUSED = -1
"""In place of a version: the server cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a worker asks, without the gradient."""

    kind: Kind
    step: int = 0
    lr: float = 0.0
    weight_decay: float = 0.0


class _Link:
    """One end.

    Args:
        group: server and worker; `Group.rank` says which of them this is.
        chunk_bytes: of a message.
    """

    def __init__(self, group: Group, *, chunk_bytes: int) -> None:
        self._group, self._chunk_bytes = group, chunk_bytes
        self._peer = WORKER if group.rank == SERVER else SERVER
        self._under_way: list[tuple[Work, torch.Tensor]] = []

    def _post(self, tensor: torch.Tensor) -> None:
        self._under_way.append((self._group.send_async(tensor, to=self._peer), tensor))

    def _send(self, values: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        """Flat tensors, as `dtype`."""
        for whole in values:
            for part in self._chunks(whole, dtype or whole.dtype):
                self._post(part.to(device="cpu", dtype=dtype or whole.dtype))

    def flush(self) -> None:
        """Return when all has been sent: what was sent may be written to again."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _receive(self, values: Sequence[torch.Tensor]) -> None:
        """Into flat tensors, as what they are."""
        parts = [part for whole in values for part in self._chunks(whole, whole.dtype)]
        arriving = []
        for part in parts:
            target = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
            arriving.append((self._group.receive_async(target, source=self._peer), target))
        for part, (work, target) in zip(parts, arriving, strict=True):
            work.wait()
            if target is not part:
                part.copy_(target)

    def _chunks(self, whole: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        size = max(1, self._chunk_bytes // dtype.itemsize)
        return (whole[start : start + size] for start in range(0, whole.numel(), size))


class WorkerEnd(_Link):
    """What a worker holds.

    Args:
        wire_dtype: of gradients; None is their own.
    """

    def __init__(self, group: Group, *, chunk_bytes: int, wire_dtype: torch.dtype | None) -> None:
        super().__init__(group, chunk_bytes=chunk_bytes)
        self._wire_dtype = wire_dtype

    def push(self, request: Request, gradients: Sequence[torch.Tensor]) -> None:
        """Start to send; the gradients must not change before `ask` or `flush` returns."""
        self._ask(request)
        self._send(gradients, self._wire_dtype)

    def ask(self, request: Request, weights: Sequence[torch.Tensor]) -> None:
        """Send a request and wait for its answer; `weights` are then the newest.

        Raises:
            RuntimeError: the connection to the server broke, or the server's to another rank.
        """
        self.flush()
        self._ask(request)
        self.flush()
        answer = torch.zeros(2, dtype=torch.int64)
        self._group.receive_async(answer, source=SERVER).wait()
        version, more = answer.tolist()
        if version == _REFUSED:
            raise RuntimeError(f"{CLOSED}: the parameter server has lost a rank, or failed")
        if more:
            self._receive(weights)

    def _ask(self, request: Request) -> None:
        numbers = (request.kind, request.step, request.lr, request.weight_decay)
        self._post(torch.tensor(numbers, dtype=torch.float64))


class ServerEnd(_Link):
    """What the server holds of a worker."""

    def receive(self, gradients: Sequence[torch.Tensor]) -> Request:
        """The next request; of a push, `gradients` get the gradient."""
        header = torch.zeros(4, dtype=torch.float64)
        self._group.receive_async(header, source=WORKER).wait()
        kind, step, lr, weight_decay = header.tolist()
        request = Request(kind=Kind(int(kind)), step=int(step), lr=lr, weight_decay=weight_decay)
        if request.kind is Kind.PUSH:
            self._receive(gradients)
        return request

    def answer(self, version: int, weights: Sequence[torch.Tensor] | None) -> None:
        """With weights, or without if the worker has them."""
        self._post(torch.tensor([version, int(weights is not None)]))
        self._send(weights or (), None)
        self.flush()

    def refuse(self) -> None:
        """The server cannot go on."""
        self._post(torch.tensor([_REFUSED, 0]))
        self.flush()

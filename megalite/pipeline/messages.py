"""Messages between pipeline stages: their format, lossy compression, sends and receives."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megalite.config.parallel import message_bytes, parse_pipeline_compression
from megalite.kernels.quantization import Integers
from megalite.topology.group import Group, Work


@dataclass(kw_only=True, eq=False)
class MessageFormat:
    """Turns a tensor between two stages, an activation or its gradient, into this rank's message and back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    split_over: Group = field(default_factory=lambda: Group.solo("tp"))
    """Ranks with equal tensors: each sends a part and all-gathers those received (Narayanan et al. 2021, section 4.1)."""
    compression: str = "none"
    """A value of `pipeline_compression`."""

    def __post_init__(self) -> None:
        self._codec: MessageCodec | None = None
        self._count = math.prod(self.shape) // self.split_over.size
        if self.compression != "none":
            self._codec = make_codec(self.compression, self._count, self.dtype, self.device)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's message: its contiguous part of a tensor, compressed if configured."""
        part = tensor if self.split_over.size == 1 else tensor.view(self.split_over.size, -1)[self.split_over.rank]
        return part if self._codec is None else self._codec.encode(part.view(-1))

    def empty(self) -> torch.Tensor:
        """Return a message to receive into."""
        if self._codec is None:
            return torch.empty(self._count, dtype=self.dtype, device=self.device)
        return torch.empty(self._codec.nbytes, dtype=torch.uint8, device=self.device)

    def unpack(self, message: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor. Collectives: an all-gather over `split_over`."""
        part = message if self._codec is None else self._codec.decode(message)
        if self.split_over.size == 1:
            return part.view(self.shape)
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.split_over.all_gather(tensor.view(-1), part)
        return tensor


class _Pending(NamedTuple):
    work: Work
    tensor: torch.Tensor
    sent: Callable[[], None] | None


class P2PCommunicator:
    """Sends and receives of one pipeline rank.

    Args:
        edges: (sender, receiver) as pipeline ranks -> the pair's group, sender first.
        send_window: Sends that may be pending on one edge; the next send waits for the oldest."""

    def __init__(self, edges: dict[tuple[int, int], Group], *, rank: int, send_window: int) -> None:
        self._edges = edges
        self._rank = rank
        self._window = send_window
        self._pending: dict[int, deque[_Pending]] = {}

    def send(self, tensor: torch.Tensor, *, to: int, sent: Callable[[], None] | None = None) -> None:
        """Start a send to pipeline rank `to`, keep the tensor until it is complete, then call `sent`."""
        pending = self._pending.setdefault(to, deque())
        while len(pending) >= self._window:
            self._finish(pending)
        work = self._edges[self._rank, to].send_async(tensor, to=1)
        pending.append(_Pending(work, tensor, sent))

    def receive(self, tensor: torch.Tensor, *, source: int) -> Work:
        """Post a receive into `tensor`; wait on the result before reading it."""
        return self._edges[source, self._rank].receive_async(tensor, source=0)

    def drain(self) -> None:
        for pending in self._pending.values():
            while pending:
                self._finish(pending)

    @staticmethod
    def _finish(pending: deque[_Pending]) -> None:
        oldest = pending.popleft()
        oldest.work.wait()
        if oldest.sent is not None:
            oldest.sent()


class MessageCodec(ABC):
    """Converts tensors of `count` elements to uint8 [nbytes] and back. NaN and infinity never become finite numbers.

    The receiver computes with the decompressed activation, and the sender's backward gets the compressed gradient. Errors
    are not corrected later: there is no error feedback, because the next message belongs to other samples. Source: dynamic
    communication thresholding for model parallelism, arXiv 2010.08899. Unlike there, the largest elements are chosen per
    message, so the size is fixed and there is no state. A message depends on the tensor alone: tensor-parallel ranks with
    equal tensors send equal bits."""

    def __init__(self, compression: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.dtype, self.device = count, dtype, device
        self.nbytes = message_bytes(compression, count, dtype.itemsize)
        self.share = parse_pipeline_compression(compression)[1]

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the message for `values` [count], without changing them."""

    @abstractmethod
    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """Return the values [count] of a message, in the codec's dtype."""


class _Rounded(MessageCodec):
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        return message.view(torch.bfloat16).to(self.dtype)


class _Integers(MessageCodec):
    """Scales are at least fp32: a 16-bit scale could be too small for the largest element of its block."""

    def __init__(self, compression: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(compression, count, dtype, device)
        self._integers = Integers(count, torch.promote_types(dtype, torch.float32), device)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._integers.encode(values.to(self._integers.dtype, copy=True), message)
        return message

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        values = torch.empty(self.count, dtype=self._integers.dtype, device=self.device)
        self._integers.decode(message, values)
        return values.to(self.dtype)


class _Largest(MessageCodec):
    """Sends indices and values of the elements with the largest magnitude; the others arrive as 0."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        assert values.numel() < 1 << 31, "indices are 32-bit integers"
        indices = torch.topk(values.abs(), math.ceil(self.share * self.count), sorted=False).indices
        return torch.cat([indices.to(torch.int32).view(torch.uint8), values[indices].view(torch.uint8)])

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        split = self.nbytes // (4 + self.dtype.itemsize) * 4
        # The copy aligns the values: their offset need not be a multiple of the element size.
        indices, values = message[:split].view(torch.int32), message[split:].clone().view(self.dtype)
        result = torch.zeros(self.count, dtype=self.dtype, device=self.device)
        return result.index_copy_(0, indices.long(), values)


_CODECS: dict[str, type[MessageCodec]] = {"bf16": _Rounded, "uint8": _Integers, "topk": _Largest}


def make_codec(compression: str, count: int, dtype: torch.dtype, device: torch.device) -> MessageCodec:
    """Build the codec of a `pipeline_compression` value other than "none". Raise ConfigError if it is unknown."""
    return _CODECS[parse_pipeline_compression(compression)[0]](compression, count, dtype, device)

"""What travels between stages in fewer bytes, by `pipeline_compression`.

The receiver computes with what has arrived, and the sender's backward gets the compressed gradient of that: of
activations and of gradients something is lost, and nothing makes up for it later (no error feedback: the next message is
of other samples). Source: dynamic communication thresholding for model parallelism, arXiv 2010.08899. A message's largest
elements are chosen by a threshold for this message alone, so it always adapts, its size is fixed, and there is no state. A
message is a function of the tensor alone: tensor-parallel ranks that send the same send the same bits.
"""

import math
from abc import ABC, abstractmethod

import torch

from megalite.config.parallel import message_bytes, parse_pipeline_compression
from megalite.kernels.integers import Integers


class MessageCodec(ABC):
    """Turns tensors of `count` elements into uint8 [nbytes] and back. NaN and infinities stay what no finite number is."""

    def __init__(self, compression: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.dtype, self.device = count, dtype, device
        self.nbytes = message_bytes(compression, count, dtype.itemsize)
        self.share = parse_pipeline_compression(compression)[1]

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The message for `values` [count], which stay as they are."""

    @abstractmethod
    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """[count], of the codec's type."""


class _Rounded(MessageCodec):
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        return message.view(torch.bfloat16).to(self.dtype)


class _Integers(MessageCodec):
    """Scales are fp32 at least: one in 16 bits could be too small for the largest of its block."""

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
    """Places and values of the elements that are largest in magnitude; the others arrive as 0."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        assert values.numel() < 1 << 31, "places are 32-bit integers"
        places = torch.topk(values.abs(), math.ceil(self.share * self.count), sorted=False).indices
        return torch.cat([places.to(torch.int32).view(torch.uint8), values[places].view(torch.uint8)])

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        split = self.nbytes // (4 + self.dtype.itemsize) * 4
        # Values are copied, as they need not start where their type may.
        places, values = message[:split].view(torch.int32), message[split:].clone().view(self.dtype)
        whole = torch.zeros(self.count, dtype=self.dtype, device=self.device)
        return whole.index_copy_(0, places.long(), values)


_CODECS: dict[str, type[MessageCodec]] = {"bf16": _Rounded, "uint8": _Integers, "topk": _Largest}


def make_codec(compression: str, count: int, dtype: torch.dtype, device: torch.device) -> MessageCodec:
    """Of tensors of `count` elements; `compression` as `pipeline_compression` says it, but not none. Raises
    ConfigError: the text is no compression."""
    return _CODECS[parse_pipeline_compression(compression)[0]](compression, count, dtype, device)

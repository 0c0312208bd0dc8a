"""Lossy compression of the activations and gradients that pipeline stages exchange (`pipeline_compression`).

The receiver computes with the decompressed activation, and the sender's backward gets the compressed gradient. Errors
are not corrected later: there is no error feedback, because the next message belongs to other samples. Source: dynamic
communication thresholding for model parallelism, arXiv 2010.08899. Unlike there, the largest elements are chosen per
message, so the size is fixed and there is no state. A message depends on the tensor alone: tensor-parallel ranks with
equal tensors send equal bits.
"""

import math
from abc import ABC, abstractmethod

import torch

from megalite.config.parallel import message_bytes, parse_pipeline_compression
from megalite.kernels.quantization import Integers


class MessageCodec(ABC):
    """Converts tensors of `count` elements to uint8 [nbytes] and back. NaN and infinity never become finite numbers."""

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

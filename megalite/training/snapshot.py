"""A copy of tensors in host memory, for a writer that works while the originals change."""

from collections.abc import Sequence

import torch


class HostMemory:
    """Takes copies into memory that it keeps for the next ones: a page's first touch costs as much as the copy."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the memory for copies of these.

        Raises:
            RuntimeError: there is not so much.
        """
        if [_kind(buffer) for buffer in self._buffers] != [_kind(tensor) for tensor in tensors]:
            self._buffers = []
            self._buffers = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors
            ]

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of now, contiguous and on the CPU; overwritten by the next call."""
        self.reserve(tensors)
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self._buffers


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype

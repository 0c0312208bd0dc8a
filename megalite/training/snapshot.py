"""A copy of tensors in host memory, for a writer that works while the originals change."""

from collections.abc import Sequence

import torch


class HostMemory:
    """Takes copies into memory that it keeps for the next ones: a page's first touch costs as much as the copy."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of now, contiguous and on the CPU; overwritten by the next call."""
        if [self._shape(buffer) for buffer in self._buffers] != [self._shape(tensor) for tensor in tensors]:
            self._buffers = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors
            ]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self._buffers

    @staticmethod
    def _shape(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        return tensor.shape, tensor.dtype

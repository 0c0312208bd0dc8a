"""What every lossy mean has in common."""

from abc import ABC, abstractmethod

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.facts import STATES
from megalite.data_parallel.strategy import FlatState, TensorState, kept
from megalite.data_parallel.wire import Channel


class Codec(ABC):
    """The mean over replicas of flat tensors like one bucket, with far fewer bytes than the whole takes.

    Error feedback: what rounding has left out of this rank's values is added to the next ones, so that over many calls
    nothing is lost: Σ results + mean of the errors left = Σ means, but for rounding in fp32.

    Errors are in the unit of the values: a caller that multiplies values with a loss scale divides by it before.

    Args:
        bucket: gives the places of tensors; its data and grad are not touched.
        channel: the replicas.
    """

    name: str
    """Of the codec in `grad_compression`; its states are those of `facts.STATES` that begin with it."""
    wire_bytes: int
    """That this rank sends for one mean."""

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        self.bucket, self.channel = bucket, channel
        size = bucket.grad.numel() if channel.size > 1 else 0
        self.error = bucket.grad.new_zeros(size)
        """What this rank still owes, element by element."""
        self.server_error = bucket.grad.new_zeros(size // channel.size)
        """Where each rank serves a chunk of the bucket: what is still owed of this rank's."""

    @torch.no_grad()
    def mean(self, values: torch.Tensor) -> None:
        """In place: this rank's `values` [bucket size], of the gradient's type, become the lossy mean, the same bits on
        every replica. With one replica it changes nothing.

        It blocks; run it with `channel.in_background` to overlap it.

        Collectives: over the replicas.
        """
        if self.channel.size > 1:
            self._mean(values)

    @abstractmethod
    def _mean(self, values: torch.Tensor) -> None:
        """`mean`, with several replicas."""

    def states(self) -> list[FlatState]:
        """Errors, element by element; alone there are none."""
        if self.channel.size == 1:
            return []
        found = [kept(f"{self.name}_error", self.bucket, self.error)]
        if f"{self.name}_server_error" in STATES:
            start = self.channel.rank * self.server_error.numel()
            found.append(kept(f"{self.name}_server_error", self.bucket, self.server_error, start))
        return found

    def tensor_states(self) -> list[TensorState]:
        """What is kept of whole tensors."""
        return []

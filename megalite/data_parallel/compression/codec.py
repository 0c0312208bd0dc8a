"""What every lossy mean has in common."""

from abc import ABC, abstractmethod

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.states import FlatState, TensorState
from megalite.data_parallel.wire import Channel


class Codec(ABC):
    """The mean over replicas of flat tensors like one bucket, with far fewer bytes than the whole takes.

    Error feedback: what rounding has left out of this rank's values is added to the next ones, so that over many calls
    nothing is lost: Σ results + mean of the errors left = Σ means, but for rounding in fp32.

    Errors are in the unit of the values: whoever multiplies values with a loss scale divides by it before.

    Args:
        bucket: gives the places of tensors; its data and grad are not touched.
        channel: the replicas.
    """

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        self.bucket, self.channel = bucket, channel

    @abstractmethod
    def mean(self, values: torch.Tensor) -> None:
        """In place: this rank's fp32 `values` [bucket size] become the lossy mean, the same bits on every replica.

        It blocks; run it with `channel.in_background` to overlap it. With one replica it changes nothing.

        Collectives: over the replicas.
        """

    def states(self) -> list[FlatState]:
        """Errors, element by element."""
        return []

    def tensor_states(self) -> list[TensorState]:
        """What is remembered of whole tensors."""
        return []

"""What strategies and optimizers remember between steps, and whose it is: checkpoints ask for nothing else."""

from dataclasses import dataclass
from enum import Enum

import torch

from megalite.data_parallel.buckets import Bucket, Placed


class Placement(Enum):
    """How the ranks that hold the same bucket hold a state of it."""

    REPLICATED = "replicated"
    """All have the same values; they share out the writing."""
    SHARDED = "sharded"
    """Each has a range of its own; together they are the whole."""
    PRIVATE = "private"
    """Each has values of its own for every element; all are saved, under a leading dimension over replicas.

    Taken up by another number of replicas, each gets the mean of the old ones.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatState:
    """One state for each element of a range of a bucket."""

    name: str
    """Its key in a checkpoint is `optimizer.<name>:<tensor>`; lower case, with underscores."""
    bucket: Bucket
    start: int
    """`values` are of the elements from here on."""
    values: torch.Tensor
    """Flat and live: loading writes into it."""
    placement: Placement
    default: str = "required"
    """What a checkpoint without it means: `required` (an error), `zeros` (0 with a line in the log) or `parameter` (the
    main parameters)."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.values.numel()


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorState:
    """Something about one tensor of the model, or about this rank's slice of it.

    A checkpoint that does not have it, or for another cut of the tensor, leaves it as it is, with a line in the log.
    """

    name: str
    bucket: Bucket
    placed: Placed
    values: torch.Tensor
    """Live, of any shape."""
    per_slice: bool = False
    """It belongs to the local slice: each tp (or ep) rank has its own. Replicas have the same."""

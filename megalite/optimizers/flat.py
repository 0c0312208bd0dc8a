"""What an optimizer is given: flat parameters, which of them belongs to which tensor, and the terms of one update."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Segment:
    """The part of a flat parameter that belongs to one tensor of the model.

    A flat parameter may hold only some of the elements of this rank's slice of the tensor; `offset` says from which on.
    """

    name: str
    """Of the tensor; the same on every rank that holds a part of it."""
    start: int
    stop: int
    """Place in the flat parameter."""
    offset: int
    """First element in the flattened local slice."""
    local_shape: tuple[int, ...]
    """Of this rank's slice of the tensor."""
    global_shape: tuple[int, ...]
    shard_dim: int | None
    """Dimension that tensor parallelism splits."""
    slice: tuple[tuple[int, int], ...]
    """Per dimension [start, stop) of the local slice in the tensor."""
    counts: bool
    """In a sum over the world's ranks these elements are counted here; where others hold the same ones, on one alone."""


@dataclass(frozen=True, eq=False)
class FlatParameter:
    """One tensor for the optimizer: the main parameters of a bucket, or of the range of it that this rank updates."""

    param: torch.nn.Parameter
    """Flat; `.grad` is set before a step."""
    decay: bool
    """Weight decay applies."""
    segments: tuple[Segment, ...]
    """In the order of their places; padding is in none."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an update goes by beside the gradients."""

    step: int
    """The step under way, counted from 1."""
    lr: float
    weight_decay: float
    factor: float = 1.0
    """What gradients are yet to be multiplied with: it undoes the loss scale and clips."""
    copies: Mapping[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Where new parameters are to be put as well, rounded: for optimizers that say `writes_copies`."""

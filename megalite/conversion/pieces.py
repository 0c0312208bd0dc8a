"""How another format's tensors correspond to ours: each of theirs is a piece of exactly one of ours.

One table serves both directions, so that import and export cannot disagree.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

View = Callable[[torch.Tensor], torch.Tensor]
"""From one of our tensors, whole, to the view of it that is their tensor. A view, never a copy: importing writes
through it. Indexing, `view`, `unflatten`, `transpose` and `narrow` give views."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Theirs is ours."""
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Theirs is [in, out] where ours is [out, in]."""
    return tensor.t()


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs.

    Args:
        theirs: its name there.
        ours: the name of the tensor of ours that it is a piece of.
        view: from ours to what theirs holds, element for element, up to the shape `shape`.
        shape: of theirs. It has as many elements as the view, in the same order (their rows may be our groups times
            heads): reading does `view(ours).copy_(theirs.view(view's shape))`, writing `view(ours).reshape(shape)`.
    """

    theirs: str
    ours: str
    shape: tuple[int, ...]
    view: View = whole

    def put(self, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        """Copy their tensor into its place in ours, converting its type to ours."""
        place = self.view(ours)
        place.copy_(theirs.reshape(place.shape))

    def take(self, ours: torch.Tensor) -> torch.Tensor:
        """Their tensor, from ours."""
        return self.view(ours).reshape(self.shape)

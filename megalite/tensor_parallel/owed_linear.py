"""The weight gradient of a linear layer, computed at once or left to the tape."""

from dataclasses import dataclass

import torch

from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import DONE, Group, Work


@dataclass
class OwedLinear:
    """grad_rowsᵀ·x; x [s/tp, b, i] is gathered over the sequence first where there is a `gather` group."""

    parameter: ShardedParameter
    x: torch.Tensor
    grad_rows: torch.Tensor
    gather: Group | None
    _gathering: Work = DONE

    def start(self) -> None:
        """Start the gather."""
        if self.gather is not None:
            part = self.x.contiguous()
            self.x = part.new_empty(part.shape[0] * self.gather.size, *part.shape[1:])
            self._gathering = self.gather.all_gather_async(self.x, part)

    def compute(self) -> torch.Tensor | None:
        """See `OwedGradient`."""
        self._gathering.wait()
        x_rows, weight = self.x.flatten(0, -2), self.parameter
        if weight.main_grad is None:
            return (self.grad_rows.t() @ x_rows).view(weight.shape)
        weight.accumulate_product(weight.main_grad.flatten(0, -2), self.grad_rows, x_rows)
        weight.report()
        return None

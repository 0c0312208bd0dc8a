"""Sums over whole tensors of the model, whatever part of them a rank holds."""

from collections import Counter
from collections.abc import Sequence

import torch

from megalite.optimizers.flat import FlatParameter, Segment
from megalite.topology.group import Group


class TensorSums:
    """One number for each tensor of the whole model: each rank adds up the elements that it counts (`Segment.counts`), and
    one all-reduce makes the sums of all tensors whole, the same on every rank.

    So shards of tensor parallelism, of experts and of a distributed optimizer, and the stages of a pipeline, all come to
    the same sums but for rounding.

    Args:
        parameters: those whose tensors are summed over; other ranks may have other ones, or none.
        group: the ranks that together count every element once.

    Collectives: the names of the tensors are gathered over `group`, once.
    """

    def __init__(self, parameters: Sequence[FlatParameter], *, group: Group, device: torch.device) -> None:
        own = sorted({segment.name for flat in parameters for segment in flat.segments})
        gathered = group.gather_json(own, device)
        self.names: tuple[str, ...] = tuple(sorted({name for names in gathered for name in names}))
        """Of all tensors, in the same order on every rank."""
        self._group, self.device = group, device
        self._column = {name: column for column, name in enumerate(self.names)}

    def column(self, segment: Segment) -> int:
        """The place of the segment's tensor in a row of sums."""
        return self._column[segment.name]

    def zeros(self, rows: int) -> torch.Tensor:
        """fp64 [rows, tensors], to be filled with what this rank counts."""
        return torch.zeros(rows, len(self.names), dtype=torch.float64, device=self.device)

    def all_reduce(self, table: torch.Tensor, *, op: str = "sum") -> None:
        """In place: the sums (or maxima) over all ranks.

        Collectives: one all-reduce of the table.
        """
        self._group.all_reduce(table, op=op)


class Pieces:
    """Adds up numbers of pieces of tensors: many launches' work in three, in the same order in every run.

    Args:
        columns: for each piece the place of its tensor in a row of `sums`.
    """

    def __init__(self, columns: Sequence[int], sums: TensorSums) -> None:
        seen: Counter[int] = Counter()
        rows = []
        for column in columns:
            rows.append(seen[column])
            seen[column] += 1
        self._shape = (max(seen.values(), default=0), len(sums.names))
        place = [row * self._shape[1] + column for row, column in zip(rows, columns, strict=True)]
        self._place = torch.tensor(place, dtype=torch.int64, device=sums.device)

    def add_up(self, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """fp64 [tensors], the sums of the squares of the pieces' numbers: of their norms, say."""
        table = torch.zeros(self._shape, dtype=torch.float64, device=self._place.device)
        if numbers:
            table.view(-1)[self._place] = torch.stack(list(numbers)).double().square()
        return table.sum(dim=0)

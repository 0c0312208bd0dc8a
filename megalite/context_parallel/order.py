"""Between the order in which ranks hold a sequence and its true order."""

import torch

from megalite.topology.sequence import sequence_spans


def to_true_order(by_rank: torch.Tensor, seq_length: int) -> torch.Tensor:
    """[cp, s/cp, ...] with the rows that each rank holds -> [s, ...] in true order."""
    output = by_rank.new_empty(seq_length, *by_rank.shape[2:])
    for rank, rows in enumerate(by_rank):
        parts = _parts(output, rank, by_rank.shape[0])
        for part, piece in zip(parts, rows.split([part.shape[0] for part in parts])):
            part.copy_(piece)
    return output


def to_rank_order(sequence: torch.Tensor, cp_size: int) -> torch.Tensor:
    """[s, ...] in true order -> [cp, s/cp, ...] with the rows that each rank holds."""
    return torch.stack([torch.cat(_parts(sequence, rank, cp_size)) for rank in range(cp_size)])


def _parts(sequence: torch.Tensor, rank: int, cp_size: int) -> list[torch.Tensor]:
    spans = sequence_spans(sequence.shape[0], cp_rank=rank, cp_size=cp_size)
    return [sequence[first:stop] for first, stop in spans]

"""Sums over ranks in the order of ranks, which have the same bits in every run, on every machine and in every layout."""

import torch

_PIECE = 1 << 16
"""Elements that stay in a CPU's cache while the rows are added to them."""


def add_in_order(output: torch.Tensor, parts: torch.Tensor) -> None:
    """`output` [...], contiguous, becomes ((parts[0] + parts[1]) + parts[2]) + ... of `parts` [size, ...].

    Additions are in the precision of `output`, and in fp32 where that has 16 bits. `torch.sum` is no such sum: from some
    number of rows on it adds several chains and then these.
    """
    whole, rows = output.view(-1), parts.view(parts.shape[0], -1).unbind()
    step = _PIECE if output.device.type == "cpu" else max(1, whole.numel())
    for start in range(0, whole.numel(), step):
        piece = whole[start : start + step]
        narrow = piece.dtype in (torch.bfloat16, torch.float16)
        total = torch.empty_like(piece, dtype=torch.float32) if narrow else piece
        total.copy_(rows[0][start : start + step])
        for row in rows[1:]:
            total.add_(row[start : start + step])
        if narrow:
            piece.copy_(total)

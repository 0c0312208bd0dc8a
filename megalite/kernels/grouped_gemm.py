"""Products of groups of rows with a matrix each: the experts of a mixture.

Rows of one expert are consecutive. An expert may have none.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from megalite.kernels.matmul import matmul
from megalite.kernels.products import Matmul
from megalite.kernels.weight_grad import accumulate_weight_grad

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
"""One launch for all groups, in bf16 alone; its rows must be multiples of 16 bytes long."""


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], multiply: Matmul = matmul
) -> torch.Tensor:
    """y[rows of e] = x[rows of e] · weight[e] for x [n, i], weight [E, i, o] and Σ counts = n -> [n, o].

    `multiply` does one group's, where they are not fused.
    """
    if _fused(x, weight):
        return grouped_matmul_fused(x, weight, counts)
    y = x.new_empty(x.shape[0], weight.shape[2])
    for expert, rows in _groups(counts):
        multiply(x[rows], weight[expert], out=y[rows])
    return y


def grouped_matmul_fused(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """`grouped_matmul` by torch's fused kernel, for bf16."""
    assert _grouped_mm is not None
    ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
    return _grouped_mm(x, weight, offs=ends)


def accumulate_grouped_weight_grad(
    main_grad: torch.Tensor,
    grad_y: torch.Tensor,
    x: torch.Tensor,
    counts: Sequence[int],
    accumulate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = accumulate_weight_grad,
) -> None:
    """main_grad[e] [o, i] += grad_y[rows of e]ᵀ · x[rows of e] for grad_y [n, o], x [n, i].

    A GEMM for each expert, also on CUDA: the fused kernel has no form that adds in the main gradient's precision.
    """
    for expert, rows in _groups(counts):
        accumulate(main_grad[expert], grad_y[rows], x[rows])


def _fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    return _grouped_mm is not None and x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0] > 0


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of those that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count

"""`Pieces` by torch's symmetric memory: products that read the rows of their neighbours where these lie.

torch._symmetric_memory cuts the product into the ranks' parts and copies each from its owner's memory over NVLink, on a
second stream, without kernels of NCCL (the asynchronous tensor parallelism of torchtitan, arXiv 2410.06511).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.config.registry import imported
from megalite.kernels.matmul import Matmul, matmul
from megalite.topology.group import DONE, Group, Work

_ROWS, _WIDTH, _OFF = 64, 128, 2e-2
"""Of the products that are tried, and of ‖its - NCCL's‖/‖NCCL's‖ in bf16."""


class SymmetricMemory:
    """Collectives: a gather or a reduction by copies, over tp; the weight's product takes part in it."""

    def __init__(self, tp: Group, matmul: Matmul) -> None:
        assert tp.process_group is not None
        self._name = tp.process_group.group_name

    def gather(
        self, x: Tensor, columns: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [columns], 0, self._name, return_A=keep
        )
        return y if bias is None else y.add_(bias), whole

    def scatter(self, x: Tensor, columns: Tensor) -> tuple[Tensor, Work]:
        part = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), columns, "sum", 0, self._name)
        return part, DONE


def why_not_symmetric(tp: Group, device: torch.device) -> str | None:
    """Why tp cannot multiply by symmetric memory, or None; the same on all its ranks. Both products are tried.

    Collectives: over tp, those of the trial and two all-reduces of a number.
    """
    return f"{device.type} has no symmetric memory" if device.type != "cuda" else tried(tp, device)


def tried(tp: Group, device: torch.device) -> str | None:
    """`why_not_symmetric`, whatever the device is."""
    for trial in (lambda: _why_not_here(tp), *_trials(tp, device)):
        try:
            reason = trial()
        except Exception as error:  # of torch's private parts, whatever it is
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if (reason := _for_all(tp, reason, device)) is not None:
            return reason
    return None


def _for_all(tp: Group, reason: str | None, device: torch.device) -> str | None:
    fine = torch.full((), float(reason is None), device=device)
    tp.all_reduce(fine, op="min")
    return None if fine.item() else reason or "another rank of tp has none"


def _why_not_here(tp: Group) -> str | None:
    try:
        assert tp.process_group is not None
        imported("torch.distributed._symmetric_memory:enable_symm_mem_for_group")(tp.process_group.group_name)
        missing = [name for name in _OPERATORS if not hasattr(torch.ops.symm_mem, name)]
    except Exception as error:
        return f"torch {torch.__version__} has none ({type(error).__name__})"
    return f"torch {torch.__version__} has no {missing[0]}" if missing else None


_OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def _trials(tp: Group, device: torch.device) -> list[Callable[[], str | None]]:
    """Comparisons with products of what the group's own collectives bring."""
    generator = torch.Generator().manual_seed(tp.rank)
    drawn = torch.randn(2, _ROWS * tp.size, _WIDTH, generator=generator).to(device, torch.bfloat16)
    x, weight = drawn[0, :_ROWS].unsqueeze(1), drawn[1, :_WIDTH]
    whole, summed = x.new_empty(_ROWS * tp.size, 1, _WIDTH), torch.empty_like(x)
    tp.all_gather(whole, x)
    tp.reduce_scatter(summed, whole @ weight)
    pieces = SymmetricMemory(tp, matmul)

    def gather() -> str | None:
        y, kept = pieces.gather(x, weight, keep=True)
        assert kept is not None
        return _why_wrong("a gather", kept, whole) or _why_wrong("a gathered product", y, whole @ weight)

    return [gather, lambda: _why_wrong("a scattered product", pieces.scatter(whole, weight)[0], summed)]


def _why_wrong(name: str, found: Tensor, right: Tensor) -> str | None:
    off = float((found.float() - right.float()).norm() / right.float().norm())
    return None if off <= _OFF else f"{name} is off by {off:.1e} of itself when it is tried"  # NaN too

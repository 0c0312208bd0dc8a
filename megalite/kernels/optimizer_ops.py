"""torch kernels of an optimizer step over flat tensors: AdamW, the two halves of LAMB, the norm of gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor


class MomentSettings(TypedDict):
    """Settings of the moments' update and their bias corrections."""

    beta1: float
    beta2: float
    eps: float
    step: int  # number of this update, from 1


class AdamSettings(MomentSettings):
    """Settings of `adam`."""

    lr: float
    weight_decay: float


def adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    factor: Tensor | None,
    copy: Tensor | None,
    **settings: Unpack[AdamSettings],
) -> None:
    """Apply AdamW with decoupled decay (arXiv 1711.05101) in place, by torch's fused kernel.

    Args:
        param, grad, exp_avg, exp_avg_sq: [n], all of one type.
        factor: [], multiplied with the gradient, which may be overwritten; None: 1.
        copy: [n], receives the new parameters, rounded to its type."""
    if factor is not None:
        grad.mul_(factor)
    step = torch.full((), settings["step"], dtype=torch.float32, device=param.device)
    rest = {name: value for name, value in settings.items() if name != "step"}
    # Called directly, because torch.optim's preparation takes longer than a small update.
    torch._fused_adamw_(  # type: ignore[call-overload]
        *([param], [grad], [exp_avg], [exp_avg_sq], [], [step]), **rest, amsgrad=False, maximize=False
    )
    if copy is not None:
        copy.copy_(param)


ROW = 1 << 10  # elements per sum of squares in the tensor's own precision


def norm(values: Tensor) -> Tensor:
    """Return ‖v‖ of a flat tensor, fp64 []. Sums by rows: one fp32 sum on a CPU loses digits, most for equal values."""
    whole = values.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1)
    if whole < values.numel():
        rows = torch.cat([rows, torch.linalg.vector_norm(values[whole:]).view(1)])
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Direction:
    """m̂/(√v̂ + ε) = scale·m/(√v + eps) in one update."""

    scale: float  # √(1 - β₂ᵗ)/(1 - β₁ᵗ)
    eps: float  # ε·√(1 - β₂ᵗ)

    @classmethod
    def at(cls, step: int, *, beta1: float, beta2: float, eps: float, frozen: int | None = None) -> "Direction":
        """Build it with the bias corrections of update `step`, from 1; `frozen`: number of updates of v, if smaller."""
        root = math.sqrt(1.0 - beta2 ** (step if frozen is None else frozen))
        return cls(scale=root / (1.0 - beta1**step), eps=eps * root)

    def add_to(self, values: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, factor: float = 1.0) -> Tensor:
        """Add factor·m̂/(√v̂ + ε) to `values` in place."""
        return values.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(self.eps), value=factor * self.scale)


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    norms: bool,
    weight_decay: float,
    **settings: Unpack[MomentSettings],
) -> tuple[Tensor, ...]:
    """Update both moments in place; the gradient does not change.

    The direction u = m̂/(√v̂ + ε) + weight_decay·x is not kept, because it is as large as the parameters: `lamb_step`
    recomputes it.

    Args:
        param, grad, exp_avg, exp_avg_sq: [n] of one type, a piece of flat buffers.

    Returns:
        With `norms`: (‖x‖, ‖u‖) of the piece, fp64 [] on its device; otherwise ()."""
    exp_avg.lerp_(grad, 1.0 - settings["beta1"])
    exp_avg_sq.mul_(settings["beta2"]).addcmul_(grad, grad, value=1.0 - settings["beta2"])
    if not norms:
        return ()
    u = Direction.at(**settings).add_to(param * weight_decay, exp_avg, exp_avg_sq)
    return norm(param), norm(u)


def lamb_step(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float,
    weight_decay: float,
    **settings: Unpack[MomentSettings],
) -> None:
    """Subtract rate·u from x in place, u from `lamb_moments`' results; `rate`: learning rate times trust ratio."""
    if weight_decay != 0.0:
        param.mul_(1.0 - rate * weight_decay)
    Direction.at(**settings).add_to(param, exp_avg, exp_avg_sq, factor=-rate)


PIECES = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Elements converted to fp64 at a time: on a CPU what fits its cache, on CUDA enough to make launches negligible."""


def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return sqrt(Σ x²) over all elements of one or more flat tensors, fp64 [] on their device.

    The square of an fp32 number is exact in fp64, and the sum has 29 bits more than fp32. Rounded to fp32, like a
    clipping factor, the norm no longer depends on the order of the sum or the number of ranks."""
    device = tensors[0].device
    size = min(PIECES["cpu" if device.type == "cpu" else "cuda"], max(x.numel() for x in tensors))
    exact = torch.empty(size, dtype=torch.float64, device=device)
    squares = [torch.zeros((), dtype=torch.float64, device=device)]
    for x in tensors:
        for piece in x.split(max(size, 1)):
            values = exact[: piece.numel()].copy_(piece)
            squares.append(torch.dot(values, values))
    return torch.stack(squares).sum().sqrt()

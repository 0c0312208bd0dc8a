"""The core of attention as the models call it, fused and with its scores in memory; forward and backward apart."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megalite.kernels.attention import causal_attention
from megalite.kernels.unfused_attention import unfused_attention
from megalite.profiling.timing import Timer, Timing

KINDS = ("fused", "unfused")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """b sequences of s tokens, so many heads of d channels."""

    b: int
    heads: int
    s: int
    d: int

    @property
    def flops(self) -> int:
        """Of the forward's two products over the whole square of scores, whatever the causal mask hides."""
        return 4 * self.b * self.heads * self.s**2 * self.d


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Forward or backward of one shape."""

    kind: str
    """`fused` or `unfused`."""
    backward: bool
    shape: AttentionShape
    dtype: str
    timing: Timing

    @property
    def flops_per_second(self) -> float:
        """Achieved, by the FLOPs of the whole square: two products forward and, recomputation left out, four backward."""
        return (2 if self.backward else 1) * self.shape.flops / self.timing.seconds


def attention_shapes(*, most_flops: float, most_bytes: float) -> list[AttentionShape]:
    """Heads of 64 and 128 over growing sequences, as far as the limits go; at least the smallest of each.

    `most_bytes` bounds the fp32 scores of the unfused path.
    """
    shapes = []
    for d in (64, 128):
        for s in (128, 512, 2048, 4096):
            shape = AttentionShape(b=1, heads=8, s=s, d=d)
            scores = 16 * shape.b * shape.heads * s * s
            if s == 128 or (3 * shape.flops <= most_flops and scores <= most_bytes):
                shapes.append(shape)
    return shapes


def measure_attention(
    timer: Timer, *, dtype: torch.dtype, name: str, shapes: list[AttentionShape], seconds: float
) -> Iterator[AttentionTime]:
    """Forward and backward of each shape, fused and unfused; every rank at once, `seconds` in all.

    Collectives: barriers and gathers over the timer's world.
    """
    each = seconds / max(1, 4 * len(shapes))
    for shape in shapes:
        for kind in KINDS:
            for backward, run in _passes(shape, kind, dtype, timer.device):
                timing = timer.over_ranks(timer.each(run, seconds=each))
                yield AttentionTime(kind=kind, backward=backward, shape=shape, dtype=name, timing=timing)


def _passes(
    shape: AttentionShape, kind: str, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[bool, Callable[[], object]]]:
    """q, k and v are views of one [s, b, heads, 3·d], as they come from the qkv projection."""
    qkv = torch.randn(shape.s, shape.b, shape.heads, 3, shape.d, device=device).to(dtype)
    q, k, v = (part.squeeze(3).permute(1, 2, 0, 3).detach().requires_grad_() for part in qkv.split(1, dim=3))
    visible = torch.ones(shape.s, shape.s, dtype=torch.bool, device=device).tril()

    def forward() -> torch.Tensor:
        if kind == "fused":
            return causal_attention(q, k, v)
        return unfused_attention(q, k, v, visible=visible, keep=None, p=0.0)

    yield False, forward
    out = forward()
    grad = torch.randn_like(out)
    yield True, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

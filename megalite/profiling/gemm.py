"""Matrix products in the shapes of transformer layers: forward, input gradient and weight gradient of linear layers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.kernels.registry import Kernels
from megalite.profiling.timing import Timer, Timing

HIDDEN_SIZES = (128, 256, 512, 768, 1024, 2048, 4096, 8192, 12288)
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
SPLITS = (1, 8)
"""Tensor-parallel sizes whose narrow matrices are among the shapes."""
PRODUCTS = ("forward", "input-gradient", "weight-gradient")


@dataclass(frozen=True, order=True)
class LinearShape:
    """A linear layer on so many tokens: x [tokens, inputs] · weight [outputs, inputs]ᵀ."""

    tokens: int
    outputs: int
    inputs: int

    @property
    def flops(self) -> int:
        """Of each of its three products."""
        return 2 * self.tokens * self.outputs * self.inputs

    def bytes(self, itemsize: int) -> int:
        """What is in memory while the three products run: operands, results and the fp32 main gradient."""
        activations = 2 * self.tokens * (self.outputs + self.inputs)
        return activations * itemsize + self.outputs * self.inputs * (itemsize + 4)

    def product(self, name: str) -> tuple[int, int, int]:
        """(m, n, k) of a product: m by n results, each the sum over k."""
        return {
            "forward": (self.tokens, self.outputs, self.inputs),
            "input-gradient": (self.tokens, self.inputs, self.outputs),
            "weight-gradient": (self.outputs, self.inputs, self.tokens),
        }[name]


@dataclass(frozen=True, kw_only=True)
class GemmTime:
    """A product's time. `weight-gradient` adds to an fp32 main gradient, as training does."""

    product: str
    m: int
    n: int
    k: int
    dtype: str
    timing: Timing

    @property
    def flops_per_second(self) -> float:
        """Achieved."""
        return 2 * self.m * self.n * self.k / self.timing.seconds


def layer_shapes() -> list[LinearShape]:
    """qkv, output, up and down projection of GPT layers of all sizes, whole and split over tp; by FLOPs."""
    shapes = set()
    for h in HIDDEN_SIZES:
        for tp in SPLITS:
            if h // tp < 128 and tp > 1:
                continue
            for tokens in TOKENS:
                shapes.add(LinearShape(tokens, 3 * h // tp, h))
                shapes.add(LinearShape(tokens, h, h // tp))
                shapes.add(LinearShape(tokens, 4 * h // tp, h))
                shapes.add(LinearShape(tokens, h, 4 * h // tp))
    return sorted(shapes, key=lambda shape: (shape.flops, shape))


def chosen_shapes(*, count: int, most_flops: float, most_bytes: float, itemsize: int) -> list[LinearShape]:
    """At most `count` of `layer_shapes()` that are within the limits, evenly spread over the logarithm of their FLOPs.

    The smallest is always among them, also where it is beyond the limits.
    """
    smallest, *rest = layer_shapes()
    fitting = [smallest] + [
        shape for shape in rest if shape.flops <= most_flops and shape.bytes(itemsize) <= most_bytes
    ]
    low, high = math.log(fitting[0].flops), math.log(fitting[-1].flops)
    chosen: dict[LinearShape, None] = {}
    for index in range(count):
        wanted = low + (high - low) * index / max(count - 1, 1)
        near = [shape for shape in fitting if shape not in chosen] or fitting
        # Of shapes with equal FLOPs another one each time, so that wide, tall and narrow ones all occur.
        close = min(abs(math.log(shape.flops) - wanted) for shape in near)
        same = [shape for shape in near if abs(math.log(shape.flops) - wanted) <= close + 1e-9]
        chosen[same[index % len(same)]] = None
    return sorted(chosen, key=lambda shape: (shape.flops, shape))


def first_rate(timer: Timer, dtype: torch.dtype) -> float:
    """FLOP/s of a middling product: which shapes there is time for is judged by it. The same on every rank.

    Raises:
        RuntimeError: torch has no matrix product of this type on the device.
    """
    size = 2048 if timer.device.type == "cuda" else 256
    x = torch.randn(size, size, device=timer.device).to(dtype)
    matmul = Kernels().get("matmul", device=timer.device, dtype=dtype, size=size)
    seconds = timer.over_ranks(timer.each(lambda: matmul(x, x), seconds=0.0)).seconds
    return 2 * size**3 / seconds


def measure_gemms(
    timer: Timer, *, dtype: torch.dtype, name: str, shapes: Sequence[LinearShape], seconds: float
) -> Iterator[GemmTime]:
    """Times of the three products of each shape, every rank at its own at once; `seconds` in all.

    Collectives: barriers and gathers over the timer's world.
    """
    each = seconds / max(1, len(shapes) * len(PRODUCTS))
    for shape in shapes:
        for product, run in _products(shape, dtype, timer.device):
            timing = timer.over_ranks(timer.each(run, seconds=each))
            m, n, k = shape.product(product)
            yield GemmTime(product=product, m=m, n=n, k=k, dtype=name, timing=timing)


def _products(
    shape: LinearShape, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls that `tensor_parallel.layers.linear` makes, on one rank's tensors."""
    main = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(shape.tokens, shape.inputs, device=device).to(dtype)
    weight = torch.randn(shape.outputs, shape.inputs, device=device).to(dtype)
    grad = torch.randn(shape.tokens, shape.outputs, device=device).to(dtype)
    main_grad = torch.zeros(shape.outputs, shape.inputs, dtype=main, device=device)
    kernels = Kernels()
    matmul, weight_grad = (
        kernels.get(operation, device=device, dtype=dtype, size=shape.inputs)
        for operation in ("matmul", "weight_grad")
    )
    yield "forward", lambda: matmul(x, weight.t())
    yield "input-gradient", lambda: matmul(grad, weight)
    yield "weight-gradient", lambda: weight_grad(main_grad, grad, x)

"""Measures single operations: matrix products, attention and passes over memory."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.kernels.attention import causal_attention
from megalite.kernels.registry import Kernels
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import FlatParameter, Update
from megalite.profiling.timing import Timer, Timing

HIDDEN_SIZES = (128, 256, 512, 768, 1024, 2048, 4096, 8192, 12288)
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
SPLITS = (1, 8)  # tensor-parallel sizes, which make matrices narrower
PRODUCTS = ("forward", "input-gradient", "weight-gradient")


@dataclass(frozen=True, order=True)
class LinearShape:
    """Shape of a linear layer: x [tokens, inputs] · weight [outputs, inputs]ᵀ."""

    tokens: int
    outputs: int
    inputs: int

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.outputs * self.inputs

    def bytes(self, itemsize: int) -> int:
        """Return the memory of the three products: operands, results and the fp32 main gradient."""
        activations = 2 * self.tokens * (self.outputs + self.inputs)
        return activations * itemsize + self.outputs * self.inputs * (itemsize + 4)

    def product(self, name: str) -> tuple[int, int, int]:
        """Return (m, n, k) of a product: m by n results, each a sum over k."""
        return {
            "forward": (self.tokens, self.outputs, self.inputs),
            "input-gradient": (self.tokens, self.inputs, self.outputs),
            "weight-gradient": (self.outputs, self.inputs, self.tokens),
        }[name]


@dataclass(frozen=True, kw_only=True)
class GemmTime:
    """Time of a product. `weight-gradient` accumulates into an fp32 main gradient, as training does."""

    product: str
    m: int
    n: int
    k: int
    dtype: str
    timing: Timing

    @property
    def flops_per_second(self) -> float:
        return 2 * self.m * self.n * self.k / self.timing.seconds


def layer_shapes() -> list[LinearShape]:
    """Return QKV, output, up and down projections of GPT layers of all sizes, whole and split over tp, by FLOPs."""
    shapes = set()
    for h, tp, tokens in itertools.product(HIDDEN_SIZES, SPLITS, TOKENS):
        if tp == 1 or h // tp >= 128:
            widths = ((3 * h // tp, h), (h, h // tp), (4 * h // tp, h), (h, 4 * h // tp))
            shapes |= {LinearShape(tokens, outputs, inputs) for outputs, inputs in widths}
    return sorted(shapes, key=lambda shape: (shape.flops, shape))


def chosen_shapes(*, count: int, most_flops: float, most_bytes: float, itemsize: int) -> list[LinearShape]:
    """Return at most `count` of `layer_shapes()` within the limits, evenly spread over the logarithm of their FLOPs.
    The smallest is always included."""
    smallest, *rest = layer_shapes()
    fitting = [smallest] + [
        shape for shape in rest if shape.flops <= most_flops and shape.bytes(itemsize) <= most_bytes
    ]
    low, high = math.log(fitting[0].flops), math.log(fitting[-1].flops)
    chosen: dict[LinearShape, None] = {}
    for index in range(count):
        wanted = low + (high - low) * index / max(count - 1, 1)
        near = [shape for shape in fitting if shape not in chosen] or fitting
        # Alternate between shapes with equal FLOPs, so that wide, tall and narrow ones occur.
        close = min(abs(math.log(shape.flops) - wanted) for shape in near)
        same = [shape for shape in near if abs(math.log(shape.flops) - wanted) <= close + 1e-9]
        chosen[same[index % len(same)]] = None
    return sorted(chosen, key=lambda shape: (shape.flops, shape))


def first_rate(timer: Timer, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of medium size, to choose shapes by their time. The same on every rank."""
    size = 2048 if timer.device.type == "cuda" else 256
    x = torch.randn(size, size, device=timer.device).to(dtype)
    matmul = Kernels().get("matmul", device=timer.device, dtype=dtype, size=size)
    seconds = timer.each_over_ranks(lambda: matmul(x, x), seconds=0.0).seconds
    return 2 * size**3 / seconds


def measure_gemms(
    timer: Timer, *, dtype: torch.dtype, name: str, shapes: Sequence[LinearShape], seconds: float
) -> Iterator[GemmTime]:
    """Measure the three products of each shape, on all ranks at once, `seconds` in total.

    Collectives: barriers and gathers over the timer's world."""
    each = seconds / max(1, len(shapes) * len(PRODUCTS))
    for shape in shapes:
        for product, run in _products(shape, dtype, timer.device):
            timing = timer.each_over_ranks(run, seconds=each)
            m, n, k = shape.product(product)
            yield GemmTime(product=product, m=m, n=n, k=k, dtype=name, timing=timing)


def _products(
    shape: LinearShape, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the products that `tensor_parallel.layers.linear` runs, on one rank's tensors."""
    main = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(shape.tokens, shape.inputs, device=device).to(dtype)
    weight = torch.randn(shape.outputs, shape.inputs, device=device).to(dtype)
    grad = torch.randn(shape.tokens, shape.outputs, device=device).to(dtype)
    main_grad = torch.zeros(shape.outputs, shape.inputs, dtype=main, device=device)
    kernels = Kernels()
    matmul, weight_grad = (
        kernels.get(operation, device=device, dtype=dtype, size=shape.inputs) for operation in ("matmul", "weight_grad")
    )
    yield "forward", lambda: matmul(x, weight.t())
    yield "input-gradient", lambda: matmul(grad, weight)
    yield "weight-gradient", lambda: weight_grad(main_grad, grad, x)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Shape of attention: b sequences of s tokens, heads of d channels."""

    b: int
    heads: int
    s: int
    d: int

    @property
    def flops(self) -> int:
        """FLOPs of the forward's two products over the whole square of scores, without regard to the causal mask."""
        return 4 * self.b * self.heads * self.s**2 * self.d


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    backward: bool
    shape: AttentionShape
    dtype: str
    timing: Timing

    @property
    def flops_per_second(self) -> float:
        """Achieved rate over the whole square of scores: two products forward, four backward without recomputation."""
        return (2 if self.backward else 1) * self.shape.flops / self.timing.seconds


def attention_shapes(*, most_flops: float, most_bytes: float) -> list[AttentionShape]:
    """Return shapes with heads of 64 and 128 channels and growing sequences, within the limits; at least the smallest
    of each. `most_bytes` limits the fp32 scores, which some kernels store."""
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
    """Measure forward and backward of each shape, on all ranks at once, `seconds` in total.

    Collectives: barriers and gathers over the timer's world."""
    each = seconds / max(1, 2 * len(shapes))
    for shape in shapes:
        for backward, run in _attention_passes(shape, dtype, timer.device):
            timing = timer.each_over_ranks(run, seconds=each)
            yield AttentionTime(backward=backward, shape=shape, dtype=name, timing=timing)


def _attention_passes(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[bool, Callable[[], object]]]:
    """Yield forward and backward. q, k and v are views of one [s, b, heads, 3·d], as after the QKV projection."""
    qkv = torch.randn(shape.s, shape.b, shape.heads, 3, shape.d, device=device).to(dtype)
    q, k, v = (part.squeeze(3).permute(1, 2, 0, 3).detach().requires_grad_() for part in qkv.split(1, dim=3))
    yield False, lambda: causal_attention(q, k, v)
    out = causal_attention(q, k, v)
    grad = torch.randn_like(out)
    yield True, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


OPERATIONS = ("copy", "add", "adam")
ADAM_BYTES = 28  # per element in fp32: AdamW reads parameter, gradient and two moments, and writes three of them


@dataclass(frozen=True, kw_only=True)
class MemoryTime:
    """Time of one pass over tensors of `elements` fp32 numbers each."""

    operation: str
    elements: int
    bytes_moved: int
    timing: Timing

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_moved / self.timing.seconds


def tensor_sizes(*, most_elements: float) -> list[int]:
    """Return numbers of elements, from 64 Ki (fits into a cache) to at most 64 Mi (fits into none); at least two."""
    sizes = [2**16, 2**20, 2**22, 2**24, 2**26]
    return [size for size in sizes if size <= max(most_elements, sizes[1])]


def first_bandwidth(timer: Timer) -> float:
    """Return a rough rate of an optimizer's pass in bytes per second; the same on every rank."""
    elements = 2**26 if timer.device.type == "cuda" else 2**20
    *_, (_, moved, run) = _memory_passes(elements, timer.device)
    return moved / timer.each_over_ranks(run, seconds=0.0).seconds


def measure_memory(timer: Timer, *, sizes: list[int], seconds: float) -> Iterator[MemoryTime]:
    """Measure copy, sum and optimizer step at each size, on all ranks at once, `seconds` in total.

    Collectives: barriers and gathers over the timer's world."""
    each = seconds / max(1, len(sizes) * len(OPERATIONS))
    for elements in sizes:
        for operation, bytes_moved, run in _memory_passes(elements, timer.device):
            timing = timer.each_over_ranks(run, seconds=each)
            yield MemoryTime(operation=operation, elements=elements, bytes_moved=bytes_moved, timing=timing)


def _memory_passes(elements: int, device: torch.device) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield (operation, bytes of a pass, function that runs the pass)."""
    a, b, c = (torch.zeros(elements, device=device) for _ in range(3))
    yield "copy", 8 * elements, lambda: c.copy_(a)
    yield "add", 12 * elements, lambda: torch.add(a, b, out=c)
    yield "adam", ADAM_BYTES * elements, adam_step(a, b)


def adam_step(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs an AdamW update of flat fp32 parameters."""
    parameter = torch.nn.Parameter(values)
    parameter.grad = grad
    optimizer = AdamW([FlatParameter(param=parameter, decay=True, segments=())], OptimizerConfig())
    update = Update(step=1, lr=1e-3, weight_decay=0.01)
    return lambda: optimizer.step(update)

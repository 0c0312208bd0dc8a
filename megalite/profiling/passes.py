"""Measures forwards and backwards of small stages, and fits the planner's costs other than products and attention.

Kernel times are not enough on a CPU. The work between the products (norms, activations, softmax, copies) consists of
many operations, some bound by memory and some by arithmetic, so no formula of bytes predicts its rate."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.config.describe import replace
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.gpt import GPTStage
from megalite.models.shapes import StageLayers
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import Parts, workload_of
from megalite.planner.cost.stage import stage_cost
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.profiling.operations import adam_step
from megalite.profiling.timing import Timer, Timing, fit_times
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """Shape of a last or middle stage of a small GPT, with one sequence per microbatch."""

    family: str  # `gpt` (LayerNorm, GELU, biases) or `llama` (RMSNorm, SwiGLU, rotary positions)
    hidden: int
    sequence: int
    layers: int
    vocabulary: int  # 0: a middle stage, without a head

    @property
    def config(self) -> RunConfig:
        llama = self.family == "llama"
        model = ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=max(1, self.hidden // 64),
            vocab_size=self.vocabulary or 128,
            max_position_embeddings=None if llama else self.sequence,
            position_embedding_type="rope" if llama else "learned_absolute",
            normalization="RMSNorm" if llama else "LayerNorm",
            activation="swiglu" if llama else "gelu",
            add_bias_linear=not llama,
        )
        return config_of(model, self.sequence)

    @property
    def flops(self) -> float:
        weights = 12.0 * self.layers * self.hidden**2 + self.vocabulary * self.hidden
        return 6.0 * weights * self.sequence


def config_of(model: ModelConfig, sequence: int) -> RunConfig:
    config = dataclasses.replace(RunConfig(), model=model)
    config = replace(config, seq_length=sequence, micro_batch_size=1, global_batch_size=1, train_iters=1)
    return validate(config, world_size=1)


# From small stages, mostly overhead, to the size of models trained on CPUs.
SHAPES = tuple(
    StageShape(family=family, hidden=hidden, sequence=sequence, layers=layers, vocabulary=vocabulary)
    for hidden, sequence in ((64, 64), (128, 128), (256, 256), (512, 256))
    for family, layers, vocabulary in (("gpt", 1, 0), ("llama", 2, 0), ("llama", 1, 32 * hidden))
)


@dataclass(frozen=True, kw_only=True)
class PassTime:
    shape: StageShape
    backward: bool
    dtype: str
    timing: Timing


def measure_passes(
    timer: Timer, *, dtype: torch.dtype, name: str, most_flops: float, seconds: float
) -> Iterator[PassTime]:
    """Measure stages of at most `most_flops`, on all ranks at once, `seconds` in total.

    Collectives: barriers and gathers over the timer's world."""
    shapes = [shape for shape in SHAPES if shape.flops <= most_flops] or list(SHAPES[:3])
    each = seconds / (2 * len(shapes))
    for shape in shapes:
        head = shape.vocabulary > 0
        runs = _passes(shape.config.model, shape.layers, shape.sequence, dtype, timer.device, head=head)
        for backward, run in enumerate(runs):
            timing = timer.each_over_ranks(run, seconds=each)
            yield PassTime(shape=shape, backward=bool(backward), dtype=name, timing=timing)


def _passes(
    model: ModelConfig, layers: int, sequence: int, dtype: torch.dtype, device: torch.device, *, head: bool = False
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run a stage's forward, and its forward and backward. Weight gradients accumulate into fp32
    buffers, as in training."""
    stage = GPTStage(
        model,
        StageLayers(first_layer=0, last_layer=layers, has_embedding=False, has_head=head),
        factory=ParameterFactory(tp=Group.solo("tp"), seed=1, dtype=dtype, device=device),
        seq_length=sequence,
    )
    main = torch.float64 if dtype == torch.float64 else torch.float32
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=main, device=device)
    x = torch.randn(stage.activation_shape(1), device=device).to(dtype).requires_grad_()
    labels = torch.arange(sequence, device=device).view(1, -1) if head else None
    grad = torch.ones(1, sequence, device=device) if head else torch.ones_like(x)

    def forward() -> torch.Tensor:
        return stage(x, stage.context(), labels=labels)

    def both() -> None:
        y = forward()
        y.backward(grad.to(y.dtype))
        x.grad = None
        for parameter in stage.parameters():
            parameter.grad = None

    return forward, both


def with_passes(
    times: Sequence[PassTime], cluster: Cluster, stack: SoftwareStack, *, source: str, least_operation: float = 0.0
) -> tuple[SoftwareStack, float]:
    """Fit the stack's elementwise slowdown, operation time and microbatch constant to the measured passes. Returns the
    stack and the mean relative error.

    Minimizes squared relative errors; products (from the cluster) and attention (from the stack) keep the planner's
    formulas. `source`: date, software and method, for the provenance. `least_operation`: least seconds per operation.
    On noisy times the fit cannot separate the three constants and may set one to 0, but no operation is free."""
    plain = dataclasses.replace(stack, elementwise_slowdown=1.0)
    without = dataclasses.replace(stack, elementwise_slowdown=0.0)
    known, moved, operations, passes = [], [], [], []
    for time in times:
        bare, parts = _parts(time, cluster, without), _parts(time, cluster, plain)
        products = float(bare.gemm + bare.memory)
        moved.append(float(parts.gemm + parts.memory) - products)
        operations.append(float(parts.operations))
        known.append(products + least_operation * operations[-1])
        passes.append(2.0 if time.backward else 1.0)
    (slowdown, operation, constant), error = fit_times(
        [moved, operations, passes], [time.timing.seconds for time in times], known=known
    )
    names = ("elementwise_slowdown", "operation_seconds", "microbatch_seconds")
    fitted = dataclasses.replace(
        stack,
        elementwise_slowdown=max(slowdown, 0.01),  # no operation on activations is free
        operation_seconds=least_operation + operation,
        microbatch_seconds=constant,
        provenance={**stack.provenance, **dict.fromkeys(names, f"fitted on passes of small stages, {source}")},
    )
    return fitted, error


def _parts(time: PassTime, cluster: Cluster, stack: SoftwareStack) -> Parts:
    config = replace(time.shape.config, precision=time.dtype)
    price = Pricing.of(workload_of(config), cluster, stack)
    cost = stage_cost(price, dense=float(time.shape.layers), has_head=float(time.shape.vocabulary > 0))
    return cost.forward_parts + cost.backward_parts if time.backward else cost.forward_parts


FEW, MANY = 1, 5  # layers of the two compared stages
TINY_MODEL = ModelConfig(
    num_layers=MANY,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=8,
)
TINY_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Overheads in seconds, the same on every rank."""

    operation: Timing  # of one operation on one number
    layer: float  # of a layer in the forward and backward of a stage
    stage: float  # of a stage's forward and backward without layers
    step: Timing  # norm, update and clearing of one small bucket


def measure_overheads(timer: Timer, *, dtype: torch.dtype, seconds: float) -> Overheads:
    """Measure overheads on all ranks at once, `seconds` in total.

    Collectives: barriers and gathers over the timer's world."""

    def timed(run: Callable[[], object]) -> Timing:
        return timer.each_over_ranks(run, seconds=seconds / 4)

    number = torch.zeros(1, device=timer.device)
    operation, step = timed(lambda: number.add_(1.0)), timed(_step(timer.device))
    few, many = (
        timed(_passes(TINY_MODEL, layers, TINY_TOKENS, dtype, timer.device)[1]).seconds for layers in (FEW, MANY)
    )
    layer = max(0.0, (many - few) / (MANY - FEW))
    return Overheads(operation=operation, layer=layer, stage=max(0.0, few - FEW * layer), step=step)


def _step(device: torch.device) -> Callable[[], object]:
    grad = torch.zeros(1024, device=device)
    update = adam_step(torch.zeros_like(grad), grad)

    def step() -> None:
        float(grad.square().sum().sqrt())
        update()
        grad.zero_()

    return step

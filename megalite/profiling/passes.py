"""What passes of real stages take, and what of it is neither products nor attention: bytes, operations, a constant.

Kernels alone say too little of a CPU: what lies between the products (norms, activations, softmax, copies) is many
operations there, some bound by memory and some by arithmetic, and no formula of bytes gives their rate.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.config.describe import replace
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.gpt import GPTStage
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import FlatParameter, Update
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import Parts
from megalite.planner.cost.stage import stage_cost
from megalite.planner.cost.workload import workload_of
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.profiling.timing import Timer, Timing, fit_times
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """A last or a middle stage of a small GPT, one sequence a microbatch."""

    family: str  # `gpt` (LayerNorm, GELU, biases) or `llama` (RMSNorm, SwiGLU, rotary positions)
    hidden: int
    sequence: int
    layers: int
    vocabulary: int  # 0: a middle stage, without a head

    @property
    def config(self) -> RunConfig:
        """Of a model with such a stage."""
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
        config = replace(
            dataclasses.replace(RunConfig(), model=model),
            seq_length=self.sequence,
            micro_batch_size=1,
            global_batch_size=1,
            train_iters=1,
        )
        return validate(config, world_size=1)

    @property
    def flops(self) -> float:
        """Of products, forward and backward, about."""
        weights = 12.0 * self.layers * self.hidden**2 + self.vocabulary * self.hidden
        return 6.0 * weights * self.sequence


SHAPES = tuple(
    StageShape(family=family, hidden=hidden, sequence=sequence, layers=layers, vocabulary=vocabulary)
    for hidden, sequence in ((64, 64), (128, 128), (256, 256), (512, 256))
    for family, layers, vocabulary in (("gpt", 1, 0), ("llama", 2, 0), ("llama", 1, 32 * hidden))
)
"""Small ones, of which most is overhead, to such as CPUs train."""


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A forward, or a forward with its backward."""

    shape: StageShape
    backward: bool
    dtype: str
    timing: Timing


def measure_passes(
    timer: Timer, *, dtype: torch.dtype, name: str, most_flops: float, seconds: float
) -> Iterator[PassTime]:
    """Every rank at once, `seconds` in all.

    Args:
        most_flops: stages with more are left out.

    Collectives: barriers and gathers over the timer's world.
    """
    shapes = [shape for shape in SHAPES if shape.flops <= most_flops] or list(SHAPES[:3])
    each = seconds / (2 * len(shapes))
    for shape in shapes:
        for backward, run in ((False, _forward(shape, dtype, timer.device)), (True, _both(shape, dtype, timer.device))):
            timing = timer.over_ranks(timer.each(run, seconds=each))
            yield PassTime(shape=shape, backward=backward, dtype=name, timing=timing)


def _stage(shape: StageShape, dtype: torch.dtype, device: torch.device) -> tuple[GPTStage, torch.Tensor]:
    """A stage whose weight gradients go to fp32 buffers, as in training, and its input."""
    factory = ParameterFactory(tp=Group.solo("tp"), seed=1, dtype=dtype, device=device)
    stage = GPTStage(
        shape.config.model,
        first_layer=0,
        last_layer=shape.layers,
        has_embedding=False,
        has_head=shape.vocabulary > 0,
        factory=factory,
        seq_length=shape.sequence,
    )
    main = torch.float64 if dtype == torch.float64 else torch.float32
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=main, device=device)
    return stage, torch.randn(stage.activation_shape(1), device=device).to(dtype).requires_grad_()


def _forward(shape: StageShape, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    stage, x = _stage(shape, dtype, device)
    labels = torch.arange(shape.sequence, device=device).view(1, -1) if shape.vocabulary else None

    def forward() -> torch.Tensor:
        return stage(x, stage.context(), labels=labels)

    return forward


def _both(shape: StageShape, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    stage, x = _stage(shape, dtype, device)
    labels = torch.arange(shape.sequence, device=device).view(1, -1) if shape.vocabulary else None
    grad = torch.ones(1, shape.sequence, device=device) if shape.vocabulary else torch.ones_like(x)

    def both() -> None:
        y = stage(x, stage.context(), labels=labels)
        y.backward(grad.to(y.dtype))
        x.grad = None
        for parameter in stage.parameters():
            parameter.grad = None

    return both


@dataclass(frozen=True, kw_only=True)
class PassFit:
    """What the planner's formulas lack to give the measured passes."""

    elementwise_slowdown: float
    operation_seconds: float
    pass_seconds: float
    error: float  # mean of |formula / measured - 1|


def fit_passes(
    times: Sequence[PassTime], cluster: Cluster, stack: SoftwareStack, *, least_operation: float = 0.0
) -> PassFit:
    """Least squares over relative errors, with products and attention as the formulas have them.

    Args:
        cluster: with its rates of products and of memory.
        stack: with its attention.
        least_operation: seconds that any operation takes. The fit cannot tell operations from elementwise work and passes
            where the times are noisy, and gives one of them all; but none is free.
    """
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
    seconds = [time.timing.seconds for time in times]
    fit = fit_times([moved, operations, passes], seconds, known=known)
    slowdown, operation, constant = fit.constants
    return PassFit(
        # At least a little: no operation on activations is free.
        elementwise_slowdown=max(slowdown, 0.01),
        operation_seconds=least_operation + operation,
        pass_seconds=constant,
        error=fit.error,
    )


def _parts(time: PassTime, cluster: Cluster, stack: SoftwareStack) -> Parts:
    config = replace(time.shape.config, precision=time.dtype)
    cost = stage_cost(
        Pricing.of(workload_of(config), cluster, stack),
        dense=float(time.shape.layers),
        has_head=float(time.shape.vocabulary > 0),
    )
    return cost.forward_parts + cost.backward_parts if time.backward else cost.forward_parts


def with_passes(
    times: Sequence[PassTime], cluster: Cluster, stack: SoftwareStack, *, source: str, least_operation: float = 0.0
) -> tuple[SoftwareStack, float]:
    """The stack with the constants of `fit_passes`, and its error.

    Args:
        least_operation: of `fit_passes`.
        source: when, with what and how it was measured, for the provenance.
    """
    fit = fit_passes(times, cluster, stack, least_operation=least_operation)
    where = f"fitted on passes of small stages, {source}"
    names = ("elementwise_slowdown", "operation_seconds", "microbatch_seconds")
    fitted = dataclasses.replace(
        stack,
        elementwise_slowdown=fit.elementwise_slowdown,
        operation_seconds=fit.operation_seconds,
        microbatch_seconds=fit.pass_seconds,
        provenance={**stack.provenance, **dict.fromkeys(names, where)},
    )
    return fitted, fit.error


FEW, MANY = 1, 5  # layers of the two stages whose difference is that of their layers
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
    """Seconds, the same on every rank."""

    operation: Timing  # one operation on one number
    layer_forward: float
    layer_backward: float  # what a layer adds to a stage's pass
    pass_forward: float
    pass_backward: float  # what a stage's pass takes beside its layers
    step: Timing  # norm, update and clearing of one small bucket


def measure_overheads(timer: Timer, *, dtype: torch.dtype, seconds: float) -> Overheads:
    """Every rank at once, `seconds` in all.

    Collectives: barriers and gathers over the timer's world.
    """
    each = seconds / 6
    number = torch.zeros(1, device=timer.device)
    operation = timer.over_ranks(timer.each(lambda: number.add_(1.0), seconds=each))
    step = timer.over_ranks(timer.each(_step(timer.device), seconds=each))
    passes = {
        (layers, name): timer.over_ranks(timer.each(run, seconds=each))
        for layers in (FEW, MANY)
        for name, run in _stage_passes(layers, dtype, timer.device)
    }
    forward = _line(passes[FEW, "forward"].seconds, passes[MANY, "forward"].seconds)
    # Only the two together can be repeated.
    whole = _line(passes[FEW, "both"].seconds, passes[MANY, "both"].seconds)
    return Overheads(
        operation=operation,
        layer_forward=forward[1],
        layer_backward=max(0.0, whole[1] - forward[1]),
        pass_forward=forward[0],
        pass_backward=max(0.0, whole[0] - forward[0]),
        step=step,
    )


def _line(few: float, many: float) -> tuple[float, float]:
    """(seconds without layers, seconds of a layer), neither below 0."""
    layer = max(0.0, (many - few) / (MANY - FEW))
    return max(0.0, few - FEW * layer), layer


def _stage_passes(layers: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward alone, and forward with backward, of a middle stage; weight gradients go to fp32 buffers, as in training."""
    factory = ParameterFactory(tp=Group.solo("tp"), seed=1, dtype=dtype, device=device)
    stage = GPTStage(
        TINY_MODEL,
        first_layer=0,
        last_layer=layers,
        has_embedding=False,
        has_head=False,
        factory=factory,
        seq_length=TINY_TOKENS,
    )
    main = torch.float64 if dtype == torch.float64 else torch.float32
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=main, device=device)
    x = torch.zeros(stage.activation_shape(1), dtype=dtype, device=device, requires_grad=True)
    grad = torch.zeros_like(x, requires_grad=False)

    def forward() -> torch.Tensor:
        return stage(x, stage.context())

    def both() -> None:
        forward().backward(grad)
        x.grad = None
        for parameter in stage.parameters():
            parameter.grad = None

    yield "forward", forward
    yield "both", both


def _step(device: torch.device) -> Callable[[], object]:
    """Norm, update and clearing of 1024 parameters."""
    parameter = torch.nn.Parameter(torch.zeros(1024, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = AdamW([FlatParameter(param=parameter, decay=True, segments=())], OptimizerConfig())
    update = Update(step=1, lr=1e-3, weight_decay=0.01)

    def step() -> None:
        assert parameter.grad is not None
        float(parameter.grad.square().sum().sqrt())
        optimizer.step(update)
        parameter.grad.zero_()

    return step

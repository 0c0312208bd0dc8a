"""What small things cost: one operation, a pass through a layer or a stage that has next to nothing to compute, a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.models.gpt import GPTStage
from megalite.optimizers.adam import AdamW
from megalite.optimizers.flat import FlatParameter, Update
from megalite.profiling.timing import Timer, Timing
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group

FEW, MANY = 1, 5
"""Layers of the two stages whose difference is that of their layers."""

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

    operation: Timing
    """One operation on one number."""
    layer_forward: float
    layer_backward: float
    """What a layer adds to a stage's pass."""
    pass_forward: float
    pass_backward: float
    """What a stage's pass takes beside its layers."""
    step: Timing
    """Norm, update and clearing of one small bucket."""


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
        for name, run in _passes(layers, dtype, timer.device)
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


def _passes(
    layers: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward alone, and forward with backward, of a middle stage; weight gradients go to fp32 buffers, as in training."""
    make = ParameterFactory(tp=Group.solo("tp"), seed=1, dtype=dtype, device=device)
    stage = GPTStage(
        TINY_MODEL,
        first_layer=0,
        last_layer=layers,
        has_embedding=False,
        has_head=False,
        make=make,
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

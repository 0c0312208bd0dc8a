"""The stages of a small GPT in fp32, and our executor over them; gradients go to `.grad`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megalite.config.model import ModelConfig
from megalite.models.gpt import GPTStage
from megalite.pipeline.executor import Executor, Tracer
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.validate import validate
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ParameterFactory, attach_tape
from megalite.tensor_parallel.weight_tape import WeightTape
from megalite.topology.group import Group
from megalite.topology.topology import Topology

SEQ, MICRO = 128, 2
MODEL = ModelConfig(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=8,
    vocab_size=512,
    max_position_embeddings=SEQ,
    tie_embeddings=False,
)


class _Linear(torch.nn.Module):
    """The parameters of one of our linear layers under autograd's own linear function."""

    def __init__(self, ours: ColumnParallelLinear | RowParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias = ours.weight, ours.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x, self.weight.flatten(0, -2), bias)


class Part(torch.nn.Module):
    """One stage: tokens [b, s] or [s, b, h] -> [s, b, h], or on the last stage logits [s, b, V]."""

    def __init__(self, stage: GPTStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage(x, self.stage.context())


def build_part(stage: int, num_stages: int, *, plain: bool) -> Part:
    """Layers of a stage, in fp32, the same weights wherever it is built."""
    each = MODEL.num_layers // num_stages
    make = ParameterFactory(tp=Group.solo("tp"), seed=3, dtype=torch.float32, device=torch.device("cpu"))
    part = Part(
        GPTStage(
            MODEL,
            first_layer=stage * each,
            last_layer=(stage + 1) * each,
            has_embedding=stage == 0,
            has_head=stage == num_stages - 1,
            make=make,
            seq_length=SEQ,
        ).eval()
    )
    if plain:
        for module in list(part.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                    setattr(module, name, _Linear(child))
    return part


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the microbatch's losses: logits [s, b, V], labels [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="sum")


@dataclass
class System:
    """One of the competitors on one rank."""

    run: Callable[[], object]
    parts: dict[int, Part]

    def zero_grad(self) -> None:
        """Forget gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def grads(self) -> dict[str, torch.Tensor]:
        """By stage and name."""
        return {
            f"{stage}.{name}": parameter.grad.clone()
            for stage, part in self.parts.items()
            for name, parameter in part.named_parameters()
            if parameter.grad is not None
        }


def batch_of(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [b, s] of all microbatches."""
    draws = torch.Generator().manual_seed(1)
    shape = (2, microbatches * MICRO, SEQ)
    tokens, labels = torch.randint(0, int(MODEL.vocab_size or 0), shape, generator=draws)
    return tokens, labels


def build_ours(schedule: Schedule, topology: Topology, *, tracer: Tracer | None = None) -> System:
    """The executor over this rank's stages."""
    rank, last = topology.pp.rank, schedule.num_stages - 1
    stages = schedule.stages_of(rank)
    parts = {stage: build_part(stage, schedule.num_stages, plain=False) for stage in stages}
    tapes = {stage: WeightTape() for stage in parts}
    for stage, part in parts.items():
        attach_tape(part, tapes[stage])
    tokens, labels = (whole.split(MICRO) for whole in batch_of(schedule.num_microbatches))

    def forward(stage: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        y = parts[stage](tokens[microbatch] if x is None else x)
        return loss_of(y, labels[microbatch]) if stage == last else y

    program = lower(schedule)
    validate(program)
    executor = Executor(
        program,
        rank=rank,
        edges=topology.edges,
        forward=forward,
        activation_shape=(SEQ, MICRO, MODEL.hidden_size),
        dtype=torch.float32,
        device=torch.device("cpu"),
        reducer=None,
        tapes=tapes,
        tracer=tracer,
    )
    return System(executor.run, parts)

"""Plain PyTorch as a contender of peers.run: alone, under DDP, with ZeRO-1, and with DTensor tensor parallelism.

The model is plain_gpt's."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import plain_gpt
from benchmarks.peers.case import CLIP, LR, Case, adamw, adamw_groups, clip, plain_weights, squares
from benchmarks.peers.megalite import stage_layers

MeanLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Loop:
    """The usual training loop: microbatches in sequence, clip, update.

    Args:
        forward: tokens and labels [b, s] -> mean loss; the model itself or a wrapper of it.
        rank: data-parallel rank.
        around: context of each microbatch.
        parts: number of ranks with the same loss."""

    def __init__(
        self,
        case: Case,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        forward: MeanLoss,
        *,
        rank: int = 0,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        parts: int = 1,
    ) -> None:
        self._case, self._parameters, self._optimizer, self._forward = case, parameters, optimizer, forward
        self._rank, self._around, self._parts = rank, around, parts

    def step(self, tokens: torch.Tensor) -> float:
        count = self._case.microbatches
        losses = []
        for index, part in enumerate(self._case.share(tokens, self._rank)):
            with plain_gpt.without_reduction(self._forward, last=index == count - 1), self._around():
                loss = self._forward(part[:, :-1], part[:, 1:]) / count
                loss.backward()
            losses.append(loss.detach())
        _clip(self._parameters)
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = torch.stack([loss.to_local() if isinstance(loss, DTensor) else loss for loss in losses])
        return float(total.sum()) / self._case.layout.dp / self._parts


def _clip(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm of all gradients; torch's clipping would treat split and whole tensors separately."""
    split = [parameter for parameter in parameters if isinstance(parameter.data, DTensor)]
    if not split:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        return
    whole = [parameter for parameter in parameters if not isinstance(parameter.data, DTensor)]
    groups = [part for part in (split, whole) if part]
    norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for part in groups:
        nn.utils.clip_grads_with_norm_(part, CLIP, total)


def plain_model(case: Case) -> plain_gpt.GPT:
    """The model with the common weights."""
    model = plain_gpt.GPT(case.size)
    model.load_state_dict(plain_weights(case))
    return model


def in_precision(case: Case, model: nn.Module) -> MeanLoss:
    """Set the model's precision: in bf16, fp32 weights and bf16 products."""

    def autocast(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens, labels)

    return autocast if case.bf16 else model


def build_plain(case: Case, context: Any) -> Loop:
    model = plain_model(case)
    parameters = list(model.parameters())
    return Loop(case, parameters, adamw(parameters), in_precision(case, model))


def build_ddp(case: Case, context: Any) -> Loop:
    """DistributedDataParallel; gradients are views of its buckets."""
    model = DistributedDataParallel(plain_model(case), gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    return Loop(case, parameters, adamw(parameters), model, rank=context.rank)


def build_zero(case: Case, context: Any) -> Loop:
    model = DistributedDataParallel(plain_model(case), gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        adamw_groups(parameters), torch.optim.AdamW, lr=LR, fused=True, parameters_as_bucket_view=True
    )
    return Loop(case, parameters, optimizer, model, rank=context.rank)


def build_dtensor(case: Case, context: Any) -> Loop:
    """Tensor parallelism by DTensor: heads, MLP, vocabulary and loss are split; norms and the residual stream are whole."""
    model = plain_model(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {"word": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    for name in ("qkv", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("out", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    parameters = list(model.parameters())

    def forward(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(model.features(tokens), mesh, [Replicate()], run_check=False)
        logits = F.linear(whole, model.word.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    ranks = dist.get_world_size()
    return Loop(case, parameters, adamw(parameters), forward, around=loss_parallel, parts=ranks)


SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
DOWN_AND_UP = ("zb-v", "dualpipe-v")  # the second half of the stages is on the ranks in reverse order


class Part(nn.Module):
    """Layers [first, last) of the GPT, with the embedding before or the head after them: tokens [b, s] or [b, s, h]."""

    def __init__(self, case: Case, layers: tuple[int, int], *, embeds: bool, heads: bool) -> None:
        super().__init__()
        size = case.size
        self.embeds, self.heads = embeds, heads
        if embeds or heads:
            self.word = nn.Embedding(size.vocab, size.hidden)
        if embeds:
            self.position = nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleDict({str(index): plain_gpt.Block(size) for index in range(*layers)})
        if heads:
            self.norm = nn.LayerNorm(size.hidden)
        weights = plain_weights(case)
        self.load_state_dict({name: weights[name] for name in self.state_dict()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, h], or logits [b, s, V]."""
        if self.embeds:
            x = self.word(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return F.linear(self.norm(x), self.word.weight) if self.heads else x


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pipeline:
    def __init__(self, case: Case, rank: int, cut: list[tuple[int, int]], schedule: str) -> None:
        ranks, last = case.layout.pp, len(cut) - 1
        mine = (rank, last - rank) if schedule in DOWN_AND_UP else range(rank, len(cut), ranks)
        self._parts = {stage: Part(case, cut[stage], embeds=stage == 0, heads=stage == last) for stage in mine}
        stages = [PipelineStage(part, stage, len(cut), torch.device("cpu")) for stage, part in self._parts.items()]
        settings: dict[str, Any] = {"loss_fn": _loss, "scale_grads": True}
        self._schedule = SCHEDULES[schedule](stages[0] if len(cut) == ranks else [*stages], case.microbatches, **settings)
        self._first, self._last = 0 in self._parts, last in self._parts
        self._parameters = [p for part in self._parts.values() for p in part.parameters()]
        # Two copies, updated alike, even if one rank has both: each stage divides the gradients of its parameters.
        self._words = [part.word.weight for part in self._parts.values() if part.embeds or part.heads]
        self._optimizer = adamw(self._parameters)

    def step(self, tokens: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        self._schedule.step(
            *((tokens[:, :-1],) if self._first else ()),
            target=tokens[:, 1:] if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
        )
        _sum_tied_gradients(self._words)
        own = [p for p in self._parameters if not any(p is word for word in self._words)]
        own += self._words[:1] if self._first else []
        total = squares(own)
        dist.all_reduce(total)
        clip(self._parameters, total.sqrt().float())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if self._last else 0.0


def _sum_tied_gradients(words: list[torch.Tensor]) -> None:
    """Sum the gradients of both copies of the tied weight, on this rank or over two ranks."""
    grads = [word.grad for word in words]
    if len(grads) == 2:
        grads[0] += grads[1]
        grads[1].copy_(grads[0])
    elif grads:
        dist.all_reduce(grads[0])


def even_cut(layers: int, stages: int) -> list[tuple[int, int]]:
    """Equal numbers of layers per stage; the first stages get the remainder."""
    each, over = divmod(layers, stages)
    starts = [stage * each + min(stage, over) for stage in range(stages + 1)]
    return list(pairwise(starts))


def build_even(case: Case, context: Any) -> Pipeline:
    cut = even_cut(case.size.layers, case.layout.pp * case.layout.vpp)
    return Pipeline(case, context.rank, cut, _usual(case))


def build_balanced(case: Case, context: Any) -> Pipeline:
    """Use the default schedule, with the layers cut as megalite cuts them."""
    return Pipeline(case, context.rank, stage_layers(case), _usual(case))


def build_interleaved_zb(case: Case, context: Any) -> Pipeline:
    """Fill the bubble with weight gradients, with the layers cut as megalite cuts them."""
    return Pipeline(case, context.rank, stage_layers(case), "interleaved-zb")


def build_zb_v(case: Case, context: Any) -> Pipeline:
    """Use zb-v, with the layers cut as megalite cuts them for zb-v."""
    return Pipeline(case, context.rank, stage_layers(dataclasses.replace(case, schedule="zb-v")), "zb-v")


def build_dualpipe_v(case: Case, context: Any) -> Pipeline:
    """Use dualpipe-v, with the layers cut as megalite cuts them for dualpipe-v."""
    cut = stage_layers(dataclasses.replace(case, schedule="dualpipe-v"))
    return Pipeline(case, context.rank, cut, "dualpipe-v")


def _usual(case: Case) -> str:
    return "interleaved" if case.layout.vpp > 1 else "1f1b"

"""torch.distributed.pipelining over plain_gpt.py's blocks as a contender of step_vs_peers.py.

It knows no tied embeddings and no global norm: both are added here as its users do, by one all-reduce each.
"""

import dataclasses
from itertools import pairwise
from typing import Any

import plain_gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_case import Case, adamw, clip, plain_weights, squares
from peer_megalite import stage_layers
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
DOWN_AND_UP = ("zb-v", "dualpipe-v")
"""The second half of the stages lies on the ranks in reverse."""


class Part(nn.Module):
    """Layers [first, last) of the GPT, the embedding before or the head after them: tokens [b, s] or [b, s, h]."""

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
        """-> [b, s, h], or logits [b, s, V]."""
        if self.embeds:
            x = self.word(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return F.linear(self.norm(x), self.word.weight) if self.heads else x


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pipeline:
    """See `Contender`."""

    def __init__(self, case: Case, rank: int, cut: list[tuple[int, int]], schedule: str) -> None:
        ranks, last = case.layout.pp, len(cut) - 1
        mine = (rank, last - rank) if schedule in DOWN_AND_UP else range(rank, len(cut), ranks)
        self._parts = {
            stage: Part(case, cut[stage], embeds=stage == 0, heads=stage == last) for stage in mine
        }
        stages = [
            PipelineStage(part, stage, len(cut), torch.device("cpu")) for stage, part in self._parts.items()
        ]
        settings: dict[str, Any] = {"loss_fn": _loss, "scale_grads": True}
        self._schedule = SCHEDULES[schedule](
            stages[0] if len(cut) == ranks else [*stages], case.microbatches, **settings
        )
        self._first, self._last = 0 in self._parts, last in self._parts
        self._parameters = [p for part in self._parts.values() for p in part.parameters()]
        # Two, updated alike, also where one rank has both: each stage divides the gradients of its parameters.
        self._words = [part.word.weight for part in self._parts.values() if part.embeds or part.heads]
        self._optimizer = adamw(self._parameters)

    def step(self, tokens: torch.Tensor) -> float:
        """See `Contender`."""
        losses: list[torch.Tensor] = []
        self._schedule.step(
            *((tokens[:, :-1],) if self._first else ()),
            target=tokens[:, 1:] if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
        )
        _sum_of_both(self._words)
        own = [p for p in self._parameters if not any(p is word for word in self._words)]
        own += self._words[:1] if self._first else []
        total = squares(own)
        dist.all_reduce(total)
        clip(self._parameters, total.sqrt().float())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if self._last else 0.0


def _sum_of_both(words: list[torch.Tensor]) -> None:
    """The tied weight's gradients, of this rank's copies and the other's."""
    grads = [word.grad for word in words]
    if len(grads) == 2:
        grads[0] += grads[1]
        grads[1].copy_(grads[0])
    elif grads:
        dist.all_reduce(grads[0])


def even_cut(layers: int, stages: int) -> list[tuple[int, int]]:
    """As many layers on each stage; the first ones get what is left over."""
    each, over = divmod(layers, stages)
    starts = [stage * each + min(stage, over) for stage in range(stages + 1)]
    return list(pairwise(starts))


def build_even(case: Case, context: Any) -> Pipeline:
    """The usual cut and schedule."""
    cut = even_cut(case.size.layers, case.layout.pp * case.layout.vpp)
    return Pipeline(case, context.rank, cut, _usual(case))


def build_balanced(case: Case, context: Any) -> Pipeline:
    """The usual schedule, the layers cut as megalite cuts them."""
    return Pipeline(case, context.rank, stage_layers(case), _usual(case))


def build_interleaved_zb(case: Case, context: Any) -> Pipeline:
    """Weight gradients fill the bubble, the layers cut as megalite cuts them."""
    return Pipeline(case, context.rank, stage_layers(case), "interleaved-zb")


def build_zb_v(case: Case, context: Any) -> Pipeline:
    """The layers cut as megalite cuts them for its own."""
    return Pipeline(case, context.rank, stage_layers(dataclasses.replace(case, schedule="zb-v")), "zb-v")


def build_dualpipe_v(case: Case, context: Any) -> Pipeline:
    """The layers cut as megalite cuts them for its own."""
    cut = stage_layers(dataclasses.replace(case, schedule="dualpipe-v"))
    return Pipeline(case, context.rank, cut, "dualpipe-v")


def _usual(case: Case) -> str:
    return "interleaved" if case.layout.vpp > 1 else "1f1b"

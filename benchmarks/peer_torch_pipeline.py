"""torch.distributed.pipelining over plain_gpt.py's blocks as a contender of step_vs_peers.py.

It knows no tied embeddings and no global norm: both are added here as its users do, by one all-reduce each.
"""

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
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B


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

    def __init__(self, case: Case, rank: int, cut: list[tuple[int, int]]) -> None:
        ranks, last = case.layout.pp, len(cut) - 1
        self._parts = {
            stage: Part(case, cut[stage], embeds=stage == 0, heads=stage == last)
            for stage in range(rank, len(cut), ranks)
        }
        stages = [
            PipelineStage(part, stage, len(cut), torch.device("cpu")) for stage, part in self._parts.items()
        ]
        settings: dict[str, Any] = {"loss_fn": _loss, "scale_grads": True}
        self._schedule = (
            Schedule1F1B(stages[0], case.microbatches, **settings)
            if len(stages) == 1
            else ScheduleInterleaved1F1B([*stages], case.microbatches, **settings)
        )
        self._first, self._last = 0 in self._parts, last in self._parts
        self._parameters = [p for part in self._parts.values() for p in part.parameters()]
        self._word = self._parts[0 if self._first else last].word.weight
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
        assert self._word.grad is not None
        dist.all_reduce(self._word.grad)
        own = [p for p in self._parameters if self._first or p is not self._word]
        total = squares(own)
        dist.all_reduce(total)
        clip(self._parameters, total.sqrt().float())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if self._last else 0.0


def even_cut(layers: int, stages: int) -> list[tuple[int, int]]:
    """As many layers on each stage; the first ones get what is left over."""
    each, over = divmod(layers, stages)
    starts = [stage * each + min(stage, over) for stage in range(stages + 1)]
    return list(pairwise(starts))


def build_even(case: Case, context: Any) -> Pipeline:
    """The usual cut."""
    return Pipeline(case, context.rank, even_cut(case.size.layers, case.layout.pp * case.layout.vpp))


def build_balanced(case: Case, context: Any) -> Pipeline:
    """The layers cut as megalite cuts them."""
    return Pipeline(case, context.rank, stage_layers(case))

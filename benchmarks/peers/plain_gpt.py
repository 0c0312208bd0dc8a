"""The same GPT in plain PyTorch.

The modules take their sizes from a `Size`, so that peers.run can cut them into stages and split them over ranks."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Size:
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    vocab: int = 8192
    seq: int = 256
    micro: int = 4
    batch: int = 16
    gelu: str = "none"
    """torch's name of the approximation of GELU."""

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class Block(nn.Module):
    """Pre-norm attention and MLP. Rows of `qkv` are ordered by head, so that a slice of rows is a set of heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        h = size.hidden
        self.head, self.gelu = size.head, size.gelu
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        b, s, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(b, s, -1, 3, self.head)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class GPT(nn.Module):
    """Learned positions, tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.hidden)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Input of the head: tokens [b, s] -> [b, s, h]."""
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.features(tokens), labels)

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = F.linear(features, self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def without_reduction(model: Any, *, last: bool) -> AbstractContextManager[Any]:
    """Make DDP reduce only in the backward of the last microbatch."""
    return model.no_sync() if not last and isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()

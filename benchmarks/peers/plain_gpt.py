"""The same GPT and step in plain PyTorch, alone or under DDP. As a program: the peer of steps.run, a JSON line a step.

The modules take their sizes from a `Size`, so that peers.run can cut them into stages and split them over ranks.
"""

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class Block(nn.Module):
    """Pre-norm attention and MLP. Rows of `qkv` are ordered by head, so that a part of them is a part of the heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        h = size.hidden
        self.head = size.head
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
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, tied embeddings."""

    def __init__(self, size: Size | None = None) -> None:
        super().__init__()
        size = size or Size()
        self.word, self.position = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.hidden)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head sees: tokens [b, s] -> [b, s, h]."""
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = F.linear(self.features(tokens), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def without_reduction(model: Any, *, last: bool) -> AbstractContextManager[Any]:
    """DDP reduces in the last microbatch's backward alone."""
    return model.no_sync() if not last and isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()


def main() -> None:
    size, ranks = Size(), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = GPT()
    model: nn.Module = plain
    if ranks > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    counts = size.batch // size.micro // ranks
    for _ in range(int(sys.argv[1])):
        start = time.perf_counter()
        for index in range(counts):
            tokens = torch.randint(0, size.vocab, (size.micro, size.seq + 1))
            with without_reduction(model, last=index == counts - 1):
                (model(tokens[:, :-1], tokens[:, 1:]) / counts).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps({"tokens_per_second": size.batch * size.seq / seconds}), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

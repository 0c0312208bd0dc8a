#!/usr/bin/env python3
"""The peer of train_step.py: the same GPT and step in plain PyTorch, alone or under DDP. Prints a JSON line a step."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, MICRO, BATCH = 4, 256, 8, 8192, 256, 4, 16


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        b, s, _ = x.shape
        q, k, v = (
            t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(HIDDEN, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, HIDDEN))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss."""
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    """Train for as many steps as the first argument says."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = GPT()
    plain = model
    if ranks > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    counts = BATCH // MICRO // ranks
    for _ in range(int(sys.argv[1])):
        start = time.perf_counter()
        for index in range(counts):
            tokens = torch.randint(0, VOCAB, (MICRO, SEQ + 1))
            last = index == counts - 1
            with model.no_sync() if ranks > 1 and not last else torch.enable_grad():
                (model(tokens[:, :-1], tokens[:, 1:]) / counts).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps({"tokens_per_second": BATCH * SEQ / seconds}), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

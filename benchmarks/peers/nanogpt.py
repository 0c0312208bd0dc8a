"""A training loop in the manner of nanoGPT as a contender of peers.run, on one rank; the GPU benchmark has the model too.

Against plain_gpt: attention, MLP and blocks are modules by themselves, dropout layers stand where nanoGPT has them
(p = 0), the fused projection is cut into queries, keys and values of all heads, and the head is a tied `nn.Linear`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.case import Case, adamw, plain_weights
from benchmarks.peers.plain_gpt import Size
from benchmarks.peers.pytorch import Loop, in_precision


class SelfAttention(nn.Module):
    """Causal attention of all heads in one projection: [b, s, h] -> [b, s, h]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.width = size.heads, size.hidden
        self.qkv, self.out = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.size()
        parts = self.qkv(x).split(self.width, dim=2)
        q, k, v = (part.view(b, s, self.heads, h // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).contiguous().view(b, s, h)))


class FeedForward(nn.Module):
    """Two projections with GELU between them."""

    def __init__(self, size: Size, approximate: str) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(size.hidden, 4 * size.hidden), nn.GELU(approximate)
        self.down, self.drop = nn.Linear(4 * size.hidden, size.hidden), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.act(self.up(x))))


class Layer(nn.Module):
    def __init__(self, size: Size, approximate: str) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.hidden), SelfAttention(size)
        self.norm2, self.mlp = nn.LayerNorm(size.hidden), FeedForward(size, approximate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Tokens and labels [b, s] -> mean loss.

    Args:
        approximate: of GELU.
        std: of the initial weights; None: torch's.
    """

    def __init__(self, size: Size, *, approximate: str = "none", std: float | None = None) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList([Layer(size, approximate) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        self.word.weight = self.head.weight
        for parameter in self.parameters():
            if std is not None and parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.drop(self.word(tokens) + self.position(places))
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, labels)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))


def weights_of(case: Case) -> dict[str, torch.Tensor]:
    size, found = case.size, {}
    for name, value in plain_weights(case).items():
        if ".qkv." in name:  # from by head to by kind
            value = value.view(size.heads, 3, size.head, -1).transpose(0, 1).reshape(value.shape)
        name = name.replace("blocks.", "layers.")
        for part, owner in (("qkv", "attention"), ("out", "attention"), ("up", "mlp"), ("down", "mlp")):
            name = name.replace(f".{part}.", f".{owner}.{part}.")
        found[name] = value
    return {**found, "head.weight": found["word.weight"]}


def build(case: Case, context: Any) -> Loop:
    model = Model(case.size)
    model.load_state_dict(weights_of(case))
    parameters = list(model.parameters())
    return Loop(case, parameters, adamw(parameters), in_precision(case, model))

"""A GPT written from the definitions: functions of a dictionary of full weights, without megalite code."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Plain:
    """All settings that determine the function."""

    layers: int
    heads: int
    groups: int
    head_size: int
    vocab_size: int
    norm: str = "LayerNorm"
    eps: float = 1e-5
    activation: str = "gelu"
    rope_base: float | None = None
    rotary_size: int | None = None
    rotary_interleaved: bool = False
    tied: bool = True


def normalize(w: Weights, name: str, x: Tensor, c: Plain) -> Tensor:
    if c.norm == "RMSNorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.eps) * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + c.eps)
    return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def bias(w: Weights, name: str, like: Tensor) -> Tensor:
    return w.get(f"{name}.bias", like.new_zeros(()))


def rotate(x: Tensor, base: float, size: int | None = None, interleaved: bool = False) -> Tensor:
    """Pairs (x_i, x_{i+d/2}), or (x_2i, x_2i+1), of the first d channels of [b, s, ..., channels] turned by position ·
    base^(-2i/d)."""
    s, d = x.shape[1], size or x.shape[-1]
    x, rest = x[..., :d], x[..., d:]
    theta = torch.tensor([[t * base ** (-2 * i / d) for i in range(d // 2)] for t in range(s)], dtype=x.dtype)
    theta = theta.view(s, *[1] * (x.dim() - 3), d // 2)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : d // 2], x[..., d // 2 :])
    turned = (a * theta.cos() - b * theta.sin(), a * theta.sin() + b * theta.cos())
    return torch.cat([torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), rest], -1)


def attend(w: Weights, name: str, x: Tensor, c: Plain) -> Tensor:
    """Apply attention. Rows of the qkv weight: for each group its queries, then its key, then its value."""
    per = c.heads // c.groups
    weight = w[f"{name}.qkv.weight"].view(c.groups, per + 2, c.head_size, -1)
    qkv = torch.einsum("bsh,gjdh->bsgjd", x, weight)
    if f"{name}.qkv.bias" in w:
        qkv = qkv + w[f"{name}.qkv.bias"].view(c.groups, per + 2, c.head_size)
    q, k, v = qkv[:, :, :, :per], qkv[:, :, :, per], qkv[:, :, :, per + 1]
    if c.rope_base is not None:
        q, k = (rotate(x, c.rope_base, c.rotary_size, c.rotary_interleaved) for x in (q, k))
    scores = torch.einsum("bsgjd,btgd->bgjst", q, k) / math.sqrt(c.head_size)
    s = x.shape[1]
    future = torch.tensor([[t > i for t in range(s)] for i in range(s)])
    mixed = torch.einsum("bgjst,btgd->bsgjd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    out = torch.einsum("bsk,hk->bsh", mixed.flatten(2), w[f"{name}.out.weight"])
    return out + bias(w, f"{name}.out", out)


def feed_forward(w: Weights, name: str, x: Tensor, c: Plain) -> Tensor:
    if c.activation == "swiglu":
        both = torch.einsum("bsh,zfh->zbsf", x, w[f"{name}.up.weight"])
        if f"{name}.up.bias" in w:
            both = both + w[f"{name}.up.bias"][:, None, None]
        y = both[0] * torch.sigmoid(both[0]) * both[1]
    else:
        y = torch.einsum("bsh,fh->bsf", x, w[f"{name}.up.weight"]) + bias(w, f"{name}.up", x)
        if c.activation == "squared_relu":
            y = y.clamp(min=0.0) ** 2
        elif c.activation == "gelu_tanh":
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        else:
            y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    out = torch.einsum("bsf,hf->bsh", y, w[f"{name}.down.weight"])
    return out + bias(w, f"{name}.down", out)


def losses(w: Weights, tokens: Tensor, labels: Tensor, c: Plain) -> Tensor:
    """Return the cross-entropy of each token, [b, s]."""
    x = w["embedding.word.weight"][tokens]
    if "embedding.position.weight" in w:
        x = x + w["embedding.position.weight"][: tokens.shape[1]]
    for index in range(c.layers):
        name = f"layers.{index}"
        x = x + attend(w, f"{name}.attention", normalize(w, f"{name}.attention_norm", x, c), c)
        x = x + feed_forward(w, f"{name}.mlp", normalize(w, f"{name}.mlp_norm", x, c), c)
    head = w["embedding.word.weight" if c.tied else "head.weight"][: c.vocab_size]
    logits = torch.einsum("bsh,vh->bsv", normalize(w, "final_norm", x, c), head)
    return logits.exp().sum(-1).log() - logits.gather(-1, labels[..., None])[..., 0]

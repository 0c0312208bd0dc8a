"""A plain mixture of experts: every expert computed for every token, in loops, on one rank."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.model import ModelConfig

Weights = dict[str, Tensor]  # by the name after `layers.i.moe.`


@dataclass
class Expected:
    """Return the layer's expected output for whole sequences x [s, b, h]."""

    y: Tensor
    balance: Tensor  # E·Σ f_e·P_e, summed over the sequences
    z: Tensor  # logsumexp², summed over the tokens
    kept: Tensor  # [s, b, E]: 1 where the expert takes the token


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def activation(x: Tensor, config: ModelConfig) -> Tensor:
    """Apply the activation to x [..., f], or [..., 2, f] with the gate first."""
    name, limit = config.activation, config.activation_func_clamp_value
    if name == "quick_geglu":
        gate, up = x[..., 0, :], x[..., 1, :]
        if limit is not None:
            gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + config.glu_linear_offset)
    if name == "swiglu":
        return F.silu(x[..., 0, :]) * x[..., 1, :]
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def network(
    x: Tensor, up: Tensor, down: Tensor, config: ModelConfig, biases: tuple[Tensor | float, Tensor | float] = (0.0, 0.0)
) -> Tensor:
    """Apply one expert: up [f, h] or [2, f, h], down [h, f], biases [f] or [2, f], and [h]."""
    inner = torch.einsum("...h,...fh->...f" if up.dim() == 2 else "sbh,gfh->sbgf", x, up)
    return activation(inner + biases[0], config) @ down.t() + biases[1]


def choose(logits: Tensor, k: int) -> list[int]:
    """Return the k largest, the lower index first among equals."""
    values = logits.tolist()
    return sorted(range(len(values)), key=lambda expert: (-values[expert], expert))[:k]


def sinkhorn(logits: Tensor) -> Tensor:
    """Scale the rows and columns of exp(logits) [s, E] until a step changes the columns' factors by 1e-4 or less."""
    cost, columns, change = logits.exp(), torch.ones(logits.shape[1], dtype=logits.dtype), 1.0
    while change > 1e-4:
        rows = 1 / logits.shape[0] / (cost @ columns)
        former, columns = columns, 1 / logits.shape[1] / (rows @ cost)
        change = (columns - former).abs().mean().item()
    return rows[:, None] * cost * columns


def expected(x: Tensor, weights: Weights, config: ModelConfig, *, together: int = 1) -> Expected:
    s, b, _ = x.shape
    experts, k = config.num_experts, config.moe_router_topk
    logits = x @ weights["router.weight"].t() + weights.get("router.linear_bias", 0.0)
    probabilities = logits.sigmoid() if config.moe_router_score_function == "sigmoid" else logits.softmax(-1)
    scores = config.moe_router_pre_softmax or config.moe_router_score_function == "sigmoid"
    ranking = logits.detach()
    if config.moe_router_sinkhorn:
        ranking = torch.stack([sinkhorn(ranking[:, i]) for i in range(b)], dim=1)
    scale = torch.zeros(s, b, experts, dtype=x.dtype)
    chosen = torch.zeros(s, b, experts, dtype=x.dtype)
    for t in range(s):
        for i in range(b):
            picks = choose(ranking[t, i], k)
            if config.moe_router_force_load_balancing:
                picks = [(t * k + j) % experts for j in range(k)]
            source = probabilities[t, i, picks] if scores else logits[t, i, picks].softmax(0)
            row = torch.zeros(experts, dtype=x.dtype)
            row = row.index_put((torch.tensor(picks),), source * config.moe_router_topk_scaling_factor)
            scale = scale.index_put((torch.tensor(t), torch.tensor(i)), row)
            chosen[t, i, picks] = 1.0
    kept = chosen.clone()
    if config.moe_expert_capacity_factor is not None:
        capacity = math.ceil(config.moe_expert_capacity_factor * s * k / experts)
        for i in range(b):
            for expert in range(experts):
                takers = [t for t in range(s) if chosen[t, i, expert]]
                if config.moe_token_drop_policy == "probs":
                    takers.sort(key=lambda t: (-scale[t, i, expert].item(), t))
                for t in takers[capacity:]:
                    kept[t, i, expert] = 0.0
    y = torch.zeros_like(x)
    for expert in range(experts):
        ups, downs = weights["experts.up.weight"][expert], weights["experts.down.weight"][expert]
        biases = 0.0, 0.0
        if config.moe_add_bias_linear:
            biases = weights["experts.up.bias"][expert], weights["experts.down.bias"][expert]
        y = y + (scale * kept)[..., expert : expert + 1] * network(x, ups, downs, config, biases)
    if "shared.up.weight" in weights:
        y = y + network(x, weights["shared.up.weight"], weights["shared.down.weight"], config)
    balance = torch.zeros((), dtype=x.dtype)
    for first in range(0, b, together):  # each loss counts as its sequences
        share = chosen[:, first : first + together].mean((0, 1)) / k
        means = probabilities[:, first : first + together].mean((0, 1))
        balance = balance + together * experts * (share * means).sum()
    return Expected(y=y, balance=balance, z=logits.logsumexp(-1).square().sum(), kept=kept)

"""QK-clip: shrinks query and key weights of heads with attention logits above a limit (Kimi-K2, arXiv 2507.20534)."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.models.context import AuxiliaryLosses
from megalite.topology.group import Group

Rows = tuple[int, int, float]
"""Rows [first, stop) of a tensor, and the factor that multiplies them."""


def largest_logits(seen: AuxiliaryLosses, model: ModelConfig, world: Group) -> list[list[float]]:
    """Return the largest logit of the whole batch by layer and head.

    Collectives: one max all-reduce of layers·heads numbers over the world."""
    layers = model.mtp_layers.stop
    table = torch.full((layers, model.num_attention_heads), -torch.inf, dtype=torch.float64, device=world.device)
    for layer, logits in seen.logits.items():
        table[layer] = logits
    world.all_reduce(table, op="max")
    with world.heartbeat.synchronise():
        found: list[list[float]] = table.tolist()
    return found


def clipped_rows(
    logits: Sequence[Sequence[float]], model: ModelConfig, config: OptimizerConfig
) -> Mapping[str, Sequence[Rows]]:
    """Return the rows to shrink of each tensor. With γ = min(1, qk_clip_threshold / the largest logit), query rows are
    multiplied by γ^α and key rows by γ^(1-α), so that logits shrink by γ. Heads that share a key use the γ of their
    largest logit. In latent attention the queries' RoPE channels take all of γ, since all heads share those keys."""
    found: dict[str, list[Rows]] = {}
    for layer, heads in enumerate(logits):
        shared = model.num_attention_heads // model.query_groups
        for group in range(model.query_groups):
            largest = max(heads[group * shared : (group + 1) * shared])
            if largest > config.qk_clip_threshold:
                factor = config.qk_clip_threshold / largest
                for name, rows in _rows(model, f"layers.{layer}.attention", group, factor, config.qk_clip_alpha):
                    found.setdefault(name, []).append(rows)
    return found


def _rows(model: ModelConfig, prefix: str, group: int, factor: float, alpha: float) -> Iterator[tuple[str, Rows]]:
    """Yield tensor names and the rows to shrink for one group of heads."""
    query, key = factor**alpha, factor ** (1.0 - alpha)
    if model.multi_latent_attention:
        name = f"{prefix}.q{'' if model.q_lora_rank is None else '_up'}.weight"
        first, plain = group * model.head_size, model.qk_head_dim
        yield name, (first, first + plain, query)
        yield name, (first + plain, first + model.head_size, factor)
        first = group * (plain + model.v_head_dim)
        yield f"{prefix}.kv_up.weight", (first, first + plain, key)
        return
    queries = model.num_attention_heads // model.query_groups * model.head_size
    first = group * model.group_heads * model.head_size
    keys = first + (model.group_heads - 2) * model.head_size
    for kind in ("weight", "bias"):  # the bias may not exist
        yield f"{prefix}.qkv.{kind}", (first, first + queries, query)
        yield f"{prefix}.qkv.{kind}", (keys, keys + model.head_size, key)

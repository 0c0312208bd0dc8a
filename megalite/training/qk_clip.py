"""QK-clip: heads with attention logits above a limit get smaller query and key weights (Kimi-K2, arXiv 2507.20534)."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.models.context import AuxiliaryLosses
from megalite.topology.group import Group

Rows = tuple[int, int, float]
"""First row of a tensor, one past the last, and what they are multiplied with."""


def largest_logits(seen: AuxiliaryLosses, model: ModelConfig, world: Group) -> list[list[float]]:
    """By layer and head, over the whole batch.

    Collectives: one max all-reduce of layers·heads numbers over the world.
    """
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
    """The rows to shrink of each tensor. With γ = min(1, qk_clip_threshold / the largest logit), query rows are multiplied
    with γ^α and key rows with γ^(1-α), so that logits shrink by γ; heads that share a key share γ, that of their largest
    logit. Of latent attention the queries' channels with rope take all of γ, since their keys serve every head."""
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
    """Tensors, and what to shrink of them for one group of heads."""
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
    first = group * (queries + 2 * model.head_size)
    for kind in ("weight", "bias"):  # there may be none
        yield f"{prefix}.qkv.{kind}", (first, first + queries, query)
        yield f"{prefix}.qkv.{kind}", (first + queries, first + queries + model.head_size, key)

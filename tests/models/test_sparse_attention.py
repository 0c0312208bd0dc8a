"""Sparse attention: an independent loop over tokens gives the same outputs, indexer loss and gradients; equal scores are
resolved by position; a cache of the indexer's keys gives the logits of the whole text."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.models import sparse_attention
from megalite.models.context import INDEXER_LOSS, AuxiliaryLosses
from megalite.models.shapes import attention_core_flops, layer_forward_flops
from megalite.models.sparse_attention import top_keys
from tests.models.stages import LLAMA, B, S, build, continued, named, varied
from tests.support.tiny import words

MODEL: ModelConfig = varied(
    LLAMA,
    **words(
        "num_query_groups=null kv_channels=null multi_latent_attention q_lora_rank=9 kv_lora_rank=10 qk_head_dim=6 "
        "qk_pos_emb_head_dim=4 v_head_dim=7 qk_norm experimental_attention_variant=dsa dsa_indexer_n_heads=3 "
        "dsa_indexer_head_dim=6 dsa_indexer_topk=4 dsa_indexer_loss_coeff=0.3"
    ),
)
COEFFICIENT, PER_TOKEN = 0.3, 1 / 50
DOCUMENTS = ((0, 3, 8), (0,))
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"dsa_indexer_use_sparse_loss": True},
    "pairs": {"dsa_indexer_rope_interleaved": True, "dsa_indexer_k_norm_epsilon": 0.1},
    "no query latent": {"q_lora_rank": None, "qk_norm": False, "softmax_scale": 0.4},
    "all keys": {"dsa_indexer_topk": 50},
    "one key": {"dsa_indexer_topk": 1, "dsa_indexer_use_sparse_loss": True},
}


def rotated(x: Tensor, position: int, base: float, *, pairs: bool) -> Tensor:
    """RoPE of one vector [d], pair by pair: neighbours, or channels of the two halves."""
    half, out = len(x) // 2, torch.zeros_like(x)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairs else (i, i + half)
        angle = position * base ** (-i / half)
        first = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        second = x[b] * math.cos(angle) + x[a] * math.sin(angle)
        out = out + torch.nn.functional.one_hot(torch.tensor(a), len(x)) * first
        out = out + torch.nn.functional.one_hot(torch.tensor(b), len(x)) * second
    return out


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x / (x.square().mean() + eps).sqrt() * weight


def definition(
    model: ModelConfig, weights: dict[str, Tensor], x: Tensor, documents: tuple[tuple[int, ...], ...]
) -> tuple[Tensor, Tensor]:
    """The layer's output [s, b, h] and the sum of the indexer's divergences, token by token."""
    w = {name.removeprefix("layers.0.attention."): value for name, value in weights.items()}
    base, eps, interleaved = model.rotary_base, model.norm_epsilon, model.dsa_indexer_rope_interleaved
    heads, plain, e, n = model.num_attention_heads, model.qk_head_dim, model.qk_pos_emb_head_dim, 3
    scale = model.softmax_scale or 1 / math.sqrt(model.head_size)
    out, total = torch.zeros_like(x), x.new_zeros(())

    def parts(vector: Tensor) -> tuple[Tensor, Tensor]:
        return vector[:e], vector[e:]

    def turn(vector: Tensor, at: int) -> Tensor:
        first, rest = parts(vector)
        return torch.cat((rotated(first, at, base, pairs=interleaved), rest))

    for row in range(x.shape[1]):
        queries, keys, values, index_queries, index_keys, index_weights = ([] for _ in range(6))
        for at in range(len(x)):
            token = x[at, row]
            latent = token if model.q_lora_rank is None else w["q_down.weight"] @ token
            latent = rms(latent, w.get("q_latent_norm.weight"), eps)
            up = w["q.weight" if model.q_lora_rank is None else "q_up.weight"]
            query = (up @ latent).view(heads, -1)
            down = w["kv_down.weight"] @ token
            both = w["kv_up.weight"] @ rms(down[: model.kv_lora_rank], w.get("kv_latent_norm.weight"), eps)
            both = both.view(heads, -1)
            shared = rotated(down[model.kv_lora_rank :], at, base, pairs=True)
            queries.append(
                torch.stack([torch.cat((q[:plain], rotated(q[plain:], at, base, pairs=True))) for q in query])
            )
            keys.append(torch.stack([torch.cat((each[:plain], shared)) for each in both]))
            values.append(both[:, plain:])
            alone, latent = token.detach(), latent.detach()
            index_queries.append([turn(q, at) for q in (w["indexer.q_up.weight"] @ latent).view(n, -1)])
            key = w["indexer.key.weight"] @ alone
            epsilon = model.dsa_indexer_k_norm_epsilon or eps
            key = (key - key.mean()) / (key.var(correction=0) + epsilon).sqrt()
            index_keys.append(turn(key * w["indexer.key_norm.weight"] + w["indexer.key_norm.bias"], at))
            index_weights.append(w["indexer.head_weights.weight"] @ alone)
        for at in range(len(x)):
            start = max(first for first in documents[row] if first <= at)
            visible = list(range(start, at + 1))
            scores = {}
            for other in visible:
                products = [torch.relu(q @ index_keys[other]) / math.sqrt(6) for q in index_queries[at]]
                scores[other] = sum(a * b for a, b in zip(index_weights[at], products, strict=True)) / math.sqrt(n)
            best = sorted(visible, key=lambda other: (-float(scores[other].detach()), other))
            chosen = sorted(best[: model.dsa_indexer_topk])
            mixed, target = [], x.new_zeros(len(x))
            seen = chosen if model.dsa_indexer_use_sparse_loss else visible
            for head in range(heads):
                logits = torch.stack([queries[at][head] @ keys[other][head] for other in chosen]) * scale
                found = logits.softmax(0)
                mixed.append(sum(p * values[other][head] for p, other in zip(found, chosen, strict=True)))
                logits = torch.stack([queries[at][head] @ keys[other][head] for other in seen]).detach() * scale
                target[seen] += logits.softmax(0) / heads
            out[at, row] = w["out.weight"] @ torch.cat(mixed)
            predicted = torch.stack([scores[other] for other in seen]).log_softmax(0)
            total = total + (target[seen] * (target[seen].log() - predicted)).sum()
    return out, total


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_is_its_definition(
    variant: str, documents: tuple[tuple[int, ...], ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "INDEX_ROWS", 4)  # scores of 10 queries in three parts
    model = varied(MODEL, num_layers=1, **VARIANTS[variant])
    stage = build(model)
    weights = {name: value for name, value in named(stage).items() if ".attention." in name}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in weights.items():
            if "norm" in name:
                value.add_(0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(S, B, 16, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(S, B, 16, generator=generator, dtype=torch.float64)
    losses = AuxiliaryLosses(1.0, PER_TOKEN, 1.0, torch.device("cpu"))
    layer: Any = stage.layers["0"]
    out = layer.attention(x, stage.context((0, 1), attention_documents=documents, auxiliary=losses))
    found = torch.autograd.grad(out, [x, *weights.values()], grad)
    wanted, total = definition(model, dict(weights), x, documents or ((0,),) * B)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-11)
    added = COEFFICIENT * PER_TOKEN * total
    torch.testing.assert_close(losses.totals[INDEXER_LOSS], added.detach(), rtol=1e-10, atol=0.0)
    loss = (wanted * grad).sum() + added
    theirs = torch.autograd.grad(loss, [x, *weights.values()], allow_unused=True)
    for name, ours, their in zip(["x", *weights], found, theirs, strict=True):
        torch.testing.assert_close(ours, their, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
        assert their is None or variant == "one key" or their.abs().max() > 0, name


def test_model_and_indexer_learn_from_different_losses() -> None:
    """Without a gradient of the output only the indexer has one; without the coefficient it has none."""
    for coefficient in (0.0, 0.3):
        stage = build(varied(MODEL, num_layers=1, dsa_indexer_loss_coeff=coefficient))
        losses = AuxiliaryLosses(1.0, PER_TOKEN, 1.0, torch.device("cpu"))
        layer: Any = stage.layers["0"]
        x = torch.randn(S, B, 16, dtype=torch.float64, requires_grad=True)
        out = layer.attention(x, stage.context((0, 1), auxiliary=losses))
        out.backward(torch.zeros_like(out))
        assert x.grad is not None and not x.grad.any()
        for name, value in named(stage).items():
            if ".attention." in name:
                assert value.grad is not None
                assert bool(value.grad.any()) == (".indexer." in name and coefficient > 0), name


def test_equal_scores_are_resolved_by_position() -> None:
    scores = torch.tensor([[3.0, 0.0, 1.0, 0.0, -1.0, 0.0, 2.0]])
    every = torch.ones(1, 7, dtype=torch.bool)
    for count, wanted in {
        1: [0],
        4: [0, 1, 2, 6],
        5: [0, 1, 2, 3, 6],
        6: [0, 1, 2, 3, 5, 6],
        9: list(range(7)),
    }.items():
        assert top_keys(scores, every, count)[0].nonzero().flatten().tolist() == wanted
    hidden = every.clone()
    hidden[0, [0, 1]] = False
    assert top_keys(scores, hidden, 3)[0].nonzero().flatten().tolist() == [2, 3, 6]
    assert torch.equal(top_keys(scores, hidden, 5), hidden) and torch.equal(top_keys(scores, hidden, 50), hidden)


def test_cached_index_keys_give_the_logits_of_the_whole_text() -> None:
    continued(MODEL, [9, 1, 5], 4)


def test_flops_count_the_chosen_keys_and_the_indexer() -> None:
    # Two products with 4 of 10 keys of 10 and 7 channels for 4 heads; 10 keys of 6 channels for 3 heads of the indexer.
    core = 2 * 4 * 4 * (10 + 7)
    assert attention_core_flops(MODEL, 0, 10) == core + 2 * 10 * 3 * 6
    assert attention_core_flops(MODEL, 0, 10, "megatron") == core * (20 - 4) // 20 + 10 * 3 * 6
    dense = varied(MODEL, **words("experimental_attention_variant=null"))
    more = 2 * (3 * 6 * 9 + 6 * 16 + 3 * 16)
    assert layer_forward_flops(MODEL, 0, 10) - attention_core_flops(MODEL, 0, 10) == more + (
        layer_forward_flops(dense, 0, 10) - attention_core_flops(dense, 0, 10)
    )

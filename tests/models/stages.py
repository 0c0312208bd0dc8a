"""Build a stage of a small GPT, for the tests of models and generation."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megalite.config.describe import replace
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.models.context import KeyValueCache
from megalite.models.gpt import GPTStage
from megalite.models.recompute import Recompute
from megalite.models.shapes import StageLayers
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group
from megalite.topology.topology import Topology
from tests.support.tiny import words

S, B = 10, 2
GPT = ModelConfig(
    num_layers=3,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=37,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=12,
    init_method_std=0.2,
)
LLAMA = dataclasses.replace(
    GPT,
    **words(
        "num_query_groups=2 kv_channels=6 ffn_hidden_size=20 max_position_embeddings=null position_embedding_type=rope "
        "rotary_base=50.0 normalization=RMSNorm activation=swiglu add_bias_linear=false tie_embeddings=false "
        "norm_epsilon=1e-3"
    ),
)


def varied(model: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(RunConfig(model=model), **changes).model


def build(
    model: ModelConfig,
    *,
    cut: tuple[int, int] | None = None,
    topology: Topology | None = None,
    tp: Group | None = None,
    dtype: torch.dtype = torch.float64,
    recompute: Recompute | None = None,
    sequence_parallel: bool = False,
    seq_length: int = S,
    seed: int = 5,
    loss: str = "cross-entropy",
) -> GPTStage:
    """Layers [first, last) of `cut`, by default all, on one rank of a topology, or of a tp group only."""
    first, last = cut or (0, model.num_layers)
    topology = topology or Topology.solo()
    groups = {name: getattr(topology, name) for name in ("tp", "tp_cp", "ep", "expert_tp")}
    if tp is not None:
        groups |= {"tp": tp, "tp_cp": tp, "expert_tp": tp}
    cpu = torch.device("cpu")
    factory = ParameterFactory(**groups, seed=seed, dtype=dtype, device=cpu, sequence_parallel=sequence_parallel)
    return GPTStage(
        model,
        StageLayers(first_layer=first, last_layer=last, has_embedding=first == 0, has_head=last == model.num_layers),
        factory=factory,
        seq_length=seq_length,
        recompute=recompute,
        loss=loss,
    )


def named(stage: GPTStage) -> dict[str, ShardedParameter]:
    found = {}
    for parameter in stage.parameters():
        found[parameter.info.spec.name] = parameter
    return found


def continued(model: ModelConfig, texts: list[int], new: int) -> tuple[GPTStage, Tensor, list[Tensor]]:
    """Compare logits with and without a cache, for texts of these lengths and `new` tokens more. Halfway the first text
    leaves and the others change places. Return the stage, the prompts, padded to the longest, and logits without a cache."""
    longest = max(texts) + new
    stage, cache = build(model, seq_length=longest).eval(), KeyValueCache(limit=longest)
    tokens = torch.randint(0, 37, (len(texts), longest), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = [
            stage(tokens[row : row + 1, : length + new], stage.context(seq_length=length + new))[:, 0]
            for row, length in enumerate(texts)
        ]
        prompts = tokens[:, : max(texts)] * (torch.arange(max(texts)) < torch.tensor(texts).unsqueeze(1))
        logits = stage(prompts, stage.generation_context(max(texts), texts), cache=cache)
        for row, length in enumerate(texts):
            torch.testing.assert_close(logits[length - 1, row], wanted[row][length - 1], rtol=1e-9, atol=1e-11)
        rows = list(range(len(texts)))
        for step in range(new):
            if step == new // 2:
                rows = rows[:0:-1]
                cache.keep(rows)
            lengths = [texts[row] + step for row in rows]
            logits = stage(tokens[rows, lengths].unsqueeze(1), stage.next_token_context(lengths), cache=cache)
            for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                torch.testing.assert_close(logits[0, place], wanted[row][length], rtol=1e-9, atol=1e-11)
    return stage, prompts, wanted

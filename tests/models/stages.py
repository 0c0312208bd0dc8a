"""Build a stage of a small GPT, for the tests of models and generation."""

import dataclasses
from typing import Any

import torch

from megalite.config.describe import replace
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
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

"""Tiny models of every kind, whole or divided over the ranks of a topology, with the same weights in every layout."""

from typing import Any

from megalite.generation.continuation import MakeText, Sampling
from megalite.generation.generate import Chain, generate_batch
from megalite.models.gpt import GPTStage
from megalite.partition.stages import cut_stages
from megalite.topology.topology import Topology
from tests.models.stages import build
from tests.support.tiny import LATENT, LLAMA, SPARSE, rows_of, tiny_config

PROMPT = [5, 17, 60, 3]
PROMPTS = [PROMPT, [88], [4, 4, 4, 9, 30, 2, 71], [90, 1], PROMPT]  # of unequal lengths, with one repeated
VOCAB = 93

FAMILIES = rows_of(
    """
gpt: GPT
llama: LLAMA
gpt-dropout: hidden_dropout=0.5 attention_dropout=0.5
one group: LLAMA num_query_groups=1 qk_norm
mistral: LLAMA sliding_window=3
qwen3: LLAMA qk_norm
gemma: LLAMA activation=geglu_tanh scale_embeddings norm_zero_centered
gemma2: LLAMA sliding_window=3 window_attn_skip_freq=[2] post_norms softmax_scale=0.5 attn_logit_softcapping=2.0
  final_logit_softcapping=3.0
gemma3: LLAMA sliding_window=3 window_attn_skip_freq=[3] qk_norm rotary_base_local=50.0
olmo2: LLAMA qk_norm qk_norm_all_heads no_rope_freq=[2] pre_norms=false post_norms
sinks: LLAMA sliding_window=3 window_attn_skip_freq=[2] softmax_type=learnable
latent: LATENT
sparse: SPARSE dsa_indexer_topk=3
latent, sinks: LATENT softmax_type=off-by-one
latent, no norm: LATENT q_lora_rank=null qk_norm=false sliding_window=3 softmax_scale=0.3
mixtral: LLAMA num_experts=4 moe_expert_capacity_factor=1.0
deepseek: LLAMA num_experts=4 moe_first_dense_layers=1 moe_shared_expert_intermediate_size=16
""",
    {"GPT": {}, "LLAMA": LLAMA, "LATENT": LATENT, "SPARSE": SPARSE},
)


def stage_of(settings: dict[str, Any], topology: Topology | None = None) -> GPTStage:
    """The stage of one rank, in float64."""
    topology = topology or Topology.solo()
    config = tiny_config(1, **{"init_method_std": 0.3, **settings})
    part = cut_stages(config, range(topology.pp.size))[topology.pp.rank]
    cut = part.first_layer, part.last_layer
    return build(config.model, cut=cut, topology=topology, seq_length=16, seed=3).eval()


def chain_of(settings: dict[str, Any], topology: Topology | None = None) -> Chain:
    """The pipeline of one rank."""
    topology = topology or Topology.solo()
    return Chain(stage_of(settings, topology), topology)


def texts(
    chain: Chain,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    batch_size: int = 16,
    make_text: MakeText | None = None,
) -> list[tuple[list[int], str | None]]:
    """New tokens of each prompt, and the reason for the end."""
    made = generate_batch(
        chain, prompts, sampling, stop_token_ids=stop_token_ids, batch_size=batch_size, make_text=make_text
    )
    done = {one.index: (one.new, one.finish) for one in made if one.finish is not None}
    return [done[index] for index in range(len(prompts))]


def new_tokens(stage: GPTStage, prompt: list[int], sampling: Sampling, *, eod: int | None = None) -> list[int]:
    """New tokens after one prompt, by a model in one stage."""
    stop_token_ids = frozenset(() if eod is None else (eod,))
    return texts(Chain(stage), [prompt], sampling, stop_token_ids=stop_token_ids)[0][0]

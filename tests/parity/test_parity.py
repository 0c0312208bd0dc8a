"""Promise 1: parallelism changes the speed, never the numbers.

In float64 each layout of the matrix trains two steps on samples with uneven documents; losses,
gradient norms, every gradient of every step, every weight after them and an evaluation must equal the one-rank run's to
1e-9 relative."""

import pytest

from megalite.parity.trajectory import rank_trajectory
from tests.parity.covering import AT_LEAST, PAIRS, cannot_be, name_of, pairs_of, rows_on_file
from tests.parity.factors import FAMILIES, Z1, Settings, refusal, settings_of, world_of
from tests.parity.reference import STEPS, TOLERANCE, reference
from tests.support.ranks import run_ranks
from tests.support.same import require_same
from tests.support.tiny import BIASED, LATENT, MAMBA, NEXT, SPARSE, rows_of, tiny_config, whole, words

TWO: Settings = {"num_layers": 2}

QWEN: Settings = (
    FAMILIES["qwen2-moe"]
    | NEXT
    | words(
        "add_qkv_bias=false moe_router_pre_softmax=false norm_zero_centered qk_norm rotary_percent=0.5 kv_channels=8"
    )
)
"""Qwen3-Next."""

HYBRID: Settings = (
    MAMBA
    | BIASED
    | words("num_experts=4 moe_ffn_hidden_size=16 moe_shared_expert_intermediate_size=16 tie_embeddings=false")
)
"""Nemotron 3: Mamba-2, attention and experts."""

GROUPS: dict[str, Settings] = {
    **FAMILIES,
    "LATENT": LATENT,
    "Z1": Z1,
    "QWEN": QWEN,
    "HYBRID": HYBRID,
    "MAMBA": MAMBA,
    "SPARSE": SPARSE,
    "TWO": TWO,
    "GRANITE": words("embedding_multiplier=3.0 residual_multiplier=0.4 logits_scaling=2.5"),
    "FEW": {**TWO, "micro_batch_size": 2, "global_batch_size": 4},  # for collectives over eight ranks
    "SIX": {"global_batch_size": 6},
    "RAMP": {"rampup_batch_size": [4, 4, 8], "global_batch_size": 12},
    "STEPWISE": {"step_batch_size_schedule": "0:4 64:8", "global_batch_size": None},
    "SERVER": {"dp_strategy": "parameter-server", "server_chunk_mb": 0.01},
    "SHARDED": {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.004},
    "SHARED": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "shared_experts"]},
}

ODD = rows_of(
    """
tp8-one-group: qwen kv_channels=4 tp=8 sequence_parallel FEW
tp8-two-groups: mistral tp=8 attention_dropout=0.1 FEW
tp4-one-group-zb-muon: qwen tp=4 pp=2 pipeline_schedule=zb-h1 optimizer=muon FEW
tp4-latent-sp-muon: LATENT recompute_granularity=selective recompute_modules=["layernorm","mla_up_proj"] tp=4 dp=2
  sequence_parallel optimizer=muon FEW
tp2-latent-plain-a2a2-zb: LATENT q_lora_rank=null qk_norm=false position_embedding_type=none mtp_num_layers=2 tp=2 cp=2
  cp_comm_type=a2a pp=2 pipeline_schedule=zb-h1 FEW
tp2-a2a2-one-group-sinks: qwen softmax_type=learnable recompute_granularity=selective tp=2 cp=2 cp_comm_type=a2a
  attention_dropout=0.1 FEW
tp2-dp2-zero3-gpt-oss: gpt-oss tp=2 dp=2 ep=2 sequence_parallel dp_strategy=fully-sharded FEW
cp2-dp2-zero3-latent-sinks: LATENT softmax_type=learnable recompute_granularity=selective cp=2 dp=2
  dp_strategy=fully-sharded FEW
tp2-a2a4-one-group: qwen tp=2 cp=4 cp_comm_type=a2a FEW
tp4-lamb-sharded-server: qwen tp=4 dp=2 optimizer=lamb dp_strategy=sharded-parameter-server server_chunk_mb=0.01 FEW
cp8: llama cp=8 FEW
cp8-a2a: gpt cp=8 cp_comm_type=a2a FEW
cp3: llama cp=3 seq_length=18 FEW
ep8: deepseek dp=8 ep=8 dp_strategy=distributed-optimizer TWO SHARED
zero3-dp8: gemma dp=8 dp_strategy=fully-sharded reduction_order=rank TWO
zero3-tp2-cp2: mixtral tp=2 cp=2 dp=2 sequence_parallel dp_strategy=fully-sharded recompute_granularity=full FEW
hybrid2-tp2-muon: mistral Z1 tp=2 dp=4 sequence_parallel shard_gradients dp_instances=2 optimizer=muon
  overlap_grad_reduce=false TWO
hybrid2-zb-tied: Z1 pp=2 dp=4 pipeline_schedule=zb-h1 shard_gradients dp_instances=2 reduction_order=rank TWO
hybrid2-pp2-few: llama Z1 pp=2 dp=4 shard_gradients dp_instances=2 TWO
hybrid3-cp2-lamb: qwen cp=2 dp=3 dp_strategy=fully-sharded dp_instances=3 optimizer=lamb SIX TWO
hybrid3-experts-alone: mixtral tp=2 etp=1 ep=4 dp=4 dp_strategy=fully-sharded dp_instances=2 TWO
zero3-hybrid-pp2-host: llama dp=4 pp=2 dp_strategy=fully-sharded dp_instances=2 optimizer_cpu_offload
  optimizer_offload_fraction=0.6 optimizer=muon ema_decay=0.5 eval_ema qk_clip qk_clip_threshold=0.05 TWO
balanced-gathered-latent-qk-clip: deepseek-v3 cp=2 dp=2 ep=2 cp_comm_type=allgather context_parallel_load_balancer=area
  reset_attention_mask optimizer=muon qk_clip qk_clip_threshold=0.05 FEW
mup-zero3-ep2: deepseek-v3 use_mup mup_base_hidden_size=8 tp=2 dp=2 ep=2 dp_strategy=fully-sharded FEW
mup-tied-pp2: gpt use_mup mup_base_hidden_size=16 tp=2 pp=2 TWO
granite-tp2-sp-pp2: llama GRANITE tp=2 sequence_parallel pp=2 hidden_dropout=0.1 FEW
biased-softmax-tp2-ep2: mixtral moe_router_enable_expert_bias tp=2 dp=2 ep=2 sequence_parallel dp_strategy=fully-sharded FEW
granite-moe-cp2-ep2-mtp-zb: mixtral GRANITE cp=2 dp=2 ep=2 pp=2 mtp_num_layers=1 pipeline_schedule=zb-h1 TWO
granite-zero3-recomputed-norms: gpt GRANITE tp=2 dp=2 dp_strategy=fully-sharded recompute_granularity=selective
  recompute_modules=["layernorm"] FEW
server-pp2: pp=2 dp=3 SERVER SIX TWO
server-zb-tied: gpt pp=2 dp=2 pipeline_schedule=zb-h1 SERVER TWO
server-ep2: mixtral ep=2 dp=4 SERVER TWO
ramp-pp2-z1: pp=2 dp=2 Z1 RAMP TWO
batches-of-a-schedule-z1: dp=2 Z1 STEPWISE TWO
experts-over-tp: mixtral tp=2 etp=1 reduction_order=rank TWO
experts-over-tp-server: mixtral tp=2 etp=1 SHARDED reduction_order=rank TWO
next-tp2-sp-ep2: QWEN tp=2 dp=2 ep=2 sequence_parallel recompute_granularity=selective optimizer=muon FEW
next-tp4-one-group-zb: QWEN num_query_groups=2 linear_num_key_heads=4 tp=4 pp=2 pipeline_schedule=zb-h1 FEW
next-pp2-vpp2-host: QWEN linear_attention_freq=[1,0,1,1] pp=2 vpp=2 cpu_offloading_num_layers=1 micro_batch_size=2
next-cp4-documents-zero3: QWEN cp=4 dp=2 reset_attention_mask reset_position_ids dp_strategy=fully-sharded FEW
next-tp2-cp2-a2a-full: QWEN tp=2 cp=2 dp=2 cp_comm_type=a2a reset_attention_mask eod_mask_loss
  context_parallel_load_balancer=headtail recompute_granularity=full sequence_parallel FEW
mamba-tp2-sp-ep2: HYBRID tp=2 dp=2 ep=2 sequence_parallel recompute_granularity=selective recompute_modules=["moe"]
  micro_batch_size=2 global_batch_size=4
mamba-tp4-zb: MAMBA tp=4 pp=2 pipeline_schedule=zb-h1 micro_batch_size=2 global_batch_size=4
mamba-pp2-vpp2-host: HYBRID pp=2 vpp=2 cpu_offloading_num_layers=1 micro_batch_size=2
mamba-cp2-tp2-documents-zero3: MAMBA tp=2 cp=2 dp=2 reset_attention_mask dp_strategy=fully-sharded
  recompute_granularity=full micro_batch_size=2 global_batch_size=4
mamba-cp2-balanced-zero1-muon: HYBRID Z1 cp=2 dp=2 reset_attention_mask context_parallel_load_balancer=area optimizer=muon
mamba-alone: MAMBA no_mlp_freq=[1] linear_attention_freq=[5] tp=2 pp=2 dp=2 Z1 sequence_parallel
mamba-mtp-ahead: MAMBA no_mlp_freq=[0,1,0,0] mtp_num_layers=1 pp=2 recompute_granularity=full recompute_ahead dp=2
next-cp2-balanced-zero1: QWEN Z1 cp=2 dp=2 reset_attention_mask context_parallel_load_balancer=area linear_conv_kernel_dim=1
  qk_norm=false qk_clip qk_clip_threshold=0.05 FEW
sparse-tp2-sp-pp2: SPARSE tp=2 pp=2 sequence_parallel reset_attention_mask micro_batch_size=2
sparse-tp2-zb-plain: SPARSE q_lora_rank=null qk_norm=false tp=2 pp=2 dp=2 Z1 pipeline_schedule=zb-h1 mtp_num_layers=1
  mtp_loss_scaling_factor=0.4 dsa_indexer_use_sparse_loss
sparse-pp2-vpp2-ep2-zero2: deepseek-v3 SPARSE pp=2 vpp=2 dp=2 ep=2 Z1 shard_gradients optimizer=muon
  recompute_granularity=selective recompute_modules=["mla_up_proj","moe"]
sparse-cp2-zero3-full: SPARSE tp=2 cp=2 dp=2 cp_comm_type=allgather dp_strategy=fully-sharded sequence_parallel
  reset_attention_mask recompute_granularity=full dsa_indexer_rope_interleaved dsa_indexer_k_norm_epsilon=1e-3 FEW
sparse-cp4-documents-host: SPARSE cp=4 cp_comm_type=allgather context_parallel_load_balancer=area reset_attention_mask
  reset_position_ids cpu_offloading_num_layers=2 recompute_granularity=selective recompute_modules=["layernorm"] FEW
decayed-norms: qwen apply_wd_to_qk_layernorm tp=2 pp=2 dp=2 Z1 weight_decay=0.5 FEW
nemotron: gpt position_embedding_type=rope rotary_percent=0.5 activation=squared_relu decoupled_lr=0.02 tp=2 dp=2
  dp_strategy=distributed-optimizer FEW
gpt-j-decoupled: llama rotary_interleaved decoupled_lr=0.03 decoupled_min_lr=0.01 pp=2 cp=2 TWO
decoupled-tied-pp2: gpt decoupled_lr=0.03 pp=2 dp=2 TWO
multipliers-zero2-pp2: gpt lr_multipliers=["embedding.*=0.2","layers.0.*=3","*.qkv.weight=0.5"] decoupled_lr=0.03 pp=2
  dp=2 dp_strategy=distributed-optimizer shard_gradients TWO
sft-dp2-pp2: gpt sft eod_mask_loss=false dp=2 pp=2 TWO
sft-tp2-cp2: llama sft eod_mask_loss=false tp=2 cp=2 FEW
packed-tp2-sp-pp2: gpt packing=best-fit tp=2 sequence_parallel pp=2 micro_batch_size=2 TWO
packed-window-cp2-z1: mistral Z1 packing=best-fit cp=2 dp=2 micro_batch_size=2 TWO
pp3-dp2-average: num_layers=7 pp=3 dp=2 Z1 ema_decay=0.5 eval_ema
pp8: llama num_layers=8 pp=8
pp2-vpp3: num_layers=7 pp=2 vpp=3 global_batch_size=4
head-alone: llama tp=2 pp=2 pipeline_layers=[2,0] TWO micro_batch_size=2
head-alone-vpp2: num_layers=7 pp=2 vpp=2 pipeline_layers=[3,2,2,0] dp=2
ends-alone-zb-v: num_layers=5 pp=2 vpp=2 pipeline_layout=E|ttt|tt|L pipeline_schedule=zb-v dp=2 pipeline_check_memory
pp4-zb-v-tied: num_layers=9 pp=4 vpp=2 pipeline_schedule=zb-v tp=2
pp3-vpp2-few: num_layers=6 pp=3 vpp=2 global_batch_size=2
mixtral-losses-of-two: mixtral tp=2 cp=2 ep=2 sequence_parallel moe_aux_loss_coeff=0.1 moe_aux_loss_sequences=2 FEW
sinkhorn-tp2-cp2-full: switch moe_router_sinkhorn moe_router_score_function=sigmoid moe_router_pre_softmax=false tp=2 cp=2
  ep=2 sequence_parallel recompute_granularity=full FEW
sinkhorn-pp2-dp2-zb: mixtral moe_router_sinkhorn moe_router_pre_softmax pp=2 dp=2 ep=2 pipeline_schedule=zb-h1
  recompute_granularity=selective recompute_modules=["core_attn","moe"] micro_batch_size=2 TWO
mixtral-uneven: mixtral pp=2 ep=2 dp=2 pipeline_layers=[3,1] moe_aux_loss_coeff=0.1 micro_batch_size=2
""",
    GROUPS,
)
"""Sizes that the factors leave out. In `experts-over-tp`, ranks with the same experts are tensor-parallel ranks, which
layers use in the last backward: overlapped sums must not interfere with the layers' collectives."""

ROWS = rows_on_file()


AXES_OF_GROUPS = ("rank_order", "tp", "cp", "pp", "dp", "ep", "etp", "dp_instances", "pipeline_schedule")


def groups_of(settings: Settings) -> tuple[int, list[str]]:
    """Layouts that agree in these values have the same process groups, so the pool's ranks reuse them, and the job if the
    number of ranks is equal."""
    return world_of(settings), [str(settings.get(axis)) for axis in AXES_OF_GROUPS]


NAMED = {"-".join(name_of(row).replace("=", "").split()): settings_of(row) for row in ROWS}
LAYOUTS = dict(sorted({**NAMED, **ODD}.items(), key=lambda item: groups_of(item[1])))


@pytest.mark.parametrize("name", LAYOUTS, ids=list(LAYOUTS))
def test_layout_equals_one_rank(name: str) -> None:
    """Parity with the sanitizer: no tensor is used before it has arrived, or changed while it is sent."""
    settings = {**LAYOUTS[name], "sanitize_communication": True}
    world = world_of(settings)
    ours = whole(run_ranks(world, rank_trajectory, tiny_config(world, **settings), STEPS))
    require_same(ours, reference(settings), TOLERANCE)


def test_every_compatible_pair_of_values_is_in_some_row() -> None:
    seen = {pair for row in ROWS for pair in pairs_of(row)}
    assert [pair for pair in PAIRS if pair not in seen] == []
    assert [pair for pair in seen if cannot_be(pair)] == []


def test_matrix_is_long_valid_and_without_duplicates() -> None:
    assert len(ROWS) >= AT_LEAST
    assert len(LAYOUTS) == len(ROWS) + len(ODD)
    assert {name: refusal(settings) for name, settings in LAYOUTS.items() if refusal(settings)} == {}

"""Communication formulas against the volumes that the groups move in a real step."""

import math
from collections import Counter
from typing import Any

import pytest

import examples.extend.smooth_z  # noqa: F401  # registers its loss, also in the ranks
from megalite.config.run import RunConfig
from megalite.planner.communication import group_sizes, step_volumes, wire_factor
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LATENT, LLAMA, MAMBA, NEXT, SPARSE, Runner, build, rows_of, tiny_config
from tests.support.traffic import counted

GROUPS: dict[str, dict[str, Any]] = {
    "SP": {"sequence_parallel": True},
    "Z1": {"dp_strategy": "distributed-optimizer"},
    "Z2": {"dp_strategy": "distributed-optimizer", "shard_gradients": True},
    "Z3": {"dp_strategy": "fully-sharded", "num_layers": 4},
    "SELECTIVE": {"recompute_granularity": "selective"},
    "FULL": {"recompute_granularity": "full"},
    "LLAMA": LLAMA,
    "LATENT": LATENT,
    "NEXT": NEXT,
    "SPARSE": SPARSE,
    "MAMBA": MAMBA,
    "OLMO2": {**LLAMA, "qk_norm": True, "qk_norm_all_heads": True, "post_norms": True},
    "MOE": {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.01},
    "SHARED": {"moe_shared_expert_intermediate_size": 16, "recompute_granularity": "selective"},
    "HIERARCHICAL": {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]},
}
LAYOUTS = rows_of(
    """
packed sp: tp=2 SP micro_batch_size=2 packing=best-fit
gathered logits, further token: tp=2 SP LLAMA precision=bf16 mtp_num_layers=1 loss=smooth-z
dp4 zero-1 bf16, noise scale: dp=4 Z1 precision=bf16 log_gradient_noise_scale
dp4 fused, bf16 wire: dp=4 dp_strategy=fused-all-reduce precision=bf16 wire_dtype=bf16 fusion_threshold_mb=0.01
dp2 cp2 by rank, largest logits: dp=2 cp=2 qk_clip SELECTIVE reduction_order=rank
dp2 tp2 sp zero-2: dp=2 tp=2 SP Z2
dp2 cp2 pp2 tied zero-2, two instances by rank: dp=2 cp=2 pp=2 Z2 reduction_order=rank dp_instances=2
dp6 zero-3, fp16 wire, three instances: dp=6 Z3 LLAMA precision=bf16 wire_dtype=fp16 dp_instances=3
dp2 gpipe, a layer each, zero-3: dp=2 pp=4 Z3 pipeline_schedule=gpipe
dp2 pp2 zb-v tied zero-3, by rank: dp=2 pp=2 vpp=2 Z3 tie_embeddings pipeline_schedule=zb-v reduction_order=rank
dp2 pp2 ahead, further tokens, zero-3: dp=2 pp=2 Z3 LLAMA mtp_num_layers=1 FULL recompute_ahead
dp4 ep2 zero-3, further tokens: dp=4 ep=2 LLAMA Z3 num_experts=4 moe_ffn_hidden_size=16 mtp_num_layers=2
dp4 sharded server: dp=4 dp_strategy=sharded-parameter-server precision=fp32 server_chunk_mb=0.004
tp2 pp2, messages scattered: tp=2 pp=2 mtp_num_layers=1 LLAMA
tp4 pp2, messages whole: tp=4 pp=2 scatter_gather_tensors_in_pipeline=false
tp2 pp2 sp bf16, largest of messages: tp=2 pp=2 vpp=2 SP LLAMA mtp_num_layers=1 precision=bf16
  pipeline_compression=topk:0.1
tp2 full recompute of two layers, dropout: tp=2 hidden_dropout=0.1 FULL recompute_num_layers=2 num_layers=4
tp2 olmo2 recomputed: tp=2 OLMO2 FULL pre_norms=false
cp2 ring: cp=2 LLAMA qk_norm
cp4 gathered bf16, core recomputed: cp=4 LLAMA cp_comm_type=allgather precision=bf16 SELECTIVE
cp4 in two groups, one key, dropout: cp=4 LLAMA HIERARCHICAL num_query_groups=1 attention_dropout=0.1
cp4 in two groups, latent, recomputed:
  cp=4 LATENT HIERARCHICAL SELECTIVE recompute_modules=["core_attn","mla_up_proj"]
tp2 cp2 sp latent, recomputed: tp=2 cp=2 SP LATENT cp_comm_type=a2a SELECTIVE recompute_modules=["mla_up_proj"]
tp2 cp2 latent, queries from the input: tp=2 cp=2 LATENT q_lora_rank=null qk_norm=false
tp2 cp2 sp sparse, recomputed: tp=2 cp=2 SP SPARSE cp_comm_type=allgather SELECTIVE precision=bf16
  recompute_modules=["core_attn","mla_up_proj"] seq_length=528
tp2 pp2 sparse, whole layers recomputed: tp=2 pp=2 SPARSE FULL
tp2 cp2 sp linear: tp=2 cp=2 SP NEXT SELECTIVE recompute_modules=["core_attn"]
tp2 cp2 sp state space, layers without an MLP: tp=2 cp=2 SP MAMBA FULL
pp2 tp2 state space, MLP recomputed: tp=2 pp=2 MAMBA SELECTIVE recompute_modules=["mlp"]
tp4 linear, two ranks share a key, recomputed: tp=4 NEXT num_query_groups=2 FULL
pp2 dp2 full, a further token of experts: pp=2 dp=2 LLAMA Z1 tie_embeddings mtp_num_layers=1 num_experts=4
  moe_router_score_function=sigmoid moe_router_enable_expert_bias FULL
tp4, two ranks share a key: tp=4 LLAMA num_query_groups=2 kv_channels=8
tp4 cp2 ring sp, one key: tp=4 cp=2 SP LLAMA num_query_groups=1 FULL
ep2 etp1 tp2 sp cp2, padded: dp=1 tp=2 cp=2 ep=2 etp=1 SP MOE Z1 moe_expert_capacity_factor=1.5
  moe_pad_expert_input_to_capacity
ep2 tp2, the shared expert recomputed: dp=2 tp=2 ep=2 etp=1 MOE SHARED recompute_modules=["shared_experts"]
dp2 tp2 sp llama, muon: dp=2 tp=2 SP LLAMA optimizer=muon
dp2 tp2 latent, soap: dp=2 tp=2 LATENT optimizer=soap
tp2 cp2, Sinkhorn's algorithm, experts recomputed: tp=2 cp=2 ep=2 MOE moe_aux_loss_coeff=0.0 moe_router_sinkhorn SELECTIVE
  recompute_modules=["moe"]
etp2 tp2, experts recomputed, shared, capacity: dp=2 tp=2 ep=2 etp=2 MOE SHARED recompute_modules=["mlp","moe"]
  moe_expert_capacity_factor=1.9 moe_first_dense_layers=1
""",
    GROUPS,
)
DROPPING = "etp2 tp2, experts recomputed, shared, capacity"


def _world(settings: dict[str, Any]) -> int:
    return math.prod(settings.get(axis, 1) for axis in ("tp", "cp", "dp", "pp"))


def _config(settings: dict[str, Any]) -> RunConfig:
    """Few layers and microbatches, but enough to show that the formulas count them."""
    pp, dp = settings.get("pp", 1), settings.get("dp", 1)
    count = dp * settings.get("micro_batch_size", 1) * (2 if pp == 1 else 4)
    few = {"num_layers": max(2, pp * settings.get("vpp", 1)), "global_batch_size": count}
    return tiny_config(_world(settings), **{**few, **settings})


def volumes_of_a_step(context: RankContext, settings: dict[str, Any]) -> dict[str, Any]:
    """Counted in the second step, which gathers the first step's parameters, as every later step does."""
    runner = Runner(build(context, _config(settings)))
    runner.step()
    with counted() as (found, _):
        runner.step()
        runner.replica.strategy.wait_until_idle()
    return {"pp": runner.replica.topology.pp.rank, "volumes": dict(found)}


def expected(settings: dict[str, Any], pipeline_rank: int) -> dict[tuple[str, str], int]:
    config = _config(settings)
    t = config.training
    assert t.global_batch_size is not None and config.parallel.dp is not None
    count = t.global_batch_size // (t.micro_batch_size * config.parallel.dp)
    return dict(step_volumes(config, pipeline_rank, count))


@pytest.mark.parametrize("name", sorted(LAYOUTS.keys() - {DROPPING}, key=lambda name: (_world(LAYOUTS[name]), name)))
def test_bytes_of_a_step_equal_the_formulas(name: str) -> None:
    settings = LAYOUTS[name]
    ranks = run_ranks(_world(settings), volumes_of_a_step, settings)
    rows = [(group, "all-to-all") for group in ("ep", "expert-tp", "tp", "tp-dp-cp")]
    total: Counter[tuple[str, str]] = Counter()
    total_expected: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        formula = expected(settings, rank["pp"])
        assert formula.keys() == rank["volumes"].keys()
        for key, size in formula.items():
            if key not in rows:
                assert rank["volumes"][key] == size, key
        total.update(rank["volumes"])
        total_expected.update(formula)
    # Rows of experts depend on the routing; each message has one sender among ranks with the same key, and each rank updates
    # other matrices. Only the sum over all ranks is predictable.
    assert total == total_expected


AVERAGED: dict[str, Any] = {"dp_strategy": "local-sgd", "sync_interval": 4, "average_optimizer_state": True}
LATE: dict[str, Any] = {"dp_strategy": "local-sgd", "sync_interval": 4, "sync_delay": 2}
SHARDED: dict[str, Any] = {"dp_strategy": "fully-sharded", "num_layers": 4, "global_batch_size": 8}
GOSSIP: dict[str, Any] = {"dp_strategy": "gossip"}
LOSSY: dict[str, dict[str, Any]] = {
    "onebit": {"grad_compression": "onebit"},
    "topk": {"grad_compression": "topk", "topk_density": 0.1},
    "powersgd fp64": {"grad_compression": "powersgd", "precision": "fp64"},
    "onebit-adam": {"optimizer": "onebit-adam", "freeze_step": 1},
    "local-sgd": {"dp_strategy": "local-sgd", "sync_interval": 4},
    "local-sgd, late": LATE,
    "local-sgd averages muon": {**AVERAGED, "optimizer": "muon", "wire_dtype": "bf16"},
    "diloco": {"dp_strategy": "diloco", "sync_interval": 4, "sync_fragments": 2},
    "local-sgd, hierarchical, bf16": {**LATE, "dp_instances": 2, "wire_dtype": "bf16"},
    "gossip, hierarchical, 8 bits": {**GOSSIP, "dp_instances": 2, "gossip_algorithm": "choco-sgd"},
    "gossip, 8 bits, fp64": {**GOSSIP, "gossip_algorithm": "choco-sgd", "precision": "fp64"},
    "fully-sharded, late, tied": {**SHARDED, "overlap_param_gather": False, "tie_embeddings": True},
    "fully-sharded, two layers, not tied": {**SHARDED, **LLAMA, "num_layers": 2},
}


def four_ranks(settings: dict[str, Any]) -> RunConfig:
    few = {"num_layers": 2, "global_batch_size": 4, "hidden_size": 64}
    return tiny_config(4, **{"dp": 4, "precision": "fp32", **few, **settings})


def bytes_sent(context: RankContext, settings: dict[str, Any]) -> float:
    """Mean over four steps, after two steps."""
    runner = Runner(build(context, four_ranks(settings)))
    for _ in range(2):
        runner.step()
    runner.replica.strategy.take_wire_bytes()
    sent = sum(runner.step().wire_bytes for _ in range(4)) / 4
    runner.replica.strategy.close()
    return sent


@pytest.mark.parametrize("name", LOSSY)
def test_bytes_of_varying_and_lossy_strategies(name: str) -> None:
    """Within 10 %, as scales of compressed gradients are not planned. Each gather of sharded parameters is."""
    settings = LOSSY[name]
    config = four_ranks(settings)
    count = int(config.training.global_batch_size or 0) // 4
    volumes, sizes = step_volumes(config, 0, count), group_sizes(config)
    planned = sum(
        size * wire_factor(operation, sizes[group])
        for (group, operation), size in volumes.items()
        if group.endswith("dp-cp") and (operation != "all-reduce" or size > 8)
    )
    exact = settings.get("dp_strategy") in ("fully-sharded", "gossip") or "sync_delay" in settings
    for sent in run_ranks(4, bytes_sent, settings):
        assert sent == pytest.approx(planned, rel=1e-9 if exact else 0.1)


def test_dropped_tokens_are_not_sent() -> None:
    settings = LAYOUTS[DROPPING]
    ranks = run_ranks(4, volumes_of_a_step, settings)
    formula = expected(settings, 0)
    for rank in ranks:
        assert formula.keys() == rank["volumes"].keys()
        for key, size in formula.items():
            if key[1] != "all-to-all":
                assert rank["volumes"][key] == size, key
    for key in formula:
        if key[1] == "all-to-all":
            assert sum(rank["volumes"][key] for rank in ranks) <= 4 * formula[key]


def test_groups_of_one_rank_send_nothing() -> None:
    assert step_volumes(tiny_config(1), 0, 8) == {}
    assert set(group_sizes(tiny_config(1)).values()) == {1}
    factors = [wire_factor(operation, 4) for operation in ("all-reduce", "all-gather", "all-to-all", "send")]
    assert factors == [1.5, 0.75, 0.75, 1.0]

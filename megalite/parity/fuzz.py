"""Compare random legal layouts and models with one rank: odd shapes, uneven stages, combinations of features."""

import math
import random
import shlex
import time
from collections.abc import Callable
from typing import Any

from megalite.config.describe import settings
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.model import GATED
from megalite.config.optimizer import MUON_SCALES, OPTIMIZERS
from megalite.config.rules.compute import OFFLOAD_MODULES
from megalite.config.strategies import STRATEGIES
from megalite.parity.pool import RankPool
from megalite.parity.report import Report, run_parity
from megalite.parity.shrink import EXACT_STRATEGIES, MAX_BATCH, MAX_WORLD, Shrunk, shrink

Drawn = dict[str, Any]  # setting -> value


def fuzz(
    seconds: float, *, seed: int, steps: int, tolerance: float | None, failed: Callable[[str, Report], None]
) -> tuple[int, int]:
    """Try random configs until the time is up; return (number tried, number failed). Config i depends only on (seed,
    i), so a longer run with the same seed starts with the same configs. `failed`: called with the command line that
    reproduces a failure, and its report."""
    end = time.monotonic() + seconds
    tried = failures = 0
    pool = RankPool(MAX_WORLD)
    try:
        while time.monotonic() < end or not tried:
            arguments, shrunk = draw(random.Random(f"{seed} {tried}"))
            if pool.stopped:  # by the previous failure
                pool = RankPool(MAX_WORLD)
            report = run_parity(shrunk, steps=steps, tolerance=tolerance, pool=pool)
            tried += 1
            if not report.same:
                failures += 1
                extra = [] if tolerance is None else ["--tolerance", str(tolerance)]
                failed(shlex.join(["megalite", "parity", *arguments, "--steps", str(steps), *extra]), report)
    finally:
        pool.stop()
    return tried, failures


def draw(generator: random.Random) -> tuple[list[str], Shrunk]:
    """Return the flags of a random small legal config, and the result of `shrink`, which keeps its sizes."""
    while True:
        arguments = [word for name, value in _settings(generator).items() for word in settings()[name].words(value)]
        invocation = parse_arguments(arguments)
        keep = frozenset({"eod_mask_loss"} & invocation.explicit)
        try:
            return arguments, shrink(invocation.config, keep=keep, explicit=invocation.explicit)
        except ConfigError:
            continue  # only the validator checks which settings are compatible


def _settings(generator: random.Random) -> Drawn:
    drawn = _layout(generator)
    if generator.random() < 0.4:
        drawn |= _experts(generator, drawn)
    for part in (_shape, _switches, _sparse, _stages, _batch, _schedule, _recompute, _offload):
        drawn |= part(generator, drawn)
    return drawn


def _layout(generator: random.Random) -> Drawn:
    sizes = (1, 1, 2, 2, 3, 4)
    while True:
        tp, cp, pp, dp = (generator.choice(sizes) for _ in range(4))
        if 1 < tp * cp * pp * dp <= MAX_WORLD:
            break
    drawn: Drawn = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    if tp > 1 and generator.random() < 0.6:
        drawn["sequence_parallel"] = True
    if cp > 1:
        drawn["cp_comm_type"] = generator.choice(("p2p", "p2p", "allgather", "a2a", "a2a", "a2a+p2p"))
    if drawn.get("cp_comm_type") == "a2a+p2p":
        inner = generator.choice([size for size in range(1, cp + 1) if cp % size == 0])
        drawn["hierarchical_context_parallel_sizes"] = [inner, cp // inner]
    if pp > 1:
        drawn["vpp"] = generator.choice((1, 1, 2, 3))
    drawn |= _strategy(generator, dp * cp)
    drawn["optimizer"] = generator.choice(
        ("adam", "adam", "sgd", "lamb", "muon", "soap", "one-sided-soap", "schedule-free-adamw")
    )
    if drawn["optimizer"] == "sgd":
        drawn |= {"sgd_momentum": 0.8, "sgd_nesterov": generator.random() < 0.5}
    elif drawn["optimizer"] == "muon":
        drawn |= {"muon_scale_mode": generator.choice(MUON_SCALES), "muon_split_qkv": generator.random() < 0.5}
    elif OPTIMIZERS.facts(drawn["optimizer"]).sides:
        drawn["soap_frequency"] = generator.randint(1, 2)
    elif drawn["optimizer"] == "schedule-free-adamw":
        drawn["lr_decay_style"] = "constant"
    if drawn["optimizer"] != "schedule-free-adamw":
        drawn |= {"ema_decay": 0.5, "eval_ema": True} if generator.random() < 0.25 else {}
        drawn |= {"qk_clip": True, "qk_clip_threshold": 0.05} if generator.random() < 0.25 else {}
    if STRATEGIES.facts(drawn["dp_strategy"]).searched and generator.random() < 0.25:
        drawn["lr_multipliers"] = ["*.out.weight=0.3", "layers.0.*=2"]
    drawn["overlap_grad_reduce"] = generator.random() < 0.5
    drawn["ddp_bucket_size"] = generator.choice((1, 200, 1000, 3000))
    drawn["rank_order"] = generator.choice(("tp-cp-ep-dp-pp", "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))
    return drawn


def _strategy(generator: random.Random, replicas: int) -> Drawn:
    found: Drawn = {"dp_strategy": generator.choice(EXACT_STRATEGIES)}
    strategy = STRATEGIES.facts(found["dp_strategy"])
    if strategy.has("overlap_param_gather"):
        found["overlap_param_gather"] = generator.random() < 0.5
    if strategy.has("shard_gradients"):
        found["shard_gradients"] = generator.random() < 0.5
    parts = [n for n in range(2, replicas) if replicas % n == 0]
    if strategy.has("dp_instances") and parts and generator.random() < 0.5:
        found["dp_instances"] = generator.choice(parts)
    if strategy.has("fusion_threshold_mb"):
        found["fusion_threshold_mb"] = generator.choice((0.0001, 0.005, 64.0))
    if strategy.has("server_chunk_mb"):
        found["server_chunk_mb"] = generator.choice((0.001, 0.003, 4.0))
    elif generator.random() < 0.3:
        found["reduction_order"] = "rank"
    return found


def _experts(generator: random.Random, drawn: Drawn) -> Drawn:
    ep = generator.choice([n for n in (1, 2, 3, 4) if drawn["tp"] * drawn["cp"] * drawn["dp"] % n == 0])
    etp = generator.choice([n for n in (1, 2, 3, 4) if drawn["tp"] * drawn["cp"] * drawn["dp"] % (n * ep) == 0])
    experts = ep * generator.randint(1, 8 // ep)
    topk = generator.randint(1, min(experts, 3))
    pre_softmax = topk == 1 or generator.random() < 0.4
    found: Drawn = {"num_experts": experts, "ep": ep, "etp": etp, "moe_router_topk": topk}
    found |= {"moe_router_pre_softmax": pre_softmax, "moe_ffn_hidden_size": etp * generator.randint(3, 9)}
    if generator.random() < 0.3:
        found["moe_shared_expert_intermediate_size"] = drawn["tp"] * generator.randint(2, 7)
        found["moe_shared_expert_gate"] = generator.random() < 0.5
    if generator.random() < 0.4:
        found |= {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False}
    found["moe_router_enable_expert_bias"] = generator.random() < 0.3
    if generator.random() < 0.3 and experts % 2 == 0 and topk <= experts // 2:
        found |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    if generator.random() < 0.3:
        found["moe_add_bias_linear"] = True
    if generator.random() < 0.3:
        found["moe_first_dense_layers"] = 1
    if generator.random() < 0.3:
        found["moe_layer_freq"] = 2
    if generator.random() < 0.6:
        found |= {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
    if generator.random() < 0.4:
        found["moe_expert_capacity_factor"] = generator.choice((0.7, 1.0, 1.3))
        found["moe_token_drop_policy"] = generator.choice(("probs", "position"))
        found["moe_pad_expert_input_to_capacity"] = generator.random() < 0.5
    others = ("moe_aux_loss_coeff", "moe_router_num_groups", "moe_router_enable_expert_bias")
    if not any(found.get(name) for name in others) and generator.random() < 0.3:
        found["moe_router_sinkhorn"] = True
    return found


def _shape(generator: random.Random, drawn: Drawn) -> Drawn:
    tp, cp = drawn["tp"], drawn["cp"]
    groups = tp * _exchanging(drawn) * generator.choice((1, 1, 2))
    heads = groups * generator.choice((1, 1, 2, 3) if groups <= 5 else (1, 1, 2) if groups <= 8 else (1,))
    # Not 2: a norm over two channels is almost a sign, so a difference in the last bit becomes 1e-8, even on one rank.
    sizes: tuple[int, ...] = (4, 5, 6, 8)
    if generator.random() < 0.2:  # fewer groups than tp: ranks share key/value heads
        groups = generator.choice([share for share in range(1, tp + 1) if tp % share == 0])
        sizes = tuple(size for size in sizes if 2 * size * groups % tp == 0)
    size = generator.choice(sizes)
    found: Drawn = {"num_attention_heads": heads, "num_query_groups": groups, "hidden_size": heads * size}
    if generator.random() < 0.3:
        found |= {"kv_channels": size, "hidden_size": generator.randint(8, 48)}
    if groups == heads and generator.random() < 0.3:
        found |= _latents(generator)
        del found["num_query_groups"]
    over_tp = tp * cp if "sequence_parallel" in drawn or "num_experts" in drawn else 1
    unit = math.lcm(2 * cp if cp > 1 else 1, over_tp)
    s = unit * generator.randint(1, max(1, 36 // unit))
    found |= {"seq_length": s, "ffn_hidden_size": math.lcm(tp, drawn.get("etp", 1)) * generator.randint(3, 12)}
    found |= {"vocab_size": generator.randint(20, 130)}
    found["make_vocab_size_divisible_by"] = tp * generator.choice((1, 2, 3))
    if generator.random() < 0.25 and s > 2:
        found["sliding_window"] = generator.randint(2, s)
        if generator.random() < 0.5:
            found["window_attn_skip_freq"] = [generator.randint(2, 3)]
    if generator.random() < 0.2:
        found |= _linear_attention(generator, tp * cp)
    elif "multi_latent_attention" not in found:
        found["attention_output_gate"] = generator.random() < 0.2
    return found | ({"no_mlp_freq": [generator.randint(2, 3)]} if generator.random() < 0.1 else {})


def _exchanging(drawn: Drawn) -> int:
    """Return the number of context-parallel ranks that exchange heads."""
    default: int = drawn["cp"] if drawn.get("cp_comm_type") == "a2a" else 1
    return drawn.get("hierarchical_context_parallel_sizes", [default])[0]


def _latents(generator: random.Random) -> Drawn:
    plain, rotary = generator.randint(3, 8), 2 * generator.randint(1, 3)
    found: Drawn = {"multi_latent_attention": True, "kv_lora_rank": generator.randint(4, 12)}
    found |= {"qk_head_dim": plain, "qk_pos_emb_head_dim": rotary, "v_head_dim": generator.randint(3, plain + rotary)}
    return found | ({"q_lora_rank": generator.randint(4, 12)} if generator.random() < 0.5 else {})


def _linear_attention(generator: random.Random, ranks: int) -> Drawn:
    keys = ranks * generator.randint(1, 2)
    variant = generator.choice(("gated_delta_net", "mamba2"))
    found: Drawn = {"experimental_attention_variant": variant, "linear_num_key_heads": keys}
    found |= {"linear_attention_freq": [generator.randint(2, 3)], "linear_conv_kernel_dim": generator.randint(1, 4)}
    found |= {"linear_num_value_heads": keys * generator.randint(1, 2), "linear_key_head_dim": generator.randint(2, 6)}
    return found | {"linear_value_head_dim": generator.randint(2, 6)}


_SOMETIMES: dict[str, tuple[Any, ...]] = {
    "softmax_scale": (0.2, 0.7),
    "attn_logit_softcapping": (1.0, 5.0),
    "final_logit_softcapping": (2.0, 9.0),
    "softmax_type": ("off-by-one", "learnable"),
    "embedding_multiplier": (0.5, 6.0),
    "residual_multiplier": (0.2, 0.7),
    "logits_scaling": (0.5, 4.0),
}


def _switches(generator: random.Random, drawn: Drawn) -> Drawn:
    def chance(probability: float) -> bool:
        return generator.random() < probability

    found: Drawn = {
        "position_embedding_type": generator.choice(("learned_absolute", "rope", "rope", "none")),
        "normalization": generator.choice(("LayerNorm", "RMSNorm")),
        "activation": generator.choice(("gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh", "quick_geglu")),
        "add_bias_linear": chance(0.5),
        "tie_embeddings": chance(0.5),
        "norm_zero_centered": chance(0.3),
        "qk_norm": chance(0.3),
        "clip_grad": generator.choice((0.0, 0.3, 1.0)),
        "seed": generator.randint(0, 9999),
    }
    if found["activation"] in GATED and chance(0.3):
        found |= {"activation_func_clamp_value": generator.choice((0.05, 0.5)), "glu_linear_offset": 0.5}
    if found["position_embedding_type"] == "rope" and chance(0.3):
        found |= {
            "rope_scaling": generator.choice(("llama3", "yarn", "dynamic")),
            "rope_original_max_positions": max(2, drawn["seq_length"] // 2),
            "attn_temperature_beta": generator.choice((0.0, 0.3)),
        }
    if found["position_embedding_type"] == "rope":
        if chance(0.2):
            found["no_rope_freq"] = [2]
        if "sliding_window" in drawn and chance(0.5):
            found["rotary_base_local"] = 100.0
    if chance(0.3):
        found |= {"post_norms": True, "pre_norms": chance(0.5)}
    latent = "multi_latent_attention" in drawn
    if found["qk_norm"] and found["normalization"] == "RMSNorm" and not latent and chance(0.5):
        found["qk_norm_all_heads"] = drawn["num_query_groups"] % drawn["tp"] == 0
    if found["position_embedding_type"] != "learned_absolute" and chance(0.2):
        found |= {"mtp_num_layers": generator.randint(1, 2), "mtp_loss_scaling_factor": 0.4}
    for name, values in _SOMETIMES.items():
        if chance(0.15):
            found[name] = generator.choice(values)
    found["scale_embeddings"] = "embedding_multiplier" not in found and chance(0.3)
    if drawn["optimizer"] in ("adam", "schedule-free-adamw") and "softmax_scale" not in found and chance(0.15):
        found |= {"use_mup": True, "mup_base_hidden_size": 8}
    if not found["add_bias_linear"] and not latent:
        found["add_qkv_bias"] = chance(0.5)
    if chance(0.3):
        found["hidden_dropout"] = 0.1
    if chance(0.3):
        found["attention_dropout"] = 0.2
    if chance(0.2):
        found["eod_mask_loss"] = False
    if chance(0.4):
        found["reset_attention_mask"] = True
        if _exchanging(drawn) < drawn["cp"] and "attention_dropout" not in found and chance(0.5):
            found["context_parallel_load_balancer"] = "area"
    if chance(0.3):
        found["reset_position_ids"] = True
    return found


def _sparse(generator: random.Random, drawn: Drawn) -> Drawn:
    """Draw sparse attention, and drop from `drawn` what does not go with it."""
    if "multi_latent_attention" not in drawn or "linear_attention_freq" in drawn or generator.random() < 0.5:
        return {}
    for name in (
        *(
            "qk_clip",
            "qk_clip_threshold",
            "sliding_window",
            "window_attn_skip_freq",
            "rotary_base_local",
            "no_rope_freq",
        ),
        *("softmax_type", "attn_logit_softcapping", "attention_dropout", "reset_position_ids"),
        "hierarchical_context_parallel_sizes",
    ):
        drawn.pop(name, None)
    found: Drawn = {"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": generator.randint(1, 4)}
    found |= {"dsa_indexer_head_dim": generator.randint(6, 9), "dsa_indexer_topk": generator.randint(1, 12)}
    for name in ("dsa_indexer_use_sparse_loss", "dsa_indexer_rope_interleaved"):
        found[name] = generator.random() < 0.5
    found |= {"cp_comm_type": "allgather"} if drawn["cp"] > 1 else {}
    return found | {"dsa_indexer_loss_coeff": generator.choice((0.0, 0.2))}


def _stages(generator: random.Random, drawn: Drawn) -> Drawn:
    stages = drawn["pp"] * drawn.get("vpp", 1)
    layers = stages + generator.randint(0, max(1, min(4, 12 - stages)))
    found: Drawn = {"num_layers": min(layers, 12)}
    if generator.random() < 0.5 and stages > 1:
        cut = [1] * stages
        for _ in range(found["num_layers"] - stages):
            cut[generator.randrange(stages)] += 1
        found["pipeline_layers"] = cut
    return found


def _batch(generator: random.Random, drawn: Drawn) -> Drawn:
    micro = generator.choice((1, 1, 2))
    count = generator.randint(1, MAX_BATCH // (micro * drawn["dp"]))
    count = min(count, generator.choice((2, 4, 6, 8)))
    unit = micro * drawn["dp"]
    found: Drawn = {"micro_batch_size": micro, "global_batch_size": unit * count}
    if micro > 1 and drawn.get("moe_aux_loss_coeff") and generator.random() < 0.5:
        found["moe_aux_loss_sequences"] = micro
    if generator.random() < 0.15 and drawn["seq_length"] % 2 == 0:
        found["seq_length_warmup"] = [drawn["seq_length"] // 2, 2]
    if count > 1 and generator.random() < 0.15:
        first = unit * generator.randint(1, count - 1)
        found["rampup_batch_size"] = [first, unit * count - first, first]
    return found


def _schedule(generator: random.Random, drawn: Drawn) -> Drawn:
    pp, vpp = drawn["pp"], drawn.get("vpp", 1)
    if pp == 1 or generator.random() < 0.3:
        return {}
    if vpp == 1:
        found: Drawn = {"pipeline_schedule": generator.choice(("gpipe", "1f1b", "zb-h1", "zb-h2", "auto"))}
        if found["pipeline_schedule"] == "1f1b":
            found["pipeline_warmup"] = generator.choice(("pa", "pb"))
    elif vpp == 2 and generator.random() < 0.7:
        found = {"pipeline_schedule": generator.choice(("zb-v", "dualpipe-v", "looped-bfs", "auto"))}
    elif generator.random() < 0.5:
        found = {"microbatch_group_size_per_virtual_pipeline_stage": pp + generator.randint(0, 2)}
    else:
        found = {"pipeline_schedule": "looped-bfs"}
    if generator.random() < 0.3:
        found["pipeline_recv_prefetch"] = generator.randint(0, 4)
        found["pipeline_send_window"] = generator.randint(1, 3)
    return found


def _offload(generator: random.Random, drawn: Drawn) -> Drawn:
    if not OPTIMIZERS.facts(drawn["optimizer"]).host_passes or generator.random() < 0.7:
        return {}
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": generator.choice((0.4, 1.0))}


def _recompute(generator: random.Random, drawn: Drawn) -> Drawn:
    kind = generator.choice(("none", "none", "selective", "full"))
    found: Drawn = {}
    if generator.random() < 0.4:
        found["cpu_offloading_num_layers"] = generator.randint(1, 2)
    if generator.random() < 0.2:
        found["fine_grained_activation_offloading"] = True
        found["offload_modules"] = sorted(generator.sample(OFFLOAD_MODULES, generator.randint(1, 5)))
    if kind == "none":
        return found
    found["recompute_granularity"] = kind
    if kind == "selective":
        modules = ["core_attn", "layernorm", "mlp_act", "mlp", "moe"]
        modules += ["mla_up_proj"] * ("multi_latent_attention" in drawn)
        found["recompute_modules"] = sorted(generator.sample(modules, generator.randint(1, 3)))
    elif drawn["pp"] > 1 and generator.random() < 0.4:
        found["recompute_ahead"] = True
    else:
        found["recompute_method"] = generator.choice(("uniform", "block"))
        found["recompute_num_layers"] = generator.randint(1, 2)
    return found

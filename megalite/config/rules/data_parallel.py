"""Rules about data-parallel strategies, compression and networks, and what excludes what."""

from collections.abc import Mapping
from types import MappingProxyType

from megalite.config.errors import Findings
from megalite.config.parallel import DP_STRATEGIES, LOCAL_STRATEGIES
from megalite.config.rules.effect import divisors, refuse_elsewhere, refuse_idle
from megalite.config.run import RunConfig

LLAMA3_SETTINGS = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_positions")


def check_network(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Heads, groups, widths and positions must fit one another."""
    model, s = config.model, config.training.seq_length
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        below = model.hidden_size // heads * heads
        yield (
            f"hidden_size {model.hidden_size} is not divisible by num_attention_heads {heads}; use hidden_size "
            f"{below + heads}, or say the size of a head with --kv-channels {max(1, model.hidden_size // heads)}"
        )
    if heads % model.query_groups:
        yield (
            f"num_attention_heads {heads} is not divisible by num_query_groups {model.query_groups}; use "
            f"num_query_groups {divisors(heads)}"
        )
    dense = not all(map(model.is_moe_layer, range(model.num_layers))) or model.moe_ffn_hidden_size is None
    if dense and model.ffn_size < 1:
        yield (
            f"hidden_size {model.hidden_size} with {model.activation} gives an MLP of width 8·h/3 rounded down to a multiple of "
            f"64 = 0; set --ffn-hidden-size, e.g. 64"
        )
    if model.add_qkv_bias and model.add_bias_linear:
        yield (
            "add_qkv_bias has no effect with add_bias_linear, which gives every linear layer of attention a bias; remove "
            "it, or add --disable-bias-linear"
        )
    yield _check_rope(config, explicit)
    if model.max_position_embeddings is not None and s > model.max_position_embeddings:
        yield (
            f"seq_length {s} is more than max_position_embeddings {model.max_position_embeddings}; use "
            f"--max-position-embeddings {s} or a shorter sequence"
        )


def _check_rope(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """RoPE's settings need RoPE, and those of one kind of scaling that kind."""
    model = config.model
    positions = f"with position_embedding_type {model.position_embedding_type}"
    if model.position_embedding_type == "rope":
        if model.head_size % 2:
            yield (
                f"a head size of {model.head_size} is odd, but rope turns pairs of channels; use --kv-channels "
                f"{model.head_size + 1}"
            )
    else:
        yield refuse_idle(config, explicit, ["rotary_base"], cause=positions, remedy="use rope")
        if model.rope_scaling != "none":
            yield (f"rope_scaling {model.rope_scaling} has no effect {positions}; use rope, or --rope-scaling none")
    scaling = f"with rope_scaling {model.rope_scaling}"
    if model.rope_scaling == "none":
        remedy = "use linear or llama3,"
        yield refuse_idle(config, explicit, ["rope_scaling_factor"], cause=scaling, remedy=remedy)
    if model.rope_scaling != "llama3":
        yield refuse_idle(config, explicit, LLAMA3_SETTINGS, cause=scaling, remedy="use llama3")
    elif model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield (
            f"rope_low_freq_factor {model.rope_low_freq_factor:g} is not below rope_high_freq_factor "
            f"{model.rope_high_freq_factor:g}; use {model.rope_high_freq_factor / 4:g}"
        )


SERVERS = ("parameter-server", "sharded-parameter-server", "async-parameter-server")

OF_STRATEGIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "overlap_param_gather": (
            *("distributed-optimizer", "fully-sharded"),
            *("parameter-server", "sharded-parameter-server"),
        ),
        "shard_gradients": ("distributed-optimizer",),
        "fusion_threshold_mb": ("fused-all-reduce",),
        "server_chunk_mb": SERVERS,
        "max_staleness": ("async-parameter-server",),
        "staleness_aware_lr": ("async-parameter-server",),
        "sync_interval": ("local-sgd", "diloco"),
        "sync_warmup_steps": LOCAL_STRATEGIES,
        "average_optimizer_state": ("local-sgd",),
        "outer_lr": ("diloco",),
        "outer_momentum": ("diloco",),
        "sync_fragments": ("diloco",),
        "sync_delay": ("diloco",),
        "sync_mix": ("diloco",),
        "gossip_graph": ("gossip",),
        "gossip_algorithm": ("gossip",),
        "grad_compression": ("all-reduce",),
        "reduction_order": tuple(name for name in DP_STRATEGIES if name != "async-parameter-server"),
        "ddp_bucket_size": tuple(
            name for name in DP_STRATEGIES if name not in ("fused-all-reduce", "sharded-parameter-server")
        ),
    }
)
"""Setting -> the strategies that it means something to."""


def check_data_parallel(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """The strategy and what goes over the wire fit together and to the layout."""
    yield _check_strategy(config, explicit)
    yield _check_compression(config, explicit)


def _check_strategy(config: RunConfig, explicit: frozenset[str]) -> Findings:
    p, d = config.parallel, config.data_parallel
    strategy = p.dp_strategy
    yield refuse_elsewhere(config, explicit, "dp_strategy", OF_STRATEGIES)
    if strategy in LOCAL_STRATEGIES and not d.sync_warmup_steps:
        # Weights are averaged in the order of ranks anyway.
        cause = f"with dp_strategy {strategy} and sync_warmup_steps 0"
        remedy = "use --sync-warmup-steps 100,"
        yield refuse_idle(config, explicit, ["reduction_order"], cause=cause, remedy=remedy)
    apart = (*LOCAL_STRATEGIES, "async-parameter-server")
    for axis, size in (("cp", p.cp), ("ep", p.ep)):
        if strategy in apart and size > 1:
            yield (
                f"{axis} {size} does not go with dp_strategy {strategy}: its ranks take steps of their own, and those of "
                f"{'an' if axis == 'ep' else 'a'} {axis} group would have to take them together; use --{axis} 1, or --dp-strategy all-reduce"
            )
    for axis, size in (("pp", p.pp), ("ep", p.ep)):
        if strategy == "fully-sharded" and size > 1:
            yield (
                f"{axis} {size} does not go with dp_strategy fully-sharded, which gathers every layer for every microbatch; "
                f"use --{axis} 1, or --dp-strategy distributed-optimizer"
            )
    if strategy in apart and config.model.num_experts and p.expert_tp != p.tp:
        yield (
            f"etp {p.expert_tp} does not go with dp_strategy {strategy} and tp {p.tp}: experts would have other replicas than "
            f"the rest; use --etp {p.tp}"
        )
    if strategy == "async-parameter-server" and config.training.precision == "fp16":
        yield (
            "precision fp16 does not go with dp_strategy async-parameter-server: its ranks never agree on a loss scale; "
            "use --precision bf16"
        )
    if strategy == "gossip" and d.gossip_graph == "one-peer" and p.dp is not None and p.dp > 1 and p.dp % 2:
        yield (
            f"gossip_graph one-peer pairs up the data-parallel ranks, but dp is {p.dp}; use --gossip-graph ring, or dp "
            f"{p.dp - 1 if p.dp > 1 else 2} or {p.dp + 1}"
        )
    if strategy == "gossip" and d.gossip_graph == "one-peer" and d.gossip_algorithm == "decentlam":
        yield (
            "gossip_algorithm decentlam does not go with gossip_graph one-peer: its correction grows without bound from 6 ranks "
            "on; use --gossip-graph ring"
        )
    if strategy == "diloco":
        yield _check_fragments(config)
    if d.check_replicas_interval is not None:
        if p.dp is not None and p.dp * p.cp == 1:
            cause = "with dp 1, where no weight has a replica"
            yield refuse_idle(config, explicit, ["check_replicas_interval"], cause=cause, remedy="start more ranks")
        own = "each rank has weights of its own" if strategy in apart else "no weight is on two ranks"
        if strategy in (*apart, "fully-sharded"):
            yield (
                f"check_replicas_interval {d.check_replicas_interval} has no effect with dp_strategy {strategy}, where "
                f"{own}; remove it"
            )
        if config.optimizer.optimizer == "zero-one-adam":
            yield (
                f"check_replicas_interval {d.check_replicas_interval} does not go with optimizer zero-one-adam, whose ranks "
                "take local steps; remove it"
            )


def _check_fragments(config: RunConfig) -> Findings:
    d = config.data_parallel
    if d.sync_interval % d.sync_fragments:
        yield (
            f"sync_interval {d.sync_interval} is not divisible by sync_fragments {d.sync_fragments}; use fragments "
            f"{divisors(d.sync_interval)}"
        )
    elif d.sync_delay >= (between := d.sync_interval // d.sync_fragments):
        yield (
            f"sync_delay {d.sync_delay} is not below sync_interval / sync_fragments = {d.sync_interval}/{d.sync_fragments} = "
            f"{between}: the next exchange would start before this one is used; use --sync-delay {between - 1} or less"
        )
    if d.sync_fragments > config.model.num_layers:
        yield (
            f"sync_fragments {d.sync_fragments} is more than num_layers {config.model.num_layers}: some would be empty; use "
            f"--sync-fragments {config.model.num_layers} or less"
        )


def _check_compression(config: RunConfig, explicit: frozenset[str]) -> Findings:
    d = config.data_parallel
    kind = d.grad_compression
    if kind == "none":
        yield refuse_idle(
            config,
            explicit,
            ["compression_warmup_steps"],
            cause="with grad_compression none",
            remedy="use --grad-compression onebit,",
        )
    for name, needs in (("topk_density", "topk"), ("powersgd_rank", "powersgd")):
        if kind != needs:
            cause = f"with grad_compression {kind}"
            yield refuse_idle(config, explicit, [name], cause=cause, remedy=f"use --grad-compression {needs},")

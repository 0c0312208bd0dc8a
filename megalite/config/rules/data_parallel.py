"""Rules about data-parallel strategies and compression, and what excludes what."""

from collections.abc import Mapping
from types import MappingProxyType

from megalite.config.errors import ConfigError
from megalite.config.parallel import DP_STRATEGIES, LOCAL_STRATEGIES
from megalite.config.rules.divide import divisors
from megalite.config.rules.effect import refuse_elsewhere, refuse_idle
from megalite.config.run import RunConfig

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


def check_data_parallel(config: RunConfig, explicit: frozenset[str]) -> None:
    """The strategy and what goes over the wire fit together and to the layout.

    Raises:
        ConfigError: naming both settings and a value that works.
    """
    _check_strategy(config, explicit)
    _check_compression(config, explicit)


def _check_strategy(config: RunConfig, explicit: frozenset[str]) -> None:
    p, d = config.parallel, config.data_parallel
    strategy = p.dp_strategy
    refuse_elsewhere(config, explicit, "dp_strategy", OF_STRATEGIES)
    if strategy in LOCAL_STRATEGIES and not d.sync_warmup_steps:
        # Weights are averaged in the order of ranks anyway.
        cause = f"with dp_strategy {strategy} and sync_warmup_steps 0"
        remedy = "use --sync-warmup-steps 100,"
        refuse_idle(config, explicit, ["reduction_order"], cause=cause, remedy=remedy)
    apart = (*LOCAL_STRATEGIES, "async-parameter-server")
    for axis, size in (("cp", p.cp), ("ep", p.ep)):
        if strategy in apart and size > 1:
            raise ConfigError(
                f"{axis} {size} does not go with dp_strategy {strategy}: its ranks take steps of their own, and those of "
                f"{'an' if axis == 'ep' else 'a'} {axis} group would have to take them together; use --{axis} 1, or --dp-strategy all-reduce"
            )
    for axis, size in (("pp", p.pp), ("ep", p.ep)):
        if strategy == "fully-sharded" and size > 1:
            raise ConfigError(
                f"{axis} {size} does not go with dp_strategy fully-sharded, which gathers every layer for every microbatch; "
                f"use --{axis} 1, or --dp-strategy distributed-optimizer"
            )
    if strategy in apart and config.model.num_experts and p.expert_tp != p.tp:
        raise ConfigError(
            f"etp {p.expert_tp} does not go with dp_strategy {strategy} and tp {p.tp}: experts would have other replicas than "
            f"the rest; use --etp {p.tp}"
        )
    if strategy == "async-parameter-server" and config.training.precision == "fp16":
        raise ConfigError(
            "precision fp16 does not go with dp_strategy async-parameter-server: its ranks never agree on a loss scale; "
            "use --precision bf16"
        )
    if strategy == "gossip" and d.gossip_graph == "one-peer" and p.dp is not None and p.dp > 1 and p.dp % 2:
        raise ConfigError(
            f"gossip_graph one-peer pairs up the data-parallel ranks, but dp is {p.dp}; use --gossip-graph ring, or dp "
            f"{p.dp - 1 if p.dp > 1 else 2} or {p.dp + 1}"
        )
    if strategy == "gossip" and d.gossip_graph == "one-peer" and d.gossip_algorithm == "decentlam":
        raise ConfigError(
            "gossip_algorithm decentlam does not go with gossip_graph one-peer: its correction grows without bound from 6 ranks "
            "on; use --gossip-graph ring"
        )
    if strategy == "diloco":
        _check_fragments(config)
    if d.check_replicas_interval is not None:
        if p.dp is not None and p.dp * p.cp == 1:
            cause = "with dp 1, where no weight has a replica"
            refuse_idle(config, explicit, ["check_replicas_interval"], cause=cause, remedy="start more ranks")
        own = "each rank has weights of its own" if strategy in apart else "no weight is on two ranks"
        if strategy in (*apart, "fully-sharded"):
            raise ConfigError(
                f"check_replicas_interval {d.check_replicas_interval} has no effect with dp_strategy {strategy}, where "
                f"{own}; remove it"
            )
        if config.optimizer.optimizer == "zero-one-adam":
            raise ConfigError(
                f"check_replicas_interval {d.check_replicas_interval} does not go with optimizer zero-one-adam, whose ranks "
                "take local steps; remove it"
            )


def _check_fragments(config: RunConfig) -> None:
    d = config.data_parallel
    if d.sync_interval % d.sync_fragments:
        raise ConfigError(
            f"sync_interval {d.sync_interval} is not divisible by sync_fragments {d.sync_fragments}; use fragments "
            f"{divisors(d.sync_interval)}"
        )
    if d.sync_fragments > config.model.num_layers:
        raise ConfigError(
            f"sync_fragments {d.sync_fragments} is more than num_layers {config.model.num_layers}: some would be empty; use "
            f"--sync-fragments {config.model.num_layers} or less"
        )
    between = d.sync_interval // d.sync_fragments
    if d.sync_delay >= between:
        raise ConfigError(
            f"sync_delay {d.sync_delay} is not below sync_interval / sync_fragments = {d.sync_interval}/{d.sync_fragments} = "
            f"{between}: the next exchange would start before this one is used; use --sync-delay {between - 1} or less"
        )


def _check_compression(config: RunConfig, explicit: frozenset[str]) -> None:
    d = config.data_parallel
    kind = d.grad_compression
    if kind == "none":
        refuse_idle(
            config,
            explicit,
            ["compression_warmup_steps"],
            cause="with grad_compression none",
            remedy="use --grad-compression onebit,",
        )
    for name, needs in (("topk_density", "topk"), ("powersgd_rank", "powersgd")):
        if kind != needs:
            cause = f"with grad_compression {kind}"
            refuse_idle(config, explicit, [name], cause=cause, remedy=f"use --grad-compression {needs},")

"""Rules about data-parallel strategies, compression, optimizers and number formats, and what excludes what."""

from collections.abc import Mapping
from types import MappingProxyType

from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.parallel import LOCAL_STRATEGIES
from megalite.config.rules.divide import divisors
from megalite.config.rules.effect import asked_for, refuse_idle, shown
from megalite.config.run import RunConfig

SERVERS = ("parameter-server", "sharded-parameter-server", "async-parameter-server")

SPLITS_MAIN = (
    *("all-reduce", "fused-all-reduce", "distributed-optimizer", "fully-sharded"),
    "sharded-parameter-server",
)
"""They can keep main parameters as the bits that bf16 parameters lack."""

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
        "reduction_order": ("all-reduce", "fused-all-reduce", "distributed-optimizer", "fully-sharded"),
    }
)
"""Setting -> the strategies that it means something to."""

OF_OPTIMIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sgd_momentum": ("sgd",),
        "sgd_nesterov": ("sgd",),
        "lamb_min_coeff": ("lamb", "onebit-lamb"),
        "lamb_max_coeff": ("lamb", "onebit-lamb"),
        "muon_momentum": ("muon",),
        "muon_steps": ("muon",),
        "muon_scale": ("muon",),
        "freeze_step": ONEBIT_OPTIMIZERS,
        "freeze_threshold": ONEBIT_OPTIMIZERS,
        "onebit_scale": ONEBIT_OPTIMIZERS,
        "local_step_clipper": ("zero-one-adam",),
        "local_step_scaler": ("zero-one-adam",),
        "variance_update_scaler": ("zero-one-adam",),
        "exp_avg_dtype": ("adam",),
        "exp_avg_sq_dtype": ("adam",),
        "stochastic_rounding": ("adam",),
    }
)
"""Setting -> the optimizers that it means something to."""


def check_data_parallel(config: RunConfig, explicit: frozenset[str]) -> None:
    """The strategy, what goes over the wire, the optimizer and its number formats fit together.

    Raises:
        ConfigError: naming both settings and a value that works.
    """
    _check_strategy(config, explicit)
    _check_compression(config, explicit)
    _check_optimizer(config, explicit)
    _check_formats(config, explicit)


def _refuse_elsewhere(
    config: RunConfig,
    explicit: frozenset[str],
    setting: str,
    value: str,
    known: Mapping[str, tuple[str, ...]],
) -> None:
    for name in asked_for(config, explicit, known):
        if value not in known[name]:
            first = known[name][0]
            raise ConfigError(
                f"{shown(config, name)} has no effect with {setting} {value}; use --{setting.replace('_', '-')} {first} "
                "or remove it"
            )


def _check_strategy(config: RunConfig, explicit: frozenset[str]) -> None:
    p, d = config.parallel, config.data_parallel
    strategy = p.dp_strategy
    _refuse_elsewhere(config, explicit, "dp_strategy", strategy, OF_STRATEGIES)
    apart = (*LOCAL_STRATEGIES, "async-parameter-server")
    for axis, size in (("cp", p.cp), ("ep", p.ep)):
        if strategy in apart and size > 1:
            raise ConfigError(
                f"{axis} {size} does not go with dp_strategy {strategy}: its ranks take steps of their own, and those of a "
                f"{axis} group would have to take them together; use --{axis} 1, or --dp-strategy all-reduce"
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
    _check_length(config, "compression_warmup_steps", d.compression_warmup_steps if kind != "none" else None)


def _check_length(config: RunConfig, name: str, last: int | None) -> None:
    """A warm-up that lasts as long as the run, after which nothing would ever be compressed."""
    total = config.training.train_iters
    if last is not None and total is not None and last >= total:
        raise ConfigError(
            f"{name} {last} is not below train_iters {total}: nothing would ever be compressed; use "
            f"--{name.replace('_', '-')} {total // 6}"
        )


def _check_optimizer(config: RunConfig, explicit: frozenset[str]) -> None:
    o, p, d = config.optimizer, config.parallel, config.data_parallel
    name, strategy = o.optimizer, p.dp_strategy
    _refuse_elsewhere(config, explicit, "optimizer", name, OF_OPTIMIZERS)
    if name in ONEBIT_OPTIMIZERS:
        if strategy != "all-reduce":
            why = {
                "distributed-optimizer": "every rank needs the whole second moment to read what others send",
                "fully-sharded": "every rank needs the whole second moment to read what others send",
            }.get(strategy, "both say what ranks exchange")
            raise ConfigError(
                f"optimizer {name} does not go with dp_strategy {strategy}: {why}; use --dp-strategy all-reduce, or "
                f"--optimizer {'lamb' if name == 'onebit-lamb' else 'adam'}"
            )
        if d.grad_compression != "none":
            raise ConfigError(
                f"grad_compression {d.grad_compression} does not go with optimizer {name}, which exchanges no gradients once "
                "it is frozen; use --grad-compression none"
            )
        _check_length(config, "freeze_step", o.freeze_step)
        for axis, size in (("cp", p.cp), ("ep", p.ep)):
            if name == "zero-one-adam" and size > 1:
                raise ConfigError(
                    f"{axis} {size} does not go with optimizer zero-one-adam, whose ranks take steps of their own; use --{axis} "
                    "1, or --optimizer onebit-adam"
                )
    if name in ("lamb", "muon") and strategy == "async-parameter-server":
        raise ConfigError(
            f"optimizer {name} does not go with dp_strategy async-parameter-server: it needs whole tensors, of which servers "
            "hold parts that change at different times; use --optimizer adam"
        )
    if name == "lamb" and strategy in LOCAL_STRATEGIES:
        raise ConfigError(
            f"optimizer lamb does not go with dp_strategy {strategy}: its trust ratios are of weights that all ranks share; "
            "use --optimizer adam, or --dp-strategy all-reduce"
        )
    if strategy == "gossip" and d.gossip_algorithm == "decentlam" and name != "sgd":
        raise ConfigError(
            f"gossip_algorithm decentlam corrects the momentum of SGD, but optimizer is {name}; use --optimizer sgd, or "
            "--gossip-algorithm d-psgd"
        )
    if strategy == "gossip" and d.gossip_algorithm == "decentlam" and o.sgd_nesterov:
        raise ConfigError(
            "sgd_nesterov does not go with gossip_algorithm decentlam, which corrects plain momentum; use --no-sgd-nesterov"
        )


def _check_formats(config: RunConfig, explicit: frozenset[str]) -> None:
    o, precision, strategy = config.optimizer, config.training.precision, config.parallel.dp_strategy
    if o.main_params == "split":
        if precision != "bf16":
            raise ConfigError(
                f"main_params split keeps the 16 bits that bf16 parameters lack, but precision is {precision}; use "
                "--precision bf16 or remove it"
            )
        if strategy not in SPLITS_MAIN:
            raise ConfigError(
                f"main_params split does not go with dp_strategy {strategy}; use --dp-strategy distributed-optimizer, or "
                "--main-params fp32"
            )
        if o.optimizer == "zero-one-adam":
            raise ConfigError(
                "main_params split does not go with optimizer zero-one-adam, which keeps parameters of its own; use "
                "--main-params fp32"
            )
    narrow = "bf16" in (o.exp_avg_dtype, o.exp_avg_sq_dtype)
    if narrow and precision == "fp64":
        raise ConfigError(
            "bf16 moments (exp_avg_dtype, exp_avg_sq_dtype) do not go with precision fp64; use --precision fp32"
        )
    if o.exp_avg_sq_dtype == "bf16" and not o.stochastic_rounding and o.adam_beta2 > 1.0 - 2.0**-8:
        raise ConfigError(
            f"exp_avg_sq_dtype bf16 with adam_beta2 {o.adam_beta2:g} stands still when rounded to the nearest, since a step "
            "changes less than bf16 resolves; add --stochastic-rounding, or use --adam-beta2 0.99"
        )
    if o.stochastic_rounding and not narrow:
        raise ConfigError(
            "stochastic_rounding has no effect with exp_avg_dtype fp32 and exp_avg_sq_dtype fp32; use --exp-avg-dtype bf16 "
            "or remove it"
        )

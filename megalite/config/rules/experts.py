"""Rules about mixture of experts: routing, capacity, and how experts divide over ranks."""

import math

from megalite.config.describe import settings
from megalite.config.errors import ConfigError
from megalite.config.rules.divide import divisors
from megalite.config.rules.effect import refuse_idle, shown
from megalite.config.run import RunConfig


def check_experts(config: RunConfig, explicit: frozenset[str]) -> None:
    """Expert settings need experts; with them, routing must make sense and the grid of experts must divide."""
    p, model = config.parallel, config.model
    if model.num_experts is None:
        if p.ep > 1:
            raise ConfigError(
                f"ep {p.ep} has no effect without experts; add --num-experts {p.ep * 2} or use ep 1"
            )
        names = ["etp"] + [name for name in settings() if name.startswith("moe_")]
        refuse_idle(config, explicit, names, cause="without experts", remedy="add --num-experts 8")
        return
    _check_router(config)
    _check_capacity(config, explicit)
    _check_grid(config)
    _check_cuts(config)


def _check_router(config: RunConfig) -> None:
    model = config.model
    experts, topk = model.num_experts, model.moe_router_topk
    assert experts is not None
    if topk > experts:
        raise ConfigError(f"moe_router_topk {topk} is more than num_experts {experts}; use at most {experts}")
    if topk == 1 and not model.moe_router_pre_softmax:
        raise ConfigError(
            "moe_router_topk 1 without moe_router_pre_softmax gives every chosen expert the weight 1, from which the "
            "router learns nothing; add --moe-router-pre-softmax, or use --moe-router-topk 2"
        )
    if model.moe_first_dense_layers >= model.num_layers:
        raise ConfigError(
            f"moe_first_dense_layers {model.moe_first_dense_layers} leaves none of num_layers {model.num_layers} to "
            f"experts; use at most {model.num_layers - 1}, or remove num_experts {experts}"
        )


def _check_capacity(config: RunConfig, explicit: frozenset[str]) -> None:
    model = config.model
    factor = model.moe_expert_capacity_factor
    assert model.num_experts is not None
    if factor is None:
        refuse_idle(
            config,
            explicit,
            ["moe_token_drop_policy"],
            cause="without moe_expert_capacity_factor, because no token is dropped",
            remedy="add --moe-expert-capacity-factor 1.25",
        )
    elif factor * model.moe_router_topk >= model.num_experts:
        share = model.num_experts / model.moe_router_topk
        raise ConfigError(
            f"moe_expert_capacity_factor {factor:g} has no effect with num_experts {model.num_experts} and "
            f"moe_router_topk {model.moe_router_topk}: from {share:g} on, an expert has room for every token; use less "
            f"or remove it"
        )


def _check_grid(config: RunConfig) -> None:
    p, experts = config.parallel, config.model.num_experts
    assert p.dp is not None and experts is not None
    if experts % p.ep:
        raise ConfigError(
            f"num_experts {experts} is not divisible by ep {p.ep}; use ep "
            f"{divisors(math.gcd(experts, max(1, p.tp * p.cp * p.dp // p.expert_tp)))}"
        )
    stage_ranks, expert_ranks = p.tp * p.cp * p.dp, p.expert_tp * p.ep
    if stage_ranks % expert_ranks:
        raise ConfigError(
            f"the tp·cp·dp = {stage_ranks} ranks of a pipeline stage are not a multiple of etp·ep = "
            f"{p.expert_tp}·{p.ep} = {expert_ranks}; choose etp·ep among {divisors(stage_ranks)}"
        )
    own_grid = p.ep > 1 or p.expert_tp != p.tp
    if p.rank_order == "tp-cp-ep-pp-dp" and p.pp > 1 and own_grid and expert_ranks != p.tp * p.cp:
        raise ConfigError(
            f"rank_order {p.rank_order} with pp {p.pp} puts experts and the rest of a layer into one pipeline only if "
            f"etp·ep = {p.expert_tp}·{p.ep} = {expert_ranks} is tp·cp = {p.tp}·{p.cp} = {p.tp * p.cp}; use --rank-order "
            f"tp-cp-ep-dp-pp"
        )


def _check_cuts(config: RunConfig) -> None:
    """Widths over the tensor-parallel ranks inside and beside experts, tokens over tp."""
    p, model, s = config.parallel, config.model, config.training.seq_length
    assert p.dp is not None
    if model.expert_ffn_size % p.expert_tp:
        name = "moe_ffn_hidden_size" if model.moe_ffn_hidden_size else "ffn_hidden_size"
        raise ConfigError(
            f"{name} {model.expert_ffn_size} is not divisible by etp {p.expert_tp}; use etp "
            f"{divisors(math.gcd(model.expert_ffn_size, p.tp * p.cp * p.dp // p.ep))}"
        )
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % p.tp:
        raise ConfigError(
            f"{shown(config, 'moe_shared_expert_intermediate_size')} is not divisible by tp {p.tp}; use tp "
            f"{divisors(math.gcd(shared, model.query_groups))}"
        )
    if s % (p.tp * p.cp):
        product = f"tp·cp = {p.tp * p.cp}" if p.cp > 1 else f"tp {p.tp}"
        step = math.lcm(p.tp * p.cp, 2 * p.cp if p.cp > 1 else 1)
        raise ConfigError(
            f"seq_length {s} is not divisible by {product}, over which the layers of num_experts {model.num_experts} "
            f"split the tokens; use a multiple, e.g. {-(-s // step) * step}"
        )

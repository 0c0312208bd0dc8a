"""Rules about ranks: how the axes divide the world and the model, experts included."""

import math

from megalite.config.describe import settings
from megalite.config.errors import ConfigError, Findings
from megalite.config.rules.effect import divisors, next_multiple, refuse_idle, shown
from megalite.config.rules.pipeline import check_pipeline, check_stages
from megalite.config.run import RunConfig


def check_experts(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Expert settings need experts; with them, routing must make sense and the grid of experts must divide."""
    p, model = config.parallel, config.model
    if model.num_experts is None:
        if p.ep > 1:
            yield f"ep {p.ep} has no effect without experts; add --num-experts {p.ep * 2} or use ep 1"
        names = ["etp"] + [name for name in settings() if name.startswith("moe_")]
        yield refuse_idle(config, explicit, names, cause="without experts", remedy="add --num-experts 8")
        return
    yield _check_router(config)
    yield _check_capacity(config, explicit)
    yield _check_grid(config)
    yield _check_cuts(config)


def _check_router(config: RunConfig) -> Findings:
    model = config.model
    experts, topk = model.num_experts, model.moe_router_topk
    assert experts is not None
    if topk > experts:
        yield f"moe_router_topk {topk} is more than num_experts {experts}; use at most {experts}"
    if topk == 1 and not model.moe_router_pre_softmax:
        yield (
            "moe_router_topk 1 without moe_router_pre_softmax gives every chosen expert the weight 1, from which the "
            "router learns nothing; add --moe-router-pre-softmax, or use --moe-router-topk 2"
        )
    if model.moe_first_dense_layers >= model.num_layers:
        yield (
            f"moe_first_dense_layers {model.moe_first_dense_layers} leaves none of num_layers {model.num_layers} to "
            f"experts; use at most {model.num_layers - 1}, or remove num_experts {experts}"
        )


def _check_capacity(config: RunConfig, explicit: frozenset[str]) -> Findings:
    model = config.model
    factor = model.moe_expert_capacity_factor
    assert model.num_experts is not None
    if factor is None:
        yield refuse_idle(
            config,
            explicit,
            ["moe_token_drop_policy"],
            cause="without moe_expert_capacity_factor, because no token is dropped",
            remedy="add --moe-expert-capacity-factor 1.25",
        )
    elif factor * model.moe_router_topk >= model.num_experts:
        share = model.num_experts / model.moe_router_topk
        yield (
            f"moe_expert_capacity_factor {factor:g} has no effect with num_experts {model.num_experts} and "
            f"moe_router_topk {model.moe_router_topk}: from {share:g} on, an expert has room for every token; use less "
            f"or remove it"
        )


def _check_grid(config: RunConfig) -> Findings:
    p, experts = config.parallel, config.model.num_experts
    assert p.dp is not None and experts is not None
    if experts % p.ep:
        yield (
            f"num_experts {experts} is not divisible by ep {p.ep}; use ep "
            f"{divisors(math.gcd(experts, max(1, p.tp * p.cp * p.dp // p.expert_tp)))}"
        )
    stage_ranks, expert_ranks = p.tp * p.cp * p.dp, p.expert_tp * p.ep
    if stage_ranks % expert_ranks:
        yield (
            f"the tp·cp·dp = {stage_ranks} ranks of a pipeline stage are not a multiple of etp·ep = "
            f"{p.expert_tp}·{p.ep} = {expert_ranks}; choose etp·ep among {divisors(stage_ranks)}"
        )
    own_grid = p.ep > 1 or p.expert_tp != p.tp
    if p.rank_order == "tp-cp-ep-pp-dp" and p.pp > 1 and own_grid and expert_ranks != p.tp * p.cp:
        yield (
            f"rank_order {p.rank_order} with pp {p.pp} puts experts and the rest of a layer into one pipeline only if "
            f"etp·ep = {p.expert_tp}·{p.ep} = {expert_ranks} is tp·cp = {p.tp}·{p.cp} = {p.tp * p.cp}; use --rank-order "
            f"tp-cp-ep-dp-pp"
        )


def _check_cuts(config: RunConfig) -> Findings:
    """Widths over the tensor-parallel ranks inside and beside experts, tokens over tp."""
    p, model, s = config.parallel, config.model, config.training.seq_length
    assert p.dp is not None
    if model.expert_ffn_size % p.expert_tp:
        name = "moe_ffn_hidden_size" if model.moe_ffn_hidden_size else "ffn_hidden_size"
        yield (
            f"{name} {model.expert_ffn_size} is not divisible by etp {p.expert_tp}; use etp "
            f"{divisors(math.gcd(model.expert_ffn_size, p.tp * p.cp * p.dp // p.ep))}"
        )
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % p.tp:
        yield (
            f"{shown(config, 'moe_shared_expert_intermediate_size')} is not divisible by tp {p.tp}; use tp "
            f"{divisors(math.gcd(shared, model.query_groups))}"
        )
    if s % (p.tp * p.cp):
        product = f"tp·cp = {p.tp * p.cp}" if p.cp > 1 else f"tp {p.tp}"
        step = math.lcm(p.tp * p.cp, 2 * p.cp if p.cp > 1 else 1)
        yield (
            f"seq_length {s} is not divisible by {product}, over which the layers of num_experts {model.num_experts} "
            f"split the tokens; use a multiple, e.g. {-(-s // step) * step}"
        )


def resolve_dp(config: RunConfig, world_size: int) -> int:
    """The data-parallel size: what tp·pp·cp leaves of the world.

    Raises:
        ConfigError: the world does not divide, or dp was given as another number.
    """
    p = config.parallel
    if world_size < 1:
        raise ConfigError(f"world size is {world_size}; it must be at least 1")
    model_ranks = p.tp * p.pp * p.cp
    if world_size % model_ranks:
        below = world_size // model_ranks * model_ranks
        works = f"{below} or {below + model_ranks} ranks" if below else f"{model_ranks} ranks"
        if world_size == 1:  # most likely started without a launcher
            nodes = f"--nnodes {-(-model_ranks // 8)} " if model_ranks > 8 else ""
            works += f" (torchrun {nodes}--nproc-per-node {min(model_ranks, 8)} -m megalite.cli.main train ...)"
        raise ConfigError(
            f"world size {world_size} is not a multiple of tp·pp·cp = {p.tp}·{p.pp}·{p.cp} = {model_ranks}; start "
            f"{works}, or choose tp, pp, cp with a product among {divisors(world_size)}"
        )
    dp = world_size // model_ranks
    if p.dp not in (None, dp):
        raise ConfigError(
            f"dp {p.dp} does not fit: world size {world_size} / (tp·pp·cp = {model_ranks}) is {dp}; use --dp {dp} or "
            f"start {model_ranks * (p.dp or 1)} ranks"
        )
    return dp


def check_layout(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Axes that need company, and settings of one axis that have no effect without it."""
    p = config.parallel
    yield check_pipeline(config, explicit)
    if p.sequence_parallel and p.tp == 1:
        yield "sequence_parallel has no effect with tp 1; use tp 2 or more, or --no-sequence-parallel"
    if config.training.device == "cpu" and p.distributed_backend == "nccl":
        yield "distributed_backend nccl cannot run on device cpu; use gloo or auto"
    if p.cp == 1:
        remedy = "use cp 2 or more,"
        yield refuse_idle(config, explicit, ["cp_comm_type"], cause="with cp 1", remedy=remedy)


def check_model_cuts(config: RunConfig, _: frozenset[str]) -> Findings:
    """Heads, groups, MLP width, vocabulary, sequence and layers must divide over the axes that split them."""
    p, model = config.parallel, config.model
    widths = {"num_attention_heads": model.num_attention_heads, "num_query_groups": model.query_groups}
    if not all(model.is_moe_layer(index) for index in range(model.num_layers)):
        widths["ffn_hidden_size"] = model.ffn_size
    for name, size in widths.items():
        if size % p.tp:
            yield (f"{name} {size} is not divisible by tp {p.tp}; use tp {divisors(math.gcd(*widths.values()))}")
            break  # what is named works for all
    if model.vocab_size is not None and model.padded_vocab_size % p.tp:
        multiple = model.make_vocab_size_divisible_by
        yield (
            f"the vocabulary of {model.vocab_size}, padded to {model.padded_vocab_size} by "
            f"make_vocab_size_divisible_by {multiple}, is not divisible by tp {p.tp}; use "
            f"--make-vocab-size-divisible-by {math.lcm(multiple, p.tp)}"
        )
    yield _check_sequence(config)
    yield check_stages(config)


def _check_sequence(config: RunConfig) -> Findings:
    p, s = config.parallel, config.training.seq_length
    # One number that works for both.
    step = math.lcm(p.tp * p.cp if p.sequence_parallel else 1, 2 * p.cp if p.cp > 1 else 1)
    if s % (2 * p.cp) and p.cp > 1:
        yield f"seq_length {s} is not divisible by 2·cp = {2 * p.cp}; use a multiple, e.g. {next_multiple(s, step)}"
    elif p.sequence_parallel and s % (p.tp * p.cp):
        product = f"tp·cp = {p.tp * p.cp}" if p.cp > 1 else f"tp {p.tp}"
        yield (
            f"seq_length {s} is not divisible by {product}, which sequence_parallel needs; use a multiple, e.g. "
            f"{next_multiple(s, step)}"
        )
    groups = config.model.query_groups
    if p.cp > 1 and p.cp_comm_type == "a2a" and groups // p.tp % p.cp:
        yield (
            f"cp_comm_type a2a deals out the num_query_groups/tp = {groups}/{p.tp} = {groups // p.tp} key/value heads of a "
            f"rank over cp, but they are not divisible by cp {p.cp}; use cp {divisors(groups // p.tp)}, or "
            f"--cp-comm-type p2p"
        )

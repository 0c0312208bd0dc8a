"""Rules about ranks: how the axes divide the world and the model."""

import math

from megalite.config.errors import ConfigError
from megalite.config.rules.divide import divisors, next_multiple
from megalite.config.rules.effect import refuse_idle
from megalite.config.rules.pipeline import check_pipeline, check_stages
from megalite.config.run import RunConfig


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
        works = f"{below} or {below + model_ranks}" if below else str(model_ranks)
        raise ConfigError(
            f"world size {world_size} is not a multiple of tp·pp·cp = {p.tp}·{p.pp}·{p.cp} = {model_ranks}; start "
            f"{works} ranks, or choose tp, pp, cp with a product among {divisors(world_size)}"
        )
    dp = world_size // model_ranks
    if p.dp not in (None, dp):
        raise ConfigError(
            f"dp {p.dp} does not fit: world size {world_size} / (tp·pp·cp = {model_ranks}) is {dp}; use --dp {dp} or "
            f"start {model_ranks * (p.dp or 1)} ranks"
        )
    return dp


def check_layout(config: RunConfig, explicit: frozenset[str]) -> None:
    """Axes that need company, and settings of one axis that have no effect without it."""
    p = config.parallel
    check_pipeline(config, explicit)
    if p.sequence_parallel and p.tp == 1:
        raise ConfigError(
            "sequence_parallel has no effect with tp 1; use tp 2 or more, or --no-sequence-parallel"
        )
    if config.training.device == "cpu" and p.distributed_backend == "nccl":
        raise ConfigError("distributed_backend nccl cannot run on device cpu; use gloo or auto")
    if p.cp == 1:
        remedy = "use cp 2 or more,"
        refuse_idle(config, explicit, ["cp_comm_type"], cause="with cp 1", remedy=remedy)


def check_model_cuts(config: RunConfig) -> None:
    """Heads, groups, MLP width, vocabulary, sequence and layers must divide over the axes that split them."""
    p, model = config.parallel, config.model
    widths = {"num_attention_heads": model.num_attention_heads, "num_query_groups": model.query_groups}
    if not all(model.is_moe_layer(index) for index in range(model.num_layers)):
        widths["ffn_hidden_size"] = model.ffn_size
    for name, size in widths.items():
        if size % p.tp:
            raise ConfigError(
                f"{name} {size} is not divisible by tp {p.tp}; use tp {divisors(math.gcd(*widths.values()))}"
            )
    if model.vocab_size is not None and model.padded_vocab_size % p.tp:
        multiple = model.make_vocab_size_divisible_by
        raise ConfigError(
            f"the vocabulary of {model.vocab_size}, padded to {model.padded_vocab_size} by "
            f"make_vocab_size_divisible_by {multiple}, is not divisible by tp {p.tp}; use "
            f"--make-vocab-size-divisible-by {math.lcm(multiple, p.tp)}"
        )
    _check_sequence(config)
    check_stages(config)


def _check_sequence(config: RunConfig) -> None:
    p, s = config.parallel, config.training.seq_length
    if s % (2 * p.cp) and p.cp > 1:
        raise ConfigError(
            f"seq_length {s} is not divisible by 2·cp = {2 * p.cp}; use a multiple, e.g. {next_multiple(s, 2 * p.cp)}"
        )
    if p.sequence_parallel and s % (p.tp * p.cp):
        product = f"tp·cp = {p.tp * p.cp}" if p.cp > 1 else f"tp {p.tp}"
        step = math.lcm(p.tp * p.cp, 2 * p.cp if p.cp > 1 else 1)
        raise ConfigError(
            f"seq_length {s} is not divisible by {product}, which sequence_parallel needs; use a multiple, e.g. "
            f"{next_multiple(s, step)}"
        )
    groups = config.model.query_groups
    if p.cp > 1 and p.cp_comm_type == "a2a" and groups // p.tp % p.cp:
        raise ConfigError(
            f"cp_comm_type a2a deals out the num_query_groups/tp = {groups}/{p.tp} = {groups // p.tp} key/value heads of a "
            f"rank over cp, but they are not divisible by cp {p.cp}; use cp {divisors(groups // p.tp)}, or "
            f"--cp-comm-type p2p"
        )

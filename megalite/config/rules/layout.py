"""Rules about the layout: how the axes divide the world, the model, its experts and its pipeline stages."""

import math

from megalite.config.describe import settings
from megalite.config.errors import ConfigError, Findings
from megalite.config.numbers import parse_byte_size
from megalite.config.parallel import cta_limits, layout_items, message_bytes
from megalite.config.rules.rule import (
    Check,
    Settings,
    divisor_list,
    divisors,
    owned,
    parsed,
    rules,
    shares_of_heads,
    whole_shares,
    without,
)
from megalite.config.run import save_folder, stage_layers


def resolve_dp(c: Settings, world_size: int) -> int:
    """Return dp = world / (tp·pp·cp). Raises ConfigError: the world does not divide, or dp has another value."""
    if world_size < 1:
        raise ConfigError(f"world size is {world_size}; it must be at least 1")
    model_ranks = c.tp * c.pp * c.cp
    dp, rest = divmod(world_size, model_ranks)
    if rest:
        works = f"{dp * model_ranks} or {(dp + 1) * model_ranks} ranks" if dp else f"{model_ranks} ranks"
        if world_size == 1:  # most likely started without a launcher
            nodes = f"--nnodes {-(-model_ranks // 8)} " if model_ranks > 8 else ""
            works += f" (torchrun {nodes}--nproc-per-node {min(model_ranks, 8)} -m megalite.cli.main train ...)"
        raise ConfigError(
            f"world size {world_size} is not a multiple of tp·pp·cp = {c.tp}·{c.pp}·{c.cp} = {model_ranks}; start "
            f"{works}, or choose tp, pp, cp with a product among {divisors(world_size)}"
        )
    if c.dp not in (None, dp):
        raise ConfigError(
            f"dp {c.dp} does not fit: world size {world_size} / (tp·pp·cp = {model_ranks}) is {dp}; use --dp {dp} or "
            f"start {model_ranks * (c.dp or 1)} ranks"
        )
    return dp


def _late_trace(c: Settings) -> Findings:
    late = [step for step in c.trace_steps if c.train_iters is not None and step > c.train_iters]
    if c.trace and late:
        yield f"{{trace_steps}} has {late[0]} in it, but {{train_iters}} is the last; use steps up to {{=train_iters}}"


def _instances(c: Settings) -> Findings:
    if c.instances == 1 or c.dp is None:
        return
    ranks, stage = c.dp * c.cp, _ranks(c)
    of_experts = stage // (c.expert_tp * c.ep) if c.num_experts is not None else ranks
    if ranks % c.dp_instances or of_experts % c.dp_instances or c.dp_instances == ranks:
        fits = ", ".join(str(n) for n in divisor_list(math.gcd(ranks, max(of_experts, 1))) if n < ranks) or "1"
        experts = f", and the {of_experts} of each expert," if of_experts != ranks else ""
        yield (
            f"{{dp_instances}} must divide the dp·cp = {c.dp}·{c.cp} = {ranks} ranks{experts} and leave two or more to each "
            f"instance; use --dp-instances {fits}, or --dp-strategy all-reduce, which shards nothing"
        )


def _compression(c: Settings) -> Findings:
    """Check that compressed messages between stages are smaller than uncompressed ones."""
    width, many = {"fp64": 8, "fp32": 4}.get(c.precision, 2), 1_000_000
    if c.pipeline_compression != "none" and message_bytes(c.pipeline_compression, many, width) >= many * width:
        yield (
            "{pipeline_compression} does not send fewer bytes than uncompressed {precision}; use uint8, or topk with a share below "
            f"{width / (4 + width):.2g}"
        )


_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"


LAYOUT: tuple[Check, ...] = (
    parsed(cta_limits, "nccl_max_ctas"),
    *owned("recompute_granularity", {"?recompute_ahead": ("full",)}),
    *owned("cp_comm_type", {"hierarchical_context_parallel_sizes": ("a2a+p2p",)}),
    *owned(
        "attention_dropout", {"?context_parallel_load_balancer": (0.0,)}
    ),  # with dropout, hidden pairs are computed too
    *without(
        {
            "!trace_steps": "--trace",
            "?vpp|recompute_ahead": "--pp 2",
            "!pipeline_recv_prefetch|pipeline_send_window|pipeline_check_memory|pipeline_compression": "--pp 2",
            "?sequence_parallel": "--tp 2",
            "!cp_comm_type|hierarchical_context_parallel_sizes": "--cp 2",
            "?context_parallel_load_balancer": "--cp 2",
        }
    ),
    *rules(
        {
            "{?pipeline_schedule} and {pipeline_schedule_file} both set the schedule; remove one of them": (
                lambda c: c.pipeline_schedule_file
            ),
            "{?scatter_gather_tensors_in_pipeline} has no effect with {pp} and {tp}, where no ranks send the same message; remove it": (
                lambda c: 1 in (c.pp, c.tp)
            ),
            "{?scatter_gather_tensors_in_pipeline} has no effect with sequence_parallel, where each rank sends a part; remove it": (
                lambda c: c.tp > 1 and c.sequence_parallel
            ),
            f"{{?{_GROUP}}} has no effect with schedule {{=schedule_name}}; use --vpp 2 with --pipeline-schedule interleaved "
            "or remove it": lambda c: c.schedule_name != "interleaved",
            "{!pipeline_warmup} has no effect with schedule {=schedule_name}; use --pipeline-schedule 1f1b or remove it": (
                lambda c: c.schedule_name != "1f1b"
            ),
            "{!pipeline_costs} has no effect with schedule {=schedule_name}; use --pipeline-schedule auto or remove it": (
                lambda c: c.schedule_name != "auto"
            ),
            "{?pipeline_layers} and {pipeline_layout} both split the model; remove one of them": lambda c: (
                c.pipeline_layout
            ),
            "{?recompute_ahead} does not change {pipeline_schedule_file}: write the R actions into the file (megalite schedule "
            "--recompute-ahead --write-csv) and remove it": lambda c: c.pipeline_schedule_file,
            "{?recompute_method|recompute_num_layers} does not go with recompute_ahead, which recomputes whole stages; remove "
            "one of them": lambda c: c.recompute_ahead,
            "{?pipeline_memory_limit} is not a size with a unit; use e.g. 12GiB or 800MB": (
                lambda c: parse_byte_size(c.pipeline_memory_limit or "") is None
            ),
            "{?nccl_max_ctas} has no effect on gloo; run on cuda, or remove it": (
                lambda c: c.device == "cpu" or c.distributed_backend == "gloo"
            ),
            "{distributed_backend} cannot run on {device}; use gloo or auto": (
                lambda c: c.device == "cpu" and c.distributed_backend == "nccl"
            ),
            "{?context_parallel_load_balancer} has no effect with {cp_comm_type}, where each rank has all queries of some heads; "
            "use cp_comm_type allgather, or headtail": lambda c: c.cp > 1 and c.cp_heads == c.cp,
            "{?context_parallel_load_balancer} has no effect without separate documents, where headtail is balanced; "
            "use --reset-attention-mask, --packing best-fit or headtail": (
                lambda c: not (c.packs_documents or c.reset_attention_mask)
            ),
        }
    ),
    _late_trace,
    _instances,
    _compression,
)


def _ranks(c: Settings) -> int:
    """Return the number of ranks of a pipeline stage."""
    assert c.dp is not None
    return c.tp * c.cp * c.dp


def _grid(c: Settings) -> Findings:
    """Check that the ranks of a stage divide among the experts."""
    if c.num_experts is None:
        return
    stage, grid = _ranks(c), c.expert_tp * c.ep
    if c.num_experts % c.ep:
        works = divisors(math.gcd(c.num_experts, max(1, stage // c.expert_tp)))
        yield f"{{num_experts}} is not divisible by {{ep}}; use ep {works}"
    if stage % grid:
        yield (
            f"the tp·cp·dp = {stage} ranks of a pipeline stage are not a multiple of etp·ep = {c.expert_tp}·{c.ep} = {grid}; "
            f"choose etp·ep among {divisors(stage)}"
        )
    own_grid = c.ep > 1 or c.expert_tp != c.tp
    if c.rank_order == "tp-cp-ep-pp-dp" and c.pp > 1 and own_grid and grid != c.tp * c.cp:
        yield (
            "{rank_order} with {pp} keeps experts and the rest of a layer in one pipeline only if etp·ep = "
            f"{c.expert_tp}·{c.ep} = {grid} is tp·cp = {c.tp}·{c.cp} = {c.tp * c.cp}; use --rank-order tp-cp-ep-dp-pp"
        )


def _expert_widths(c: Settings) -> Findings:
    """Check the widths over the tensor-parallel ranks inside and beside experts."""
    if c.num_experts is None:
        return
    if c.expert_ffn_size % c.expert_tp:
        name = "moe_ffn_hidden_size" if c.moe_ffn_hidden_size else "ffn_hidden_size"
        works = divisors(math.gcd(c.expert_ffn_size, _ranks(c) // c.ep))
        yield f"{name} {c.expert_ffn_size} is not divisible by etp {c.expert_tp}; use etp {works}"
    shared = c.moe_shared_expert_intermediate_size
    if shared is not None and shared % c.tp:
        works = shares_of_heads(c.query_groups, shared, c.num_attention_heads)
        yield f"{{moe_shared_expert_intermediate_size}} is not divisible by {{tp}}; use tp {works}"


def _capacity(c: Settings) -> Findings:
    if c.num_experts is not None and c.moe_expert_capacity_factor is not None:
        share = c.num_experts / c.moe_router_topk
        if c.moe_expert_capacity_factor >= share:
            yield (
                "{moe_expert_capacity_factor} has no effect with {num_experts} and {moe_router_topk}: every token has room "
                f"in its experts; use less than {share:g} or remove it"
            )


def _groups(c: Settings) -> Findings:
    groups, chosen, experts, topk = c.moe_router_num_groups, c.moe_router_group_topk, c.num_experts, c.moe_router_topk
    if experts is None or (groups is None and chosen is None):
        return
    if groups is None or chosen is None:
        missing = "moe_router_group_topk" if chosen is None else "moe_router_num_groups"
        yield f"{missing} is missing: groups of experts need moe_router_num_groups and moe_router_group_topk, e.g. 8 and 4"
    elif experts % groups:
        yield f"{{num_experts}} is not divisible by {{moe_router_num_groups}}; use {divisors(experts)}"
    elif chosen > groups or topk % chosen or topk // chosen > experts // groups:
        works = [n for n in range(1, groups + 1) if topk % n == 0 and topk // n <= experts // groups]
        use = f"use moe_router_group_topk {works[-1]}" if works else "use fewer groups"
        yield (
            "{moe_router_topk} experts cannot come evenly from {moe_router_group_topk} of {moe_router_num_groups} groups of "
            f"{experts // groups}; {use}"
        )


_MOE = "|".join(name for name in settings() if name.startswith("moe_"))
EXPERTS: tuple[Check, ...] = (
    *without(
        {
            "!moe_router_bias_update_rate": "--moe-router-enable-expert-bias",
            "!moe_aux_loss_sequences": "--moe-aux-loss-coeff 0.01",
            "!moe_token_drop_policy|moe_pad_expert_input_to_capacity": "--moe-expert-capacity-factor 1.25",
            f"!etp|{_MOE}": "--num-experts 8",
        }
    ),
    *rules(
        {
            "{?ep} has no effect without experts; add --num-experts {=ep} or use ep 1": lambda c: c.num_experts is None,
            "{moe_router_topk} is more than {num_experts}; use at most {=num_experts}": (
                lambda c: c.num_experts is not None and c.moe_router_topk > c.num_experts
            ),
            "{moe_router_topk} without moe_router_pre_softmax gives every chosen expert the weight 1, so the router cannot "
            "learn; add --moe-router-pre-softmax, or use --moe-router-topk 2": (
                lambda c: c.num_experts is not None and c.moe_router_topk == 1 and not c.score_table
            ),
            "{moe_aux_loss_coeff} and moe_router_sinkhorn do not go together: both balance the experts; remove one": (
                lambda c: c.moe_router_sinkhorn and c.moe_aux_loss_coeff > 0
            ),
            "{?moe_router_enable_expert_bias|moe_router_num_groups} does not go with moe_router_sinkhorn, which chooses "
            "among all experts by the logits; remove one": lambda c: c.moe_router_sinkhorn,
            "moe_router_force_load_balancing trains without the router, so its weights must not be saved; remove it, or save and "
            "save_interval": lambda c: c.moe_router_force_load_balancing and save_folder(c.run) is not None,
            "{?moe_router_pre_softmax} has no effect with moe_router_score_function sigmoid, which has no softmax; remove it": (
                lambda c: c.moe_router_score_function == "sigmoid"
            ),
            "moe_shared_expert_gate has no effect without a shared expert; add --moe-shared-expert-intermediate-size or "
            "remove it": (lambda c: c.moe_shared_expert_gate and c.moe_shared_expert_intermediate_size is None),
            "moe_router_enable_expert_bias needs replicas with the same weights: {dp_strategy} lets them differ; use "
            "dp_strategy distributed-optimizer": (
                lambda c: c.moe_router_enable_expert_bias and c.strategy.weights != "equal"
            ),
            "{moe_aux_loss_sequences} does not divide {micro_batch_size}; use {=micro_batch_size} or less, or a multiple of "
            "{=moe_aux_loss_sequences} as --micro-batch-size": lambda c: c.micro_batch_size % c.moe_aux_loss_sequences,
            "{moe_first_dense_layers} leaves none of {num_layers} to experts; use less than {=num_layers}, or remove "
            "{num_experts}": lambda c: c.num_experts is not None and c.moe_first_dense_layers >= c.num_layers,
        }
    ),
    _capacity,
    _groups,
    _grid,
    _expert_widths,
)


def _widths(c: Settings) -> Findings:
    """Check heads, groups and the dense MLP over tp."""
    widths = {"num_attention_heads": c.num_attention_heads}
    if any(map(c.has_dense_mlp, range(c.num_layers))):
        widths["ffn_hidden_size"] = c.ffn_size
    works = shares_of_heads(c.query_groups, *widths.values())
    for name, size in widths.items():
        if size % c.tp:
            yield f"{name} {size} is not divisible by tp {c.tp}; use tp {works}"
            return  # the named tp works for all
    if not whole_shares(c.query_groups, c.tp):
        yield f"{{num_query_groups}} is neither a multiple nor a divisor of {{tp}}; use tp {works}"
    sharing = c.tp // math.gcd(c.query_groups, c.tp)
    if c.qk_norm_all_heads and sharing > 1:
        yield (
            "qk_norm_all_heads counts every key once, but {tp} ranks share the keys of {num_query_groups}; use tp "
            f"{divisors(math.gcd(*widths.values(), c.query_groups))}"
        )
    if 2 * c.head_size % sharing:
        yield (
            f"a key and a value of {c.head_size} channels each are not divisible by the {sharing} of the tp {c.tp} ranks that "
            f"share them; use --kv-channels {-(-c.head_size // sharing) * sharing}"
        )


def _linear_heads(c: Settings) -> Findings:
    """Check the key heads of linear attention over tp and cp: every rank computes the whole sequence for some."""
    ranks = c.tp * c.cp
    if c.linear_attention_freq is not None and c.linear_num_key_heads % ranks:
        yield (
            f"{{linear_num_key_heads}} is not divisible by tp·cp = {c.tp}·{c.cp} = {ranks}, over which linear attention splits "
            f"its heads; use tp·cp {divisors(c.linear_num_key_heads)}"
        )


def _vocabulary(c: Settings) -> Findings:
    if c.vocab_size is not None and c.padded_vocab_size % c.tp:
        multiple = math.lcm(c.make_vocab_size_divisible_by, c.tp)
        yield (
            f"the vocabulary of {{=vocab_size}}, padded to {c.padded_vocab_size} by {{make_vocab_size_divisible_by}}, is not "
            f"divisible by {{tp}}; use --make-vocab-size-divisible-by {multiple}"
        )


def _sequence(c: Settings) -> Findings:
    """Check the tokens over cp, and over tp if the residual stream or the experts' tokens are split over it."""
    over_tp = "sequence_parallel" if c.sequence_parallel else "num_experts" if c.num_experts is not None else None
    # One number that works for both.
    halves, ranks = 2 * c.cp if c.cp > 1 else 1, c.tp * c.cp if over_tp else 1
    step = math.lcm(halves, ranks)
    works = f"use a multiple, e.g. {-(-c.seq_length // step) * step}"
    if c.seq_length_warmup is not None:
        yield from _warmup(c, c.seq_length_warmup, step)
    if c.seq_length % halves:
        yield f"{{seq_length}} is not divisible by 2·cp = {halves}; {works}"
    elif over_tp and c.seq_length % ranks:
        product = f"tp·cp = {ranks}" if c.cp > 1 else f"tp {ranks}"
        yield f"{{seq_length}} is not divisible by {product}, over which {{{over_tp}}} splits the tokens; {works}"


def _warmup(c: Settings, given: list[int], unit: int) -> Findings:
    """Check seq_length_warmup. `unit`: every length must be a multiple of it."""
    name = f"seq_length_warmup {' '.join(map(str, given))}"
    example = f"--seq-length-warmup {max(c.seq_length // 8 // unit, 1) * unit} 1000"
    if len(given) != 2 or min(given) < 1:
        yield f"{name} is not two numbers above 0, START STEPS; use e.g. {example}"
        return
    if given[0] >= c.seq_length:
        yield f"{name} does not start below {{seq_length}}; use e.g. {example}, or remove it"
    elif given[0] % unit:
        yield f"{name} starts with a length that cp, or tp·cp, does not divide into multiples of {unit}; use e.g. {example}"
    if c.step_batch_size_schedule is not None:
        yield f"{name} does not go with {{step_batch_size_schedule}}, which counts in whole sequences; use rampup_batch_size"


def _exchanged_heads(c: Settings) -> Findings:
    if c.cp == 1 or c.cp_comm_type not in ("a2a", "a2a+p2p"):
        return
    hierarchical = c.cp_comm_type == "a2a+p2p"
    sizes = c.hierarchical_context_parallel_sizes or []
    if hierarchical and (len(sizes) != 2 or math.prod(sizes) != c.cp):
        inner = next((d for d in divisor_list(c.cp) if d > 1 and c.num_attention_heads // c.tp % d == 0), 1)
        given = f"is {' '.join(map(str, sizes))}, but takes" if sizes else "is missing: it has"
        yield (
            f"hierarchical_context_parallel_sizes {given} two numbers with the product {{cp}}, of ranks that exchange heads "
            f"and of groups in the ring of {{cp_comm_type}}; use --hierarchical-context-parallel-sizes {inner} {c.cp // inner}"
        )
        return
    heads, groups = c.num_attention_heads // c.tp, max(1, c.query_groups // c.tp)
    if heads % c.cp_heads or not whole_shares(groups, c.cp_heads):
        over, works = "cp: {cp}", f"cp {shares_of_heads(groups, heads)}"
        if hierarchical:
            over = "ranks: the first of {hierarchical_context_parallel_sizes}"
            inner = max(d for d in divisor_list(math.gcd(c.cp, heads)) if whole_shares(groups, d))
            works = f"--hierarchical-context-parallel-sizes {inner} {c.cp // inner}"
        yield (
            f"{{cp_comm_type}} splits the {heads} query and {groups} key/value heads of a rank over {over} must "
            f"divide the former and be a multiple or a divisor of the latter; use {works}, or --cp-comm-type p2p"
        )


def _stages(c: Settings) -> Findings:
    """Check that each stage has a layer, and that a given split matches the layers and stages."""
    stages, cut = c.pp * c.vpp, stage_layers(c.run)
    product = f"pp·vpp = {c.pp}·{c.vpp} = {stages} stages"
    # Only a given split can leave the first and last stage with just embedding and head.
    if c.num_layers < (stages if cut is None else max(stages - 2, 1)):
        yield f"{{num_layers}} is less than {product}, which need a layer each; use num_layers {stages}, or pp·vpp up to {{=num_layers}}"
        return
    if cut is None:
        return
    further = layout_items(c.pipeline_layout or "").count("m")
    if further not in (0, c.mtp_num_layers):
        yield f"{{pipeline_layout}} has {further} m, but {{mtp_num_layers}}; use as many, or none"
    given = f"{'pipeline_layers' if c.pipeline_layers is not None else 'pipeline_layout, in layers'} {_commas(cut)}"
    even = _commas(_even(c.num_layers, stages))
    if len(cut) != stages:
        remedy = f"--vpp {len(cut) // c.pp} or " if len(cut) % c.pp == 0 and c.pp > 1 else ""
        yield f"{given} has {len(cut)} entries, but there are {product}; use {remedy}{even}"
    elif 0 in cut[1:-1] or cut == [0]:
        yield (
            f"{given} leaves stage {cut.index(0, min(1, stages - 1))} without a layer; only the first, which has the "
            f"embedding, and the last, which has the head, may have none: use {even}"
        )
    elif sum(cut) != c.num_layers:
        yield f"{given} adds up to {sum(cut)}, but num_layers is {c.num_layers}; use {even}"


def _even(layers: int, stages: int) -> list[int]:
    """Return an even split; later stages get the remainder. With too few layers the ends have none."""
    if layers >= stages:
        return [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
    return [int(layers == stages - 1), *[1] * (stages - 2), 0]


def _commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


CUTS: tuple[Check, ...] = (_widths, _linear_heads, _vocabulary, _sequence, _exchanged_heads, _stages)

"""Bytes of one rank: parameters, gradients, optimizer state, activations.

Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), term by
term, so that other MLP widths, grouped queries and absent dropout count right: with GPT's shape and dropout they are
the paper's s·b·h·(10 + 24/t + 5·a·s/(h·t)). What fragments, kernels' workspaces and communication buffers take comes
on top and is not estimated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape
from megalite.pipeline.ir.actions import Action, Kind
from megalite.planner.stages import StagePlan, shapes_of_rank

_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank, by what holds them."""

    parameters: int
    """Elements, not bytes: what this rank holds after tensor, pipeline and expert parallelism."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Moments and, below fp32, the fp32 main parameters."""
    activation_bytes: int
    """Of all microbatches in flight at the peak."""
    workspace_bytes: int
    """One layer's activations while it is recomputed in the backward."""

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.workspace_bytes
        )


def local_size(shape: ParameterShape, config: RunConfig) -> int:
    """Elements of a parameter on one rank."""
    p = config.parallel
    if shape.expert:
        return shape.size // (p.ep * p.expert_tp)
    return shape.size if shape.shard_dim is None else shape.size // p.tp


def state_bytes_per_parameter(precision: str) -> tuple[int, int, int]:
    """(parameter, gradient, optimizer) bytes an element, nothing sharded.

    bf16 and fp16: 2 + 4 (fp32 gradients) + 12 (fp32 main parameter and two moments) = 18; fp32: 4 + 4 + 8; fp64: twice
    that.
    """
    element = _ELEMENT_BYTES[precision]
    return (2, 4, 12) if element == 2 else (element, element, 2 * element)


def layer_activation_bytes(config: RunConfig, granularity: str | None = None) -> int:
    """Bytes that one layer keeps for the backward of one microbatch, on one rank.

    Args:
        config: validated; micro_batch_size b, seq_length s (s/cp here), tp t.
        granularity: recompute_granularity to assume instead of the config's.
    """
    model, training, p = config.model, config.training, config.parallel
    granularity = granularity or training.recompute_granularity
    e = _ELEMENT_BYTES[training.precision]
    h, d, heads = model.hidden_size, model.head_size, model.num_attention_heads
    sequence = training.seq_length // p.cp
    whole = (
        p.tp if p.sequence_parallel else 1
    )  # what tensor parallelism leaves whole, sequence parallelism splits
    if granularity == "full":
        return sequence * training.micro_batch_size * h * e // whole
    # Inputs of both norms and of both column-parallel layers, masks of both dropouts.
    replicated = 4 * e * h + (2 * h if model.hidden_dropout else 0)
    # Query, key, value, and the input of the output projection.
    split = e * (2 * heads + 2 * model.query_groups) * d
    per_token = replicated / whole + split / p.tp + _feed_forward_bytes(config, e)
    if granularity == "none" and model.attention_dropout:
        # Unfused attention keeps the softmax, its dropout mask and the dropped-out softmax; fused attention none.
        per_token += (2 * e + 1) * heads * training.seq_length / p.tp
    return round(sequence * training.micro_batch_size * per_token)


def _feed_forward_bytes(config: RunConfig, e: int) -> float:
    """Per token: input and output of the nonlinearity; with experts for each of top-k, and what is sent to them."""
    model, p = config.model, config.parallel
    inner = (3 if model.activation == "swiglu" else 2) * e * model.ffn_size
    if model.num_experts is None:
        return inner / p.tp
    routed = 2 * e * model.hidden_size * model.moe_router_topk
    return routed + inner * model.moe_router_topk / p.expert_tp + 4 * model.num_experts


def stage_activation_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that a stage keeps for the backward of one microbatch, with embedding and head if it has them."""
    model, training, p = config.model, config.training, config.parallel
    tokens = training.seq_length // p.cp * training.micro_batch_size
    whole = p.tp if p.sequence_parallel else 1
    total = plan.num_layers * layer_activation_bytes(config)
    if plan.has_embedding and model.hidden_dropout:
        total += tokens * model.hidden_size // whole
    if plan.has_head:
        # Inputs of final norm and output projection; logits are kept in fp32 for the loss (fp64 in fp64).
        e = _ELEMENT_BYTES[training.precision]
        total += tokens * 2 * e * model.hidden_size // whole
        total += tokens * max(4, e) * model.padded_vocab_size // p.tp
    return total


def in_flight_at_peak(row: Iterable[Action], stage_bytes: Mapping[int, int]) -> dict[int, int]:
    """Microbatches of each stage alive when a rank's activations weigh most.

    Args:
        row: the rank's actions in order; a microbatch of a stage lives from its F to its B.
        stage_bytes: what one microbatch of a stage keeps.
    """
    live = dict.fromkeys(stage_bytes, 0)
    weight = heaviest = 0
    peak = dict(live)
    for action in row:
        if action.kind is Kind.F:
            live[action.stage] += 1
            weight += stage_bytes[action.stage]
            if weight > heaviest:
                heaviest, peak = weight, dict(live)
        elif action.kind is Kind.B:
            live[action.stage] -= 1
            weight -= stage_bytes[action.stage]
    return peak


def rank_memory(config: RunConfig, stages: Sequence[StagePlan], in_flight: Mapping[int, int]) -> RankMemory:
    """Memory of a rank that holds `stages`.

    With the distributed optimizer its state is divided by dp·cp (for experts by their own data-parallel size), which
    gives the usual 6 + 12/dp bytes a parameter in bf16.

    Args:
        config: validated, vocabulary known.
        stages: the virtual stages of this pipeline rank.
        in_flight: stage -> microbatches whose activations are alive at the peak.
    """
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    shapes = shapes_of_rank(config, list(stages))
    dense = sum(local_size(shape, config) for shape in shapes if not shape.expert)
    expert = sum(local_size(shape, config) for shape in shapes if shape.expert)
    parameter, gradient, optimizer = state_bytes_per_parameter(config.training.precision)
    sharded = p.dp_strategy == "distributed-optimizer"
    dense_parts = p.dp * p.cp if sharded else 1
    expert_parts = p.tp * p.cp * p.dp // (p.expert_tp * p.ep) if sharded else 1
    recomputing = config.training.recompute_granularity == "full"
    return RankMemory(
        parameters=dense + expert,
        parameter_bytes=parameter * (dense + expert),
        gradient_bytes=gradient * (dense + expert),
        optimizer_bytes=-(-optimizer * dense // dense_parts) + -(-optimizer * expert // expert_parts),
        activation_bytes=sum(stage_activation_bytes(config, plan) * in_flight[plan.stage] for plan in stages),
        workspace_bytes=layer_activation_bytes(config, "none") if recomputing else 0,
    )

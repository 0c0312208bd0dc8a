"""Bytes that each stage of a config holds for one microbatch, as the proof of a schedule counts them."""

from collections.abc import Iterator

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.pipeline.ir.memory import Sizes
from megalite.planner.activations import ELEMENT_BYTES, recompute_workspace_bytes, stage_activation_bytes
from megalite.planner.stages import StagePlan


def stage_sizes(config: RunConfig, stages: tuple[StagePlan, ...]) -> Sizes:
    """Activations, what a split backward keeps for W, what recompute-ahead keeps for R, a message between stages, and
    what a backward computes again.

    Args:
        config: validated.
        stages: all stages of the pipeline, in order.
    """
    kept = config
    if config.training.recompute_ahead:
        # From R on the graph is whole.
        kept = replace(config, recompute_granularity="none", recompute_ahead=False)
    message = _message_bytes(config)
    return Sizes(
        activation=tuple(float(stage_activation_bytes(kept, plan)) for plan in stages),
        deferred=tuple(float(deferred_bytes(config, plan)) for plan in stages),
        kept_input=tuple(0.0 if plan.has_embedding else float(message) for plan in stages),
        message=float(message),
        workspace=tuple(float(recompute_workspace_bytes(config, plan)) for plan in stages),
    )


def deferred_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that wait for the W of one microbatch: input and output gradient of each matrix product with a weight.

    With sequence parallelism an input is kept as this rank's part; W gathers it again.
    """
    elements = sum(sum(_layer(config, index)) for index in range(plan.first_layer, plan.last_layer))
    if plan.has_head:
        p, model = config.parallel, config.model
        whole = p.tp if p.sequence_parallel else 1
        elements += model.hidden_size / whole + model.padded_vocab_size / p.tp
    return round(_tokens(config) * elements * ELEMENT_BYTES[config.training.precision])


def _layer(config: RunConfig, index: int) -> Iterator[float]:
    """Elements a token, product by product."""
    model, p = config.model, config.parallel
    h, whole = model.hidden_size, p.tp if p.sequence_parallel else 1
    queries = model.num_attention_heads * model.head_size
    keys_and_values = 2 * model.query_groups * model.head_size
    yield h / whole + (queries + keys_and_values) / p.tp
    yield queries / p.tp + h
    if not model.is_moe_layer(index):
        yield from _feed_forward(config, model.ffn_size / p.tp)
        return
    assert model.num_experts is not None
    # The router works in fp32 (fp64) on this rank's tokens; its input is kept as it came.
    exact = max(4, ELEMENT_BYTES[config.training.precision]) / ELEMENT_BYTES[config.training.precision]
    shared = model.moe_shared_expert_intermediate_size
    # Shared experts keep the same input.
    yield (0.0 if shared else h / p.tp) + exact * model.num_experts / p.tp
    factor = model.moe_expert_capacity_factor
    rows = model.moe_router_topk / p.tp * (1.0 if factor is None else min(1.0, factor))
    gates = 2 if model.is_gated else 1
    yield rows * (h * p.expert_tp + gates * model.expert_ffn_size)
    yield rows * (model.expert_ffn_size + h * p.expert_tp)
    if shared is not None:
        yield from _feed_forward(config, shared / p.tp)


def _feed_forward(config: RunConfig, width: float) -> Iterator[float]:
    """The two products of an MLP of `width` local channels."""
    h, p = config.model.hidden_size, config.parallel
    yield h / (p.tp if p.sequence_parallel else 1) + (2 if config.model.is_gated else 1) * width
    yield width + h


def _tokens(config: RunConfig) -> int:
    return config.training.seq_length // config.parallel.cp * config.training.micro_batch_size


def _message_bytes(config: RunConfig) -> int:
    """The tensor between two stages, on one rank."""
    whole = config.parallel.tp if config.parallel.sequence_parallel else 1
    return _tokens(config) * config.model.hidden_size * ELEMENT_BYTES[config.training.precision] // whole

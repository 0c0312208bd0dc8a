"""Number formats, the data-parallel strategy and the optimizer of a run."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megalite.config.run import RunConfig
from megalite.data_parallel.facts import bucket_size
from megalite.data_parallel.shards import OptimizerShard, StrategyGroups, StrategyOptions, placed_in
from megalite.data_parallel.strategy import STRATEGIES, DataParallelStrategy, strategy_name
from megalite.kernels.registry import Kernels
from megalite.models.shapes import is_hidden_matrix
from megalite.optimizers.base import OPTIMIZERS, Context, FlatParameter, Optimizer, Segment
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.topology import Topology

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """`compute` is the type of parameters and activations, `main` that of gradients and main parameters."""

    compute: torch.dtype
    main: torch.dtype

    @classmethod
    def of(cls, name: str) -> "Precision":
        """The formats behind `fp32`, `bf16`, `fp16` or `fp64`."""
        return cls(_FORMATS[name], torch.float64 if name == "fp64" else torch.float32)


def build_strategy(
    config: RunConfig, stages: Mapping[int, torch.nn.Module], topology: Topology, precision: Precision, kernels: Kernels
) -> DataParallelStrategy:
    """What `dp_strategy` names, over this rank's stages; their parameters move into its buckets."""
    parallel, settings = config.parallel, config.data_parallel
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    if config.optimizer.optimizer == "muon":
        # Hidden matrices then share no bucket with parameters that are not orthogonalised.
        for parameter in parameters:
            if isinstance(parameter, ShardedParameter):
                info = parameter.info
                found = is_hidden_matrix(info.spec.name, info.spec.global_shape, decay=info.decay)
                parameter.info = dataclasses.replace(info, orthogonal=found)
    groups = StrategyGroups(
        dp=topology.dp_cp,
        expert_dp=topology.expert_dp,
        tp=topology.tp,
        embedding=topology.embedding,
        world=topology.world,
    )
    elements = sum(parameter.numel() for parameter in parameters)
    options = StrategyOptions(
        bucket_size=bucket_size(config, topology.dp_cp.size),
        grad_dtype=precision.main,
        overlap=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        settings=settings,
        wire_dtype=torch.bfloat16 if settings.wire_dtype == "bf16" else None,
        by_rank=settings.reduction_order == "rank",
        split_main=config.optimizer.main_params == "split",
        l2norm=kernels.get("l2norm", device=topology.device, dtype=precision.main, size=elements),
    )
    strategy = STRATEGIES.get(strategy_name(config))
    return strategy.from_config(stages, config, topology, groups=groups, options=options)


def build_optimizer(
    config: RunConfig, strategy: DataParallelStrategy, topology: Topology, kernels: Kernels
) -> Optimizer:
    """What `optimizer` names, over the strategy's shards."""
    context = Context(topology=topology, kernels=kernels, replicas_agree=strategy.replicas_agree)
    parameters = [_flat_parameter(shard) for shard in strategy.shards]
    optimizer = OPTIMIZERS.get(config.optimizer.optimizer).from_config(parameters, config, context)
    strategy.attach(optimizer)
    return optimizer


def _flat_parameter(shard: OptimizerShard) -> FlatParameter:
    """A shard as the optimizer sees it."""
    segments = []
    for placed in placed_in(shard):
        info = placed.parameter.info
        start, stop = max(placed.start, shard.start), min(placed.stop, shard.stop)
        segments.append(
            Segment(
                name=info.spec.name,
                start=start - shard.start,
                stop=stop - shard.start,
                offset=start - placed.start,
                global_shape=info.spec.global_shape,
                slice=info.spec.slice,
                counts=shard.counts_in_norm,
            )
        )
    kind = shard.bucket.kind
    return FlatParameter(shard.main_param, kind.decay, tuple(segments), kind.orthogonal)

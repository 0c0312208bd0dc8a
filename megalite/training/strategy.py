"""The data-parallel strategy of a run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from megalite.config.batch import total_steps
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.data_parallel.all_reduce import AllReduce
from megalite.data_parallel.async_parameter_server import AsyncParameterServer
from megalite.data_parallel.compressed_all_reduce import CompressedAllReduce
from megalite.data_parallel.diloco import DiLoCo
from megalite.data_parallel.distributed_optimizer import DistributedOptimizer
from megalite.data_parallel.fully_sharded import FullySharded
from megalite.data_parallel.fused_all_reduce import FusedAllReduce
from megalite.data_parallel.gossip import Gossip
from megalite.data_parallel.local_momentum import LocalMomentumExchange
from megalite.data_parallel.local_sgd import LocalSGD
from megalite.data_parallel.momentum_exchange import MomentumExchange
from megalite.data_parallel.parameter_server import ParameterServer
from megalite.data_parallel.sharded_parameter_server import ShardedParameterServer
from megalite.data_parallel.shards import StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.kernels.registry import Kernels
from megalite.models.shapes import is_hidden_matrix
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.topology import Topology, server_groups
from megalite.training.precision import Precision


def build_strategy(
    config: RunConfig,
    stages: Mapping[int, torch.nn.Module],
    topology: Topology,
    precision: Precision,
    kernels: Kernels,
) -> DataParallelStrategy:
    """What `dp_strategy` names, over this rank's stages; their parameters move into its buckets."""
    if config.optimizer.optimizer == "muon":
        _mark_hidden_matrices(stages)
    parallel, settings = config.parallel, config.data_parallel
    groups = StrategyGroups(
        dp=topology.dp_cp,
        expert_dp=topology.expert_dp,
        tp=topology.tp,
        embedding=topology.embedding,
        world=topology.world,
    )
    elements = sum(p.numel() for stage in stages.values() for p in stage.parameters())
    l2norm = kernels.get("l2norm", device=topology.device, dtype=precision.main, size=elements)
    options = _options(config, precision, l2norm)
    if parallel.dp_strategy == "distributed-optimizer":
        return DistributedOptimizer(
            stages,
            groups=groups,
            options=options,
            overlap_param_gather=parallel.overlap_param_gather,
            shard_gradients=settings.shard_gradients,
        )
    if parallel.dp_strategy == "fully-sharded":
        return FullySharded(
            stages, groups=groups, options=options, overlap_param_gather=parallel.overlap_param_gather
        )
    if settings.grad_compression != "none":
        return CompressedAllReduce(stages, groups=groups, options=options, settings=settings)
    if parallel.dp_strategy == "fused-all-reduce":
        return FusedAllReduce(stages, groups=groups, options=options, settings=settings)
    if parallel.dp_strategy in ("parameter-server", "sharded-parameter-server"):
        server = ParameterServer if parallel.dp_strategy == "parameter-server" else ShardedParameterServer
        return server(
            stages,
            groups=groups,
            options=options,
            settings=settings,
            overlap_param_gather=parallel.overlap_param_gather,
        )
    if parallel.dp_strategy == "async-parameter-server":
        minutes = parallel.distributed_timeout_minutes
        return AsyncParameterServer(
            stages,
            groups=groups,
            options=options,
            settings=settings,
            scope=topology.model,
            servers=server_groups(topology, timeout_minutes=minutes) if topology.dp.size > 1 else None,
        )
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        goes_apart = config.optimizer.optimizer == "zero-one-adam"
        exchange = LocalMomentumExchange if goes_apart else MomentumExchange
        return exchange(
            stages,
            groups=groups,
            options=options,
            scale=config.optimizer.onebit_scale,
            warmup=_warmup_share(config),
        )
    if parallel.dp_strategy in ("local-sgd", "diloco"):
        local = LocalSGD if parallel.dp_strategy == "local-sgd" else DiLoCo
        return local(stages, groups=groups, options=options, settings=settings)
    if parallel.dp_strategy == "gossip":
        momentum = config.optimizer.sgd_momentum
        return Gossip(stages, groups=groups, options=options, settings=settings, momentum=momentum)
    return AllReduce(stages, groups=groups, options=options)


def _warmup_share(config: RunConfig) -> float | None:
    """Share of the run before a 1-bit optimizer is frozen, if it is known before the run."""
    freeze, training = config.optimizer.freeze_step, config.training
    if freeze is None or (training.train_iters is None and training.train_samples is None):
        return None
    return min(freeze / max(total_steps(config), 1), 1.0)


def _options(
    config: RunConfig, precision: Precision, l2norm: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> StrategyOptions:
    parallel, settings = config.parallel, config.data_parallel
    return StrategyOptions(
        bucket_size=parallel.ddp_bucket_size,
        grad_dtype=precision.main,
        overlap=parallel.overlap_grad_reduce,
        wire_dtype=torch.bfloat16 if settings.wire_dtype == "bf16" else None,
        by_rank=settings.reduction_order == "rank",
        split_main=config.optimizer.main_params == "split",
        l2norm=l2norm,
    )


def _mark_hidden_matrices(stages: Mapping[int, torch.nn.Module]) -> None:
    """Let them share no bucket with parameters that are not orthogonalised."""
    for stage in stages.values():
        for parameter in stage.parameters():
            if isinstance(parameter, ShardedParameter):
                info = parameter.info
                found = is_hidden_matrix(info.spec.name, info.spec.global_shape, decay=info.decay)
                parameter.info = dataclasses.replace(info, orthogonal=found)

"""The optimizer of a run, over the shards that the strategy gives this rank."""

from collections.abc import Sequence

from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.data_parallel.shards import OptimizerShard, placed_in
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.kernels.registry import Kernels
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import FlatParameter, Segment
from megalite.optimizers.freeze import FreezePoint
from megalite.optimizers.lamb import LAMB
from megalite.optimizers.muon import Muon
from megalite.optimizers.onebit_adam import OneBitAdam
from megalite.optimizers.onebit_lamb import OneBitLAMB
from megalite.optimizers.rounded_adam import RoundedAdamW
from megalite.optimizers.sgd import SGD
from megalite.optimizers.zero_one_adam import ZeroOneAdam
from megalite.topology.topology import Topology


def flat_parameter(shard: OptimizerShard) -> FlatParameter:
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
                local_shape=info.spec.shape,
                global_shape=info.spec.global_shape,
                shard_dim=info.shard_dim,
                slice=info.spec.slice,
                counts=shard.counts_in_norm,
            )
        )
    return FlatParameter(shard.main_param, shard.decay, tuple(segments))


def build_optimizer(
    config: RunConfig, strategy: DataParallelStrategy, topology: Topology, kernels: Kernels
) -> Optimizer:
    """What `optimizer` names, over the strategy's shards."""
    optimizer = _make_optimizer(config, strategy, topology, kernels)
    strategy.attach(optimizer)
    return optimizer


def _make_optimizer(
    config: RunConfig, strategy: DataParallelStrategy, topology: Topology, kernels: Kernels
) -> Optimizer:
    parameters = [flat_parameter(shard) for shard in strategy.shards]
    if config.optimizer.optimizer == "sgd":
        return SGD(parameters, config.optimizer)
    if config.optimizer.optimizer == "lamb":
        return LAMB(parameters, config.optimizer, group=topology.world, kernels=kernels)
    if config.optimizer.optimizer == "muon":
        kinds = [shard.bucket.kind for shard in strategy.shards]
        matrices = [flat for flat, kind in zip(parameters, kinds, strict=True) if kind.orthogonal]
        others = [flat for flat, kind in zip(parameters, kinds, strict=True) if not kind.orthogonal]
        # Where replicas go their own ways each orthogonalises its own matrices.
        group = topology.tp_dp_cp if strategy.replicas_agree else topology.tp
        return Muon(matrices, others, config.optimizer, group=group)
    if "bf16" in (config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype):
        return RoundedAdamW(parameters, config.optimizer, seed=config.training.seed)
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        return build_onebit_optimizer(config, parameters, topology, kernels)
    return AdamW(parameters, config.optimizer, kernels)


def build_onebit_optimizer(
    config: RunConfig, parameters: Sequence[FlatParameter], topology: Topology, kernels: Kernels
) -> Optimizer:
    """One that exchanges its own state once it is frozen."""
    freeze = FreezePoint(config, world=topology.world)
    if config.optimizer.optimizer == "onebit-lamb":
        return OneBitLAMB(parameters, config.optimizer, freeze, group=topology.world, kernels=kernels)
    if config.optimizer.optimizer == "zero-one-adam":
        return ZeroOneAdam(parameters, config.optimizer, freeze)
    return OneBitAdam(parameters, config.optimizer, freeze)

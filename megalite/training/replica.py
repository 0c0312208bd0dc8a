"""Builds the `Replica`: this rank's stages of the network, with programs, data-parallel strategy and optimizer."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.batch import microbatch_counts
from megalite.config.compute import kernel_requests
from megalite.config.describe import without_credentials, without_derived
from megalite.config.errors import ConfigError
from megalite.config.model import BLOCKS
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.config.strategies import STRATEGIES
from megalite.config.training import LOSSES
from megalite.data.loader import Balance
from megalite.data_parallel.facts import bucket_size, strategy_states
from megalite.data_parallel.shards import GradientNoise, OptimizerShard, StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import DataParallelStrategy, strategy_class
from megalite.kernels.registry import Kernels
from megalite.models.compute import apply_compute, use_numerics
from megalite.models.gpt import GPTStage, token_losses
from megalite.models.recompute import Recompute
from megalite.models.shapes import bucket_traits, check_lr_multipliers, layer_shapes
from megalite.optimizers.base import Context, FlatParameter, Optimizer, Segment, check_states
from megalite.optimizers.schedules import LossScaler
from megalite.partition.pipeline import lowered, plan_stages, proved, schedule_of
from megalite.partition.stages import StagePlan
from megalite.pipeline.ir.generators import forward_only
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.ir.validate import validate
from megalite.tensor_parallel.parameter import (
    DeferredWeightGradients,
    ParameterFactory,
    ShardedParameter,
    attach_deferred,
)
from megalite.topology.group import Group
from megalite.topology.layout import balanced_spans
from megalite.topology.topology import Topology, fix_cublas_workspace

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """`compute` is the dtype of parameters and activations, `main` the dtype of gradients and main parameters."""

    compute: torch.dtype
    main: torch.dtype

    @classmethod
    def of(cls, name: str) -> "Precision":
        return cls(_FORMATS[name], torch.float64 if name == "fp64" else torch.float32)


def build_strategy(
    config: RunConfig, stages: Mapping[int, torch.nn.Module], topology: Topology, precision: Precision, kernels: Kernels
) -> DataParallelStrategy:
    """Build the strategy `dp_strategy` for this rank's stages, and move their parameters into its buckets."""
    parallel, settings = config.parallel, config.data_parallel
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters() if parameter.requires_grad]
    check_lr_multipliers(config.model, config.optimizer)
    for parameter in parameters:
        if isinstance(parameter, ShardedParameter):
            info, spec = parameter.info, parameter.info.spec
            own = bucket_traits(
                *(spec.name, spec.global_shape),
                decay=info.decay,
                shard_dim=info.shard_dim,
                expert=info.expert,
                config=config,
            )
            parameter.info = dataclasses.replace(info, **own._asdict())
    groups = StrategyGroups(
        dp=topology.intra_dp_cp or topology.dp_cp,
        expert_dp=topology.intra_expert_dp or topology.expert_dp,
        inter_dp=topology.inter_dp_cp or Group.solo("inter-dp-cp"),
        inter_expert_dp=topology.inter_expert_dp or Group.solo("inter-expert-dp"),
        expert_tp=topology.expert_tp,
        tp=topology.tp,
        embedding=topology.embedding,
        world=topology.world,
        gathers=topology.dp_cp_gathers,
        expert_gathers=topology.expert_dp_gathers,
    )
    elements = sum(parameter.numel() for parameter in parameters)
    options = StrategyOptions(
        bucket_size=bucket_size(config, topology.dp_cp.size),
        grad_dtype=precision.main,
        overlap=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        settings=settings,
        wire_dtype=_FORMATS[settings.wire_dtype] if settings.narrow_wire else None,
        by_rank=settings.reduction_order == "rank",
        host_fraction=config.optimizer.host_fraction,
        split_main=config.optimizer.main_params == "split",
        l2norm=kernels.get("l2norm", device=topology.device, dtype=precision.main, size=elements),
        measures_noise=config.logging.log_gradient_noise_scale,
    )
    strategy = strategy_class(config)
    return strategy.from_config(stages, config, topology, groups=groups, options=options)


def build_optimizer(
    config: RunConfig, strategy: DataParallelStrategy, topology: Topology, kernels: Kernels
) -> Optimizer:
    """Build the optimizer `optimizer` over the strategy's shards."""
    context = Context(topology=topology, kernels=kernels, replicas_agree=strategy.replicas_agree)
    parameters = [_flat_parameter(shard) for shard in strategy.shards]
    name = config.optimizer.optimizer
    with strategy.main_in_memory():  # averages of weights start from the main parameters
        optimizer: Optimizer = OPTIMIZERS.get(name).from_config(parameters, config, context)
    check_states(name, optimizer)
    strategy.attach(optimizer)
    if config.parallel.dp_strategy not in STRATEGIES.builtin and topology.dp_cp.size > 1:
        _check_strategy_states(config, strategy)
    return optimizer


def _check_strategy_states(config: RunConfig, strategy: DataParallelStrategy) -> None:
    """Raise ConfigError unless a user's strategy has the states that it was registered with, beside main parameters."""
    kept = sorted({state.name for state in strategy.states()} - {"main_param", "replica_param"})
    stated = sorted(strategy_states(config))
    if kept != stated:
        raise ConfigError(
            f"dp_strategy {config.parallel.dp_strategy} keeps the states {', '.join(kept) or 'none'}, but is registered with "
            f"{', '.join(stated) or 'none'}, by which memory is planned; correct `states` in its registration"
        )


def _flat_parameter(shard: OptimizerShard) -> FlatParameter:
    """Convert a shard to the optimizer's type."""
    segments = []
    for placed, start, stop in shard.bucket.within(shard.start, shard.stop):
        info = placed.parameter.info
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
    return FlatParameter(
        shard.main_param,
        kind.decay,
        tuple(segments),
        kind.orthogonal,
        *kind.learning_rate,
        host=shard.host,
        host_main=shard.host_main,
    )


@contextmanager
def consensus(replica: "Replica", *, saved: bool = False) -> Iterator[None]:
    """Make the buckets' `data` the model to evaluate, or to save (`saved`): the weights on which replicas agree, or the
    optimizer's averages if it has them. Every rank enters it."""
    strategy, optimizer = replica.strategy, replica.optimizer
    with strategy.consensus(), ExitStack() as more:
        config = replica.config.optimizer
        if OPTIMIZERS.facts(config.optimizer).averaged or (config.eval_ema and not saved):
            more.enter_context(strategy.evaluation_weights(optimizer))
        yield


class Programs:
    """The pipeline programs of a run; a batch-size ramp-up needs several.

    The constructor builds and proves the smallest and the largest, which needs most memory, and checks that the
    schedule supports the numbers of microbatches in between. Their programs are built on first use."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.stages = plan_stages(config)
        """Every virtual stage of the model, in order."""
        self._built: dict[tuple[int, bool], Program] = {}
        first, *between = microbatch_counts(config)
        self.program(first)
        for count in between[:-1]:
            if config.parallel.schedule_name != "auto":  # "auto" supports every number, and is slow to build
                schedule_of(config, count)
        if between:
            self.program(between[-1])

    def program(self, microbatches: int, *, evaluation: bool = False) -> Program:
        """Return the program of a step, or of an evaluation batch, with this number of microbatches."""
        key = (microbatches, evaluation)
        if key not in self._built:
            if evaluation:
                placement = tuple(plan.rank for plan in self.stages)
                program = lowered(self._config, forward_only(placement, microbatches))
                validate(program)
            else:
                program = lowered(self._config, schedule_of(self._config, microbatches))
                proved(self._config, program, self.stages)
            self._built[key] = program
        return self._built[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """Everything that a rank computes with; `build_replica` builds one per run."""

    config: RunConfig
    written: RunConfig
    """Config for files: without derived values and credentials."""
    topology: Topology
    programs: Programs
    kernels: Kernels
    compute_notes: tuple[str, ...]
    """Log lines on how the layers compute."""
    precision: Precision
    stages: dict[int, GPTStage]
    """This rank's virtual stages by their global number."""
    deferred: dict[int, DeferredWeightGradients]
    """Deferred weight gradients of a split backward, by stage."""
    strategy: DataParallelStrategy
    optimizer: Optimizer
    scaler: LossScaler
    noise: GradientNoise | None
    """Set with log_gradient_noise_scale."""

    @property
    def buffers(self) -> list[ShardedParameter]:
        """Parameters of this rank's stages without gradients, which are saved with the weights."""
        parameters = [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        return [each for each in parameters if isinstance(each, ShardedParameter) and not each.requires_grad]

    @property
    def routers(self) -> list[Any]:
        """This rank's `Router`s with a bias that balances their experts."""
        modules = (module for stage in self.stages.values() for module in stage.modules())
        return [module for module in modules if hasattr(module, "balance") and module.bias is not None]

    def schedule_of(self, batch_size: int) -> Schedule:
        assert self.config.parallel.dp is not None
        each = self.config.training.micro_batch_size * self.config.parallel.dp
        return self.programs.program(batch_size // each).schedule

    @property
    def packs_documents(self) -> bool:
        return self.config.data.packs_documents

    @property
    def hides_documents(self) -> bool:
        """Whether tokens attend only to their own document."""
        return self.packs_documents or self.config.data.reset_attention_mask

    @property
    def restarts_positions(self) -> bool:
        """Whether positions start from 0 in each document."""
        return self.packs_documents or self.config.data.reset_position_ids

    @property
    def finds_documents(self) -> bool:
        """Whether layers need the starts of documents."""
        return self.hides_documents or self.restarts_positions

    @property
    def balance(self) -> Balance | None:
        """Function that splits a microbatch over cp ranks by its documents; None: a split independent of documents."""
        parallel, model = self.config.parallel, self.config.model
        if parallel.context_parallel_load_balancer == "headtail":
            return None
        layers = [index for index in range(model.num_layers) if not model.is_linear_layer(index)]
        windows = [model.sliding_window if model.has_window(index) else None for index in layers]
        return lambda length, starts: balanced_spans(length, parallel.cp, starts, tuple(windows))

    @property
    def reads_data(self) -> bool:
        """Whether this rank needs tokens, labels or the documents' starts."""
        ends = any(stage.embedding is not None or stage.head is not None for stage in self.stages.values())
        return ends or self.finds_documents


def build_stages(
    config: RunConfig, plan: Sequence[StagePlan], topology: Topology, precision: Precision, kernels: Kernels
) -> dict[int, GPTStage]:
    """Build the modules of this rank's virtual stages, with their initial weights."""
    factory = ParameterFactory(
        tp=topology.tp,
        seed=config.training.seed,
        dtype=precision.compute,
        device=topology.device,
        sequence_parallel=config.parallel.sequence_parallel,
        cp=topology.cp,
        cp_heads=topology.cp_heads,
        cp_keys=topology.cp_keys,
        tp_cp=topology.tp_cp,
        ep=topology.ep,
        expert_tp=topology.expert_tp,
        kernels=kernels,
        late=config.parallel.strategy.shards_parameters,
    )
    recompute = Recompute(
        # Recompute-ahead recomputes whole stages, as actions of the schedule.
        granularity="none" if config.training.recompute_ahead else config.training.recompute_granularity,
        modules=frozenset(config.training.recompute_modules),
        method=config.training.recompute_method,
        num_layers=config.training.recompute_num_layers,
        offload_layers=config.training.offloaded_layers,
        offload_modules=config.training.offloaded_modules,
    )
    stages: dict[int, GPTStage] = {}
    for part in plan:
        if part.rank == topology.pp.rank:
            first = stages.get(0)
            stages[part.stage] = stage = GPTStage(
                config.model,
                part,
                factory=factory,
                seq_length=config.training.seq_length,
                recompute=recompute,
                cp_comm_type=config.parallel.cp_comm_type,
                # In a V-shaped schedule one rank has the first and the last stage.
                word=first.embedding.word.weight if first is not None and first.embedding is not None else None,
                loss=config.training.loss,
            )
            if config.model.block not in BLOCKS.builtin:
                _check_parameters(config, part, stage)
    return stages


def _check_parameters(config: RunConfig, part: StagePlan, stage: GPTStage) -> None:
    """Raise ConfigError unless a user's layers have the parameters in their registration."""
    made: dict[str, tuple[object, ...]] = {}
    for name, parameter in stage.layers.named_parameters():
        if not isinstance(parameter, ShardedParameter):
            raise ConfigError(
                f"block {config.model.block}: layers.{name} is a plain parameter, without information on its split over ranks; make "
                "it with factory.parameter, or use ColumnParallelLinear and RowParallelLinear"
            )
        info = parameter.info
        made[info.spec.name] = (list(info.spec.global_shape), info.shard_dim, info.decay)
    stated: dict[str, tuple[object, ...]] = {
        shape.name: (list(shape.shape), shape.shard_dim, shape.decay)
        for index in range(part.first_layer, part.last_layer)
        for shape in layer_shapes(config.model, index)
    }
    for name in {**stated, **made}:
        actual, expected = made.get(name, "(missing)"), stated.get(name, "(missing)")
        if actual != expected:
            raise ConfigError(
                f"block {config.model.block}: {name} has the shape, split dimension and decay {actual}, but its registration "
                f"says {expected}, by which memory is planned; correct `shapes` in its registration"
            )


Modules = tuple[dict[int, GPTStage], Kernels, tuple[str, ...]]
"""This rank's stages, their kernels, and log lines on how layers compute."""


def build_modules(config: RunConfig, topology: Topology, programs: Programs) -> Modules:
    """Build this rank's stages and kernels. A ConfigError about a kernel may occur on some ranks only."""
    kernels = Kernels(kernel_requests(config.compute.kernels))
    kernels.check(topology.device)
    numerics = use_numerics(config.compute, topology.device)
    if config.compute.deterministic:
        fix_cublas_workspace()
    precision = Precision.of(config.training.precision)
    if config.training.loss not in LOSSES.builtin:  # try it before the run begins, on all ranks
        logits = torch.zeros(3, 2, config.model.vocab_size or 0, dtype=precision.main, device=topology.device)
        # A copy, because a loss may overwrite its logits.
        token_losses(config.training.loss, logits.requires_grad_().clone(), logits[..., 0].long())
    stages = build_stages(config, programs.stages, topology, precision, kernels)
    lines = [*numerics, *(line for stage in stages.values() for line in apply_compute(stage, config))]
    return stages, kernels, tuple(dict.fromkeys(lines))


def build_replica(
    config: RunConfig,
    topology: Topology,
    programs: Programs | None = None,
    modules: Modules | None = None,
    *,
    asked: RunConfig | None = None,
) -> Replica:
    """Build the replica of a validated config with vocab_size, on the topology of `layout_of(config)`.

    `asked` is the config before it was resolved; default: `config` has no derived values."""
    programs = programs or Programs(config)
    stages, kernels, compute_notes = modules or build_modules(config, topology, programs)
    precision = Precision.of(config.training.precision)
    # In stage order: in a V-shaped schedule the head's stage, which defers products with a tied embedding, must come
    # after the stage of the embedding.
    deferred = {stage: DeferredWeightGradients() for stage in stages}
    for stage, module in stages.items():
        attach_deferred(module, deferred[stage])
    strategy = build_strategy(config, stages, topology, precision, kernels)
    return Replica(
        config=config,
        written=without_credentials(without_derived(config, asked or config)),
        topology=topology,
        programs=programs,
        kernels=kernels,
        compute_notes=compute_notes,
        precision=precision,
        stages=stages,
        deferred=deferred,
        strategy=strategy,
        optimizer=build_optimizer(config, strategy, topology, kernels),
        scaler=LossScaler(config),
        noise=GradientNoise(topology.dp.size) if config.logging.log_gradient_noise_scale else None,
    )

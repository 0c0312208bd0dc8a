"""Everything that a few steps of a config do to the numbers, on one rank or put together from all ranks."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megalite.config.batch import batch_size
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.loader import BatchLoader
from megalite.optimizers.schedules import Progress, Schedules
from megalite.parity.pool import RankContext
from megalite.parity.samples import EOD, UnevenSamples
from megalite.parity.tensors import CopiesDifferError, Part, assemble, local_parts
from megalite.topology.layout import sequence_spans
from megalite.training.replica import Replica, build_replica
from megalite.training.step import Stepper, StepResult

LAYOUT_OF_ONE_RANK = {
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "cp": 1,
    "ep": 1,
    "etp": None,
    "dp": 1,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "cp_comm_type": "p2p",
    "pipeline_schedule": None,
    "pipeline_schedule_file": None,
    "pipeline_warmup": "pa",
    "pipeline_layers": None,
    "pipeline_layout": None,
    "pipeline_costs": None,
    "pipeline_memory_limit": None,
    "pipeline_recv_prefetch": 1,
    "pipeline_send_window": 1,
    "pipeline_check_memory": False,
    "microbatch_group_size_per_virtual_pipeline_stage": None,
    "rank_order": "tp-cp-ep-dp-pp",
    "dp_strategy": "all-reduce",
    "recompute_granularity": "none",
    "recompute_ahead": False,
}
"""The settings that must not change the numbers, at their plainest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalars:
    """The numbers of a step that every rank knows."""

    loss: float
    grad_norm: float
    auxiliary: dict[str, float]

    @property
    def is_finite(self) -> bool:
        """The step had a gradient, and was not skipped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTrajectory:
    """What one rank has of a trajectory."""

    steps: list[Scalars]
    gradients: list[dict[str, Part]]
    """Its slices of the reduced and clipped gradients of each step."""
    weights: dict[str, Part]
    """Its slices of the weights after the steps."""
    evaluation: float
    """The loss of the next batch, evaluated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The same with whole tensors."""

    steps: list[Scalars]
    gradients: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]
    evaluation: float


class Runner:
    """Steps a replica over `UnevenSamples`, as the training loop steps it over its data."""

    def __init__(self, replica: Replica, progress: Progress | None = None) -> None:
        self.replica = replica
        config, topology = replica.config, replica.topology
        assert config.model.vocab_size is not None
        self.progress = progress or Progress(0, 0)
        self.stepper = Stepper(replica, Schedules(config))
        seq_length = config.training.seq_length
        self.loader = BatchLoader(
            UnevenSamples(seq_length, config.model.vocab_size, packed=replica.packs_documents),
            seq_length=seq_length,
            eod_token=EOD,
            eod_mask_loss=config.data.eod_mask_loss,
            dp_rank=topology.dp.rank,
            dp_size=topology.dp.size,
            micro_batch_size=config.training.micro_batch_size,
            spans=sequence_spans(seq_length, cp_rank=topology.cp.rank, cp_size=topology.cp.size),
            find_documents=replica.finds_documents,
            packed=replica.packs_documents,
        )

    def step(self) -> StepResult:
        """One step further, of the size that a batch-size ramp-up says."""
        first = self.progress.samples
        size = batch_size(self.replica.config, first)
        batch = self.loader.load(first, size) if self.replica.reads_data else []
        result = self.stepper.step(batch, before=self.progress, batch_size=size)
        self.progress = Progress(self.progress.step + 1, first + size)
        return result

    def evaluate(self) -> float:
        """The loss of the full batch that comes next."""
        size, first = self.replica.config.training.global_batch_size, self.progress.samples
        assert size is not None
        batch = self.loader.load(first, size) if self.replica.reads_data else []
        return self.stepper.evaluate(batch, first_sample=first, batch_size=size)


def rank_trajectory(context: RankContext, config: RunConfig, steps: int) -> RankTrajectory:
    """Train a validated config on this rank of a pool and note everything."""
    runner = Runner(build_replica(config, context.topology_of(config)))
    scalars, gradients = [], []
    for _ in range(steps):
        result = runner.step()
        scalars.append(Scalars(loss=result.loss, grad_norm=result.grad_norm, auxiliary=dict(result.auxiliary)))
        gradients.append(local_parts(runner.replica, "grad"))
    return RankTrajectory(
        steps=scalars, gradients=gradients, weights=local_parts(runner.replica, "weight"), evaluation=runner.evaluate()
    )


def whole(ranks: Sequence[RankTrajectory]) -> Trajectory:
    """Put the ranks' slices together.

    Raises:
        CopiesDifferError: ranks that must hold the same numbers do not.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        # As texts, which have all digits: NaN, in steps that overflow, is equal to nothing.
        if repr((other.steps, other.evaluation)) != repr((first.steps, first.evaluation)):
            raise CopiesDifferError(f"losses or norms of rank {rank} are not those of rank 0")
    return Trajectory(
        steps=first.steps,
        gradients=[assemble([rank.gradients[step] for rank in ranks]) for step in range(len(first.steps))],
        weights=assemble([rank.weights for rank in ranks]),
        evaluation=first.evaluation,
    )


def plain(config: RunConfig) -> RunConfig:
    """The same run on one rank with nothing split, reordered or recomputed, the whole batch in one microbatch.

    With a batch-size ramp-up the microbatches stay as they are: no one size fits every step.
    """
    training = config.training
    size = training.micro_batch_size if training.rampup_batch_size else training.global_batch_size
    return validate(replace(config, **LAYOUT_OF_ONE_RANK, micro_batch_size=size), 1)


def one_rank_trajectory(config: RunConfig, steps: int) -> Trajectory:
    """What `config` must do, in this process and without any process group."""
    return whole([rank_trajectory(RankContext(0), plain(config), steps)])

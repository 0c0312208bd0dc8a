"""Record all numbers of a few training steps, on one rank or assembled from all ranks."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from megalite.config.batch import batch_size, batch_sizes, sequence_length
from megalite.config.describe import replace, settings
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.dataset import Packing
from megalite.optimizers.schedules import Progress, Schedules
from megalite.parity.pool import RankContext
from megalite.training.replica import Replica, build_replica, consensus
from megalite.training.setup import make_loader
from megalite.training.step import Stepper, StepResult

Part = tuple[tuple[int, ...], tuple[tuple[int, int], ...], np.ndarray]  # global shape, slice, values


class CopiesDifferError(AssertionError):
    """Two ranks have different numbers that the layout requires to be equal."""


def local_parts(replica: Replica, kind: str) -> dict[str, Part]:
    """Return this rank's slice of every parameter by name. `kind`: `weight`, `grad` (as reduced), `main_param`, or an
    optimizer state such as `exp_avg`.

    Collectives: with the distributed optimizer an all-gather over a bucket's ranks, except for `weight`."""
    parts = {}
    strategy = replica.strategy
    strategy.wait_for_parameters()
    for shard in strategy.shards:
        if kind == "weight":
            flat = shard.bucket.data
        else:
            grad = shard.main_param.grad
            assert grad is not None
            states = {"grad": grad, "main_param": shard.main, **replica.optimizer.state(shard.main_param)}
            flat = strategy.gather(shard, states[kind])
        for placed in shard.bucket.placed:
            spec = placed.parameter.info.spec
            values = flat[placed.start : placed.stop].view(spec.shape).detach().clone()
            if values.dtype == torch.bfloat16:
                values = values.float()  # numpy has no bf16; fp32 represents it exactly
            parts[spec.name] = (spec.global_shape, spec.slice, values.numpy())
    return parts


def assemble(ranks: Sequence[dict[str, Part]]) -> dict[str, np.ndarray]:
    """Assemble full float64 tensors from all ranks' slices. Raises CopiesDifferError if copies differ in any bit."""
    full: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for parts in ranks:
        for name, (shape, bounds, values) in parts.items():
            tensor = full.setdefault(name, np.zeros(shape))
            seen = filled.setdefault(name, np.zeros(shape, dtype=bool))
            place = tuple(slice(start, stop) for start, stop in bounds)
            if seen[place].any() and not np.array_equal(tensor[place], values, equal_nan=True):
                worst = np.nanmax(np.abs(tensor[place] - values))
                raise CopiesDifferError(f"copies of {name} on several ranks differ by up to {worst:.2e}")
            tensor[place], seen[place] = values, True
    for name, seen in filled.items():
        assert seen.all(), f"part of {name} is on no rank"
    return full


EOD = 0  # the end-of-document token of `UnevenSamples`

_OF_LAYOUT = (
    *("tp", "pp", "vpp", "cp", "ep", "etp", "rank_order", "sequence_parallel", "tp_comm_overlap"),
    *("cp_comm_type", "context_parallel_load_balancer", "hierarchical_context_parallel_sizes"),
    *("pipeline_schedule", "pipeline_schedule_file", "pipeline_layers", "pipeline_layout", "pipeline_costs"),
    *("pipeline_warmup", "pipeline_memory_limit", "pipeline_check_memory", "pipeline_recv_prefetch"),
    *("pipeline_send_window", "microbatch_group_size_per_virtual_pipeline_stage", "scatter_gather_tensors_in_pipeline"),
    *("dp_strategy", "sanitize_communication", "recompute_granularity", "recompute_ahead", "optimizer_cpu_offload"),
    *("cpu_offloading_num_layers", "fine_grained_activation_offloading"),
)
"""Settings that must not change the numbers; one rank has their defaults."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalars:
    loss: float
    grad_norm: float
    auxiliary: dict[str, float]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


Tensor = TypeVar("Tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trajectory(Generic[Tensor]):
    steps: list[Scalars]
    gradients: list[dict[str, Tensor]]  # reduced and clipped gradients of each step
    weights: dict[str, Tensor]  # after the steps
    evaluation: float  # evaluation loss of the next batch


Trajectory = _Trajectory[np.ndarray]
RankTrajectory = _Trajectory[Part]  # one rank's slices


class UnevenSamples:
    """Sample k is a pure function of (k, seq_length, vocab_size); a `SampleSource`.

    In even samples two tokens of five end a document, in odd ones one of fifty. So code that divides by a local number of
    unmasked tokens, or mixes up positions and visibility of samples, gets other numbers than one rank.

    `seq_length`: inputs per sample. `vocab_size`: bound of the tokens. `packed`: documents are packed, and up to a
    quarter of the sample is padding, none in every third. `sft`: a fifth of the predictions count in even samples, nine
    tenths in odd ones."""

    def __init__(self, seq_length: int, vocab_size: int, *, packed: bool = False, sft: bool = False) -> None:
        self.seq_length, self.vocab_size, self.packed, self.sft = seq_length, vocab_size, packed, sft

    def sample(self, k: int) -> np.ndarray:
        """Return sample k: int64 [seq_length + 1]."""
        generator = np.random.Generator(np.random.Philox(key=k))
        tokens = generator.integers(1, self.vocab_size, size=self.seq_length + 1)
        tokens[generator.random(self.seq_length + 1) < (0.4 if k % 2 == 0 else 0.02)] = EOD
        return tokens

    def packing(self, k: int) -> Packing | None:
        """Return the document boundaries of sample k, if documents are packed."""
        if not self.packed:
            return None
        used = self.seq_length - k % 3 * self.seq_length // 8
        ends = np.flatnonzero(self.sample(k)[: used - 1] == EOD)
        share = np.random.Generator(np.random.Philox(key=[k, 1])).random(self.seq_length)
        counts = share < (0.2 if k % 2 == 0 else 0.9) if self.sft else None
        return Packing(starts=(0, *(int(end) + 1 for end in ends)), used=used, counts=counts)


class Runner:
    """Trains a replica on `UnevenSamples`, as the training loop does on its data."""

    def __init__(self, replica: Replica, progress: Progress | None = None) -> None:
        self.replica = replica
        config = replica.config
        assert config.model.vocab_size is not None
        self.progress = progress or Progress(0, 0)
        self.stepper = Stepper(replica, Schedules(config))
        length, vocabulary = config.training.seq_length, config.model.vocab_size
        samples = UnevenSamples(length, vocabulary, packed=replica.packs_documents, sft=config.data.sft)
        self.loader = make_loader(replica, samples, eod_token=EOD)

    def step(self) -> StepResult:
        """Run the next step, with the batch size of the ramp-up."""
        first = self.progress.samples
        size = batch_size(self.replica.config, first)
        length = sequence_length(self.replica.config, self.progress.step)
        batch = self.loader.load(first, size, length) if self.replica.reads_data else []
        result = self.stepper.step(batch, before=self.progress, batch_size=size)
        self.progress = Progress(self.progress.step + 1, first + size)
        return result

    def evaluate(self) -> float:
        """Return the loss of the next full batch."""
        size, first = self.replica.config.training.global_batch_size, self.progress.samples
        assert size is not None
        batch = self.loader.load(first, size) if self.replica.reads_data else []
        return self.stepper.evaluate(batch, first_sample=first, batch_size=size)[0]


def rank_trajectory(context: RankContext, config: RunConfig, steps: int, *, nudged: bool = False) -> RankTrajectory:
    """Train a validated config on this rank of a pool and record its numbers. `nudged`: from weights that differ in
    their last bits, in fp64."""
    runner = Runner(build_replica(config, context.topology_of(config)))
    for module in runner.replica.stages.values() if nudged else ():
        for parameter in module.parameters():
            waves = torch.arange(parameter.numel(), dtype=torch.float64).cos().view_as(parameter)
            parameter.data.mul_(1.0 + 2.0**-50 * waves)
    scalars, gradients = [], []
    for _ in range(steps):
        result = runner.step()
        scalars.append(Scalars(loss=result.loss, grad_norm=result.grad_norm, auxiliary=dict(result.auxiliary)))
        gradients.append(local_parts(runner.replica, "grad"))
    weights = local_parts(runner.replica, "weight")
    with consensus(runner.replica):
        evaluation = runner.evaluate()
    return RankTrajectory(steps=scalars, gradients=gradients, weights=weights, evaluation=evaluation)


def whole(ranks: Sequence[RankTrajectory]) -> Trajectory:
    """Assemble the ranks' slices. Raises CopiesDifferError if ranks differ in numbers that must be equal."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        # Compared as text with all digits, as NaN (of steps that overflow) is not equal to itself.
        if repr((other.steps, other.evaluation)) != repr((first.steps, first.evaluation)):
            raise CopiesDifferError(f"losses or norms of rank {rank} differ from rank 0")
    return Trajectory(
        steps=first.steps,
        gradients=[assemble([rank.gradients[step] for rank in ranks]) for step in range(len(first.steps))],
        weights=assemble([rank.weights for rank in ranks]),
        evaluation=first.evaluation,
    )


def plain(config: RunConfig) -> RunConfig:
    """Return the same run on one rank, without splits, reordering or recompute, with one microbatch per batch. With a
    ramp-up or batch schedule the micro batch size stays, as no single size fits all batches."""
    training = config.training
    size = training.global_batch_size if len(batch_sizes(config)) == 1 else training.micro_batch_size
    one_rank = {name: settings()[name].default for name in _OF_LAYOUT}
    return validate(replace(config, **one_rank, dp=1, micro_batch_size=size), 1)


def one_rank_trajectory(config: RunConfig, steps: int, *, nudged: bool = False) -> Trajectory:
    """Run the reference of `config` in this process, without any process group."""
    return whole([rank_trajectory(RankContext(0), plain(config), steps, nudged=nudged)])

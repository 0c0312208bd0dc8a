"""megalite as a contender of peers.run: the training step of pretrain_gpt.py, without its log."""

import dataclasses

import torch

from benchmarks.peers.case import CLIP, DECAY, LR, SEED, Case, first_weights, model_of
from benchmarks.peers.plain_gpt import Size
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.loader import Microbatch, sample_ids
from megalite.models.shapes import flops_per_token
from megalite.optimizers.schedules import Progress, Schedules
from megalite.parity.pool import RankContext
from megalite.partition.pipeline import plan_stages
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.training.memory import keep_freed_memory
from megalite.training.replica import Replica, build_replica
from megalite.training.step import Stepper


def config_of(case: Case) -> RunConfig:
    """The config that pretrain_gpt.py would use."""
    size, layout = case.size, case.layout
    batch = {"seq_length": size.seq, "micro_batch_size": size.micro, "global_batch_size": size.batch}
    update = {"lr": LR, "lr_decay_style": "constant", "weight_decay": DECAY, "clip_grad": CLIP, "seed": SEED}
    axes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "vpp")}
    settings = {**batch, **update, **axes, "mock_data": True, "train_iters": 1000}
    settings |= {"precision": "bf16" if case.bf16 else "fp32", "pipeline_schedule": case.schedule}
    model = model_of(case)
    settings |= {name: getattr(model, name) for name in model.__dataclass_fields__}
    return validate(replace(RunConfig(), **settings), layout.ranks)


def stage_layers(case: Case) -> list[tuple[int, int]]:
    """First and last layer of each virtual stage as megalite cuts them: by cost, including the head."""
    return [(plan.first_layer, plan.last_layer) for plan in plan_stages(config_of(case))]


def step_flops(case: Case) -> float:
    """Model FLOPs of a step in the PaLM convention."""
    size: Size = case.size
    return float(flops_per_token(model_of(case), size.seq)) * size.batch * size.seq


class Megalite:
    def __init__(self, case: Case, context: RankContext) -> None:
        keep_freed_memory()  # as in training on a CPU
        self._case = case
        config = config_of(case)
        self._topology = context.topology_of(config)
        self._replica = build_replica(config, self._topology)
        _load(self._replica, first_weights(case))
        self._stepper = Stepper(self._replica, Schedules(config))
        self._progress = Progress(0, 0)

    def step(self, tokens: torch.Tensor) -> float:
        size, dp = self._case.size, self._topology.dp
        batches = []
        if self._replica.reads_data:
            for index, part in enumerate(self._case.share(tokens, dp.rank)):
                place = {"dp_rank": dp.rank, "dp_size": dp.size, "micro_batch_size": size.micro}
                ids = sample_ids(self._progress.samples, index, **place)
                mask = torch.ones(size.micro, size.seq)
                batches.append(Microbatch(part[:, :-1], part[:, 1:], mask, sample_ids=ids))
        result = self._stepper.step(batches, before=self._progress, batch_size=size.batch)
        self._progress = Progress(self._progress.step + 1, self._progress.samples + size.batch)
        return result.loss / self._topology.world.size


@torch.no_grad()
def _load(replica: Replica, weights: dict[str, torch.Tensor]) -> None:
    for stage in replica.stages.values():
        for parameter in stage.parameters():
            assert isinstance(parameter, ShardedParameter)
            spec = parameter.info.spec
            parameter.copy_(weights[spec.name][tuple(slice(*cut) for cut in spec.slice)])
    for shard in replica.strategy.shards:
        if shard.is_copy:
            shard.main_param.copy_(shard.bucket.data[shard.start : shard.stop])


def build(case: Case, context: RankContext) -> Megalite:
    return Megalite(case, context)


def build_zb_h2(case: Case, context: RankContext) -> Megalite:
    """Use the schedule that fills the bubble with weight gradients, with more microbatches in flight."""
    return Megalite(dataclasses.replace(case, schedule="zb-h2"), context)


def build_dualpipe_v(case: Case, context: RankContext) -> Megalite:
    """Use the schedule that pairs each forward with a backward, on stages in a V over the ranks."""
    return Megalite(dataclasses.replace(case, schedule="dualpipe-v"), context)

"""Tiny models and batches that tests of many layouts share."""

from typing import Any

import numpy as np
import torch

from megalite.config.batch import batch_size
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.loader import BatchLoader
from megalite.optimizers.schedules import Progress, Schedules
from megalite.training.replica import Replica, build_replica
from megalite.training.step import Stepper, StepResult
from tests.support.ranks import RankContext

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 93,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 20,
    "lr": 1e-2,
    "lr_warmup_iters": 2,
    "clip_grad": 0.5,
    "weight_decay": 0.1,
    "precision": "fp64",
    "device": "cpu",
    "init_method_std": 0.1,
    "mock_data": True,
    "ddp_bucket_size": 3000,
}

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "num_query_groups": 4,
    "num_attention_heads": 8,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "tie_embeddings": False,
}


class UnevenSamples:
    """Samples of made-up tokens in which the end-of-document token 0 makes masks uneven."""

    def sample(self, k: int) -> np.ndarray:
        """Sample k: about a quarter of even samples is masked, odd ones hardly at all."""
        generator = np.random.Generator(np.random.Philox(key=k))
        tokens = generator.integers(1, 93, size=17)
        tokens[generator.random(17) < (0.4 if k % 2 == 0 else 0.02)] = 0
        return tokens


def tiny_config(world_size: int = 1, **changes: Any) -> RunConfig:
    """A validated config of the tiny model."""
    return validate(replace(RunConfig(), **{**TINY, **changes}), world_size)


def build(context: RankContext, config: RunConfig) -> Replica:
    """The replica of one rank of the pool for a validated config."""
    p = config.parallel
    topology = context.topology(tp=p.tp, pp=p.pp, cp=p.cp, dp=p.dp, order=p.rank_order)
    return build_replica(config, topology)


class Runner:
    """Steps a replica over `UnevenSamples`."""

    def __init__(self, replica: Replica, progress: Progress | None = None) -> None:
        self.replica = replica
        config, topology = replica.config, replica.topology
        self.progress = progress or Progress(0, 0)
        self.stepper = Stepper(replica, Schedules(config))
        self.loader = BatchLoader(
            UnevenSamples(),
            seq_length=config.training.seq_length,
            eod_token=0,
            eod_mask_loss=True,
            dp_rank=topology.dp.rank,
            dp_size=topology.dp.size,
            micro_batch_size=config.training.micro_batch_size,
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


Part = tuple[tuple[int, ...], tuple[tuple[int, int], ...], np.ndarray]
"""Global shape, slice, values."""


def local_parts(replica: Replica, kind: str) -> dict[str, Part]:
    """This rank's slices of every weight (`weight`), reduced gradient (`grad`), main parameter or optimizer state."""
    parts = {}
    strategy = replica.strategy
    strategy.wait_for_parameters()
    for shard in strategy.shards:
        if kind == "weight":
            flat = shard.bucket.data
        else:
            grad = shard.main_param.grad
            assert grad is not None
            states = {
                "grad": grad,
                "main_param": shard.main_param.data,
                **replica.optimizer.state(shard.main_param),
            }
            flat = strategy.gather(shard, states[kind])
        for placed in shard.bucket.placed:
            spec = placed.parameter.info.spec
            values = flat[placed.start : placed.stop].view(spec.shape).detach().clone()
            if values.dtype == torch.bfloat16:
                values = values.float()  # numpy has no bf16; fp32 holds each of its values
            parts[spec.name] = (spec.global_shape, spec.slice, values.numpy())
    return parts


def assemble(ranks: list[dict[str, Part]]) -> dict[str, np.ndarray]:
    """Full tensors from the slices of all ranks; slices that several ranks hold must agree to the bit."""
    full: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for parts in ranks:
        for name, (shape, bounds, values) in parts.items():
            tensor = full.setdefault(name, np.zeros(shape))
            seen = filled.setdefault(name, np.zeros(shape, dtype=bool))
            place = tuple(slice(start, stop) for start, stop in bounds)
            if seen[place].any():
                np.testing.assert_array_equal(tensor[place], values, err_msg=f"copies of {name} differ")
            tensor[place], seen[place] = values, True
    for name, seen in filled.items():
        assert seen.all(), f"part of {name} is on no rank"
    return full

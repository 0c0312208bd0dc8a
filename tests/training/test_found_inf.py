"""A gradient that overflows on one rank: the step changes no state of any rank, for all strategies."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megalite.optimizers.schedules import Progress, Schedules
from megalite.tensor_parallel.parameter import ShardedParameter
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import changed, state_copies
from tests.support.tiny import Runner, build, tiny_config, words

Settings = dict[str, Any]

FP16: Settings = words(
    "precision=fp16 initial_loss_scale=1024.0 hysteresis=2 num_layers=2 micro_batch_size=2 global_batch_size=4 "
    "lr_decay_style=constant lr_warmup_iters=0 lr=1e-3"
)

BEFORE = 2
"""Steps before the bad one; they cover the warm-up of strategies that have one."""

STRATEGIES: dict[str, Settings] = {
    "zero-2": {"dp_strategy": "distributed-optimizer", "shard_gradients": True, "wire_dtype": "bf16"},
    "zero-3": {"dp_strategy": "fully-sharded"},
    "fp16 wire": {"wire_dtype": "fp16", "precision": "fp32"},
    "sharded server": {"dp_strategy": "sharded-parameter-server"},
    "diloco": {"dp_strategy": "diloco", "sync_interval": 2},
    "gossip": {"dp_strategy": "gossip"},
    "top-k": {"grad_compression": "topk"},
    "powersgd": {"grad_compression": "powersgd"},
    "onebit-lamb": {"optimizer": "onebit-lamb", "freeze_step": 1, "onebit_rule": "deepspeed"},
    "zero-one-adam": {"optimizer": "zero-one-adam", "freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4},
    "bf16 moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
}


@contextmanager
def planted(runner: Runner, *, here: bool, value: float = math.inf, place: int = 0) -> Iterator[None]:
    """Make one gradient element non-finite on this rank, before the last backward and any exchange."""
    strategy = runner.replica.strategy
    arm = strategy.enable_grad_sync

    def arm_and_plant(stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        # A split parameter, with a gradient on no other tp or pp rank.
        module = runner.replica.stages[stage]
        target = next(
            parameter
            for parameter in module.parameters()
            if isinstance(parameter, ShardedParameter)
            and parameter.info.shard_dim is not None
            and not parameter.info.tied
        )
        if target.before_accumulation is not None:
            target.before_accumulation()
        assert target.main_grad is not None
        target.main_grad.view(-1)[place] = value
        arm(stage, pending)

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(strategy, "enable_grad_sync", arm_and_plant)
        yield


def with_and_without(
    context: RankContext, world: int, settings: Settings, culprit: int
) -> tuple[list[str], list[str], list[bool], list[float]]:
    """Return the changes by a bad step, differences of the next step from a run without it, skipped steps, and the loss
    scales of two more bad steps and a good one."""
    config = tiny_config(world, **{**FP16, **settings})
    ends, skipped, moved, scales = [], [], list[str](), list[float]()
    for bad in (True, False):
        runner = Runner(build(context, config))
        for _ in range(BEFORE):
            skipped.append(runner.step().skipped)
        if bad:
            before = state_copies(runner.replica)
            with planted(runner, here=context.rank == culprit):
                skipped.append(runner.step().skipped)
            moved = changed(before, state_copies(runner.replica))
        else:
            step, samples = runner.progress.step, runner.progress.samples
            size = config.training.global_batch_size
            assert size is not None
            runner.progress = Progress(step + 1, samples + size)
        skipped.append(runner.step().skipped)
        ends.append(state_copies(runner.replica))
        for again in (True, True, False) if bad else ():
            with planted(runner, here=again and context.rank == culprit):
                result = runner.step()
            skipped.append(result.skipped)
            scales.append(result.loss_scale)
        runner.replica.strategy.close()
    return moved, changed(*ends), skipped, scales


def check(world: int, settings: Settings, culprit: int) -> None:
    for moved, differing, skipped, scales in run_ranks(world, with_and_without, world, settings, culprit):
        assert skipped == [False] * BEFORE + [True, False, True, True, False] + [False] * (BEFORE + 1)
        assert moved == differing == []
        # The first overflow used up the hysteresis; each later one halves the scale of the step after it.
        assert scales == [2.0**10, 2.0**9, 2.0**8]


@pytest.mark.parametrize("name", STRATEGIES)
def test_overflow_on_one_data_parallel_rank_changes_no_state(name: str) -> None:
    check(2, {"dp": 2, **STRATEGIES[name]}, 1)


@pytest.mark.parametrize(
    ("layout", "culprit"),
    [
        ({"tp": 2, "sequence_parallel": True}, 1),
        ({"pp": 2}, 0),
        ({"tp": 2, "dp": 2, "dp_strategy": "distributed-optimizer"}, 2),
        ({"tp": 2, "dp": 2, "optimizer": "onebit-adam", "freeze_step": 1}, 1),
        ({"pp": 2, "dp": 2, "dp_strategy": "local-sgd", "sync_interval": 2}, 0),
        ({"pp": 2, "dp": 2, "grad_compression": "onebit"}, 3),
    ],
    ids=str,
)
def test_overflow_on_one_tensor_or_pipeline_rank_changes_no_state(layout: Settings, culprit: int) -> None:
    check(math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp")), layout, culprit)


def rates(context: RankContext) -> tuple[list[float], list[float], list[float]]:
    """Return the learning rates of steps with an overflow in the second, also after a resume, and the schedule."""
    config = tiny_config(1, **{**FP16, "lr_decay_style": "linear", "lr_warmup_iters": 2, "train_iters": 10})
    runner = Runner(build(context, config))
    found = [runner.step().lr]
    with planted(runner, here=True):
        found.append(runner.step().lr)
    resumed = Runner(build(context, config), runner.progress)
    resumed.replica.scaler.load_state(runner.replica.scaler.state())
    again = [resumed.step().lr for _ in range(3)]
    found += [runner.step().lr for _ in range(3)]
    schedules = Schedules(config)
    return found, again, [schedules.lr(Progress(step, 8 * step)) for step in range(1, 5)]


def test_learning_rate_schedule_ignores_skipped_steps() -> None:
    found, again, (first, second, third, fourth) = rates(RankContext(0))
    assert found == [first, second, second, third, fourth]
    assert again == found[2:]

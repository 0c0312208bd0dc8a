"""Planned bytes of a schedule against the storages that are alive in a step."""

from typing import Any

import pytest

from benchmarks.live_bytes import LiveBytes
from megalite.optimizers.schedules import Schedules
from megalite.partition.activations import stage_sizes
from megalite.pipeline.ir.memory import memory_peaks
from megalite.pipeline.ir.schedule import Action
from megalite.training.step import Stepper
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config, words

MODEL: dict[str, Any] = words(
    "num_layers=8 hidden_size=64 seq_length=128 precision=bf16 micro_batch_size=2 global_batch_size=16 "
    "eod_mask_loss=false attention_backend=flash"
)
"""The other CPU kernel of attention stores a few MB of scores, which is much for a model of this size."""
V: dict[str, Any] = {"pp": 2, "vpp": 2, "pipeline_schedule": "zb-v"}
AHEAD: dict[str, Any] = {"recompute_granularity": "full", "recompute_ahead": True}


class AtEnds:
    """A tracer that records storages alive at the end of each computation."""

    def __init__(self) -> None:
        self.live = LiveBytes()
        self.most = 0

    def start(self, action: Action) -> None:
        """Do nothing."""

    def end(self, action: Action) -> None:
        self.most = max(self.most, self.live.now)


def measured(context: RankContext, world_size: int, settings: dict[str, Any]) -> tuple[int, int, float]:
    """Return most bytes alive between computations, most alive ever, and planned bytes."""
    config = tiny_config(world_size, **{**MODEL, **settings})
    replica = build(context, config)
    runner, ends = Runner(replica), AtEnds()
    runner.stepper = Stepper(replica, Schedules(config), tracer=ends)
    runner.step()
    ends.most = 0
    with ends.live:
        runner.step()
    assert config.parallel.dp == 1
    program = replica.programs.program(8)
    planned = memory_peaks(program, stage_sizes(config, replica.programs.stages))[replica.topology.pp.rank]
    return ends.most, ends.live.peak, planned.size


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 2, "pipeline_schedule": "gpipe", "pipeline_send_window": 4, "pipeline_recv_prefetch": 4},
        {"pp": 2, "vpp": 2},
        {"pp": 4, "pipeline_schedule": "zb-h2"},
        {**V, "pipeline_schedule": "dualpipe-v"},
        {**V, **AHEAD},
    ],
    ids=str,
)
def test_planned_peak_equals_measured_peak(settings: dict[str, Any]) -> None:
    """Within 5 % between computations; inside one there are a few more tensors of a layer."""
    for between, peak, planned in run_ranks(settings["pp"], measured, settings["pp"], settings):
        assert between == pytest.approx(planned, rel=0.05)
        assert peak <= planned * 1.3


def test_plan_includes_recomputation_in_a_backward() -> None:
    """Freed between computations; inside there are a unit's activations and their gradients."""
    settings = {**V, "recompute_granularity": "full"}
    for between, peak, planned in run_ranks(2, measured, 2, settings):
        assert between < planned
        assert 0.8 * peak <= planned <= 1.3 * peak

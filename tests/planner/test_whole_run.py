"""A whole training run: failures against a simulation, a ramp-up step by step, cost and energy."""

import math
import random
from dataclasses import replace

import pytest

from megalite.config.batch import batch_size
from megalite.config.describe import replace as with_settings
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, load_stack
from megalite.planner.whole_run import WholeRun, goodput
from tests.planner.cost.machines import from_flags

CLUSTER, STACK = load_cluster("dgx-a100"), load_stack("fused")
LINE = "--preset gpt3-1.3b --vocab-size 50257 --tp 2 --micro-batch-size 1 --global-batch-size 64 --bf16"


def config_of(flags: str = "") -> RunConfig:
    return from_flags(f"{LINE} {flags}", 8)


def simulated_goodput(apart: float, save: float, mtbf: float, restart: float, count: int) -> float:
    """Simulate random failures during training, saves and restarts."""
    draw = random.Random(5)
    clock, fails = 0.0, draw.expovariate(1 / mtbf)
    for _ in range(count):
        needed = apart + save
        while fails < clock + needed:
            clock, needed = fails, restart + apart + save
            fails = clock + draw.expovariate(1 / mtbf)
        clock += needed
    return count * apart / clock


@pytest.mark.parametrize(("apart", "save", "restart"), [(900.0, 30.0, 300.0), (6000.0, 600.0, 60.0)])
def test_time_of_failures_equals_a_simulation(apart: float, save: float, restart: float) -> None:
    mtbf = 7200.0
    assert goodput(apart, save, mtbf, restart) == pytest.approx(
        simulated_goodput(apart, save, mtbf, restart, 40_000), rel=0.01
    )


def test_save_interval_is_near_the_optimum() -> None:
    run = WholeRun(tokens=1e12, mtbf_hours=50_000.0, save_seconds=30.0)
    found = run.of(config_of(), 16_384, 10.0, CLUSTER, STACK)["failures"]
    assert found["mean_seconds_between"] == pytest.approx(50_000 * 3600 / 16_384)
    assert found["save_interval"] == round(math.sqrt(2 * 30 * found["mean_seconds_between"]) / 10)
    others = (goodput(seconds, 30.0, found["mean_seconds_between"], 600.0) for seconds in range(60, 20_000, 60))
    assert found["goodput"] >= max(others) - 1e-3
    assert goodput(1e6, 30.0, 60.0, 600.0) == 0.0


def test_ramp_up_takes_the_time_of_its_steps() -> None:
    config = config_of("--rampup-batch-size 8 4 3000")
    seconds = {
        size: predict(
            with_settings(config, global_batch_size=size, rampup_batch_size=None), CLUSTER, STACK
        ).step_seconds
        for size in range(8, 65, 4)
    }
    samples, taken = 0, 0.0
    while samples < 10_000:
        size = batch_size(config, samples)
        samples, taken = samples + size, taken + seconds[size]
    run = WholeRun(tokens=float(samples * config.training.seq_length))
    found = run.of(config, 8, seconds[64], CLUSTER, STACK)["seconds"]
    assert found == pytest.approx(taken, rel=0.005)
    assert found > 1.002 * samples / 64 * seconds[64]


def test_cost_and_energy() -> None:
    run, config = WholeRun(tokens=1e9), config_of()
    found = run.of(config, 8, 2.0, CLUSTER, STACK)
    seconds = 1e9 / (64 * config.training.seq_length) * 2.0
    assert found["seconds"] == pytest.approx(seconds)
    assert found["gpu_hours"] == pytest.approx(8 * seconds / 3600)
    assert found["energy"]["token_joules"] == pytest.approx(8 * seconds * 400 / 1e9)
    assert not {"cost", "failures"} & found.keys()
    assert "energy" not in run.of(config, 8, 2.0, load_cluster("cpu-box"), STACK)
    priced = replace(CLUSTER, gpu_hour_price=2.0)
    assert run.of(config, 8, 2.0, priced, STACK)["cost"]["whole"] == pytest.approx(2 * found["gpu_hours"])
    given = replace(run, gpu_hour_price=3.0).of(config, 8, 2.0, priced, STACK)
    assert given["cost"]["million_tokens"] == pytest.approx(3 * found["gpu_hours"] / 1000)


def test_failures_need_both_settings() -> None:
    with pytest.raises(ConfigError, match=r"--mtbf-hours is set alone; goodput requires both: add --save-seconds 30"):
        WholeRun(tokens=1.0, mtbf_hours=5.0)
    with pytest.raises(ConfigError, match=r"--save-seconds is set alone; .* add --mtbf-hours 50000"):
        WholeRun(tokens=1.0, save_seconds=5.0)

"""Fitting constants to measured steps."""

from dataclasses import replace

import pytest

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.planner.cost.calibrate import Measured, fit
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_stack
from tests.planner.cost.machines import BASE, cluster_with, config_of

UNFUSED = load_stack("unfused")
TRUE = cluster_with(gemm=0.62, memory=0.7, link=0.6, network=0.3)
HOST = replace(UNFUSED, operation_seconds=7e-5)


def _configs() -> list[RunConfig]:
    layouts = [(1, 1, 16), (2, 1, 8), (8, 1, 2), (8, 2, 1), (4, 4, 1), (1, 4, 4), (16, 1, 1)]
    return [
        config_of(16, num_layers=4, hidden_size=h, num_attention_heads=h // 128, tp=t, pp=p, dp=d, micro_batch_size=b,
                  global_batch_size=64, precision="fp16")
        for t, p, d in layouts
        for h, b in ((2048, 1), (4096, 4))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[Measured]:
    return [Measured(config, predict(config, TRUE, HOST).step_seconds) for config in _configs()]


def test_constants_are_recovered(rows: list[Measured]) -> None:
    found = fit(rows, BASE, UNFUSED, source="simulated steps")
    assert max(map(abs, found.errors)) < 0.02
    assert found.cluster.efficiency.gemm == pytest.approx(0.62, rel=0.05)
    assert found.cluster.efficiency.network == pytest.approx(0.3, rel=0.15)
    assert found.stack.operation_seconds == pytest.approx(7e-5, rel=0.05)
    again = [predict(row.config, found.cluster, found.stack).step_seconds for row in rows]
    assert list(found.predicted) == pytest.approx(again)
    text = f"fitted on {len(rows)} simulated steps"
    assert found.cluster.provenance["efficiency.gemm"] == text
    assert found.stack.provenance["operation_seconds"] == text
    assert found.cluster.provenance["node"] == BASE.provenance["node"]


def test_kernel_constants_are_recovered() -> None:
    """Rows without parallelism within the model: time of attention, single operations, the optimizer, and gathers that
    overlap with products."""
    true = dict(attention_efficiency=0.45, elementwise_slowdown=1.6, optimizer_slowdown=3.0, overlap_cost=0.4)
    stack = replace(load_stack("flash-2023"), **true)
    rows = []
    for world, h, s, b in (
        (8, 1024, 512, 64),
        (8, 1024, 16384, 2),
        (8, 4096, 2048, 1),
        (64, 4096, 2048, 1),
        (64, 4096, 8192, 2),
    ):
        for more in ({}, {"recompute_granularity": "full"}):
            config = config_of(world, hidden_size=h, num_attention_heads=h // 128, seq_length=s, micro_batch_size=b, dp=world,
                               global_batch_size=world * b, dp_strategy="fully-sharded", **more)  # fmt: skip
            rows.append(Measured(config, predict(config, BASE, stack).step_seconds))
    start = dict(attention_efficiency=0.6, elementwise_slowdown=1.2, optimizer_slowdown=2.0, overlap_cost=0.2)
    found = fit(rows, BASE, replace(stack, **start), only=tuple(start))
    assert max(map(abs, found.errors)) < 0.01
    for name, value in true.items():
        assert getattr(found.stack, name) == pytest.approx(value, rel=0.15), name


def test_straggler_constants_are_recovered() -> None:
    """Stragglers differ from slow products by their dependence on the number of devices."""
    true = cluster_with(gemm=0.62, device_deviation=0.06)
    rows = []
    for world in (1, 8, 64, 512):
        config = config_of(world, dp=world, micro_batch_size=2, global_batch_size=16 * world)
        rows.append(Measured(config, predict(config, true, UNFUSED).step_seconds))
    names = ["gemm", "device_deviation"]
    found = fit(rows, cluster_with(device_deviation=0.03), UNFUSED, only=names)
    assert max(map(abs, found.errors)) < 0.01
    assert found.cluster.efficiency.device_deviation == pytest.approx(0.06, rel=0.15)
    assert found.cluster.provenance["efficiency.device_deviation"] == "fitted on 4 measured steps"
    assert fit(rows, BASE, UNFUSED, only=names).cluster.efficiency.device_deviation == 0.0


def test_outliers_do_not_change_the_fit(rows: list[Measured]) -> None:
    spoilt = [Measured(row.config, row.seconds * (3.0 if at in (3, 11) else 1.0)) for at, row in enumerate(rows)]
    start = replace(TRUE, efficiency=replace(TRUE.efficiency, gemm=BASE.efficiency.gemm))
    found = fit(spoilt, start, HOST, only=["gemm"])
    good = [abs(error) for at, error in enumerate(found.errors) if at not in (3, 11)]
    assert sorted(good)[len(good) // 2] < 0.02
    assert found.cluster.efficiency.gemm == pytest.approx(0.62, rel=0.08)


def test_only_selected_constants_change(rows: list[Measured]) -> None:
    found = fit(rows[:4], BASE, UNFUSED, only=["gemm"])
    assert found.stack == UNFUSED
    assert replace(found.cluster.efficiency, gemm=BASE.efficiency.gemm) == BASE.efficiency
    assert found.cluster.efficiency.gemm != BASE.efficiency.gemm


def test_unfittable_constants_are_errors(rows: list[Measured]) -> None:
    with pytest.raises(ConfigError, match="nothing to fit: at least one measured step is required"):
        fit([], BASE, UNFUSED)
    with pytest.raises(ConfigError, match="cannot fit gem: did you mean gemm"):
        fit(rows, BASE, UNFUSED, only=["gem"])

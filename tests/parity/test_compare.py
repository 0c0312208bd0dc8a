"""The comparison: which differences count, and their messages."""

import dataclasses
import json
import pickle
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.parity.pool import RankContext, RankPool
from megalite.parity.report import (
    TOLERANCES,
    Line,
    Report,
    as_data,
    compare,
    format_report,
    relative_difference,
    run_parity,
    worst_tensor,
)
from megalite.parity.shrink import Shrunk, shrink
from megalite.parity.trajectory import CopiesDifferError, RankTrajectory, Scalars, Trajectory, assemble, whole
from tests.support.same import NumbersDifferError, require_same
from tests.support.tiny import tiny_config

POOL = cast(RankPool, None)  # no layout runs


def trajectory(**changes: float) -> Trajectory:
    """Two steps of synthetic numbers, some of them changed."""
    values = {"loss": 4.0, "norm": 2.0, "balance": 0.5, "a": 1.0, "zero": 1e-17, "weight": 0.3, "evaluation": 3.0}
    v = {**values, **changes}
    first = Scalars(loss=4.5, grad_norm=2.5, auxiliary={"load_balancing_loss": 0.5})
    second = Scalars(loss=v["loss"], grad_norm=v["norm"], auxiliary={"load_balancing_loss": v["balance"]})
    gradient = {"a": np.array([v["a"], -2.0]), "zero": np.array([v["zero"]])}
    return Trajectory(
        steps=[first, second],
        gradients=[{"a": np.array([1.0, -2.0]), "zero": np.array([0.0])}, gradient],
        weights={"a": np.array([v["weight"], 0.5])},
        evaluation=v["evaluation"],
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": 4.0004}, "loss in step 2: 4.0004, on one rank 4, relative difference 1.00e-04"),
        ({"norm": 2.1}, "gradient norm in step 2"),
        ({"balance": 0.6}, "load balancing loss in step 2"),
        ({"a": 1.1}, "gradient of a in step 2: 2, on one rank 2, relative difference 5.00e-02"),
        ({"zero": 1e-3}, "gradient of zero in step 2"),
        ({"weight": 0.4}, "weight of a: 0.5, on one rank 0.5, relative difference 2.00e-01"),
        ({"evaluation": 3.1}, "evaluation loss: 3.1, on one rank 3"),
        ({"a": float("nan")}, "gradient of a in step 2: nan"),
        ({"norm": float("inf")}, "gradient norm in step 2: inf"),
        ({"loss": 4.0004, "weight": 9.0}, "loss in step 2"),
    ],
)
def test_first_difference_is_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(NumbersDifferError) as caught:
        require_same(trajectory(**changes), trajectory(), 1e-9)
    assert str(caught.value).startswith(message)


def test_rounding_is_not_a_difference() -> None:
    require_same(trajectory(loss=4.0 * (1 + 1e-15), zero=-3e-17, weight=0.3 + 1e-13), trajectory(), 1e-9)


def test_overflow_on_both_sides_is_not_a_difference() -> None:
    nan, inf = float("nan"), float("inf")
    lines = compare(trajectory(norm=nan, a=inf), trajectory(norm=inf, a=nan))
    assert max(line.difference for line in lines) == 0.0
    assert [line.step for line in lines if line.what == "gradient"] == [1], "the step has no gradients"
    with pytest.raises(NumbersDifferError, match="gradient norm in step 2: 2, on one rank nan"):
        require_same(trajectory(), trajectory(norm=nan), 1e-9)
    skipped = Scalars(loss=1.0, grad_norm=nan, auxiliary={})
    ranks = [
        RankTrajectory(steps=[pickle.loads(pickle.dumps(skipped))], gradients=[], weights={}, evaluation=1.0)
        for _ in range(2)
    ]
    ranks = [dataclasses.replace(rank, gradients=[{}]) for rank in ranks]
    assert repr(whole(ranks).steps) == repr([skipped]), "as from two processes"


def test_comparison_fails_if_no_step_was_made() -> None:
    settings = {"precision": "fp16", "global_batch_size": 2, "num_layers": 1}
    config = tiny_config(1, **settings, initial_loss_scale=2.0**39, min_loss_scale=2.0**39)
    with pytest.raises(ConfigError, match=r"one rank overflows in 2 steps at loss scale 5\.49756e\+11"):
        run_parity(Shrunk(config=config, world_size=1, changes={}), steps=2, tolerance=None, pool=POOL)
    config = tiny_config(1, **settings, loss_scale=2.0**39)
    with pytest.raises(ConfigError, match="does not train on one rank, so no layout can be compared: step 1"):
        run_parity(Shrunk(config=config, world_size=1, changes={}), steps=2, tolerance=None, pool=POOL)


def test_differences_up_to_those_of_rounding_are_the_same() -> None:
    config = tiny_config(1, num_layers=2, global_batch_size=4, lr=3.0)  # a rate that multiplies rounding

    def report(tolerance: float | None = None, **fault: Any) -> Report:
        """The report on four microbatches in this process against one, with other settings as a fault."""
        run = lambda _, train, own, steps: [train(RankContext(0), replace(own, **fault), steps)]  # noqa: E731
        pool = cast(RankPool, SimpleNamespace(run=run))
        return run_parity(Shrunk(config=config, world_size=1, changes={}), steps=3, tolerance=tolerance, pool=pool)

    found = report()
    assert found.same and re.search(r"\(weight of .*; rounding alone changes one rank by \d", found.verdict)
    assert "SAME" in found.verdict and max(line.difference for line in found.lines) > 1e-9
    assert report(1e-9).verdict.startswith("DIFFERENT: first the weight"), "a given tolerance is the tolerance"
    line = Line(what="loss", step=3, one_rank=1.0, layout=1.0, difference=2e-7, rounding=1e-3)
    assert not TOLERANCES["fp64"].allows(line), "no rounding"
    assert report(weight_decay=0.1001).verdict.startswith("DIFFERENT: first the loss, step 2")


def test_differences_are_relative() -> None:
    assert relative_difference(1e-6, 2e-6) == pytest.approx(0.5)
    ours = {"large": np.array([100.0, 1.0]), "small": np.array([1e-2])}
    reference = {"large": np.array([100.0, 2.0]), "small": np.array([1.001e-2])}
    difference, name, *_ = worst_tensor(ours, reference, negligible=1e-5)
    assert (difference, name) == (pytest.approx(1e-2), "large")
    difference, name, *_ = worst_tensor({**ours, "large": reference["large"]}, reference, negligible=1e-5)
    assert (difference, name) == (pytest.approx(1e-3, rel=1e-2), "small")


def part(values: list[float], start: int) -> dict[str, tuple]:
    return {"w": ((4,), ((start, start + len(values)),), np.array(values))}


def test_slices_are_assembled_and_copies_must_agree() -> None:
    ranks = [part([1.0, 2.0], 0), part([3.0, 4.0], 2), part([2.0, 3.0], 1)]
    assert assemble(ranks)["w"].tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(CopiesDifferError, match=r"copies of w on several ranks differ by up to 1\.00e"):
        assemble([*ranks, part([1.0, 3.0], 0)])
    with pytest.raises(AssertionError, match="part of w is on no rank"):
        assemble(ranks[:1])


def test_scalars_must_agree_between_ranks() -> None:
    step = Scalars(loss=1.0, grad_norm=1.0, auxiliary={})
    rank = RankTrajectory(steps=[step], gradients=[part([1.0] * 4, 0)], weights=part([1.0] * 4, 0), evaluation=1.0)
    assert whole([rank, rank]).steps == [step]
    with pytest.raises(CopiesDifferError, match="rank 1"):
        whole([rank, dataclasses.replace(rank, evaluation=1.0 + 1e-15)])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_lost_half_or_doubled_tensor_is_detected_in_any_precision(precision: str, factor: float) -> None:
    gradient = np.random.default_rng(0).standard_normal((5, 7))
    found, *_ = worst_tensor({"a": factor * gradient}, {"a": gradient}, negligible=1e-5, by_elements=False)
    assert found == pytest.approx(abs(factor - 1.0))
    assert found > TOLERANCES[precision].tensor
    assert abs(factor - 1.0) > TOLERANCES[precision].number


def test_report_names_the_fault() -> None:
    found = shrink(tiny_config(1))
    lines = compare(trajectory(a=1.1, weight=0.4), trajectory())
    report = Report(shrunk=found, steps=2, tolerance=TOLERANCES["fp64"], lines=lines)
    text = format_report(report)
    marked = [line.split()[0] for line in text.splitlines() if line.endswith("<--")]
    assert marked == ["gradient", "after"]
    assert report.verdict.startswith("DIFFERENT: first the gradient of a, step 2, by 5.0e-02; worst difference 2.0e-01")
    assert json.loads(json.dumps(as_data(report)))["same"] is False
    assert not Report(shrunk=found, steps=2, tolerance=TOLERANCES["fp64"], lines=[], failure="rank 1 of 2 failed").same

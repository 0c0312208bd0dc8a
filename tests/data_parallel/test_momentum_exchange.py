"""Compare 1-bit optimizers over real processes, bit by bit, with one process that simulates all ranks."""

import math
from typing import Any

import pytest
import torch

from megalite.optimizers.base import Update
from tests.data_parallel.onebit_oracles import Layout, Tensors, layouts, onebit_adam, onebit_lamb, zero_one_adam
from tests.data_parallel.toy import SHAPES, ToyRun, assert_same, gradient
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config, words

FREEZE, STEPS = 3, 8
ZERO_ONE = words(
    "optimizer=zero-one-adam freeze_step=5 variance_update_scaler=2 local_step_scaler=2 local_step_clipper=4"
)
"""Steps 1, 2 and 4 update the second moment; exchanges after the warm-up are in steps 6, 7, 9 and 13."""

Trajectory = tuple[list[Tensors], list[tuple[str, float]], list[Layout], dict[str, float]]


def trajectory(context: RankContext, dp: int, settings: dict[str, Any], steps: int) -> Trajectory:
    run = ToyRun(context.topology(dp=dp), {"reduction_order": "rank", "freeze_step": FREEZE, **settings})
    weights, sent = [], []
    for _ in range(steps):
        run.step()
        weights.append(run.weights())
        sent.append((run.strategy.phase(run.steps), run.strategy.take_wire_bytes()))
    states = run.optimizer.tensor_state().items()
    factors = {name: float(value) for (state, name), value in states if state == "trust_factor"}
    run.strategy.close()
    return weights, sent, layouts(run), factors


@pytest.mark.parametrize(("ranks", "scale"), [(3, "tensor"), (4, "bucket"), (1, "tensor")])
def test_onebit_adam_equals_its_simulation(ranks: int, scale: str) -> None:
    settings = {"optimizer": "onebit-adam", "onebit_scale": scale}
    runs = run_ranks(ranks, trajectory, ranks, settings, STEPS)
    wanted = onebit_adam(runs[0][2], ranks, freeze=FREEZE, steps=STEPS, scale=scale)
    for weights, *_ in runs:
        assert_same(weights, wanted)


@pytest.mark.parametrize(("ranks", "scale"), [(4, "tensor"), (3, "bucket"), (1, "tensor")])
def test_onebit_lamb_equals_its_simulation(ranks: int, scale: str) -> None:
    settings = {"optimizer": "onebit-lamb", "onebit_scale": scale, "adam_beta2": 0.9}
    runs = run_ranks(ranks, trajectory, ranks, settings, STEPS)
    wanted, factors = onebit_lamb(runs[0][2], ranks, freeze=FREEZE, steps=STEPS, beta2=0.9, scale=scale)
    for weights, _, _, found in runs:
        assert_same(weights, wanted)
        assert {name: found[name] for name in factors} == factors
    assert any(abs(factor - 1.0) > 0.2 for factor in factors.values()), "r must change"


@pytest.mark.parametrize("ranks", [3, 1])
def test_zero_one_adam_equals_its_simulation(ranks: int) -> None:
    runs = run_ranks(ranks, trajectory, ranks, ZERO_ONE, 14)
    wanted = zero_one_adam(
        runs[0][2], ranks, variance_steps=(1, 2, 4), freeze=5, exchange_steps=(6, 7, 9, 13), steps=14
    )
    for rank, (weights, *_) in enumerate(runs):
        assert_same(weights, [step[rank] for step in wanted])
    if ranks > 1:
        apart = [
            any(not torch.equal(runs[0][0][at][name], runs[1][0][at][name]) for name in runs[0][0][at])
            for at in range(14)
        ]
        assert [step for step in range(1, 15) if apart[step - 1]] == [8, 10, 11, 12, 14]
        assert [step for step in range(1, 15) if not runs[0][1][step - 1][1]] == [8, 10, 11, 12, 14]


def test_bytes_of_onebit_adam() -> None:
    """1-bit Adam sends 1/32 of the bytes of whole gradients, plus the sizes of signs."""
    _, sent, buckets, _ = run_ranks(4, trajectory, 4, {"optimizer": "onebit-adam"}, FREEZE + 2)[0]
    elements = sum(bucket.size for bucket in buckets)
    whole, signs, sizes = 2 * 3 / 4 * 4 * elements, 0.25 * 3 / 4 * elements, 0
    for size, places in buckets:
        chunk = size // 4
        touching = [
            sum(start < first + chunk and stop > first for start, stop in places.values())
            for first in range(0, size, chunk)
        ]
        sizes += 2 * 3 * 4 * max(touching)
    measuring = sent.pop(FREEZE)  # the break-even measurement, with a reduction
    assert sent == [("gradients", whole)] * FREEZE + [("momentum", signs + sizes)]
    assert measuring[0] == "momentum" and measuring[1] > whole


def norms(context: RankContext, scale: float) -> list[tuple[float, float]]:
    """Return the clipping norm of each step, and this rank's gradient norm."""
    settings = {"optimizer": "onebit-adam", "freeze_step": FREEZE, "reduction_order": "rank"}
    run = ToyRun(context.topology(dp=4), settings)
    found = []
    for _ in range(STEPS):
        sums = run.gradients(loss_scale=scale)
        whole = run.strategy.norms(sums)
        assert whole.logged == whole.clipping
        own = math.sqrt(sum(float(bucket.grad.double().square().sum()) for bucket in run.strategy.all_buckets()))
        found.append((whole.clipping / scale, own / scale))
        run.steps += 1
        run.strategy.update(run.optimizer, Update(step=run.steps, lr=0.05, weight_decay=0.1, factor=1.0 / scale))
    run.strategy.close()
    return found


def test_clipping_uses_one_estimate_on_all_ranks() -> None:
    """With uncorrelated gradients of similar size, rho is about 1/2 on 4 ranks, and so is the estimate."""
    runs = run_ranks(4, norms, 1.0)
    assert all([clipping for clipping, _ in run] == [clipping for clipping, _ in runs[0]] for run in runs)
    ratio = None
    for step in range(1, STEPS + 1):
        clipping, summed = runs[0][step - 1]
        root = math.sqrt(sum((4.0 * own_part(step, rank)) ** 2 for rank in range(4)) / 4.0)
        if step <= FREEZE:
            assert clipping == pytest.approx(summed, rel=1e-6)
            ratio = clipping / root if ratio is None else 0.9 * ratio + 0.1 * clipping / root
        else:
            assert ratio is not None
            assert clipping == pytest.approx(ratio * root, rel=1e-6)
    assert run_ranks(4, norms, 1024.0)[0] == runs[0], "the loss scale is a power of 2 and must not matter"


def own_part(step: int, rank: int) -> float:
    return math.sqrt(sum(float(gradient(name, step, rank).double().square().sum()) for name in SHAPES))


SMALL: dict[str, Any] = words("num_layers=1 global_batch_size=2 precision=fp32 train_iters=200 freeze_step=4 lr=1e-3")


def copies(context: RankContext, settings: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    runner = Runner(build(context, tiny_config(4, **SMALL, **settings)))
    losses = [runner.step().loss for _ in range(steps)]
    assert all(math.isfinite(loss) for loss in losses)
    found = {}
    for bucket in runner.replica.strategy.all_buckets():
        for placed in bucket.placed:
            if placed.parameter.info.shard_dim is None:
                found[placed.parameter.info.spec.name] = placed.parameter.detach().clone()
    return found


@pytest.mark.parametrize(("optimizer", "steps"), [("onebit-adam", 8), ("onebit-lamb", 8)])
def test_parameters_replicated_over_tp_stay_equal(optimizer: str, steps: int) -> None:
    """Each tp rank decodes them from a bucket without other parameters."""
    settings = {"optimizer": optimizer, "dp": 2, "tp": 2, "sequence_parallel": True}
    runs = run_ranks(4, copies, settings, steps)
    assert len(runs[0]) > 6
    for run in runs[1:]:
        for name, values in run.items():
            assert torch.equal(values, runs[0][name]), name


def onebit_losses(
    context: RankContext, world: int, settings: dict[str, Any]
) -> tuple[list[float], dict[tuple[str, str], float]]:
    runner = Runner(build(context, tiny_config(world, **{**SMALL, **settings})))
    steps = [runner.step() for _ in range(10)]
    states = {key: float(value) for key, value in runner.replica.optimizer.tensor_state().items()}
    return [step.loss for step in steps], states


@pytest.mark.parametrize("settings", [{"tp": 2, "sequence_parallel": True}, {"pp": 2, "num_layers": 2}])
def test_lamb_factors_are_those_of_whole_tensors(settings: dict[str, Any]) -> None:
    """Without data parallelism nothing is rounded, so results do not depend on the layout."""
    common = {"optimizer": "onebit-lamb", "precision": "fp64", "num_layers": settings.get("num_layers", 1)}
    losses, states = onebit_losses(RankContext(0, {}), 1, common)
    seen = set()
    for found, others in run_ranks(2, onebit_losses, 2, {**common, **settings}):
        assert found == pytest.approx(losses, rel=1e-9)
        assert others == pytest.approx({key: states[key] for key in others}, rel=1e-7)
        seen |= set(others)
    assert seen == set(states)
    assert any(abs(value - 1.0) > 1e-3 for (state, _), value in states.items() if state == "trust_factor")


def skipping(context: RankContext, skipped: list[int]) -> list[str]:
    run = ToyRun(context.topology(dp=2), {"optimizer": "onebit-adam", "freeze_step": FREEZE})
    phases = []
    for step in range(1, FREEZE + len(skipped) + 3):
        phases.append(run.strategy.phase(step))
        if step in skipped:
            run.gradients()
            run.steps += 1
        else:
            run.step()
    run.strategy.close()
    return phases


def test_skipped_steps_extend_the_warm_up() -> None:
    """Skipped steps make it longer: otherwise a second moment of fewer gradients would be frozen."""
    for skipped in ([], [2], [1, 3, 4]):
        wanted = ["gradients"] * (FREEZE + len(skipped)) + ["momentum"] * 2
        assert run_ranks(2, skipping, skipped) == [wanted] * 2


def untouched(context: RankContext, optimizer: str) -> None:
    """Run steps in which one row of the table never gets a gradient."""
    settings = {"optimizer": optimizer, "freeze_step": FREEZE, "weight_decay": 0.0}
    run = ToyRun(context.topology(dp=2), settings)
    table: Any = run.toy.table
    accumulate = table.accumulate
    table.accumulate = lambda grad: accumulate(grad * (torch.arange(24) != 7).float().view(-1, 1))
    before = run.weights()["table"]
    for step in range(1, STEPS + 1):
        run.gradients()
        run.steps += 1
        run.strategy.update(run.optimizer, Update(step=step, lr=0.05, weight_decay=0.0))
    after = run.weights()["table"]
    assert torch.equal(after[7], before[7])
    assert (after[:7] != before[:7]).any(dim=1).all()
    assert float((after - before).abs().max()) < 10 * STEPS * 0.05
    run.strategy.close()


@pytest.mark.parametrize("optimizer", ["onebit-adam", "onebit-lamb", "zero-one-adam"])
def test_row_without_gradient_is_not_moved(optimizer: str) -> None:
    run_ranks(2, untouched, optimizer)

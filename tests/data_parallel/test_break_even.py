"""Test the break-even lines of the log."""

import contextlib
import dataclasses
import re
import time
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.data_parallel import break_even
from megalite.data_parallel.break_even import BreakEven, Costs
from megalite.data_parallel.wire import WireCounter
from megalite.optimizers.base import Exchange, Update
from megalite.optimizers.onebit import OneBitAdam
from tests.data_parallel.toy import ToyRun
from tests.support.ranks import RankContext, run_ranks

SLOW_LINK = Costs(
    step=1.0, exposed=0.8, reduction=0.9, codec=0.02, latency=0.003, optimizer=0.007, whole_bytes=1e6, lossy_bytes=4e4
)
"""80 % of the step is waiting; 0.1 s of the reduction is hidden."""


def test_predicted_speed_equals_the_formula() -> None:
    assert SLOW_LINK.speed(1.0) == pytest.approx(1.0)
    assert SLOW_LINK.speed(0.0) == pytest.approx(1.0 / (0.2 + 0.8 / 25 + 0.03))
    assert SLOW_LINK.speed(0.25) == pytest.approx(1.0 / (0.25 + 0.75 * 0.262))
    line = SLOW_LINK.line(0.25)
    assert "compute c 0.200" in line and "k 25.0" in line
    assert "about 2.24 times as fast" in line and "warm-up w 0.25)" in line and "slower" not in line
    assert "w 0.15 assumed" in SLOW_LINK.line(None)


def test_slowdown_is_reported_for_each_extra_cost() -> None:
    fast = dataclasses.replace(SLOW_LINK, exposed=0.01)
    assert "grad_compression topk will be slower here" in fast.line(0.2, name="grad_compression topk")
    for name in ("codec", "latency", "optimizer"):
        slow = dataclasses.replace(SLOW_LINK, **dict[str, Any]({name: 0.9}))
        assert "1-bit will be slower here" in slow.line(0.2) and f"{name} 900.0 ms" in slow.line(0.2)
        assert slow.break_even < SLOW_LINK.break_even and slow.speed(0.2) < 1.0


def test_both_are_equally_fast_at_the_break_even_rate() -> None:
    rate = SLOW_LINK.break_even
    hidden, whole, lossy = 0.1, SLOW_LINK.whole_bytes / rate, SLOW_LINK.lossy_bytes / rate
    assert lossy + SLOW_LINK.extra == pytest.approx(whole - hidden)
    assert f"less than {rate * 8e-6:.0f} Mbit/s" in SLOW_LINK.line(0.2)


Said = tuple[dict[int, list[str]], list[float], torch.Tensor]


def said(context: RankContext, settings: dict[str, Any], silent: bool = False) -> Said:
    """Return the log's lines by step, the bytes of each step, and the final weights; `silent`: without measurement."""
    lines, sent = {}, []
    with mock.patch.object(BreakEven, "begin", lambda self, *, whole: None) if silent else contextlib.nullcontext():
        run = ToyRun(context.topology(dp=2), {"train_iters": 20, "lr_warmup_iters": 1, **settings})
        before = torch.get_rng_state()
        for step in range(1, 15):
            run.step()
            if run.strategy.notes:
                lines[step] = list(run.strategy.notes)
                run.strategy.notes.clear()
            sent.append(run.strategy.take_wire_bytes())
        run.strategy.close()
        assert torch.equal(torch.get_rng_state(), before)
    return lines, sent, run.weights()["table"]


ONEBIT = {"optimizer": "onebit-adam"}


@pytest.mark.parametrize(("freeze", "at"), [(20, [8]), (4, [5, 12])])
def test_line_is_logged_once_and_its_bytes_are_counted(freeze: int, at: list[int]) -> None:
    """The first line comes after 2 settling and 5 measured steps, or at an earlier freeze; the second after as many
    frozen steps."""
    runs = run_ranks(2, said, {**ONEBIT, "freeze_step": freeze})
    lines, sent, _ = runs[0]
    assert runs[1][0] == lines and list(lines) == at
    signs = run_ranks(2, said, {**ONEBIT, "freeze_step": 2})[0][1][-1]
    (found,), *measured = lines.values()
    assert found.startswith("break-even: ")
    assert f"warm-up w {freeze / 20:.2f}" in found
    assert f"k {sent[0] / signs:.1f}" in found
    milliseconds = [float(number) for number in re.findall(r"([\d.]+) (?:ms|times)", str(measured))]
    for after, before, times in [milliseconds] * len(measured):
        assert times == pytest.approx(before / after, rel=0.1, abs=0.01) and f"(step {before} ms" in found
    _, plain, _ = run_ranks(2, said, {**ONEBIT, "freeze_step": freeze}, True)[0]
    assert len(set(plain)) == (1 if freeze == 20 else 2)
    # One reduction of all buckets, and three exchanges and gathers of a byte for each bucket.
    assert 0 < probed(sent, plain, at[0]) - sent[0] < 100 and (probed(sent, plain, at[0]) - sent[0]) % 6 == 0


def probed(sent: list[float], plain: list[float], at: int) -> float:
    more = {step: a - b for step, (a, b) in enumerate(zip(sent, plain, strict=True), start=1) if a != b}
    assert list(more) == [at]
    return sum(more.values())


@pytest.mark.parametrize(("name", "warmup", "at"), [("powersgd", 5, [6, 13]), ("onebit", 0, [8]), ("topk", 2, [10])])
def test_gradient_compression_logs_the_line(name: str, warmup: int, at: list[int]) -> None:
    """The line comes when the warm-up ends, or after as many steps without one; results do not change."""
    settings = {"grad_compression": name, "compression_warmup_steps": warmup, "reduction_order": "rank"}
    runs = run_ranks(2, said, settings)
    lines, sent, table = runs[0]
    assert runs[1][0] == lines and list(lines) == at
    (found,) = lines[at[0]]
    assert found.startswith("break-even: ") and "optimizer 0.0 ms" in found
    assert ("no step had whole gradients" in found) == (warmup < 5)
    none, plain, weights = run_ranks(2, said, settings, True)[0]
    assert len(set(plain[:warmup])) == min(1, warmup) and len(set(plain[warmup:])) == 1
    assert probed(sent, plain, at[0]) > 0.0
    assert none == {} and torch.equal(weights, table)


def parts(context: RankContext, rehearsed: int) -> tuple[float, float]:
    """Return the bytes of a reduction extrapolated from a part of it, and the bytes that the part sends."""
    run = ToyRun(context.topology(dp=3), {"grad_compression": "onebit"})
    strategy: Any = run.strategy
    sent: list[float] = []

    def counted(counter: WireCounter, nbytes: float) -> None:
        if counter is not strategy.wire_counter:
            sent.append(nbytes)

    with (
        mock.patch.object(break_even, "REHEARSED", rehearsed),
        mock.patch.object(WireCounter, "add", counted),
        mock.patch.object(WireCounter, "take", lambda counter: sent[-1]),
    ):
        whole = sum(strategy._break_even._reduction(bucket)[1] for bucket in strategy._break_even._buckets)
    run.strategy.close()
    return whole, sum(sent)


def test_reduction_is_extrapolated_from_a_part() -> None:
    whole, part = (run_ranks(3, parts, most)[0] for most in (1 << 20, 96))
    assert whole[0] == whole[1] == pytest.approx(part[0])
    assert part[1] < whole[1] / 5


def lossy_steps(wait: float, reduction: float) -> Costs:
    """Return the costs computed from five steps with lossy means, 3 s each."""
    measured = BreakEven(mock.Mock(), [mock.Mock(grad=torch.zeros(4))], mock.Mock(), warmup=0.0, all_alike=True)
    measured._done, measured._lossy = False, True
    measured._times, measured._waits = [3.0], [wait]
    with (
        mock.patch.object(measured, "_reduction", lambda bucket: (reduction, 100.0)),
        mock.patch.object(measured, "_codec", lambda bucket, counter: 0.1),
        mock.patch.object(measured, "_latency", lambda bucket: 0.0),
    ):
        return measured._costs()


def test_costs_without_a_measured_plain_step() -> None:
    costs = lossy_steps(wait=0.6, reduction=4.0)
    assert (costs.exposed, costs.step) == pytest.approx((4.0 - 1.6, 2.4 + 2.4))
    assert lossy_steps(wait=0.6, reduction=1.0).exposed == 0.0


def test_optimizer_cost_is_measured_without_stepping_it() -> None:
    """Uses an optimizer that sleeps in frozen steps; the run's optimizer is not stepped."""

    class Slow(OneBitAdam):
        def _frozen_step(self, update: Update, exchange: Exchange) -> None:
            time.sleep(0.05)

    run = ToyRun(RankContext(0, {}).topology(dp=1), {"optimizer": "onebit-adam", "freeze_step": 20})
    own: Any = run.optimizer
    slow = Slow(own.parameters, run.config.optimizer, own.freeze, group=run.topology.world)
    strategy: Any = run.strategy
    assert strategy._break_even.optimizer is own
    strategy._break_even.optimizer = slow
    assert strategy._break_even._optimizer_extra() > 0.04
    assert slow.updates == 0 and own.freeze.step == 20

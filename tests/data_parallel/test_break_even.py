"""What a run says of whether lossy means pay, and when."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.data_parallel.break_even import BreakEven, Costs
from megalite.optimizers.base import Exchange
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.onebit_adam import OneBitAdam
from tests.data_parallel.toy import ToyRun
from tests.support.ranks import RankContext, run_ranks

SLOW_LINK = Costs(
    step=1.0,
    exposed=0.8,
    reduction=0.9,
    codec=0.02,
    latency=0.003,
    optimizer=0.007,
    whole_bytes=1e6,
    lossy_bytes=4e4,
)
"""80 % of the step waits; 0.1 s of the reduction hides."""


def test_the_prediction_is_that_of_its_parts() -> None:
    assert SLOW_LINK.compute == pytest.approx(0.2)
    assert SLOW_LINK.volume_ratio == pytest.approx(25.0)
    assert SLOW_LINK.speed(1.0) == pytest.approx(1.0)
    assert SLOW_LINK.speed(0.0) == pytest.approx(1.0 / (0.2 + 0.8 / 25 + 0.03))
    assert SLOW_LINK.speed(0.25) == pytest.approx(1.0 / (0.25 + 0.75 * 0.262))
    line = SLOW_LINK.line(0.25)
    assert "about 2.24 times as fast" in line and "warm-up w 0.25)" in line and "slower" not in line
    assert "w 0.15 assumed" in SLOW_LINK.line(None)


def test_a_loss_is_said_plainly() -> None:
    fast = dataclasses.replace(SLOW_LINK, exposed=0.01)
    assert "1-bit will be slower here" in fast.line(0.2)
    assert fast.speed(0.2) < 1.0
    assert "grad_compression topk will be slower here" in fast.line(0.2, name="grad_compression topk")


@pytest.mark.parametrize("name", ["codec", "latency", "optimizer"])
def test_whatever_comes_on_top_can_turn_the_verdict(name: str) -> None:
    slow = dataclasses.replace(SLOW_LINK, **{name: 0.9})
    assert "1-bit will be slower here" in slow.line(0.2)
    assert f"{name} 900.0 ms" in slow.line(0.2)
    assert slow.break_even < SLOW_LINK.break_even


def test_at_the_break_even_rate_neither_is_faster() -> None:
    rate = SLOW_LINK.break_even
    hidden, whole, lossy = 0.1, SLOW_LINK.whole_bytes / rate, SLOW_LINK.lossy_bytes / rate
    assert lossy + SLOW_LINK.extra == pytest.approx(whole - hidden)
    assert f"less than {rate * 8e-6:.0f} Mbit/s" in SLOW_LINK.line(0.2)


def said(context: RankContext, freeze: int) -> tuple[dict[int, list[str]], list[float]]:
    """The log's lines by step, and the bytes of each step."""
    settings = {"optimizer": "onebit-adam", "freeze_step": freeze, "train_iters": 20, "lr_warmup_iters": 1}
    run = ToyRun(context.topology(dp=2), settings)
    before = torch.get_rng_state()
    lines, sent = {}, []
    for step in range(1, 11):
        run.step()
        if run.strategy.notes:
            lines[step] = list(run.strategy.notes)
            run.strategy.notes.clear()
        sent.append(run.strategy.wire())
    run.strategy.close()
    assert torch.equal(torch.get_rng_state(), before)
    return lines, sent


@pytest.mark.parametrize(("freeze", "at"), [(20, 8), (4, 5), (2, None)])
def test_it_is_said_once_the_same_on_all_ranks_and_sends_nothing_of_the_runs(
    freeze: int, at: int | None
) -> None:
    """After 2 steps that settle and 5 that are measured, or what there is of them before the freeze."""
    runs = run_ranks(2, said, freeze)
    lines, sent = runs[0]
    assert runs[1][0] == lines
    assert list(lines) == ([] if at is None else [at])
    for found in lines.values():
        assert len(found) == 1 and found[0].startswith("break-even: ")
        assert f"warm-up w {freeze / 20:.2f}" in found[0]
        assert f"k {sent[0] / run_ranks(2, said, 2)[0][1][-1]:.1f}" in found[0]
    assert len(set(sent)) == (1 if freeze == 20 else 2)


def compressed(context: RankContext, name: str) -> tuple[dict[int, list[str]], list[float], torch.Tensor]:
    """The log's lines by step, the bytes of each step, and weights at the end."""
    settings = {"grad_compression": name, "compression_warmup_steps": 5, "reduction_order": "rank"}
    run = ToyRun(context.topology(dp=2), settings)
    lines, sent = {}, []
    for step in range(1, 8):
        run.step()
        if run.strategy.notes:
            lines[step] = list(run.strategy.notes)
            run.strategy.notes.clear()
        sent.append(run.strategy.wire())
    run.strategy.close()
    return lines, sent, run.weights()["table"]


@pytest.mark.parametrize("name", ["onebit", "topk", "powersgd", "uint8"])
def test_compression_of_gradients_says_it_too(name: str) -> None:
    """When its warm-up ends; neither bytes nor numbers of the run show it."""
    runs = run_ranks(2, compressed, name)
    lines, sent, table = runs[0]
    assert runs[1][0] == lines and list(lines) == [6] and len(lines[6]) == 1
    assert lines[6][0].startswith("break-even: ") and "optimizer 0.0 ms" in lines[6][0]
    assert len(set(sent[:5])) == len(set(sent[5:])) == 1
    silent = run_ranks(2, unsaid, name)
    assert silent[0][0] == {} and torch.equal(silent[0][2], table)


def unsaid(context: RankContext, name: str) -> tuple[dict[int, list[str]], list[float], torch.Tensor]:
    """As `compressed`, with nothing measured."""
    with mock.patch.object(BreakEven, "begin", lambda self, *, whole: None):
        return compressed(context, name)


def test_the_optimizers_own_work_is_measured_beside_the_run() -> None:
    """An optimizer that sleeps in frozen steps; the run's own is not stepped."""

    class Slow(OneBitAdam):
        def alone(self, parameters: Sequence[FlatParameter], *, freeze_step: int) -> "Slow":
            return Slow(parameters, self._config, self.freeze.at(freeze_step))

        def _frozen_step(self, update: Update, exchange: Exchange) -> None:
            time.sleep(0.05)

    run = ToyRun(RankContext(0, {}).topology(dp=1), {"optimizer": "onebit-adam", "freeze_step": 20})
    own: Any = run.optimizer
    slow = Slow(own.parameters, run.config.optimizer, own.freeze)
    strategy: Any = run.strategy
    assert strategy._break_even._optimizer is own
    strategy._break_even.follow(slow)
    assert strategy._break_even._optimizer_extra() > 0.04
    assert slow.updates == 0 and own.freeze.step == 20

"""What a run says of whether lossy means pay, and when."""

import dataclasses

import pytest
import torch

from megalite.data_parallel.break_even import Costs
from tests.data_parallel.toy import ToyRun
from tests.support.ranks import RankContext, run_ranks

SLOW_LINK = Costs(step=1.0, exposed=0.8, reduction=0.9, codec=0.02, whole_bytes=1e6, lossy_bytes=4e4)
"""80 % of the step waits; 0.1 s of the reduction hides."""


def test_the_prediction_is_that_of_its_parts() -> None:
    assert SLOW_LINK.compute == pytest.approx(0.2)
    assert SLOW_LINK.volume_ratio == pytest.approx(25.0)
    assert SLOW_LINK.speed(1.0) == pytest.approx(1.0)
    assert SLOW_LINK.speed(0.0) == pytest.approx(1.0 / (0.2 + 0.8 / 25 + 0.02))
    assert SLOW_LINK.speed(0.25) == pytest.approx(1.0 / (0.25 + 0.75 * 0.252))
    line = SLOW_LINK.line(0.25)
    assert "about 2.28 times as fast" in line and "warm-up w 0.25)" in line and "slower" not in line
    assert "w 0.15 assumed" in SLOW_LINK.line(None)


def test_a_loss_is_said_plainly() -> None:
    fast = dataclasses.replace(SLOW_LINK, exposed=0.01)
    assert "1-bit will be slower here" in fast.line(0.2)
    assert fast.speed(0.2) < 1.0


def test_at_the_break_even_rate_neither_is_faster() -> None:
    rate = SLOW_LINK.break_even
    hidden, whole, lossy = 0.1, SLOW_LINK.whole_bytes / rate, SLOW_LINK.lossy_bytes / rate
    assert lossy + SLOW_LINK.codec == pytest.approx(whole - hidden)
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

"""An alarm for losses that jump, and none for those that scatter or fall."""

import math
import random
from pathlib import Path

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.training.reporter import LossSpikes
from megalite.training.sinks import JsonLines


def losses(count: int, *, seed: int = 1) -> list[float]:
    """A loss that falls, with noise."""
    draw = random.Random(seed)
    return [3.0 + 4.0 * math.exp(-step / 80) + draw.gauss(0.0, 0.03) for step in range(count)]


def alarms(values: list[float], *, window: int = 100, threshold: float = 10.0) -> list[int]:
    spikes = LossSpikes(window=window, threshold=threshold)
    return [step for step, loss in enumerate(values) if spikes.score(loss)[1]]


def test_a_loss_that_falls_and_scatters_is_quiet() -> None:
    for seed in range(5):
        assert alarms(losses(600, seed=seed)) == []


def test_a_jump_is_told_once_and_the_next_one_again() -> None:
    values = losses(400)
    values[200:205] = [8.0] * 5
    values[300] = 9.0
    assert alarms(values) == [200, 300]
    assert alarms(values, threshold=0.0) == []


def test_a_new_level_becomes_the_usual_one() -> None:
    values = [value + (2.0 if step >= 200 else 0.0) for step, value in enumerate(losses(400))]
    values[390] = 12.0
    assert alarms(values, window=50) == [200, 390]


def test_a_flat_loss_does_not_alarm_at_a_breath() -> None:
    assert alarms([2.0] * 100 + [2.01] + [2.0] * 20) == []
    assert alarms([2.0] * 100 + [2.2]) == [100]


def test_what_is_not_finite_is_passed_over() -> None:
    spikes = LossSpikes(window=20, threshold=5.0)
    for loss in losses(40):
        spikes.score(loss)
    score, _ = spikes.score(3.7)
    again = LossSpikes(window=20, threshold=5.0)
    for loss in losses(40):
        again.score(loss)
    for loss in (math.nan, math.inf, -math.inf):
        assert again.score(loss) == (None, False)
    assert again.score(3.7)[0] == score


def test_a_resumed_run_scores_as_one_that_did_not_stop(tmp_path: Path) -> None:
    config = replace(RunConfig(), loss_spike_window=30, run_dir=str(tmp_path))
    values = losses(200)
    values[150] = 9.0
    whole, scores = LossSpikes.resumed(config), []
    for loss in values:
        scores.append(whole.score(loss))
    sink = JsonLines(tmp_path / "metrics.jsonl", step=0)
    for step, loss in enumerate(values[:151], start=1):
        sink.write({"kind": "train", "step": step, "loss": loss})
    resumed = LossSpikes.resumed(config)
    assert [resumed.score(loss) for loss in values[151:]] == scores[151:]
    assert scores[150][1]


def test_the_words() -> None:
    assert (
        LossSpikes(window=20, threshold=5.0)
        .words(9.5, 31.25)
        .startswith("loss 9.5000 is a spike: 31.2 times the usual scatter")
    )

from typing import Any

import pytest

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.run_samples import megatron_lengths, samples_to_read


def config(**settings: Any) -> RunConfig:
    values = {"train_iters": 100, "global_batch_size": 8, "vocab_size": 64, "mock_data": True} | settings
    return validate(replace(RunConfig(), **values), 1, frozenset(values))


def test_what_a_run_reads() -> None:
    assert samples_to_read(config()) == {"train": (0, 800)}
    evaluates = config(eval_interval=30, eval_iters=5)
    expected = {"train": (80, 800), "valid": (0, 40), "test": (0, 40)}
    assert samples_to_read(evaluates, step=10, samples=80) == expected
    # Resumed after smaller batches: the steps count.
    assert samples_to_read(config(), step=10, samples=40)["train"] == (40, 760)
    assert samples_to_read(config(), step=100, samples=800)["train"] == (800, 800)


def test_a_ramp_up_is_followed() -> None:
    ramp = config(train_iters=None, train_samples=1000, rampup_batch_size=[2, 2, 60])
    first, stop = samples_to_read(ramp)["train"]
    assert (first, 1000 - stop < 8) == (0, True)
    assert samples_to_read(ramp, step=3, samples=6)["train"] == (6, stop)


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, {"train": 800}),
        # Megatron-LM, training.py: (100 // 30 + 1) * 5 evaluations of 8 samples.
        ({"eval_interval": 30, "eval_iters": 5}, {"train": 800, "valid": 160, "test": 40}),
        (
            {"train_iters": None, "train_samples": 803, "eval_interval": 50, "eval_iters": 2},
            {"train": 803, "valid": 48, "test": 16},
        ),
    ],
)
def test_megatrons_lengths(settings: dict[str, Any], lengths: dict[str, int]) -> None:
    assert megatron_lengths(config(**settings)) == lengths

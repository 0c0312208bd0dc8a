"""Batch arithmetic agrees with counting step by step."""

import pytest

from megalite.config.batch import (
    batch_size,
    batch_sizes,
    samples_after,
    sequence_length,
    steps_left,
    steps_until,
    tokens_after,
    total_samples,
    total_steps,
)
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate


def config_of(flags: str) -> RunConfig:
    return validate(parse_arguments(flags.split()).config, 1)


def test_sequence_lengths_of_a_ramp_up() -> None:
    config = config_of("--seq-length 100 --seq-length-warmup 16 10 --rampup-batch-size 4 4 30 --global-batch-size 16")
    lengths = [sequence_length(config, step) for step in range(12)]
    assert lengths == [16, 16, 32, 32, 48, 48, 64, 64, 80, 80, 100, 100]
    consumed = tokens = 0
    for step, length in enumerate(lengths):
        assert tokens_after(config, step, consumed) == tokens
        size = batch_size(config, consumed)
        consumed, tokens = consumed + size, tokens + size * length
    assert sequence_length(config_of("--seq-length 100"), 0) == 100


def test_ramp_up_grows_by_the_increment_over_the_samples() -> None:
    config = config_of("--rampup-batch-size 4 4 31 --global-batch-size 16")
    # Three increments over 31 samples: after 31/3, 62/3 and 31 samples, rounded up.
    found = [batch_size(config, consumed) for consumed in (0, 10, 11, 20, 21, 30, 31, 1000)]
    assert found == [4, 4, 8, 8, 12, 12, 16, 16]
    assert batch_sizes(config) == (4, 8, 12, 16)


@pytest.mark.parametrize(
    ("ramp", "final", "sizes"),
    [("16 8 100", 16, (16,)), ("8 8 0", 16, (16,)), ("16 16 5859375", 1536, tuple(range(16, 1537, 16)))],
)
def test_ramp_up_edges(ramp: str, final: int, sizes: tuple[int, ...]) -> None:
    config = config_of(f"--rampup-batch-size {ramp} --global-batch-size {final}")
    assert batch_sizes(config) == sizes
    assert batch_size(config, 0) == sizes[0]
    assert batch_size(config, 10**9) == final


def test_length_schedule_steps_at_its_tokens() -> None:
    config = config_of("--step-batch-size-schedule 0:4,1K:8,0.004M:2 --seq-length 100")
    assert [batch_size(config, consumed) for consumed in (0, 9, 10, 39, 40, 10**9)] == [4, 4, 8, 8, 2, 2]
    assert batch_sizes(config) == (4, 8, 2)
    assert config.training.global_batch_size == 2


@pytest.mark.parametrize(
    "ramp",
    [
        *("", "--rampup-batch-size 2 2 25", "--rampup-batch-size 4 4 7"),
        *("--step-batch-size-schedule 0:2,512:8", "--step-batch-size-schedule 0:8,1024:2,2048:8 --seq-length 64"),
    ],
)
@pytest.mark.parametrize("length", range(1, 60, 7))
def test_totals_equal_a_count(ramp: str, length: int) -> None:
    by_steps = config_of(f"--global-batch-size 8 --train-iters {length} {ramp}")
    consumed = 0
    for step in range(length):
        assert samples_after(by_steps, step) == consumed
        consumed += batch_size(by_steps, consumed)
    assert total_steps(by_steps) == length
    assert total_samples(by_steps) == consumed

    by_samples = config_of(f"--global-batch-size 8 --train-samples {length + 8} {ramp}")
    steps = consumed = 0
    while consumed + batch_size(by_samples, consumed) <= length + 8:
        consumed += batch_size(by_samples, consumed)
        steps += 1
    assert (total_steps(by_samples), total_samples(by_samples)) == (steps, consumed)


def test_length_must_be_known() -> None:
    with pytest.raises(ConfigError, match="the length of the run is not set; add --train-iters 1000"):
        total_steps(config_of(""))


def test_run_by_samples_uses_all_after_a_batch_size_change() -> None:
    config = config_of("--train-samples 40 --global-batch-size 8")
    assert steps_left(config, step=5, samples=20) == 2
    assert steps_left(config, step=5, samples=40) == 0
    # 4 samples per step up to 16 consumed, then 8.
    ramp = config_of("--train-samples 40 --global-batch-size 8 --rampup-batch-size 4 4 16")
    assert steps_left(ramp, step=0, samples=0) == 4 + 3 == total_steps(ramp)
    assert steps_left(ramp, step=1, samples=4) == 3 + 3
    assert steps_left(config_of("--train-iters 7"), step=5, samples=20) == 2


def stepwise(config: RunConfig, consumed: int, steps: int) -> list[int]:
    """Yield the samples consumed after each step."""
    found = [consumed]
    for _ in range(steps):
        found.append(found[-1] + batch_size(config, found[-1]))
    return found


@pytest.mark.parametrize("ramp_up", [None, (1, 1, 0), (1, 1, 7), (2, 3, 100), (4, 2, 1000), (3, 5, 11), (13, 1, 50)])
@pytest.mark.parametrize("start", [0, 5, 60])
def test_counts_equal_counting_by_step(ramp_up: tuple[int, int, int] | None, start: int) -> None:
    ramp = None if ramp_up is None else list(ramp_up)
    config = replace(RunConfig(), dp=1, global_batch_size=13, rampup_batch_size=ramp, train_samples=700)
    consumed = stepwise(config, start, 300)
    for steps in (0, 1, 2, 9, 50, 300):
        assert samples_after(config, steps, consumed=start) == consumed[steps]
    fits = max(step for step, samples in enumerate(consumed) if samples <= 700)
    assert steps_left(config, step=0, samples=start) == fits
    whole = stepwise(config, 0, 300)
    for samples in (0, 1, 12, 13, 99, 500):
        assert steps_until(config, samples) == next(n for n, done in enumerate(whole) if done >= samples)


def test_long_ramp_up_is_counted_quickly() -> None:
    flags = "--rampup-batch-size 1 1 999999999999 --global-batch-size 8 --train-samples 999999999999 --optimizer onebit-adam"
    config = validate(parse_arguments([*flags.split(), "--lr-warmup-samples", "99999999999"]).config, 1)
    assert 10**11 < total_steps(config) < 10**12
    assert samples_after(config, total_steps(config)) <= 10**12

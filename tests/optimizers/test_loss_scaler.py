"""Compare loss scales with sequences computed by hand."""

from typing import Any

import pytest

from megalite.config.parallel import DataParallelConfig
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.optimizers.schedules import LossScaler


def of(*, wire_dtype: str = "fp32", **training: Any) -> LossScaler:
    wire = DataParallelConfig(wire_dtype=wire_dtype)
    return LossScaler(RunConfig(training=TrainingConfig(**training), data_parallel=wire))


def scaler(*, initial: float = 1024.0, minimum: float = 1.0, window: int = 3, hysteresis: int = 2) -> LossScaler:
    return of(
        precision="fp16",
        initial_loss_scale=initial,
        min_loss_scale=minimum,
        loss_scale_window=window,
        hysteresis=hysteresis,
    )


def scales(one: LossScaler, events: str) -> list[float]:
    """Return the scale after each event: x is an overflow, o a good step."""
    found = []
    for event in events:
        one.update(overflow=event == "x")
        found.append(one.scale)
    return found


@pytest.mark.parametrize(
    "options, events, expected",
    [
        # The first overflow uses up the hysteresis; the second and each later one halve the scale.
        ({}, "xxxx", [1024, 512, 256, 128]),
        # A whole window of good steps doubles the scale and restores the hysteresis.
        ({}, "ooo", [1024, 1024, 2048]),
        ({}, "oooooo", [1024, 1024, 2048, 2048, 2048, 4096]),
        ({}, "xooox", [1024, 1024, 1024, 2048, 2048]),
        # Fewer good steps do not restore it, and an overflow restarts the window.
        ({}, "xox", [1024, 1024, 512]),
        ({}, "ooxoo", [1024, 1024, 1024, 1024, 1024]),
        ({}, "ooxooo", [1024, 1024, 1024, 1024, 1024, 2048]),
        ({"hysteresis": 1}, "xx", [512, 256]),
        ({"hysteresis": 3}, "xxx", [1024, 1024, 512]),
        ({"minimum": 300.0}, "xxxx", [1024, 512, 300, 300]),
        ({"window": 1}, "oo", [2048, 4096]),
    ],
)
def test_sequences_of_scales(options: dict[str, float], events: str, expected: list[float]) -> None:
    assert scales(scaler(**options), events) == expected  # type: ignore[arg-type]


def test_step_skipped_for_another_reason_keeps_the_scale() -> None:
    one = scaler(hysteresis=1)
    for _ in range(4):
        one.update(overflow=False, fault=True, samples=8)
    assert (one.scale, one.skipped_steps, one.skipped_samples) == (1024.0, 4, 32)
    assert scales(one, "oox") == [1024, 1024, 512], "it does not count as a good step either"


@pytest.mark.parametrize("before", ["", "x", "xx", "o", "oo", "xo", "xoo", "xxooo"])
def test_state_round_trip(before: str) -> None:
    one, other = scaler(), scaler(initial=1.0)
    scales(one, before)
    other.load_state(one.state())
    assert other.scale == one.scale
    assert scales(other, "oxoxxooo") == scales(one, "oxoxxooo")


def test_given_scale_is_constant() -> None:
    one = of(precision="fp16", loss_scale=128.0, loss_scale_window=1, hysteresis=1)
    assert not one.dynamic
    assert scales(one, "xxoo") == [128.0] * 4
    one.load_state(scaler().state())
    assert one.scale == 128.0
    for precision in ("fp32", "bf16", "fp64"):
        unscaled = of(precision=precision)
        assert scales(unscaled, "xxooo") == [1.0] * 5
        other = scaler()
        other.load_state(unscaled.state())
        assert scales(other, "oo") == [1024, 1024], "its state is ignored"


def test_number_of_skipped_steps_is_saved() -> None:
    """Learning rates do not advance in them, also after a resume, and in a resumed run without a scale."""
    one = scaler()
    for event in "oxxo":
        one.update(overflow=event == "x", samples=8)
    assert (one.skipped_steps, one.skipped_samples) == (2, 16)
    plain = of(precision="bf16")
    plain.load_state(one.state())
    again = scaler()
    again.load_state(plain.state())
    for other in (plain, again):
        assert (other.skipped_steps, other.skipped_samples) == (2, 16)
    assert again.scale == 1024.0, "a run without a scale saves none"
    fresh = scaler()
    scales(fresh, "oo")
    assert "skipped_steps" not in fresh.state()


def test_older_state_has_no_count() -> None:
    one = scaler()
    one.load_state({"scale": 8.0, "good_steps": 1, "overflows_left": 2})
    assert (one.scale, one.skipped_steps, one.skipped_samples) == (8.0, 0, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_fp16_wire_has_a_scale_in_any_precision(precision: str) -> None:
    one = of(precision=precision, wire_dtype="fp16", hysteresis=1)
    assert one.dynamic and scales(one, "x") == [32768.0]
    assert of(precision=precision, wire_dtype="fp16", loss_scale=8.0).scale == 8.0

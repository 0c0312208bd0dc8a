"""metrics.jsonl and TensorBoard hold what was written, also NaN and also after a run was killed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.training.sinks import JsonLines
from megalite.training.writers import TENSORBOARD_TAGS, TensorBoard


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "consumed_samples": 8 * step, "loss": 1.0 / step, **more}


def lines(path: Path) -> list[dict[str, Any]]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=no_constants) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_at_once(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", step=0)
    for step in (1, 2):
        sink.write(record(step, mfu=None, skipped=False))
        assert lines(tmp_path / "metrics.jsonl")[-1] == record(step, mfu=None, skipped=False)
    sink.close()


def test_not_a_number_is_written_and_the_file_stays_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", step=0)
    sink.write(record(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf))
    sink.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"], line["lr"]) == ("nan", "inf", "-inf")


# What a machine that dies can leave behind the last record.
@pytest.mark.parametrize(
    "cut", ["", '{"kind": "train", "step": 1, "lo', '{"step": 1}\n', "[1]\n", "\0\0\0\n", '{"kind": "train", "st\n']
)
def test_a_resumed_run_drops_what_it_makes_again(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, step=0)
    for step in (1, 2, 3):
        first.write(record(step))
    first.write({"kind": "valid", "step": 3, "consumed_samples": 24, "valid_loss": 2.0})
    first.close()
    path.write_text(path.read_text() + cut)
    second = JsonLines(path, step=2)
    second.write(record(3, loss=0.25))
    second.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 1.0), (2, 0.5), (3, 0.25)]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_megatrons_tags(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    numbers = {name: float(index + 1) for index, name in enumerate(TENSORBOARD_TAGS)}
    for step in (1, 2):
        sink.write({**record(step), **numbers, "ms_per_step": 1500.0})
    sink.close()
    found = scalars(tmp_path)
    megatrons = {
        *("lm loss", "learning-rate", "grad-norm", "loss-scale", "batch-size"),
        *("iteration-time", "throughput", "lm loss validation", "lm loss validation ppl"),
        "load_balancing_loss",
    }
    assert megatrons <= set(found)
    assert set(found) == {tag + end for tag in TENSORBOARD_TAGS.values() for end in ("", " vs samples")}
    assert found["lm loss"] == [(1, 1.0), (2, 1.0)]
    assert found["lm loss vs samples"] == [(8, 1.0), (16, 1.0)]
    assert found["learning-rate"] == [(step, numbers["lr"]) for step in (1, 2)]
    assert found["iteration-time"] == [(1, 1.5), (2, 1.5)], "in seconds, as Megatron-LM logs it"


def test_tensorboard_leaves_out_what_is_unknown_and_shows_nan(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.write(record(1, mfu=None, grad_norm=math.nan))
    sink.close()
    found = scalars(tmp_path)
    assert "mfu" not in found
    assert math.isnan(found["grad-norm"][0][1])


def test_tensorboard_keeps_both_curves_when_a_run_resumes(tmp_path: Path) -> None:
    """Step 3, made again, comes once more; nothing before it is lost, over steps or over samples."""
    first = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first.write(record(step))
    first.close()
    second = TensorBoard(tmp_path)
    for step in (3, 4):
        second.write(record(step))
    second.close()
    found = scalars(tmp_path)
    assert {step for step, _ in found["lm loss"]} == {1, 2, 3, 4}
    assert {samples for samples, _ in found["lm loss vs samples"]} == {8, 16, 24, 32}
    assert dict(found["lm loss"])[2] == 0.5

"""The memory benchmark, on cases of one rank."""

import pytest

from benchmarks.planner.memory import measured_rows


@pytest.mark.parametrize("name", ["gpt, dropout, core_attn recomputed", "experts, moe recomputed"])
def test_measured_memory_equals_prediction(name: str) -> None:
    (row,) = measured_rows(None, [name])
    assert row["predicted_state_bytes"] == row["state_bytes"]
    assert row["predicted_activation_bytes"] == pytest.approx(row["activation_bytes"], rel=0.02)
    assert abs(row["error"]) < 0.002

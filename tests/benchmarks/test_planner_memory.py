"""The memory benchmark, on cases of one rank with smaller layers."""

import pytest

from benchmarks.planner import memory


@pytest.mark.parametrize("name", ["gpt, dropout, core_attn recomputed", "experts, moe recomputed"])
def test_measured_memory_equals_prediction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TINY", memory.TINY | {"hidden_size": 128, "seq_length": 64, "vocab_size": 256})
    (row,) = memory.measured_rows(None, [name])
    assert row["predicted_state_bytes"] == row["state_bytes"]
    assert row["predicted_activation_bytes"] == pytest.approx(row["activation_bytes"], rel=0.02)
    assert abs(row["error"]) < 0.002

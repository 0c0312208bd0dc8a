"""The memory benchmark: cases of one rank, and the paper's closed forms beside its figure and our count."""

import pytest

from benchmarks.planner.memory import FIGURE_1, first_rank, measured_rows, published_model, published_rows


@pytest.mark.parametrize("name", ["gpt, dropout, core_attn recomputed", "experts, moe recomputed"])
def test_real_runs_hold_what_was_predicted(name: str) -> None:
    (row,) = measured_rows(None, [name])
    assert row["predicted_state_bytes"] == row["state_bytes"]
    assert row["predicted_activation_bytes"] == pytest.approx(row["activation_bytes"], rel=0.02)
    assert abs(row["error"]) < 0.002


def test_the_figure_to_a_hundredth_of_a_gibibyte() -> None:
    for row in published_rows():
        assert abs(row["form"] - row["published"]) < 0.01
        # We count more: norms, biases, embedding and head.
        assert row["form"] <= row["counted"] < 1.12 * row["form"]


def test_what_is_counted_is_the_first_rank() -> None:
    shape, batch, _ = FIGURE_1["175B"]
    plain, selective = (first_rank(published_model(shape, batch, plain)) for plain in (True, False))
    assert plain.parameter_bytes == selective.parameter_bytes
    assert plain.activation_bytes > 5 * selective.activation_bytes

"""What the sweep of this machine says of its measurements."""

from typing import Any

import pytest

from benchmarks.planner.sweep import compare


def row(pp: int, predicted: float, measured: float | None) -> dict[str, Any]:
    """Of a pass's results.csv."""
    return {
        "tp": "1", "pp": str(pp), "vpp": "1", "micro_batch_size": "1", "pipeline_schedule": "", "dp_strategy": "all-reduce",
        "predicted_step_seconds": str(predicted), "step_seconds": str(measured or ""),
        "status": "failed" if measured is None else "ok",
    }  # fmt: skip


def test_medians_over_the_passes() -> None:
    """The second layout is slow in one pass of three, and the last one fails in one."""
    passes = [
        [row(1, 1.0, 1.3), row(2, 1.1, first), row(4, 2.0, 1.9), row(8, 0.5, last)]
        for first, last in ((1.2, 0.5), (9.0, None), (1.0, 0.5))
    ]
    found = compare(passes)
    assert [(each["layout"], each["measured_seconds"]) for each in found["layouts"]] == [
        ("tp 1, pp 2, micro batch 1", 1.2),
        ("tp 1, pp 1, micro batch 1", 1.3),
        ("tp 1, pp 4, micro batch 1", 1.9),
    ]
    assert found["layouts"][0]["passes"] == [1.2, 9.0, 1.0]
    assert found["failed"] == ["tp 1, pp 8, micro batch 1"]
    assert found["regret"] == pytest.approx(1.3 / 1.2 - 1.0), "the pick is pp 1"
    assert found["rank_correlation"] == pytest.approx(0.5)
    assert found["mean_error"] == pytest.approx((0.3 / 1.3 + 0.1 / 1.2 + 0.1 / 1.9) / 3)

"""Conditions of `exclude` and `only`."""

from typing import Any

import pytest

from megalite.config.describe import values_of
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.sweep.spec import read_condition

SETTINGS: dict[str, Any] = values_of(RunConfig()) | {
    "tp": 4,
    "pp": 2,
    "dp": 3,
    "ranks": 24,
    "pipeline_layers": [1, 3],
    "pipeline_schedule": "zb-h1",
}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"tp": 4}, True),
        ({"tp": 4, "pp": 1}, False),
        ({"tp": [2, 4], "pp": [2]}, True),
        ({"tensor_model_parallel_size": 4}, True),
        ({"pipeline_layers": [1, 3]}, True),
        ({"pipeline_layers": [2, 2]}, False),
        ({"ranks": [8, 24]}, True),
        ({"pipeline_schedule_file": None}, True),
        ({"bf16": True}, False),
        ("tp * pp > 8", False),
        ("tp * pp >= 8 and dp == 3", True),
        ("1 < pp < tp", True),
        ("1 < pp < 2", False),
        ("not (tp + pp == 6)", False),
        ("ranks // tp - dp == 3 or tp % 3 == 2", True),
        ("-tp < 0", True),
        ("pipeline_schedule in ['zb-h1', 'zb-v']", True),
        ("pipeline_schedule not in ('zb-h1', 'zb-v')", False),
        ("vpp == 1 and pipeline_schedule_file == None", True),
    ],
)
def test_holds(condition: Any, holds: bool) -> None:
    assert read_condition(condition, "here").holds(SETTINGS) is holds


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (3, "here takes conditions such as"),
        ({}, "here takes conditions such as"),
        ("tp >", "tp > is not a formula"),
        ("tpp > 1", "tpp is not a setting: did you mean"),
        ("print(tp)", "print\\(tp\\) is no condition"),
        ("tp.real > 1", "tp.real > 1 is no condition"),
        ("tp ** 99999 > 1", "is no condition"),
        ({"tp": "four"}, "tp takes a whole number"),
        ({"tpp": 4}, "unknown section or key tpp"),
    ],
)
def test_what_is_no_condition(condition: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_condition(condition, "here")


@pytest.mark.parametrize("condition", ["etp > 1", "tp / (pp - 2) > 1"])
def test_what_cannot_be_worked_out(condition: str) -> None:
    with pytest.raises(ConfigError, match=r"here: .* cannot be worked out"):
        read_condition(condition, "here").holds(SETTINGS)

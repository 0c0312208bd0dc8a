"""What a resumed run reads differently is said, and nothing that is the same."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.training.resume import data_changes
from tests.support.tiny import tiny_config

BASE: dict[str, Any] = {"data_path": ["0.5", "a", "0.5", "b"], "eod_mask_loss": False}
MEGATRON = {**BASE, "data_order": "megatron", "train_iters": 20}


def saved(**changes: Any) -> dict[str, Any]:
    """The config in a manifest."""
    config: dict[str, Any] = json.loads(json.dumps(asdict(tiny_config(1, **{**BASE, **changes}))))
    return config


def changed(config: RunConfig, **changes: Any) -> list[str]:
    return data_changes(saved(), replace(config, **changes))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"seed": 99}, "seed 1234 -> 99"),
        ({"seq_length": 32}, "seq_length 16 -> 32"),
        ({"split": "8,1,1"}, "split 969,30,1 -> 8,1,1"),
        ({"packing": "best-fit"}, "packing stream -> best-fit"),
        ({"data_order": "megatron"}, "data_order megalite -> megatron"),
        ({"data_path": ["0.7", "a", "0.3", "b"]}, "data_path 0.5 a 0.5 b -> 0.7 a 0.3 b"),
        ({"mock_data": True}, "mock_data False -> True"),
        ({"data_path": [], "train_data_path": ["c"]}, "train_data_path (none) -> c"),
    ],
)
def test_each_difference_is_a_line(changes: dict[str, Any], said: str) -> None:
    lines = changed(tiny_config(1, **BASE), **changes)
    assert [line for line in lines if line.endswith(f": {said}")] == lines[-1:]
    assert all("from here on" in line for line in lines)


def test_what_is_no_part_of_the_order_is_not_said() -> None:
    config = tiny_config(1, **BASE)
    assert changed(config) == []
    assert changed(config, split="969,30,1", global_batch_size=16, train_iters=40, lr=1.0, eval_iters=3) == []


def test_settings_that_are_younger_than_the_checkpoint_had_their_defaults() -> None:
    old = saved()
    del old["data"]["packing"], old["data"]["data_order"]
    assert data_changes(old, tiny_config(1, **BASE)) == []


def test_megatron_s_order_is_another_for_another_length() -> None:
    longer = tiny_config(1, **{**MEGATRON, "train_iters": 40})
    (line,) = data_changes(saved(**MEGATRON), longer)
    assert line.endswith("and samples may repeat: train 160 -> 320 samples")
    assert data_changes(saved(**MEGATRON), tiny_config(1, **MEGATRON)) == []
    # The same number of samples is the same order.
    assert (
        data_changes(saved(**MEGATRON), tiny_config(1, **{**MEGATRON, "train_iters": 10, "global_batch_size": 16}))
        == []
    )
    open_batch = saved(**MEGATRON, micro_batch_size=2)
    open_batch["training"]["global_batch_size"] = None
    assert data_changes(open_batch, tiny_config(1, **MEGATRON), dp=4) == []
    (line,) = data_changes(open_batch, tiny_config(1, **MEGATRON), dp=2)
    assert line.endswith("train 80 -> 160 samples")
    unknown = saved(**MEGATRON)
    unknown["training"]["global_batch_size"] = "many"
    (line,) = data_changes(unknown, longer)
    assert line.startswith("the checkpoint does not say how long its run was")

"""The layout of an elastic run: the user's if possible, the checkpoint's on as many ranks, else the planner's."""

from typing import Any

import pytest

from megalite.config.describe import replace, value_of
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner import elastic as under_test
from megalite.planner.cost.step import predict
from megalite.planner.elastic import ALMOST, LAYOUT, Former, Relayout, relayout
from megalite.planner.hardware import cluster_of_device, load_cluster, load_stack
from megalite.planner.search.search import find
from megalite.planner.search.space import request_for
from tests.support.tiny import TINY

CLUSTER, STACK = load_cluster("cpu-box"), load_stack("fused")


def config_with(**changes: Any) -> RunConfig:
    """The tiny model with a layout, as read from its file."""
    return replace(RunConfig(), **{**TINY, "num_attention_heads": 8, **changes})


def asked(
    world: int,
    *,
    files: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
    former: Former | None = None,
    limit: float = 1e12,
    **changes: Any,
) -> Relayout:
    """`relayout` with settings from files and flags."""
    given = {**(files or {}), **(flags or {})}
    return relayout(
        config_with(**changes, **given),
        world_size=world,
        explicit=frozenset(given),
        fixed=frozenset(flags or {}),
        former=former,
        cluster=CLUSTER,
        stack=STACK,
        memory_limit=limit,
    )


def former(world: int, **layout: Any) -> Former:
    """A checkpoint's former layout."""
    config = validate(config_with(**layout), world)
    return Former(step=7, world_size=world, layout={name: value_of(config, name) for name in LAYOUT})


def shape(found: Relayout) -> tuple[int, int, int]:
    return found.layout["tp"], found.layout["pp"], found.layout["dp"]


def legal(found: Relayout, world: int) -> None:
    """Test whether a run can have the layout."""
    validate(config_with(**found.layout), world)


def test_user_layout_is_kept_if_it_fits() -> None:
    found = asked(8, files={"tp": 2, "pp": 2})
    assert shape(found) == (2, 2, 2)
    assert found.why == "the layout of the settings"
    back = asked(4, files={"tp": 2, "pp": 2}, former=former(2, tp=1, pp=2))
    assert shape(back) == (2, 2, 1), "when the ranks return"


def test_same_ranks_keep_the_layout_of_the_checkpoint() -> None:
    before = former(2, tp=1, pp=2, micro_batch_size=2, pipeline_schedule="gpipe")
    found = asked(2, files={"tp": 2, "pp": 2}, former=before)
    assert found.layout == before.layout
    assert found.why == "the layout of the checkpoint of step 7"
    assert shape(asked(2, former=before)) == (1, 2, 1), "also if the settings have none"


def test_flags_are_kept() -> None:
    for world in (2, 6):
        found = asked(world, flags={"tp": 2}, files={"pp": 4, "dp": 1})
        assert found.layout["tp"] == 2
        legal(found, world)
    changed = asked(2, flags={"tp": 2}, former=former(2, tp=1, pp=2))
    assert shape(changed) == (2, 1, 1), "including settings changed since the checkpoint"


def test_layout_of_any_number_of_ranks_is_close_to_the_planner() -> None:
    for world in (1, 3, 8):
        found = asked(world, files={"dp": 16})
        legal(found, world)
        assert found.why.startswith("planned")
        request = request_for(config_with(), world_size=world, fixed={}, memory_limit=1e12)
        best = find(request, CLUSTER, STACK, top=1).candidates[0].prediction.step_seconds
        ours = validate(config_with(**found.layout), world)
        assert predict(ours, CLUSTER, STACK).step_seconds <= ALMOST * best * (1 + 1e-9)


def test_instances_are_kept_if_they_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "ALMOST", 1e9)
    before = former(8, dp=8, dp_strategy="distributed-optimizer", dp_instances=2)
    assert asked(4, former=before).layout["dp_instances"] == 2
    for world in (2, 3):
        found = asked(world, former=before)
        legal(found, world)
        assert found.layout["dp_instances"] == 1
    fixed = asked(4, flags={"dp_instances": 2, "dp_strategy": "fully-sharded"})
    assert (fixed.layout["dp_instances"], fixed.layout["dp_strategy"]) == (2, "fully-sharded")


def test_old_settings_are_kept_if_they_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    manner = {"pipeline_schedule": "gpipe", "dp_strategy": "distributed-optimizer"}
    before = former(8, tp=2, pp=2, **manner)
    monkeypatch.setattr(under_test, "ALMOST", 1e9)
    found = asked(4, former=before)
    assert shape(found) == (2, 2, 1)
    assert {name: found.layout[name] for name in manner} == manner
    assert found.why.startswith(
        "planned, keeping tp, pp, cp, ep, dp_strategy, pipeline_schedule, recompute_granularity: predicted "
    )
    assert shape(asked(2, former=before)) != (2, 2, 1)
    assert asked(2, former=before).why.startswith("planned, keeping dp_strategy, ")
    monkeypatch.setattr(under_test, "ALMOST", 0.5)
    fastest = asked(4, former=before)
    assert fastest.why.startswith("planned: the fastest")
    assert fastest.layout != found.layout


def test_error_names_numbers_of_ranks_with_a_layout() -> None:
    with pytest.raises(ConfigError) as error:
        asked(5, flags={"tp": 2, "micro_batch_size": 1})
    for words in (
        "5 ranks is legal with tp 2 and micro_batch_size 1 with global_batch_size 8",
        "Start 4 or 6 ranks, or",
    ):
        assert words in str(error.value)
    with pytest.raises(ConfigError, match=r"no layout of 1 rank .*tp 8.* Start 8 ranks, or"):
        asked(1, flags={"tp": 8})


def test_error_names_the_number_of_ranks_that_fits() -> None:
    config = validate(config_with(), 1)
    request = request_for(config, world_size=1, fixed={}, memory_limit=1e12)
    most = find(request, CLUSTER, STACK, top=1).candidates[0].fullest[1].total_bytes
    with pytest.raises(ConfigError) as error:
        asked(1, limit=most * 0.4)
    assert "no layout of 1 rank fits into" in str(error.value)
    assert str(error.value).endswith("Start 2 ranks, or set fewer layout flags")


def test_user_layout_is_replaced_if_it_does_not_fit() -> None:
    own = asked(2, files={"dp": 2})
    assert shape(own) == (1, 1, 2)
    config = validate(config_with(dp=2), 2)
    held = max(rank.total_bytes for rank in predict(config, CLUSTER, STACK).memory)
    found = asked(2, files={"dp": 2}, limit=held * 0.8)
    assert found.why.startswith("planned")
    assert found.layout != own.layout


def test_cluster_of_a_device() -> None:
    for device, cluster in (
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA B200", "dgx-b200"),
        ("NVIDIA GB200", "dgx-gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", None),
    ):
        assert cluster_of_device(device) == cluster

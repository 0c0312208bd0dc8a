"""costs.json: its contents, and the error of each mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.generators import loop_placement, v_placement
from megalite.pipeline.ir.simulate import CostTable, Link, parse_costs, read_costs

LOOP = loop_placement(2, 2)
FULL = {
    "unit": "ms",
    "forward": 4,
    "input_grad": [3.0, 5.0],
    "weight_grad": [1.0, 2.0, 3.0, 4.0],
    "recompute": 2.0,
    "p2p": 0.25,
    "links": {"0->1": {"latency": 0.5, "seconds_per_message": 0.125}, "1 -> 0": {"latency": 1}},
    "memory": {"activation": [8e9, 6e9], "deferred": 2e9, "kept_input": 1e6, "message": 5e5},
}


def test_all_fields() -> None:
    table = parse_costs(FULL)
    costs = table.costs(LOOP)
    assert costs.forward == (2.0,) * 4, "a rank's share is divided over its stages"
    assert costs.weight_grad == (1.0, 2.0, 3.0, 4.0)
    assert costs.backward == (1.5 + 1, 2.5 + 2, 1.5 + 3, 2.5 + 4), "one value per rank is divided as well"
    assert costs.recompute == (1.0,) * 4
    assert (costs.p2p, table.unit) == (0.25, "ms")
    assert costs.links == {(0, 1): Link(0.5, 0.125), (1, 0): Link(1.0, 0.0)}
    sizes = table.sizes(LOOP)
    assert sizes is not None
    assert sizes.activation == (4e9, 3e9, 4e9, 3e9)
    assert sizes.deferred == (1e9,) * 4
    assert sizes.kept_input == (1e6,) * 4, "each stage keeps an input, for any number of layers"
    assert sizes.message == 5e5


def test_values_per_rank_follow_the_placement() -> None:
    table = parse_costs({"forward": [2, 4]})
    assert table.costs(v_placement(2)).forward == (1.0, 2.0, 2.0, 1.0)
    assert table.costs(loop_placement(2, 1)).forward == (2.0, 4.0)


def test_costs_of_backwards() -> None:
    one = loop_placement(1, 1)

    def halves(data: dict[str, Any]) -> tuple[float, float]:
        costs = parse_costs(data).costs(one)
        weight = costs.weight_grad or (costs.backward[0] / 2,)
        return costs.backward[0] - weight[0], weight[0]

    assert halves({"forward": 3}) == (3.0, 3.0)
    assert halves({"forward": 3, "backward": 5}) == (2.5, 2.5)
    assert halves({"forward": 3, "backward": 5, "weight_grad": 2}) == (3.0, 2.0)
    assert halves({"forward": 3, "input_grad": 4, "weight_grad": 0}) == (4.0, 0.0)


def test_defaults_and_recomputation() -> None:
    costs = CostTable().costs(LOOP)
    assert (costs.forward, costs.backward, costs.weight_grad) == ((0.5,) * 4, (1.0,) * 4, (0.5,) * 4)
    assert costs.recompute is None
    assert CostTable().sizes(LOOP) is None
    # An R costs a forward unless the file gives a time.
    assert CostTable().costs(LOOP, ahead=True).recompute == (0.5,) * 4
    assert parse_costs({"forward": 2, "recompute": 1}).costs(LOOP, ahead=True).recompute == (0.5,) * 4


BAD: list[tuple[Any, tuple[str, ...]]] = [
    ([1], ("takes `key: value` lines, got [1]",)),
    ({}, ("forward is missing", "add `forward: 1.0`")),
    ({"forwards": 1}, ("unknown key forwards", "did you mean forward?", "weight_grad")),
    ({"forward": -1}, ("forward is -1", "0 or more")),
    ({"forward": "some"}, ("forward takes a number", "'some'")),
    ({"forward": True}, ("forward takes a number", "True")),
    ({"forward": float("nan")}, ("forward is nan", "finite")),
    ({"forward": 10**400}, ("forward is 1000", "finite")),
    ({"forward": 1e16}, ("forward is 1e+16", "at most 1e+15")),
    ({"forward": [1, None]}, ("forward[1] takes a number", "None")),
    ({"forward": 1, "p2p": [1]}, ("p2p takes a number", "[1]")),
    ({"forward": 1, "backward": 2, "input_grad": 1}, ("backward 2.0 and input_grad 1.0 are both set", "keep")),
    ({"forward": 1, "input_grad": 1}, ("input_grad is set without weight_grad",)),
    ({"forward": 1, "weight_grad": 1}, ("weight_grad is set without input_grad",)),
    ({"forward": 1, "unit": "sec"}, ("unit is sec", "s, ms, us, ns")),
    ({"forward": 1, "unit": []}, ("unit takes text",)),
    ({"forward": 1, "links": []}, ('links takes e.g. {"0->1"',)),
    ({"forward": 1, "links": {"0-1": {}}}, ("links has '0-1'", '"0->1"')),
    ({"forward": 1, "links": {"0->x": {}}}, ("links has '0->x'",)),
    ({"forward": 1, "links": {"1->1": {"latency": 1}}}, ("1->1 joins the same rank twice",)),
    ({"forward": 1, "links": {"0->1": {"latency": 1}, "0 -> 1": {"latency": 2}}}, ("0 -> 1 is listed twice",)),
    ({"forward": 1, "links": {"0->1": {}}}, ("links: 0->1: latency is missing",)),
    ({"forward": 1, "links": {"0->1": {"latency": 1, "bandwith": 1}}}, ("links: 0->1: unknown key bandwith", "seconds_per_message")),
    ({"forward": 1, "memory": 3}, ("memory takes `key: value` lines, got 3",)),
    ({"forward": 1, "memory": {}}, ("memory: activation is missing",)),
    ({"forward": 1, "memory": {"activation": [1, -2]}}, ("memory: activation[1] is -2",)),
    ({"forward": 1, "memory": {"activation": 1, "kept_input": [1]}}, ("memory: kept_input takes a number",)),
]  # fmt: skip


@pytest.mark.parametrize(("data", "says"), BAD, ids=range(len(BAD)))
def test_mistakes_are_errors(data: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_costs(data, source="my.json")
    message = str(caught.value)
    assert message.startswith("my.json")
    assert "\n" not in message
    for text in says:
        assert text in message


MISFITS: list[tuple[Any, tuple[str, ...]]] = [
    ({"forward": [1, 1, 1]}, ("forward has 3 values", "4 stages on 2 ranks", "give 4, one per stage, or 2, one per rank")),
    ({"forward": 1, "input_grad": 1, "weight_grad": []}, ("weight_grad has 0 values",)),
    ({"forward": 1, "backward": 2, "weight_grad": [1, 3]}, ("weight_grad of stage 1 is 1.5", "its backward 1", "use at most 1")),
    ({"forward": 1, "links": {"0->2": {"latency": 1}}}, ('links has "0->2"', "there are 2 ranks", "use 0 to 1")),
    ({"forward": 0, "backward": 0}, ("all 0", "no time passes")),
]  # fmt: skip


@pytest.mark.parametrize(("data", "says"), MISFITS, ids=range(len(MISFITS)))
def test_values_that_do_not_fit_the_pipeline_are_errors(data: Any, says: tuple[str, ...]) -> None:
    table = parse_costs(data, source="my.json")
    with pytest.raises(ConfigError) as caught:
        table.costs(LOOP)
    for text in ("my.json: ", *says):
        assert text in str(caught.value)


def test_memory_that_does_not_fit_is_an_error() -> None:
    table = parse_costs({"forward": 1, "memory": {"activation": [1, 2, 3]}})
    with pytest.raises(ConfigError, match=r"memory\.activation has 3 values"):
        table.sizes(LOOP)


def test_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(FULL))
    assert read_costs(path).costs(LOOP) == parse_costs(FULL).costs(LOOP)
    for text, says in (
        (b"{", "is not JSON"),
        (b'{"forward": 1, "forward": 2}', "forward is given twice"),
        (b'{"forward": 1\xff}', "not UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"forward": 1e999}', "forward is inf"),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=says):
            read_costs(path)
    with pytest.raises(ConfigError, match=r"costs file .*none\.json does not exist"):
        read_costs(tmp_path / "none.json")

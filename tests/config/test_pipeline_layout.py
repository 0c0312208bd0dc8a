"""The layout language and its errors."""

import pytest

from megalite.config.errors import ConfigError
from megalite.config.parallel import parse_pipeline_layout


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("EtttL", [3]),
        ("E,t*3|t*4|t*4|L", [3, 4, 4, 0]),
        ("E|t|t|L", [0, 1, 1, 0]),
        ("Et*3|(tt|)*3,t*2L", [3, 2, 2, 2, 2]),
        ("E (t | t)*2 L", [1, 2, 1]),
        ("((Et|))(t*2|)*2 tL", [1, 2, 2, 1]),
        ("Et*2*3L", [6]),
        ("Et|tt|m*2L", [1, 2, 0]),
    ],
)
def test_layouts_are_parsed(text: str, layers: list[int]) -> None:
    assert parse_pipeline_layout(text) == layers


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the embedding E must come once, at the very beginning"),
        ("tt|tL", "the embedding E must come once"),
        ("Et|EtL", "the embedding E must come once"),
        ("Et|t", "the head L must come once, at the very end"),
        ("EtL|t", "the head L must come once, at the very end"),
        ("Et||tL", "stage 1 of 3 is empty"),
        ("Et|m|tL", r"MTP layers m must come right before the head L, but here it reads ...Et\|m\|tL"),
        ("Et|m|L", "MTP layers m must come right before the head L"),
        ("Et|dL", "'d' at character 4 is not valid here"),
        ("E*tL", r"'\*' at character 2 is not valid here"),
        ("*3EtL", r"\*3 at character 2 repeats nothing"),
        ("Et*0L", r"\*0 at character 4 repeats nothing"),
        ("Et*999999*9L", r"\*9 at character 11 makes more than 1000000 items"),
        ("E(ttL", r"a \( is not closed"),
        ("Ett)L", r"the \) at character 4 closes nothing"),
    ],
)
def test_invalid_layouts_are_errors(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_pipeline_layout(text)
    assert "e.g." in str(caught.value)
    assert repr(text) in str(caught.value)

import pytest

from megalite.config.errors import ConfigError
from megalite.config.split import parse_split
from megalite.data.splits import split_documents


def test_documents_are_cut_where_megatron_cuts_them() -> None:
    assert split_documents("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))
    # round(0.5 · 5) = 2 and round(0.75 · 5) = 4: halves go to the even number, as Python's round does.
    assert split_documents("2,1,1", 5) == (range(2), range(2, 4), range(4, 5))
    assert split_documents("100,0,0", 7) == (range(7), range(7, 7), range(7, 7))


@pytest.mark.parametrize("documents", [0, 1, 7, 100, 12345])
@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "0.9,0.05,0.05", "98,2", "1"])
def test_splits_cover_all_documents(split: str, documents: int) -> None:
    ranges = split_documents(split, documents)
    assert [i for part in ranges for i in part] == list(range(documents))


def test_shares() -> None:
    assert parse_split("98,2") == (0.98, 0.02, 0.0)
    assert parse_split(" 3, 1 ,0") == (0.75, 0.25, 0.0)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("969;30;1", "'969;30;1' is not a list of numbers; give up to three"),
        ("", "'' is not a list of numbers"),
        ("1,,1", "is not a list of numbers"),
        ("1,1,1,1", "has 4 numbers"),
        ("1,-1,1", "at least 0"),
        ("0,0,0", "not all of them 0"),
        ("nan,1,1", "at least 0"),
        ("inf,1,1", "at least 0"),
    ],
)
def test_bad_splits(split: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_split(split)

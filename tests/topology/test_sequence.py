"""The zigzag split of a sequence over context-parallel ranks."""

import pytest

from megalite.topology.layout import sequence_spans


def test_spans_of_four_ranks() -> None:
    spans = [sequence_spans(16, cp_rank=rank, cp_size=4) for rank in range(4)]
    assert spans == [((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10))]


def test_one_rank_holds_everything_in_one_span_of_any_length() -> None:
    assert sequence_spans(7, cp_rank=0, cp_size=1) == ((0, 7),)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_every_position_is_on_one_rank_and_all_ranks_have_equal_work(cp: int) -> None:
    s = 48
    held = [
        [p for first, stop in sequence_spans(s, cp_rank=rank, cp_size=cp) for p in range(first, stop)]
        for rank in range(cp)
    ]
    assert sorted(p for rows in held for p in rows) == list(range(s))
    for rows in held:
        assert rows == sorted(rows)
        assert len(rows) == s // cp
    for step in range(cp):
        # In every step of a ring all ranks see equally many pairs: none waits for another.
        pairs = {sum(c <= p for p in held[rank] for c in held[rank - step]) for rank in range(cp)}
        assert len(pairs) == 1


@pytest.mark.parametrize("s, rank, cp", [(10, 0, 2), (16, 2, 2), (16, -1, 2)])
def test_what_cannot_be_split_is_our_own_mistake(s: int, rank: int, cp: int) -> None:
    with pytest.raises(AssertionError):
        sequence_spans(s, cp_rank=rank, cp_size=cp)

"""Tiles cover exactly the visible pairs, in few pieces."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from megalite.context_parallel import tiles as tiles_module
from megalite.context_parallel.tiles import Tile, Visibility, batch_tiles, local_tiles, tiles
from megalite.kernels.attention import TileKind
from megalite.topology.layout import Span, sequence_spans

FULL, CAUSAL, EDGE = TileKind.FULL, TileKind.CAUSAL, TileKind.EDGE

Starts = tuple[int, ...] | None


def sees(p: int, c: int, window: int | None, starts: Starts) -> bool:
    if c > p or (window is not None and p - c >= window):
        return False
    return starts is None or not any(c < start <= p for start in starts)


@functools.cache
def rule(window: int | None, starts: Starts) -> np.ndarray:
    return np.array([[int(sees(p, c, window, starts)) for c in range(24)] for p in range(24)])


def expected(rows: list[int], columns: list[int], window: int | None, starts: Starts) -> np.ndarray:
    return rule(window, starts)[np.ix_(rows, columns)]


def painted(found: list[Tile], rows: Span, columns: Span) -> np.ndarray:
    canvas = np.zeros((rows[1] - rows[0], columns[1] - columns[0]), dtype=int)
    single = [(tile, place * (tile.q[1] - tile.q[0])) for tile in found for place in range(tile.count)]
    for tile in (replace(tile.shifted(further, further), count=1) for tile, further in single):
        (a, b), (c, d) = tile.q, tile.k
        assert rows[0] <= a < b <= rows[1], tile
        assert columns[0] <= c < d <= columns[1], tile
        shape = np.ones((b - a, d - c), dtype=int)
        if tile.kind is not FULL:
            assert b - a == d - c, tile
            shape = np.tril(shape) if tile.kind is CAUSAL else np.triu(shape)
        canvas[a - rows[0] : b - rows[0], c - columns[0] : d - columns[0]] += shape
    return canvas


def spans_of(n: int) -> list[Span]:
    return list(itertools.combinations(range(n + 1), 2))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("block", [1, 2, 2048])
def test_tiles_of_every_region_of_a_short_sequence(
    monkeypatch: pytest.MonkeyPatch, window: int | None, block: int
) -> None:
    monkeypatch.setattr(tiles_module, "WINDOW_BLOCK", block)
    for q, k in itertools.product(spans_of(8), repeat=2):
        np.testing.assert_array_equal(
            painted(tiles(q, k, window), q, k),
            expected(list(range(*q)), list(range(*k)), window, None),
            err_msg=f"{q} {k} {window}",
        )


@pytest.mark.parametrize("window", [None, 1, 3, 5])
def test_tiles_of_every_set_of_documents(window: int | None) -> None:
    for size in range(6):
        for inner in itertools.combinations(range(1, 6), size):
            starts = (0, *inner)
            for q, k in itertools.product([(0, 6), (1, 3), (2, 6), (4, 5), (0, 2)], repeat=2):
                np.testing.assert_array_equal(
                    painted(tiles(q, k, window, starts), q, k),
                    expected(list(range(*q)), list(range(*k)), window, starts),
                    err_msg=f"{q} {k} {window} {starts}",
                )


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 11, 23, 24, 40])
@pytest.mark.parametrize("starts", [None, (0,), (0, 1), (0, 5, 6, 17), (0, 12), (0, 3, 9, 20, 23)])
def test_local_tiles_of_every_pair_of_ranks(cp: int, window: int | None, starts: Starts) -> None:
    s = 24
    held = [sequence_spans(s, cp_rank=rank, cp_size=cp) for rank in range(cp)]
    positions = [[p for span in spans for p in range(*span)] for spans in held]
    for q, k in itertools.product(range(cp), repeat=2):
        np.testing.assert_array_equal(
            painted(list(local_tiles(held[q], held[k], window, starts)), (0, s // cp), (0, s // cp)),
            expected(positions[q], positions[k], window, starts),
            err_msg=f"{q} {k}",
        )


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_plain_zigzag_needs_one_tile_per_step(cp: int) -> None:
    s, rows = 24 * cp, 24
    held = [sequence_spans(s, cp_rank=rank, cp_size=cp) for rank in range(cp)]
    for q, k in itertools.product(range(cp), repeat=2):
        if q == k:
            one = Tile((0, rows), (0, rows), CAUSAL)
        elif k < q:  # every query is behind their front chunk and before their back chunk
            one = Tile((0, rows), (0, rows // 2), FULL)
        else:  # the back queries are behind both of their chunks, the front ones before
            one = Tile((rows // 2, rows), (0, rows), FULL)
        assert local_tiles(held[q], held[k], None, None) == (one,)


def test_window_needs_two_triangles_per_block() -> None:
    found = tiles((0, 16), (0, 16), 5)
    assert found == [
        Tile((0, 5), (0, 5), CAUSAL),
        *(
            Tile((a, min(a + 4, 16)), columns, kind)
            for a in (5, 9)
            for columns, kind in (((a - 4, a), EDGE), ((a, a + 4), CAUSAL))
        ),
        Tile((13, 16), (9, 12), EDGE),
        Tile((13, 16), (12, 13), FULL),
        Tile((13, 16), (13, 16), CAUSAL),
    ]


def test_documents_need_one_triangle_each() -> None:
    found = local_tiles(((0, 12),), ((0, 12),), None, (0, 5, 9))
    assert found == tuple(Tile(span, span, CAUSAL) for span in ((0, 5), (5, 9), (9, 12)))


def test_window_longer_than_the_sequence_has_no_effect() -> None:
    spans = ((0, 12),)
    assert local_tiles(spans, spans, 12, (0,)) == (Tile((0, 12), (0, 12), CAUSAL),)
    assert local_tiles(spans, spans, 11, (0,)) != (Tile((0, 12), (0, 12), CAUSAL),)


def test_samples_with_equal_documents_share_tiles() -> None:
    spans = ((0, 8),)
    visibility = Visibility(document_starts=((0, 3), (0, 3), (0,), (0, 3)))
    found = batch_tiles(visibility, spans, spans)
    assert [samples for samples, _ in found] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert found[0][1] == found[2][1] == local_tiles(spans, spans, None, (0, 3))
    assert found[1][1] == (Tile((0, 8), (0, 8), CAUSAL),)
    assert batch_tiles(Visibility(), spans, spans) == [(slice(None), found[1][1])]


def test_invisible_blocks_have_no_tiles() -> None:
    assert batch_tiles(Visibility(), ((0, 4),), ((4, 8),)) == []
    assert batch_tiles(Visibility(window=3), ((8, 12),), ((0, 4),)) == []
    seen_by_the_second = Visibility(document_starts=((0, 4), (0,)))
    (only,) = batch_tiles(seen_by_the_second, ((4, 8),), ((0, 4),))
    assert only == (slice(1, 2), (Tile((0, 4), (0, 4), FULL),))


@pytest.mark.parametrize("wrong", [{"window": 0}, {"document_starts": ((1, 2),)}, {"document_starts": ((0, 2, 2),)}])
def test_invalid_visibility_is_an_assertion(wrong: dict) -> None:
    with pytest.raises(AssertionError):
        Visibility(**wrong)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_short_window_over_a_long_sequence_needs_few_launches(rank: int, size: int) -> None:
    spans = sequence_spans(8192, cp_rank=rank, cp_size=size)
    found = local_tiles(spans, spans, 128, None)
    assert len(found) < 16 < sum(tile.count for tile in found)

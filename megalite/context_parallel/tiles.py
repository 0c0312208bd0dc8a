"""Cut the visible (query, key) pairs of attention into tiles that need no mask. No torch.

No fused kernel supports the mask of a sliding window, documents and the two spans of a context-parallel rank. Cut into
rectangles and triangles, the visible pairs run on the plain fused kernel, and masked pairs are never computed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise

from megalite.kernels.attention import TileKind
from megalite.topology.layout import Span

WINDOW_BLOCK = 2048
"""Largest number of rows of a window per block: enough to fill a device, and a multiple of its kernels' tiles."""


@dataclass(frozen=True)
class Visibility:
    """Mask rule: the query at position p attends to the key at position c if c <= p and the optional rules hold.

    `window`: p - c < window (Mistral's sliding window: a token attends to itself and window - 1 before it).
    `document_starts`: p and c are in the same document; per sample the ascending first positions, starting at 0."""

    window: int | None = None
    document_starts: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, self.window
        for starts in self.document_starts or ():
            assert starts[0] == 0, starts
            assert all(a < b for a, b in pairwise(starts)), starts


@dataclass(frozen=True)
class Tile:
    """Rows `q` and columns `k`, both half-open; `kind` defines the visible part."""

    q: Span
    k: Span
    kind: TileKind
    count: int = 1
    """Number of squares along the diagonal: each next one follows in rows and in columns."""

    def shifted(self, rows: int, columns: int) -> "Tile":
        return Tile((self.q[0] + rows, self.q[1] + rows), (self.k[0] + columns, self.k[1] + columns), self.kind)


def tiles(q: Span, k: Span, window: int | None = None, starts: tuple[int, ...] | None = None) -> list[Tile]:
    """Return the visible pairs of queries `q` and keys `k` of one sample as tiles, all in sequence positions.

    The tiles do not overlap and cover exactly {(p, c): q0 <= p < q1, k0 <= c < k1, c <= p, p - c < window, same
    document}."""
    result: list[Tile] = []
    for first, stop in pairwise((*(starts or (0,)), max(q[1], k[1]))):
        rows = max(q[0], first), min(q[1], stop)
        columns = max(k[0], first), min(k[1], stop)
        if rows[0] < rows[1] and columns[0] < columns[1]:
            result.extend(_band(rows, columns, window))
    return result


def _band(q: Span, k: Span, window: int | None) -> Iterator[Tile]:
    """Yield the tiles within one document.

    Row p sees the columns [max(k0, p - w + 1), min(k1, p + 1)). The right bound moves with p until k1, then is
    constant; the left bound is constant until k0 + w, then moves. Rows are cut at these points."""
    q0, k0, k1 = max(q[0], k[0]), k[0], k[1]
    if window is None:
        window = max(q[1] - k0, 1)  # wider than any distance
    q1 = min(q[1], k1 + window - 1)
    if q0 >= q1:
        return
    left_moves = k0 + window
    cuts = sorted({q0, q1, *(cut for cut in (k1, left_moves) if q0 < cut < q1)})
    for a, b in pairwise(cuts):
        if a < left_moves:
            stop = k1 if a >= k1 else a
            yield from _full((a, b), (k0, stop))
            if a < k1:
                yield _triangle((a, b), (a, b), TileKind.CAUSAL)
        elif a >= k1:
            yield _triangle((a, b), (a - window + 1, b - window + 1), TileKind.EDGE)
            yield from _full((a, b), (b - window + 1, k1))
        else:
            # Both bounds move: use blocks small enough that the window's edge and the diagonal do not overlap.
            block = max(min(window - 1, WINDOW_BLOCK), 1)
            for first in range(a, b, block):
                stop = min(first + block, b)
                if window > 1:
                    yield _triangle((first, stop), (first - window + 1, stop - window + 1), TileKind.EDGE)
                    yield from _full((first, stop), (stop - window + 1, first))
                yield _triangle((first, stop), (first, stop), TileKind.CAUSAL)


def _full(q: Span, k: Span) -> Iterator[Tile]:
    if k[0] < k[1]:
        yield Tile(q, k, TileKind.FULL)


def _triangle(q: Span, k: Span, kind: TileKind) -> Tile:
    assert q[1] - q[0] == k[1] - k[0]
    return Tile(q, k, kind if q[1] - q[0] > 1 else TileKind.FULL)


@lru_cache(maxsize=4096)
def local_tiles(
    queries: tuple[Span, ...], keys: tuple[Span, ...], window: int | None, starts: tuple[int, ...] | None
) -> tuple[Tile, ...]:
    """Return the tiles of one rank's queries and one rank's keys, in local rows and columns, for one sample.

    `queries` and `keys`: spans of positions of the rows and columns, ascending. Cached, because all layers of a step
    have the same tiles."""
    if window is not None and queries[-1][1] - 1 - keys[0][0] < window:
        window = None
    if starts is not None and len(starts) == 1:
        starts = None
    rows = sum(stop - first for first, stop in queries)
    if queries == keys and window is None and starts is None:
        # Positions ascend, so a causal mask on positions is causal on rows too, across the gap between spans.
        return (_triangle((0, rows), (0, rows), TileKind.CAUSAL),)
    result: list[Tile] = []
    row = 0
    for query in queries:
        column = 0
        for key in keys:
            result += [tile.shifted(row - query[0], column - key[0]) for tile in tiles(query, key, window, starts)]
            column += key[1] - key[0]
        row += query[1] - query[0]
    return tuple(_runs(_merged(result)))


def _merged(tiles: list[Tile]) -> list[Tile]:
    """Merge full rectangles that share a whole side: one launch of a large tile is faster than two."""
    full = [(tile.q, tile.k) for tile in tiles if tile.kind is TileKind.FULL]
    rest = [tile for tile in tiles if tile.kind is not TileKind.FULL]
    across = _joined(full)
    below = _joined([(k, q) for q, k in across])
    return sorted([*(Tile(q, k, TileKind.FULL) for k, q in below), *rest], key=lambda tile: (tile.q, tile.k))


def _runs(tiles: list[Tile]) -> list[Tile]:
    """Merge consecutive equal squares, of which a short window has hundreds, into one tile with one launch."""
    runs: list[Tile] = []
    last: dict[tuple[TileKind, int, int, int], int] = {}
    for tile in tiles:
        size = tile.q[1] - tile.q[0]
        key = tile.kind, size, tile.k[1] - tile.k[0], tile.q[0] - tile.k[0]
        index = last.get(key, -1)
        if index >= 0 and key[2] == size and runs[index].q[0] + runs[index].count * size == tile.q[0]:
            runs[index] = replace(runs[index], count=runs[index].count + 1)
        else:
            last[key] = len(runs)
            runs.append(tile)
    return runs


def _joined(pairs: list[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """Merge pairs with equal first spans and adjacent second spans."""
    result: list[tuple[Span, Span]] = []
    for same, span in sorted(pairs):
        if result and result[-1][0] == same and result[-1][1][1] == span[0]:
            result[-1] = same, (result[-1][1][0], span[1])
        else:
            result.append((same, span))
    return result


def batch_tiles(
    visibility: Visibility, queries: tuple[Span, ...], keys: tuple[Span, ...]
) -> list[tuple[slice, tuple[Tile, ...]]]:
    """Return slices of the batch with the tiles of their samples; consecutive samples with equal documents share a
    slice.

    Slices without a visible pair are omitted."""
    if visibility.document_starts is None:
        cut = local_tiles(queries, keys, visibility.window, None)
        return [(slice(None), cut)] if cut else []
    result, stop = [], 0
    for starts, samples in groupby(visibility.document_starts):
        first, stop = stop, stop + len(list(samples))
        if cut := local_tiles(queries, keys, visibility.window, starts):
            result.append((slice(first, stop), cut))
    return result

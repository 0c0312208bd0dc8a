"""Which (query, key) pairs attention may see, cut into pieces that need no mask. No torch.

A sliding window, documents and the two spans of a context-parallel rank leave a region of visible pairs that no fused
kernel takes as it is. Cut into rectangles and triangles it runs on the plain fused kernel, and what cannot be seen is
never computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise

from megalite.kernels.attention import TileKind
from megalite.topology.layout import Span

WINDOW_BLOCK = 2048
"""Rows of a window at most that are cut as one block: long enough to fill a device, and a multiple of its tiles."""


@dataclass(frozen=True)
class Visibility:
    """The rule by which the query at position p sees the key at position c: c <= p, and what is given of the others.

    p - c < window (Mistral's sliding window: a token sees itself and window - 1 before it). p and c lie in the same
    document; of each sample of the batch `document_starts` are the ascending first positions of its documents, from 0.
    """

    window: int | None = None
    document_starts: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, self.window
        for starts in self.document_starts or ():
            assert starts[0] == 0, starts
            assert all(a < b for a, b in pairwise(starts)), starts


@dataclass(frozen=True)
class Tile:
    """Rows `q` against columns `k`, both half-open, of which `kind` says what is visible."""

    q: Span
    k: Span
    kind: TileKind
    count: int = 1
    """Of squares: so many of them, each further one behind the last in rows and in columns."""

    def shifted(self, rows: int, columns: int) -> "Tile":
        return Tile((self.q[0] + rows, self.q[1] + rows), (self.k[0] + columns, self.k[1] + columns), self.kind)


def tiles(q: Span, k: Span, window: int | None = None, starts: tuple[int, ...] | None = None) -> list[Tile]:
    """The visible pairs of the queries `q` and keys `k` (true positions) of one sample as tiles.

    The tiles do not overlap, cover {(p, c): q0 <= p < q1, k0 <= c < k1, c <= p, p - c < window, same document} and
    nothing else, and are in true positions.
    """
    found: list[Tile] = []
    for first, stop in pairwise((*(starts or (0,)), max(q[1], k[1]))):
        rows = max(q[0], first), min(q[1], stop)
        columns = max(k[0], first), min(k[1], stop)
        if rows[0] < rows[1] and columns[0] < columns[1]:
            found.extend(_band(rows, columns, window))
    return found


def _band(q: Span, k: Span, window: int | None) -> Iterator[Tile]:
    """`tiles` within one document.

    Row p sees the columns [max(k0, p - w + 1), min(k1, p + 1)). The right bound moves with p before k1 and rests
    after; the left one rests before k0 + w and moves after. Between those cuts each bound does one thing.
    """
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
            # Both bounds move: in blocks of which the far edge and the diagonal do not meet.
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
    """The visible pairs of one rank's queries and one rank's keys, in local rows and columns, for one sample.

    `queries` and `keys` are the spans of true positions that the rows and columns hold, in their order, ascending. Cached:
    every layer of a step asks for the same.
    """
    if window is not None and queries[-1][1] - 1 - keys[0][0] < window:
        window = None
    if starts is not None and len(starts) == 1:
        starts = None
    rows = sum(stop - first for first, stop in queries)
    if queries == keys and window is None and starts is None:
        # Positions ascend, so that what is causal in them is causal in rows too, across the gap between spans.
        return (_triangle((0, rows), (0, rows), TileKind.CAUSAL),)
    found: list[Tile] = []
    row = 0
    for query in queries:
        column = 0
        for key in keys:
            found += [tile.shifted(row - query[0], column - key[0]) for tile in tiles(query, key, window, starts)]
            column += key[1] - key[0]
        row += query[1] - query[0]
    return tuple(_runs(_merged(found)))


def _merged(found: list[Tile]) -> list[Tile]:
    """Full rectangles that share a whole side become one; one launch of a large tile is faster than two."""
    full = [(tile.q, tile.k) for tile in found if tile.kind is TileKind.FULL]
    rest = [tile for tile in found if tile.kind is not TileKind.FULL]
    across = _joined(full)
    below = _joined([(k, q) for q, k in across])
    return sorted([*(Tile(q, k, TileKind.FULL) for k, q in below), *rest], key=lambda tile: (tile.q, tile.k))


def _runs(found: list[Tile]) -> list[Tile]:
    """Equal squares behind one another, as a short window has by the hundred, become one tile: one launch for all."""
    runs: list[Tile] = []
    last: dict[tuple[TileKind, int, int, int], int] = {}
    for tile in found:
        size = tile.q[1] - tile.q[0]
        alike = tile.kind, size, tile.k[1] - tile.k[0], tile.q[0] - tile.k[0]
        place = last.get(alike, -1)
        if place >= 0 and alike[2] == size and runs[place].q[0] + runs[place].count * size == tile.q[0]:
            runs[place] = replace(runs[place], count=runs[place].count + 1)
        else:
            last[alike] = len(runs)
            runs.append(tile)
    return runs


def _joined(pairs: list[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """Pairs with equal first spans and second spans that touch become one."""
    found: list[tuple[Span, Span]] = []
    for same, span in sorted(pairs):
        if found and found[-1][0] == same and found[-1][1][1] == span[0]:
            found[-1] = same, (found[-1][1][0], span[1])
        else:
            found.append((same, span))
    return found


def batch_tiles(
    visibility: Visibility, queries: tuple[Span, ...], keys: tuple[Span, ...]
) -> list[tuple[slice, tuple[Tile, ...]]]:
    """Slices of the batch, each with the tiles that its samples share; neighbours with equal documents go together.

    Slices without a visible pair are left out.
    """
    if visibility.document_starts is None:
        cut = local_tiles(queries, keys, visibility.window, None)
        return [(slice(None), cut)] if cut else []
    found, stop = [], 0
    for starts, samples in groupby(visibility.document_starts):
        first, stop = stop, stop + len(list(samples))
        if cut := local_tiles(queries, keys, visibility.window, starts):
            found.append((slice(first, stop), cut))
    return found

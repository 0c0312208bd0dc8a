"""context.svg: the causal mask cut in zigzag, and which keys each rank sees in each step of the ring."""

from drawings.canvas import DARK, FAINT, LIGHT, MIDDLE, MUTED, RED, Drawing
from megalite.context_parallel.tiles import Tile, TileKind, tiles
from megalite.topology.layout import Span, sequence_spans

CP = 4
CHUNKS = 2 * CP
CHUNK = 2
"""Positions of a chunk, so that a triangle is one."""


def spans_of(rank: int) -> tuple[Span, ...]:
    """Positions that a rank holds."""
    return sequence_spans(CHUNKS * CHUNK, cp_rank=rank, cp_size=CP)


def visible(queries: tuple[Span, ...], keys: tuple[Span, ...]) -> list[Tile]:
    """The pairs of true positions that attention computes."""
    return [tile for query in queries for key in keys for tile in tiles(query, key)]


def keys_at(rank: int, step: int) -> int:
    """The rank whose keys and values `rank` works on in a step of the ring; they go from rank to rank + 1."""
    return (rank - step) % CP


def draw() -> Drawing:
    """Left: the mask, coloured by the rank of the query. Right: a small mask for each rank and step."""
    drawing = Drawing(
        412,
        "Context parallelism: the causal mask of a sequence in 8 chunks, coloured by the rank that computes it, "
        "and the ring: each rank's queries against the keys of one rank a step.",
    )
    drawing.text(24, 26, "Zigzag: rank r holds chunks r and 7 − r", size=14, align="left", bold=True)
    drawing.text(408, 26, "Ring: each rank's work in each step", size=14, align="left", bold=True)
    _mask(drawing, 84, 82, 33)
    _ring(drawing, 474, 82)
    return drawing


def _mask(drawing: Drawing, x: float, y: float, cell: float) -> None:
    side = CHUNKS * cell
    drawing.text(x - 12, y - 16, "queries", colour=MUTED, align="right")
    drawing.text(x - 12, y + side + 12, "keys", colour=MUTED, align="right")
    unit = cell / CHUNK
    for rank in range(CP):
        for tile in visible(spans_of(rank), ((0, CHUNKS * CHUNK),)):
            _tile(drawing, tile, x, y, unit, LIGHT[rank])
        for first, stop in spans_of(rank):
            middle = (first + stop) / 2 * unit
            drawing.text(x - 12, y + middle, f"rank {rank}", colour=DARK[rank], align="right")
            drawing.text(x + middle, y + side + 12, str(rank), colour=DARK[rank])
    for edge in range(CHUNKS + 1):
        # Only where there is a mask: up to the diagonal.
        last = min(edge + 1, CHUNKS)
        drawing.line((x, y + edge * cell), (x + last * cell, y + edge * cell), colour="white", line=1.5)
        first = max(edge - 1, 0)
        drawing.line((x + edge * cell, y + first * cell), (x + edge * cell, y + side), colour="white", line=1.5)
    drawing.line((x, y), (x, y + side), (x + side, y + side), colour=FAINT)
    areas = {sum(area(tile) for tile in visible(spans_of(rank), ((0, CHUNKS * CHUNK),))) for rank in range(CP)}
    assert len(areas) == 1, "zigzag balances"
    share = areas.pop() / CHUNK**2
    drawing.text(x + side / 2, y + side + 36, f"the area of {share:g} chunk squares for every rank", colour=MUTED)


def area(tile: Tile) -> float:
    """Of its visible part as drawn, in pairs of positions; a triangle counts as half its square."""
    whole = (tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0])
    return whole if tile.kind is TileKind.FULL else whole / 2


def _tile(drawing: Drawing, tile: Tile, x: float, y: float, unit: float, fill: str) -> None:
    (top, bottom), (left, right) = tile.q, tile.k
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    if tile.kind is TileKind.CAUSAL:
        corners.remove((right, top))
    drawing.shape([(x + unit * column, y + unit * row) for column, row in corners], fill=fill)


def _ring(drawing: Drawing, x: float, y: float) -> None:
    pitch, size = 66.0, 44.0
    for step in range(CP):
        drawing.text(x + step * pitch + size / 2, y - 18, f"step {step}", colour=MUTED)
    for rank in range(CP):
        top = y + rank * pitch
        drawing.text(x - 14, top + size / 2, f"rank {rank}", colour=DARK[rank], align="right", bold=True)
        for step in range(CP):
            _small_mask(drawing, rank, keys_at(rank, step), x + step * pitch, top, size)
    for rank in range(CP - 1):
        # What is below and to the right had these keys a step earlier one row up.
        for step in range(CP - 1):
            start = (x + step * pitch + size + 3, y + rank * pitch + size + 3)
            end = (x + (step + 1) * pitch - 3, y + (rank + 1) * pitch - 3)
            drawing.arrow(start, end, colour=RED, line=1.2)
    drawing.text(
        408, y + 4 * pitch + 4, "Rows: own queries. Columns, colour: one rank's keys.", align="left", colour=MUTED
    )
    drawing.text(
        408, y + 4 * pitch + 24, "→ keys and values, and from the last rank to rank 0", align="left", colour=RED
    )


def _small_mask(drawing: Drawing, rank: int, owner: int, x: float, y: float, size: float) -> None:
    """The two query chunks of `rank` against the two key chunks of `owner`, in local rows and columns."""
    unit = size / (2 * CHUNK)
    drawing.box(x, y, size, size, fill="white", edge=FAINT)
    for row, query in enumerate(spans_of(rank)):
        for column, key in enumerate(spans_of(owner)):
            for tile in tiles(query, key):
                moved = tile.shifted(row * CHUNK - query[0], column * CHUNK - key[0])
                _tile(drawing, moved, x, y, unit, MIDDLE[owner])
    drawing.line((x + size / 2, y), (x + size / 2, y + size), colour="white")
    drawing.line((x, y + size / 2), (x + size, y + size / 2), colour="white")

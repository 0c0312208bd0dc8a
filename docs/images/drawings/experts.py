"""experts.svg: the way of tokens to their experts and back, and the two grids over the same ranks."""

from drawings.canvas import DARK, FAINT, GREY, LIGHT, MIDDLE, MUTED, RED, Drawing, Point
from megalite.topology.layout import ParallelLayout, ShardSpec

EP, EXPERTS = 4, 8
CHOICES = (((0, 5), (2, 5)), ((1, 4), (0, 5)), ((3, 6), (2, 7)), ((0, 7), (1, 6)))
"""Per rank, the experts that each of its tokens has chosen (made up)."""

GRIDS = ParallelLayout(tp=2, cp=2, dp=2, ep=4, etp=1)

ROW, TOP, CELL = 66.0, 84.0, 20.0
"""Height of a rank, where the first begins, and the size of a token's row."""

OUT, EXPERT, HOME = 162.0, 340.0, 542.0
"""Left edges of: rows in the order of experts, the experts, the rows that are home again."""

EXPERT_WIDTH = 112.0


def draw() -> Drawing:
    """Four ranks from left to right through dispatch and combination; below, the groups of both grids."""
    drawing = Drawing(
        508,
        "Expert parallelism: the tokens of 4 ranks are sorted by expert, exchanged, computed by 8 experts, "
        "exchanged back and summed with their weights; and the dense and the expert grid over the same ranks.",
    )
    drawing.text(24, 26, "Experts: 8 over ep 4, 2 for each token", size=14, align="left", bold=True)
    rows = EXPERTS // 2
    for x, title, colour in (
        (106, "choices", MUTED),
        (OUT + rows * CELL / 2, "by expert", MUTED),
        ((OUT + rows * CELL + EXPERT) / 2, "all-to-all", RED),
        (EXPERT + EXPERT_WIDTH / 2, "experts", MUTED),
        ((EXPERT + EXPERT_WIDTH + HOME) / 2, "all-to-all", RED),
        (HOME + rows * CELL / 2, "home again", MUTED),
        (697, "weighted sum", MUTED),
    ):
        drawing.text(x, TOP - 22, title, colour=colour, bold=colour == RED)
    seats = _experts(drawing)
    for rank in range(EP):
        _home(drawing, rank, seats)
    _grids(drawing, 386)
    return drawing


def sorted_pairs(rank: int) -> list[tuple[int, int]]:
    """(expert, token) of a rank's rows in the order in which they are sent."""
    return sorted((expert, token) for token, chosen in enumerate(CHOICES[rank]) for expert in chosen)


def experts_of(rank: int) -> range:
    """The experts that an ep rank holds."""
    return range(*ShardSpec.split("experts", (EXPERTS,), dim=0, index=rank, parts=EP).slice[0])


def _experts(drawing: Drawing) -> dict[tuple[int, int, int], Point]:
    """Draw the experts with the rows they get; the top left corner of the row of each (home, expert, token)."""
    seats = {}
    for rank in range(EP):
        for place, expert in enumerate(experts_of(rank)):
            y = TOP + rank * ROW + 1 + place * 28
            drawing.box(EXPERT, y, EXPERT_WIDTH, 26, fill="white", edge=DARK[rank], radius=4)
            drawing.text(EXPERT + 20, y + 13, f"E{expert}", colour=DARK[rank], bold=True)
            # In the order of the ranks that sent them.
            sent = [(home, *pair) for home in range(EP) for pair in sorted_pairs(home) if pair[0] == expert]
            for index, row in enumerate(sent):
                seats[row] = (EXPERT + 42 + index * (CELL + 2), y + 3)
                drawing.box(*seats[row], CELL, CELL, fill=MIDDLE[row[0]], radius=2)
    return seats


def _home(drawing: Drawing, rank: int, seats: dict[tuple[int, int, int], Point]) -> None:
    top = TOP + rank * ROW
    middle = top + 28
    drawing.text(24, middle, f"rank {rank}", align="left", colour=DARK[rank], bold=True)
    for token, chosen in enumerate(CHOICES[rank]):
        y = top + 1 + token * 28
        for left, sign in ((82, ", "), (673, " + ")):
            drawing.box(left, y, 48, 26, fill=LIGHT[rank], radius=4)
            drawing.text(left + 24, y + 13, sign.join(map(str, chosen)))
    pairs = sorted_pairs(rank)
    end = OUT + len(pairs) * CELL
    for index, (expert, token) in enumerate(pairs):
        x, y = seats[rank, expert, token]
        # Side by side at both ends, so that two rows of one rank for one expert are two lines.
        here = middle + (index - (len(pairs) - 1) / 2) * 4
        there = y + CELL / 2 + ((x - EXPERT - 42) / (CELL + 2) - 1) * 4
        drawing.curve((end, here), (EXPERT, there), colour=DARK[rank])
        drawing.curve((EXPERT + EXPERT_WIDTH, there), (HOME, here), colour=DARK[rank])
    labels, fills = [str(expert) for expert, _ in pairs], [MIDDLE[rank]] * len(pairs)
    drawing.cells(OUT, middle - CELL / 2, CELL, labels, fills)
    drawing.cells(HOME, middle - CELL / 2, CELL, labels, fills)
    drawing.arrow((134, middle), (OUT - 4, middle), colour=MUTED)
    drawing.arrow((HOME + len(pairs) * CELL + 6, middle), (669, middle), colour=MUTED)


def _grids(drawing: Drawing, y: float) -> None:
    drawing.line((24, y - 24), (736, y - 24), colour=FAINT)
    layout = GRIDS
    dense = f"{layout.world_size} ranks, dense: tp {layout.tp} · cp {layout.cp} · dp {layout.dp}"
    expert = f"the same ranks, experts: etp {layout.expert_tp} · ep {layout.ep} · edp {layout.expert_dp}"
    for left, title, kinds in (
        (24, dense, {"tp": "tp", "cp": "cp", "dp": "dp"}),
        (400, expert, {"expert-tp": "etp", "ep": "ep", "expert-dp": "edp"}),
    ):
        drawing.text(left, y - 2, title, align="left", bold=True)
        for lane, (kind, short) in enumerate(kinds.items()):
            top = y + 16 + lane * 29
            drawing.text(left, top + 13, short, align="left", colour=MUTED)
            for index, ranks in enumerate(layout.groups(kind)):
                for rank in ranks:
                    fill = GREY if len(ranks) == 1 else LIGHT[index]
                    drawing.box(left + 44 + rank * 36, top, 34, 26, fill=fill, radius=3)
                    drawing.text(left + 44 + rank * 36 + 17, top + 13, str(rank))

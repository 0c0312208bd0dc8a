"""data.svg: buckets of gradients under the last backward, without and with the distributed optimizer."""

from itertools import accumulate

from drawings.canvas import FAINT, GREY, INK, LIGHT, MIDDLE, MUTED, RED, Drawing
from megalite.data_parallel.facts import BucketKind, cut_into_buckets
from megalite.topology.layout import ShardSpec

DP, LAYERS, LAYERS_A_BUCKET = 4, 6, 2
BACKWARD, FORWARD, ALL_REDUCE, STEP = 2.0, 1.0, 3.0, 2.0
"""Times: of a layer, a layer, a bucket, all parameters. Reduce-scatter and all-gather are half an all-reduce each."""

LEFT, UNIT, BAR = 128.0, 26.0, 26.0


def bucket_layers() -> list[list[int]]:
    """The layers of each bucket as training cuts them, in the order in which their gradients come."""
    kind = BucketKind(decay=True, split_over_tp=False, partial_over_tp=False, tied=False, expert=False)
    buckets = cut_into_buckets(
        range(LAYERS), kind=lambda layer: kind, size=lambda layer: 1, bucket_size=LAYERS_A_BUCKET
    )
    return [layers for _, layers in buckets]


def draw() -> Drawing:
    """Two clocks, and below what of a bucket each rank holds with the distributed optimizer."""
    drawing = Drawing(
        440,
        "Data parallelism: gradient buckets in the order of the backward, reduced under the last backward; with the "
        "distributed optimizer a reduce-scatter, a step on the owned part and an all-gather under the next forward.",
    )
    buckets = bucket_layers()
    drawing.text(24, 26, "All-reduce of buckets under the last backward", size=14, align="left", bold=True)
    _plain(drawing, 50, buckets)
    drawing.text(24, 160, "Distributed optimizer", size=14, align="left", bold=True)
    legend = "RS reduce-scatter, AG all-gather"
    drawing.text(736, 160, legend, align="right", colour=RED)
    _distributed(drawing, 184, buckets)
    drawing.line((24, 272), (736, 272), colour=FAINT)
    _ownership(drawing, 300)
    return drawing


def _bar(
    drawing: Drawing, y: float, start: float, duration: float, label: str, *, fill: str, comm: bool = False
) -> float:
    """One box on the clock; when it ends."""
    x, width = LEFT + start * UNIT, duration * UNIT
    drawing.box(x + 1, y, width - 2, BAR, fill=fill, edge=RED if comm else "none", line=1.5, radius=3)
    drawing.text(x + width / 2, y + BAR / 2, label, size=11, colour=RED if comm else INK)
    return start + duration


def _lanes(drawing: Drawing, y: float) -> None:
    drawing.text(24, y + BAR / 2, "compute", align="left", colour=MUTED)
    drawing.text(24, y + 34 + BAR / 2, "network", align="left", colour=RED)


def _backward(drawing: Drawing, y: float, buckets: list[list[int]], name: str, cost: float) -> float:
    """The last microbatch's backward, and each bucket's reduction once it is full; the time when all have ended."""
    ends = list(accumulate([BACKWARD] * LAYERS))
    hue = {layer: index for index, layers in enumerate(buckets) for layer in layers}
    for layer, end in zip(reversed(range(LAYERS)), ends, strict=True):
        _bar(drawing, y, end - BACKWARD, BACKWARD, f"B{layer}", fill=LIGHT[hue[layer]])
    done = 0.0
    for index, layers in enumerate(buckets):
        full = max(ends[LAYERS - 1 - layer] for layer in layers)
        done = _bar(drawing, y + 34, max(full, done), cost, name, fill=LIGHT[index], comm=True)
    return done


def _plain(drawing: Drawing, y: float, buckets: list[list[int]]) -> None:
    _lanes(drawing, y)
    done = _backward(drawing, y, buckets, "all-reduce", ALL_REDUCE)
    clock = _bar(drawing, y, done, STEP, "step", fill=GREY)
    hue = {layer: index for index, layers in enumerate(buckets) for layer in layers}
    for layer in range(LAYERS):
        clock = _bar(drawing, y, clock, FORWARD, f"F{layer}", fill=LIGHT[hue[layer]])


def _distributed(drawing: Drawing, y: float, buckets: list[list[int]]) -> None:
    _lanes(drawing, y)
    done = _backward(drawing, y, buckets, "RS", ALL_REDUCE / 2)
    clock = sent = _bar(drawing, y, done, STEP / DP, "", fill=GREY)
    drawing.text(LEFT + (done + clock) / 2 * UNIT, y - 10, f"step of 1/{DP}", size=11)
    for index in reversed(range(len(buckets))):
        sent = _bar(drawing, y + 34, sent, ALL_REDUCE / 2, "AG", fill=LIGHT[index], comm=True)
        for layer in sorted(buckets[index]):
            clock = _bar(drawing, y, max(clock, sent), FORWARD, f"F{layer}", fill=LIGHT[index])


def _ownership(drawing: Drawing, y: float) -> None:
    titles = ("gradients, after reduce-scatter", "optimizer state, step", "parameters, after all-gather")
    width, pitch, left = 168.0, 20.0, 128.0
    for column, title in enumerate(titles):
        x = left + column * (width + 52)
        drawing.text(x + width / 2, y, title, colour=MUTED)
        if column:
            drawing.arrow((x - 40, y + 16 + 2 * pitch), (x - 12, y + 16 + 2 * pitch), colour=MUTED)
        for rank in range(DP):
            top = y + 18 + rank * pitch
            if column == 0:
                drawing.text(24, top + 8, f"dp rank {rank}", align="left", colour=MUTED)
            for part in range(DP):
                first, stop = ShardSpec.split("bucket", (DP,), dim=0, index=part, parts=DP).slice[0]
                own = part == rank
                if column == 1 and not own:
                    continue
                fill = MIDDLE[part] if own or column == 2 else GREY
                unit = width / DP
                drawing.box(x + first * unit, top, (stop - first) * unit - 2, pitch - 4, fill=fill, radius=2)
    note = "one bucket: each rank sums, steps and sends its own part alone"
    drawing.text(128, y + 116, note, align="left", colour=MUTED)

"""How many microbatches each chunk of a rank holds at once: closed forms of what a replay of the schedule counts.

A rank's memory peaks at one of a few moments; each is a row of counts: whole graphs (from F to B or I) and inputs kept for
a W (from I to W) by chunk. Memory is linear in the counts, so the largest row decides, whatever a microbatch weighs.
Counts of the one-chunk schedules and looped-bfs are exact, of interleaved too but for a last group that is larger or
smaller than the others; of the Vs the moments that are largest by several weights are kept.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.pipeline.ir.generators.interleaved import smallest_group
from megalite.planner.search.space import VEE, Pipeline

Counts = npt.NDArray[np.int64]


class InFlight(NamedTuple):
    """[moments, ranks, chunks]."""

    graphs: Counts
    deferred: Counts


def steady(pipeline: Pipeline, group: int | None = None) -> Pipeline:
    """The same pipeline with as few microbatches as give the same counts."""
    schedule, p, v, m = pipeline
    if schedule == "1f1b":
        return pipeline._replace(microbatches=min(m, 2 * p))
    if schedule in ("zb-h1", "zb-h2"):
        return pipeline._replace(microbatches=min(m, 4 * p))
    if schedule in VEE:
        return pipeline._replace(microbatches=min(m, 2 * p + 2))
    if schedule == "interleaved":
        size = group or smallest_group(p, m)
        # Warm-up and one round of the chunks lie in whole groups.
        enough = size * (3 + 2 * p // (v * size))
        return pipeline._replace(microbatches=min(m, enough)) if m >= enough else pipeline
    return pipeline


def in_flight(
    pipeline: Pipeline, ranks: Counts, *, warm_up: str = "pa", group: int | None = None
) -> InFlight:
    """The moments at which one of `ranks` may hold most.

    Args:
        warm_up: of 1f1b.
        group: of interleaved; default the smallest.
    """
    schedule, p, v, m = pipeline
    left = p - ranks
    if schedule in ("gpipe", "looped-bfs"):
        return _whole(np.full((1, len(ranks), v), m))
    if schedule == "1f1b":
        return _whole(np.minimum(m, left if warm_up == "pa" else 2 * left - 1)[None, :, None])
    if schedule == "interleaved":
        return _whole(_interleaved(p, v, m, group or smallest_group(p, m), ranks))
    if schedule in ("zb-h1", "zb-h2"):
        return _zero_bubble(p, m, 1 if schedule == "zb-h1" else 2, ranks)
    few = min(m, 2 * p + 2)  # more are as these
    held = np.stack([_vee(schedule, p, few, rank) for rank in ranks.tolist()], axis=1)
    return InFlight(held[:, :, :2], held[:, :, 2:])


def _whole(graphs: Counts) -> InFlight:
    return InFlight(graphs, np.zeros_like(graphs))


def _interleaved(p: int, v: int, m: int, group: int, ranks: Counts) -> Counts:
    """Before each backward at which a group of forwards or backwards changes chunk, over one round of the chunks."""
    ahead = 2 * (p - ranks - 1) + (v - 1) * group
    turns = np.arange(v) * group
    moments = np.concatenate((turns[:, None] + 0 * ahead, (turns[:, None] - ahead - 1) % (v * group)))
    moments = np.minimum(moments, np.maximum(v * m - ahead - 1, 0))
    forwards = np.minimum(moments + ahead + 1, v * m)
    return _visited(forwards, v, m, group) - _visited(moments, v, m, group)[:, :, ::-1]


def _visited(steps: Counts, v: int, m: int, group: int) -> Counts:
    """[..., chunks]: how often each chunk has been visited after so many steps, by groups of microbatches."""
    rounds = np.minimum(steps // (v * group), m // group)
    rest = steps - rounds * v * group
    size = np.where(rounds < m // group, group, m % group)[..., None]
    return rounds[..., None] * group + np.clip(rest[..., None] - np.arange(v) * size, 0, size)


def _zero_bubble(p: int, m: int, depth: int, ranks: Counts) -> InFlight:
    """After the last forward, and right after the first I for which the most W are put off."""
    ahead = np.minimum(m, depth * (p - ranks) - (depth - 1))
    behind = depth * ranks
    last = InFlight(ahead, np.minimum(behind, m - ahead))
    # Rank 0 puts nothing off: its halves are merged.
    put_off = np.where(behind == 0, 0, np.minimum(behind + 1, m))
    done = np.minimum(behind, m - 1)
    held = np.where(behind == 0, 0, np.minimum(m, ahead + done) - (done + 1))
    graphs = np.stack((last.graphs, held))[:, :, None]
    return InFlight(graphs, np.stack((last.deferred, put_off))[:, :, None])


_F, _I, _W, _B = range(4)
_STEPS = {kind + chunk: ("FIWB".index(kind), int(chunk or -1)) for kind in "FIWB" for chunk in ("0", "1", "")}
_WEIGHTS = np.array(
    [
        *([1.0, 2.0, 0.7, 1.0], [1.0, 5.0, 0.7, 2.0], [1.0, 20.0, 0.7, 5.0]),
        *([1.0, 1.01, 0.0, 0.0], [1.01, 1.0, 0.0, 0.0]),
        *([1.0, 1.01, 0.5, 0.5], [1.01, 1.0, 0.5, 0.5]),
        *([1.0, 1.01, 1.0, 1.01], [1.01, 1.0, 1.01, 1.0]),
        *([0.45, 0.46, 1.0, 1.01], [0.46, 0.45, 1.01, 1.0]),
        *([0.1, 0.1, 1.0, 1.01], [0.1, 0.1, 1.01, 1.0]),
    ]
)
"""Of graphs and of what is deferred, by chunk: moments that are largest by one of these are kept. Where the second chunk
of a rank has the head it may weigh much more than the first."""


@lru_cache(maxsize=4096)
def _vee(schedule: str, p: int, m: int, rank: int) -> Counts:
    """[weights, 4] of one rank."""
    kind, chunk = (_dualpipe_v if schedule == "dualpipe-v" else _zb_v)(p, m, rank)
    held = _held(kind, chunk, rank, p, m)
    return held[np.argmax(held @ _WEIGHTS.T, axis=0)]


def _phases(*phases: tuple[int, str]) -> tuple[Counts, Counts]:
    """(kind, chunk) of each step of repeated phases; a W without a chunk has -1."""
    steps = [_STEPS[step] for times, text in phases for step in text.split() * max(times, 0)]
    kinds, chunks = np.array(steps, dtype=np.int64).T
    return kinds, chunks.copy()


def _zb_v(p: int, m: int, rank: int) -> tuple[Counts, Counts]:
    """The walk of generators/vee.py: what it says of a rank, as arrays."""
    count, left = max(m, 2 * p - 1), p - rank
    both = count - (2 * p - rank - 1)
    return _phases(
        (2 * left - 1, "F0"),
        (rank, "F1 F0"),
        (left, "F1 I1 W1"),
        (both, "F0 I0 W0 F1 I1 W1"),
        (count - p - both, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (left, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    )


def _dualpipe_v(p: int, m: int, rank: int) -> tuple[Counts, Counts]:
    left = p - rank - 1
    kinds, chunks = _phases(
        (2 * left, "F0"),
        (rank + 1, "F0 F1"),
        (left, "I1 W F1"),
        (m - 2 * p + rank + 1, "F0 B1 F1 B0"),
        (left, "B1 F1 B0"),
        ((rank + 1) // 2, "B1 B0"),
        ((rank + 1) % 2, "B1 I0"),
        ((rank + 1) // 2, "I1 I0"),
        (left, "W I0"),
        (rank + 1, "W"),
    )
    # Each W is of the oldest I that has none.
    chunks[kinds == _W] = chunks[kinds == _I]
    return kinds, chunks


def _held(kind: Counts, chunk: Counts, rank: int, p: int, m: int) -> Counts:
    """[steps, 4]: graphs and deferred inputs of both chunks after each step."""
    if m < 2 * p - 1 and not (kind == _B).any():
        # The order of 2p-1 microbatches with those left out that there are not.
        number = np.zeros(len(kind), dtype=np.int64)
        for code in range(8):
            mine = kind * 2 + chunk == code
            number[mine] = np.arange(mine.sum())
        kind, chunk = kind[number < m], chunk[number < m]
    follows = (kind[:-1] == _I) & (kind[1:] == _W) & (chunk[:-1] == chunk[1:])
    # Nobody waits for the I of the first stage, nor at the turn of the V: it is one B with its W.
    alone = ((chunk == 0) & (rank == 0)) | ((chunk == 1) & (rank == p - 1))
    merged = np.flatnonzero(follows & alone[:-1])
    kind = kind.copy()
    kind[merged] = _B
    keep = np.ones(len(kind), dtype=bool)
    keep[merged + 1] = False
    kind, chunk = kind[keep], chunk[keep]
    change = np.zeros((len(kind), 4), dtype=np.int64)
    step = np.arange(len(kind))
    change[step, chunk] = np.select([kind == _F, (kind == _I) | (kind == _B)], [1, -1], 0)
    change[step, 2 + chunk] = np.select([kind == _I, kind == _W], [1, -1], 0)
    return np.cumsum(change, axis=0)

"""Each named schedule compared with its closed forms at many sizes: time, memory and messages.

F, I, W are the times of one stage, B = I + W, with v stages per rank. The bubble is the makespan minus v m (F+B), the computing
time of one rank."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest

from megalite.pipeline.ir.generators import build_schedule, gpipe, one_f_one_b, smallest_group, zb_h1, zb_h2, zb_v
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Schedule, live_units
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate
from megalite.pipeline.ir.validate import validate


class Size(NamedTuple):
    """A row of the grid; `name` includes the warm-up of 1f1b."""

    name: str
    p: int
    v: int
    m: int
    group: int | None = None

    def schedule(self) -> Schedule:
        name, _, warm_up = self.name.partition(" ")
        numbers = {"num_ranks": self.p, "num_chunks": self.v, "num_microbatches": self.m}
        return build_schedule(name, **numbers, group=self.group, warm_up=warm_up or "pa")


NAMES = ("gpipe", "1f1b pa", "1f1b pb", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def sizes(name: str) -> Iterator[Size]:
    """Sizes with m < p, m = p, and m not divisible by p."""
    if name == "interleaved":
        for p, v, m in product((1, 2, 3, 4, 5), (2, 3), range(1, 13)):
            legal: list[int | None] = [n for n in range(p, m + 1) if not 0 < m % n < p]
            yield from (Size(name, p, v, m, group) for group in legal[:3] or [None])
    elif name == "looped-bfs":
        for p, v, m in product((1, 2, 3, 4, 5), (2, 3), range(1, 13)):
            yield Size(name, p, v, m)
    else:
        for p, m in product(range(1, 6), range(1, 13)):
            if name != "dualpipe-v" or m >= 2 * p:
                yield Size(name, p, 2 if name in ("zb-v", "dualpipe-v") else 1, m)


def run(schedule: Schedule, f: float = 1.0, i: float = 1.0, w: float = 1.0, *, p2p: float = 0.0) -> Timeline:
    costs = Costs.uniform(schedule.num_stages, forward=f, backward=i + w, weight_grad=w, p2p=p2p)
    # Four actions of lead, as if receives were posted at will.
    return simulate(lower(schedule, recv_prefetch=4), costs)


def bubble(size: Size, f: int, i: int, w: int) -> int | None:
    """Return the closed form, or None: split schedules with few microbatches, or a V with unequal F, I, W."""
    name, p, v, m, _ = size
    hops = p - 1
    equal = f == i == w
    if name in ("gpipe", "1f1b pa", "1f1b pb"):
        return hops * (f + i + w)
    if name in ("interleaved", "looped-bfs"):
        # A full rank stage costs v of these: (p-1)(F+B)/v. Fewer microbatches than ranks wait at each wrap of the loop.
        return (hops + (v - 1) * max(p - m, 0)) * (f + i + w)
    if name == "zb-h1" and (m >= p or equal):
        # (p-1)(F+I-W) where W <= I, F: the last rank cannot start before (p-1)F, and W > F gains no more.
        return hops * max(f, i + max(f - w, 0)) + (max(p - m, 0) * f if equal else 0)
    if name == "zb-h2" and (m >= 2 * p - 1 or equal):
        return hops * max(f, i - f, f + i - 2 * w) + (max(2 * p - 1 - m, 0) // 2 * f if equal else 0)
    if name == "zb-v" and equal:
        return (hops + max(3 * p - 1 - 2 * m, 0)) * f
    if name == "dualpipe-v" and equal:
        return hops * f
    return None


@pytest.mark.parametrize("name", NAMES)
def test_makespans_equal_the_closed_forms(name: str) -> None:
    """Each size with F = I = W, and with other times where the closed form contains F, I and W."""
    others = list(product((1, 2, 3), repeat=3))
    compared = 0
    for index, size in enumerate(sizes(name)):
        schedule = size.schedule()
        for f, i, w in ((1, 1, 1), others[index % len(others)]):
            wanted = bubble(size, f, i, w)
            if wanted is not None:
                assert run(schedule, f, i, w).makespan == size.m * size.v * (f + i + w) + wanted, (size, f, i, w)
                compared += 1
    assert compared >= len(list(sizes(name)))


def test_rank_spans_of_split_schedules() -> None:
    """From the rank's first action to its last: the time of a step if the next one need not wait for all ranks."""
    for p, m in product(range(1, 5), range(1, 9)):
        for f, i, w in product((1, 2, 3), repeat=3):
            ideal = m * (f + i + w)
            if m >= p:
                span = ideal + (p - 1) * (i + max(f - w, 0))
                assert max(run(zb_h1(p, m), f, i, w).spans) == span
            if m >= 2 * p - 1:
                # (p-1)(F+I-2W), unless W is so long that there is no bubble, or I so long that it sets the pace.
                span = ideal + (p - 1) * max(0, i - f, f + i - 2 * w)
                assert max(run(zb_h2(p, m), f, i, w).spans) == span
        if m >= 2 * p - 1:
            assert run(zb_v(p, m)).spans == (6 * m,) * p


def activations(size: Size, rank: int) -> int:
    """Maximum number of live stage activations per rank; an upper bound with few microbatches."""
    name, p, v, m, group = size
    left = p - rank
    if name in ("gpipe", "looped-bfs"):
        return m * v
    if name in ("1f1b pa", "zb-h1"):
        return min(m, left)
    if name in ("1f1b pb", "zb-h2"):
        return min(m, 2 * left - 1)
    if name == "interleaved":
        return min(m * v, 2 * (left - 1) + (v - 1) * (group or smallest_group(p, m)) + 1)
    return 2 * p if name == "zb-v" else 2 * p + 1


def deferred(size: Size, rank: int) -> int:
    """Microbatches with a deferred W per rank when most activations are live."""
    if size.name == "zb-h1":
        return min(rank, size.m)
    if size.name == "zb-h2":
        return min(2 * rank, size.m)
    return 0


@pytest.mark.parametrize("name", NAMES)
def test_live_activations_equal_the_closed_forms(name: str) -> None:
    for size in sizes(name):
        found = tuple(max(units.activations for units in live_units(row)) for row in size.schedule().actions)
        wanted = tuple(activations(size, rank) for rank in range(size.p))
        if name == "zb-v" and size.m < 2 * size.p - 1:
            assert all(peak <= limit for peak, limit in zip(found, wanted, strict=True)), size
        else:
            assert found == wanted, size


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_memory_of_split_schedules_equals_the_closed_forms(name: str) -> None:
    """(p-r) M_B + r M_W for ZB-H1, (2(p-r)-1) M_B + 2r M_W for ZB-H2, 2p M_B and a constant (2p+1) M_B for the Vs.

    This is the memory between actions; an I frees one unit while it makes the other, so it needs no more."""
    full, kept = 4.0, 1.0
    compared = 0
    for size in sizes(name):
        schedule = size.schedule()
        limits = [full * activations(size, r) + kept * deferred(size, r) for r in range(size.p)]
        between = [
            max(full * units.activations + kept * units.deferred for units in live_units(row))
            for row in schedule.actions
        ]
        assert all(held <= limit for held, limit in zip(between, limits, strict=True)), size
        if size.m < {"zb-h1": size.p, "dualpipe-v": 0}.get(name, 2 * size.p - 1):
            continue
        assert between == limits, size
        bytes_of = Sizes.uniform(schedule.num_stages, activation=full, deferred=kept)
        peaks = [peak.size for peak in memory_peaks(lower(schedule), bytes_of)]
        assert peaks == limits, size
        compared += 1
    assert compared > 30


def sends(size: Size, rank: int) -> int:
    """2m for one stage per rank, 2mv for v, less if a stage is at an end or at the turn of a V."""
    name, p, v, m, _ = size
    if p == 1:
        return 0
    if name in ("zb-v", "dualpipe-v"):
        return 2 * m if rank in (0, p - 1) else 4 * m
    return 2 * m * v - m * (rank == 0) - m * (rank == p - 1)


@pytest.mark.parametrize("name", NAMES)
def test_number_of_sends(name: str) -> None:
    for size in list(sizes(name))[::3]:
        report = validate(lower(size.schedule()))
        assert report.sends == tuple(sends(size, rank) for rank in range(size.p)), size


def test_latency_of_1f1b() -> None:
    """GPipe, and 1F1B with the deep warm-up, lose 2c per hop; the shallow one loses a round trip repeatedly."""
    for p, m, c in product(range(2, 6), range(1, 11), (0.25, 1.0)):
        ramps = 3 * (m + p - 1) + 2 * (p - 1) * c
        assert run(gpipe(p, m), p2p=c).makespan == ramps
        assert run(one_f_one_b(p, m, "pb"), p2p=c).makespan == ramps
        assert run(one_f_one_b(p, m), p2p=c).makespan == ramps + 2 * c * ((m - 1) * (p - 1) // p)


@pytest.mark.parametrize(
    ("name", "v", "group", "latency", "ratio"),
    [
        ("gpipe", 1, None, 0.1, 1.467),
        ("1f1b pa", 1, None, 0.1, 1.521),
        ("gpipe", 1, None, 0.5, 1.583),
        ("1f1b pa", 1, None, 0.5, 1.854),
        ("1f1b pb", 1, None, 0.5, 1.583),
        ("interleaved", 2, None, 0.5, 1.531),
        ("interleaved", 4, None, 0.5, 1.917),
        ("interleaved", 2, 16, 0.5, 1.365),
        ("looped-bfs", 2, None, 0.5, 1.365),
        ("zb-h1", 1, None, 0.5, 1.4375),
        ("zb-h2", 1, None, 0.5, 1.219),
        ("zb-v", 2, None, 0.5, 1.427),
    ],
)
def test_latency_equals_an_independent_simulator(
    name: str, v: int, group: int | None, latency: float, ratio: float
) -> None:
    """Makespan / ideal for p = 8, m = 16, with message times relative to the rank's forward."""
    schedule = Size(name, 8, v, 16, group).schedule()
    assert run(schedule, 1 / v, 1 / v, 1 / v, p2p=latency).makespan / 48 == pytest.approx(ratio, abs=1e-3)

"""Where a stage's replicas go: DAPPLE's three ways of taking devices from what is free."""

from collections.abc import Callable, Iterable

Counts = tuple[int, ...]
"""Devices per machine."""


def fresh_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """Untouched machines before those in use: replicas stay together, so that they reduce over fast links.

    Args:
        free: Free devices per machine; at least `wanted` in all.
        whole: Devices of an untouched machine.
    """
    return _fill(free, wanted, sorted(range(len(free)), key=lambda m: (free[m] != whole, -free[m], m)))


def append_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """Machines in use before untouched ones, the fullest first: leaves whole machines for later stages."""
    return _fill(free, wanted, sorted(range(len(free)), key=lambda m: (free[m] == whole, free[m], m)))


def scatter_first(free: Counts, wanted: int, *, whole: int) -> Counts:
    """As even over the machines as what is free allows: for stages with few weights and large activations."""
    taken = [0] * len(free)
    for _ in range(wanted):
        machine = min(
            (m for m in range(len(free)) if taken[m] < free[m]), key=lambda m: (taken[m], -free[m], m)
        )
        taken[machine] += 1
    return tuple(taken)


POLICIES: tuple[Callable[..., Counts], ...] = (fresh_first, append_first, scatter_first)


def placements(free: Counts, wanted: int, *, whole: int) -> tuple[Counts, ...]:
    """What the three ways give, each once."""
    return tuple(dict.fromkeys(policy(free, wanted, whole=whole) for policy in POLICIES))


def taken_from(free: Counts, taken: Counts) -> Counts:
    """What is free afterwards."""
    return tuple(before - now for before, now in zip(free, taken, strict=True))


def _fill(free: Counts, wanted: int, order: Iterable[int]) -> Counts:
    taken = [0] * len(free)
    for machine in order:
        taken[machine] = min(wanted, free[machine])
        wanted -= taken[machine]
    return tuple(taken)

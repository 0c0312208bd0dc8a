"""Whether the ranks that should hold the same weights and optimizer states do, to the bit."""

from collections.abc import Sequence

import torch

from megalite.data_parallel.buckets import Placed
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.topology.group import Group

_CHUNK = 1 << 20
# 8 bytes are taken as two numbers: of 64 bits the highest would count alike in each place, and two of them cancel out.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_ODD = 0x9E3779B97F4A7C1


class ReplicasDifferError(RuntimeError):
    """Ranks that should hold the same weights, or optimizer states, hold different ones; the message names both."""


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor a number of 64 bits that depends on each bit of it and on its place."""
    return torch.stack([_fingerprint(values) for values in tensors]).tolist()


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=values.device)
        # Odd factors: a change of one element always changes the sum (modulo 2^64).
        total += ((part + 1) * (2 * place + 1) * _ODD).sum()
    return total


def check_replicas(
    strategy: DataParallelStrategy, *, step: int, world: Group, states: Sequence[FlatState] = ()
) -> None:
    """Compare the weights of all ranks with the same buckets, and the states of the optimizer that all of them have.

    It reads all of them once and sends 8 bytes a tensor. Of what a strategy cuts up among the ranks, weights or states,
    there is no second copy to compare with.

    Args:
        states: those that the ranks with the same bucket have alike.

    Collectives: a gather of a number for each tensor over each group of replicas, and one over `world`.

    Raises:
        ReplicasDifferError: naming the first tensor that differs, on every rank of its group (on ranks where nothing
            differs a RuntimeError with the same words).
    """
    strategy.wait_for_parameters()
    device = strategy.all_buckets()[0].data.device
    error: Exception | None = None
    groups = dict.fromkeys(strategy.groups.replicas(bucket.kind) for bucket in strategy.all_buckets())
    for group in groups:
        own = [
            (placed.parameter.info.spec.name, placed.parameter.data)
            for bucket in strategy.all_buckets()
            if strategy.groups.replicas(bucket.kind) is group
            for placed in bucket.placed
        ]
        weights = len(own)
        own += [
            (f"{state.name} of {placed.parameter.info.spec.name}", values)
            for state in states
            if strategy.groups.replicas(state.bucket.kind) is group
            for placed, values in _cut(state)
        ]
        found = group.gather_json(fingerprints([values for _, values in own]), device)
        for rank, prints in enumerate(found):
            differ = [ours != theirs for ours, theirs in zip(found[0], prints, strict=True)]
            names = [name for (name, _), differs in zip(own, differ, strict=True) if differs]
            if names and error is None:
                more = f" and {len(names) - 1} more tensors" if names[1:] else ""
                what = "weights" if any(differ[:weights]) else "optimizer states"
                error = ReplicasDifferError(
                    f"after step {step} ranks {group.ranks[0]} and {group.ranks[rank]} should have the same {what} but "
                    f"differ in {names[0]}{more}: the run cannot be trusted; continue from the last checkpoint before, and "
                    "look at the hardware if it happens again"
                )
    world.agree(error, device)


def _cut(state: FlatState) -> list[tuple[Placed, torch.Tensor]]:
    found = []
    for placed in state.bucket.placed:
        start, stop = max(placed.start, state.start), min(placed.stop, state.stop)
        if start < stop:
            found.append((placed, state.values[start - state.start : stop - state.start]))
    return found

"""Whether the ranks that should hold the same weights do, to the bit."""

from collections.abc import Sequence

import torch

from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.topology.group import Group

_CHUNK = 1 << 20
# 8 bytes are taken as two numbers: of 64 bits the highest would count alike in each place, and two of them cancel out.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_ODD = 0x9E3779B97F4A7C1


class ReplicasDifferError(RuntimeError):
    """Ranks that should hold the same weights hold different ones; the message names both."""


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


def check_replicas(strategy: DataParallelStrategy, *, step: int, world: Group) -> None:
    """Compare the weights of all ranks with the same buckets.

    It reads all weights once and sends 8 bytes a tensor. A strategy that keeps a part of the weights on each rank has no
    second copy to compare with.

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
            placed.parameter
            for bucket in strategy.all_buckets()
            if strategy.groups.replicas(bucket.kind) is group
            for placed in bucket.placed
        ]
        found = group.gather_json(fingerprints([parameter.data for parameter in own]), device)
        for rank, prints in enumerate(found):
            names = [
                parameter.info.spec.name
                for parameter, ours, theirs in zip(own, found[0], prints, strict=True)
                if ours != theirs
            ]
            if names and error is None:
                more = f" and {len(names) - 1} more tensors" if names[1:] else ""
                error = ReplicasDifferError(
                    f"after step {step} ranks {group.ranks[0]} and {group.ranks[rank]} should have the same weights but "
                    f"differ in {names[0]}{more}: the run cannot be trusted; go on from the last checkpoint before, and "
                    "look at the hardware if it happens again"
                )
    world.agree(error, device)

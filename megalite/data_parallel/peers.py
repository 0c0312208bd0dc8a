"""Detect faults of other ranks: a lost rank, or replicas with different weights or optimizer states."""

from collections.abc import Sequence

import torch

from megalite.data_parallel.facts import Placement
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.topology.group import Group, RemoteError
from megalite.topology.lost_peers import is_connection_error, lost_ranks


class PeerLostError(RuntimeError):
    """A rank that this rank needs is gone; the message names it."""


def is_failure_of_other_rank(error: BaseException) -> bool:
    """Return whether another rank failed: it closed a connection, or it reported an error."""
    return isinstance(error, (PeerLostError, RemoteError)) or is_connection_error(error)


def raise_if_peer_lost(error: BaseException, strategy: DataParallelStrategy) -> None:
    """Examine an error that ended a step on this rank; return if it is not a broken connection.

    Raises PeerLostError: it is one; the message names the ranks that are gone, or else the groups of this rank."""
    if is_connection_error(error):
        # Do not bind the new error to a name: its traceback would reference it and keep every process group alive.
        raise PeerLostError(_message(strategy, lost_ranks(strategy.groups.world))) from error


def _message(strategy: DataParallelStrategy, lost: list[int]) -> str:
    groups, world = strategy.groups, strategy.groups.world
    over = (groups.dp, groups.expert_dp, groups.inter_dp, groups.inter_expert_dp)
    replicas = [group for group in dict.fromkeys(over) if group.size > 1]
    if not lost:
        peers = ", ".join(map(_shown, replicas)) or f"world {list(world.ranks)}"
        return (
            f"step {strategy.step}: a connection of rank {world.ranks[world.rank]} broke, to a peer in its {peers}; the "
            "other ranks' logs name the lost rank"
        )
    named = [_name(rank, replicas) for rank in lost]
    return (
        f"{'; '.join(named)} {'is' if len(named) == 1 else 'are'} gone: connections were closed in step {strategy.step}. "
        "The log of the first may contain the cause; start the run again with --load to continue from the newest checkpoint"
    )


def _name(rank: int, replicas: list[Group]) -> str:
    own = next((group for group in replicas if rank in group.ranks), None)
    return f"rank {rank}" if own is None else f"rank {rank} of {_shown(own)}"


def _shown(group: Group) -> str:
    """Return a text such as `dp group [0, 2]`; with context parallelism the ranks differ in cp too."""
    return f"{'expert-dp' if 'expert-dp' in group.name else 'dp'} group {list(group.ranks)}"


_CHUNK = 1 << 20
# 8 bytes are read as two numbers: the highest of 64 bits would add the same at each position, so two would cancel out.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_ODD = 0x9E3779B97F4A7C1


class ReplicasDifferError(RuntimeError):
    """Ranks that must have equal weights or optimizer states have different ones; the message names both."""


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor that depends on every bit and its position."""
    return torch.stack([_fingerprint(values) for values in tensors]).tolist()


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=values.device)
        # With odd factors, a change of one element always changes the sum (modulo 2^64).
        total += ((part + 1) * (2 * place + 1) * _ODD).sum()
    return total


def check_replicas(
    strategy: DataParallelStrategy, *, step: int, world: Group, states: Sequence[FlatState] = ()
) -> None:
    """Compare weights, and the optimizer `states` that must be equal, between all ranks with the same buckets. Sharded
    states are compared between instances. It reads all of them, and sends 8 bytes per tensor.

    Collectives: a gather of a number for each tensor over each group of replicas, and one over `world`.

    Raises ReplicasDifferError: a tensor differs; raised on every rank of its group with the name of the first one (ranks
    without a difference raise a RuntimeError with the same message)."""
    strategy.wait_until_idle()
    error: Exception | None = None
    weights = [strategy.weights(shard) for shard in strategy.shards]
    compared: dict[Group, list[FlatState]] = {}
    for state in (*weights, *states):
        kind = state.bucket.kind
        if state.placement is Placement.REPLICATED:
            compared.setdefault(strategy.groups.replicas(kind), []).append(state)
        compared.setdefault(strategy.groups.instances(kind), []).append(state)
    for group, group_states in compared.items():
        if group.size == 1:
            continue
        own = [
            (state, p.parameter.info.spec.name, state.values[first - state.start : last - state.start])
            for state in group_states
            for p, first, last in state.bucket.within(state.start, state.stop)
        ]
        with group.heartbeat.synchronise():
            prints = fingerprints([values for _, _, values in own])
        found = group.gather_json(prints)
        for rank, prints in enumerate(found):
            differ = [first != other for first, other in zip(found[0], prints, strict=True)]
            if error is None and any(differ):
                (state, first, _), more = own[differ.index(True)], sum(differ) - 1
                what = "weights" if state in weights else "optimizer states"
                first = first if state in weights else f"{state.name} of {first}"
                error = ReplicasDifferError(
                    f"after step {step} ranks {group.ranks[0]} and {group.ranks[rank]} should have the same {what} but "
                    f"differ in {first}{f' and {more} more tensors' if more else ''}: the run cannot be trusted; continue "
                    "from an earlier checkpoint, and check the hardware if it happens again"
                )
    world.raise_on_all_ranks(error)

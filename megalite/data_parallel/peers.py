"""What can be wrong with the other ranks: one is gone, or holds other bits than it should."""

from collections.abc import Sequence

import torch

from megalite.data_parallel.facts import Placement
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.topology.group import Group, RemoteError
from megalite.topology.lost_peers import is_connection_error, lost_ranks


class PeerLostError(RuntimeError):
    """A rank is gone that this one needs; the message names it."""


def is_failure_of_other_rank(error: BaseException) -> bool:
    """The error is another rank's failure: a connection was closed from the other end, or that rank said so."""
    return isinstance(error, (PeerLostError, RemoteError)) or is_connection_error(error)


def raise_if_peer_lost(error: BaseException, strategy: DataParallelStrategy) -> None:
    """Look at an error that ended a step on this rank; return if it is not a broken connection.

    Nothing is asked for before something has failed: collectives run unguarded.

    Raises PeerLostError: it is one; the message names the ranks that are gone, or else the groups of this one."""
    if is_connection_error(error):
        # No name for the new error here: with one, its traceback would keep itself, and every process group, alive.
        raise PeerLostError(_message(strategy, lost_ranks(strategy.groups.world))) from error


def _message(strategy: DataParallelStrategy, lost: list[int]) -> str:
    groups, world = strategy.groups, strategy.groups.world
    over = (groups.dp, groups.expert_dp, groups.inter_dp, groups.inter_expert_dp)
    replicas = [group for group in dict.fromkeys(over) if group.size > 1]
    if not lost:
        peers = ", ".join(map(_shown, replicas)) or f"world {list(world.ranks)}"
        return (
            f"step {strategy.step}: a connection of rank {world.ranks[world.rank]} broke, to a peer in its {peers}; which "
            "one is gone the other ranks' logs say"
        )
    named = [_name(rank, replicas) for rank in lost]
    return (
        f"{'; '.join(named)} {'is' if len(named) == 1 else 'are'} gone: connections were closed in step {strategy.step}. "
        "The log of the first says why, if it could; start the run again with --load to continue from the newest checkpoint"
    )


def _name(rank: int, replicas: list[Group]) -> str:
    own = next((group for group in replicas if rank in group.ranks), None)
    return f"rank {rank}" if own is None else f"rank {rank} of {_shown(own)}"


def _shown(group: Group) -> str:
    """`dp group [0, 2]`; its ranks differ in cp too where there is any."""
    return f"{'expert-dp' if 'expert-dp' in group.name else 'dp'} group {list(group.ranks)}"


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
    """Compare the weights of all ranks with the same buckets, and the `states` that these should have alike: of what is
    sharded, each shard over instances. It reads all of them, and sends 8 bytes per tensor.

    Collectives: a gather of a number for each tensor over each group of replicas, and one over `world`.

    Raises ReplicasDifferError: naming the first tensor that differs, on every rank of its group (on ranks where nothing
    differs a RuntimeError with the same words)."""
    strategy.wait_until_idle()
    error: Exception | None = None
    weights = [strategy.weights(shard) for shard in strategy.shards]
    alike: dict[Group, list[FlatState]] = {}
    for state in (*weights, *states):
        kind = state.bucket.kind
        if state.placement is Placement.REPLICATED:
            alike.setdefault(strategy.groups.replicas(kind), []).append(state)
        alike.setdefault(strategy.groups.instances(kind), []).append(state)
    for group, held in alike.items():
        if group.size == 1:
            continue
        own = [
            (state, p.parameter.info.spec.name, state.values[first - state.start : last - state.start])
            for state in held
            for p, first, last in state.bucket.within(state.start, state.stop)
        ]
        with group.heartbeat.synchronise():
            prints = fingerprints([values for _, _, values in own])
        found = group.gather_json(prints)
        for rank, prints in enumerate(found):
            differ = [ours != theirs for ours, theirs in zip(found[0], prints, strict=True)]
            if error is None and any(differ):
                (state, first, _), more = own[differ.index(True)], sum(differ) - 1
                what = "weights" if state in weights else "optimizer states"
                first = first if state in weights else f"{state.name} of {first}"
                error = ReplicasDifferError(
                    f"after step {step} ranks {group.ranks[0]} and {group.ranks[rank]} should have the same {what} but "
                    f"differ in {first}{f' and {more} more tensors' if more else ''}: the run cannot be trusted; continue "
                    "from the last checkpoint before, and look at the hardware if it happens again"
                )
    world.agree(error)

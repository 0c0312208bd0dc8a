"""Says who is gone, and what it was for, where a run ends because a connection broke."""

import torch

from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.topology.group import Group, RemoteError
from megalite.topology.lost_peers import is_connection_error, lost_ranks


class PeerLostError(RuntimeError):
    """A rank is gone that this one needs; the message names it and its role in data parallelism."""


def others_failed_first(error: BaseException) -> bool:
    """The error is another rank's failure: a connection was closed from the other end, or that rank said so."""
    return isinstance(error, (PeerLostError, RemoteError)) or is_connection_error(error)


def raise_if_peer_lost(error: BaseException, strategy: DataParallelStrategy, device: torch.device) -> None:
    """Look at an error that ended a step on this rank; return if it is not a broken connection.

    Nothing is asked for before something has failed: collectives run unguarded.

    Raises:
        PeerLostError: it is one; the message names the ranks that are gone, or else the groups of this one.
    """
    if is_connection_error(error):
        # No name for the new error here: with one, its traceback would keep itself, and every process group, alive.
        raise PeerLostError(_message(strategy, lost_ranks(strategy.groups.world, device))) from error


def _message(strategy: DataParallelStrategy, lost: list[int]) -> str:
    groups, world = strategy.groups, strategy.groups.world
    replicas = [group for group in dict.fromkeys((groups.dp, groups.expert_dp)) if group.size > 1]
    if not lost:
        peers = ", ".join(map(_shown, replicas)) or f"world {list(world.ranks)}"
        return (
            f"step {strategy.step}: a connection of rank {world.ranks[world.rank]} broke, to a peer in its {peers}; which "
            "one is gone the other ranks' logs say"
        )
    named = [_name(rank, replicas, strategy) for rank in lost]
    one = len(named) == 1
    return (
        f"{named[0] if one else '; '.join(name.rstrip(',') for name in named)} {'is' if one else 'are'} gone: connections "
        f"were closed in step {strategy.step}. {'Its own log says' if one else 'The log of the first of them says'} why, if it could be said; start the run again with "
        "--load to continue from the newest checkpoint"
    )


def _name(rank: int, replicas: list[Group], strategy: DataParallelStrategy) -> str:
    for group in replicas:
        if rank in group.ranks:
            role = strategy.role(group, group.ranks.index(rank))
            return f"rank {rank}, {role} of {_shown(group)},"
    return f"rank {rank}"


def _shown(group: Group) -> str:
    """`dp group [0, 2]`; its ranks differ in cp too where there is any."""
    return f"{'expert-dp' if group.name == 'expert-dp' else 'dp'} group {list(group.ranks)}"

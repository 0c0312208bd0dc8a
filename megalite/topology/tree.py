"""All ranks of a world on gloo, as a tree of small groups: for what the hosts alone need to know."""

import datetime
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megalite.topology.group import Group

ProcessGroups = MutableMapping[tuple[str, tuple[int, ...]], Any]
"""Process groups, and the memory that ranks share, made so far, by (kind, ranks)."""

FAN_OUT = 16  # ranks of a gloo group among which small values of the whole world are exchanged


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeGroup(Group):
    """Many ranks on gloo, for JSON and few numbers: `FAN_OUT` each are a group, and so are the first ranks of these, and so on.
    As every two ranks of a gloo group have a connection, one group of 3,072 ranks would take 4.7 million, these 25,000."""

    levels: tuple[Group, ...]  # those that this rank is in, from the lowest

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum") -> None:
        for level in self.levels:
            level.all_reduce(tensor, op=op)
        for level in reversed(self.levels):
            level.broadcast(tensor)

    def gather_json(self, value: Any, device: torch.device) -> list[Any]:
        rows = [value]
        for level in self.levels:
            rows = [row for part in level.gather_json(rows, device) for row in part]
        return list(self.broadcast_json(rows, device))

    def broadcast_json(self, value: Any, device: torch.device) -> Any:
        for level in reversed(self.levels):
            value = level.broadcast_json(value, device)
        return value


def host_group(
    world: Group, name: str, *, timeout: datetime.timedelta, made: ProcessGroups | None = None, fan_out: int = FAN_OUT
) -> Group:
    """A further group of all ranks, on gloo and the CPU: JSON and all-reduces of few numbers alone. `timeout`: a peer
    that dies ends the wait at once, however long it is. `made`: process groups to re-use and add to.

    Collectives: makes process groups; every rank calls it at the same time."""
    me, ranks, levels = world.ranks[world.rank], world.ranks, list[Group]()
    made = {} if made is None else made
    while len(ranks) > 1:
        for some in (ranks[first : first + fan_out] for first in range(0, len(ranks), fan_out)):
            if len(some) > 1 and (name, some) not in made:
                made[name, some] = dist.new_group(list(some), timeout=timeout, backend="gloo")
            if len(some) > 1 and me in some:
                levels.append(Group(name, some, some.index(me), made[name, some], world.heartbeat))
        ranks = ranks[::fan_out]
    if world.size <= fan_out:
        return levels[0] if levels else world
    none: Any = dist.GroupMember.NON_GROUP_MEMBER  # what it does not offer must fail, not run on the training's group
    return TreeGroup(name, world.ranks, world.rank, none, world.heartbeat, levels=tuple(levels))

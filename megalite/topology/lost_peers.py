"""Which peers are gone, once a collective has failed."""

import time

import torch
import torch.distributed as dist

from megalite.topology.group import Group

_TAG = 0x6C6F7374
"""Of messages that nobody sends."""
_NOTICE_SECONDS = 0.3
"""From the end of a peer until gloo's loop has seen its connections close."""

_SIGNS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed"),
    *(
        "Connection refused",
        "remote process exited",
        "ncclRemoteError",
        "Application timeout caused pair closure",
    ),
)


def is_connection_error(error: BaseException) -> bool:
    """A collective or a message failed because a connection to another rank broke."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def lost_ranks(group: Group, device: torch.device) -> list[int]:
    """The global ranks of a gloo group whose connections to this one are closed; empty where that cannot be known.

    For a run that has failed: it leaves receives behind in the group, which nothing must use after this.
    """
    if group.size == 1 or dist.get_backend(group.process_group) != "gloo":
        return []
    time.sleep(_NOTICE_SECONDS)
    lost, posted = [], []
    for index, rank in enumerate(group.ranks):
        if index != group.rank:
            buffer = torch.empty(1, dtype=torch.uint8, device=device)
            try:
                # On a connection that is closed a receive fails at once; on a good one it waits, for nothing.
                posted.append((buffer, dist.irecv(buffer, rank, group=group.process_group, tag=_TAG)))
            except RuntimeError:
                lost.append(rank)
    return lost

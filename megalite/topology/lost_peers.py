"""Which ranks are gone once a collective has failed (closed connections) or timed out (roll call over the store).

A host that dies closes its connections, and its peers see that at once. A cut cable closes none: all that is left is
a wait that takes too long. The ranks then look for one another in the store where they met.
"""

import datetime
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalite.topology.group import Group
from megalite.topology.topology import Launch

_TAG = 0x6C6F7374  # of messages that no one sends
_NOTICE_SECONDS = 0.3  # from the end of a peer until gloo's loop has seen its connections close

_CLOSED_SIGNS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed"),
    *("Connection refused", "remote process exited", "ncclRemoteError", "Application timeout caused pair closure"),
    *("Connection timed out", "No route to host", "Software caused connection abort", "Got completion from peer"),
    *("Connection closed by remote peer", "NCCL communicator was aborted"),
)


def is_connection_error(error: BaseException) -> bool:
    """A collective or a message failed because a connection to another rank broke."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CLOSED_SIGNS)


def lost_ranks(group: Group) -> list[int]:
    """The global ranks of a gloo group that have closed their connections to this one; empty where that cannot be known.

    For a run that has failed: it leaves receives behind in the group, which nothing must use after this.
    """
    if group.size == 1 or dist.get_backend(group.process_group) != "gloo":
        return []
    time.sleep(_NOTICE_SECONDS)
    lost, posted = [], []
    for index, rank in enumerate(group.ranks):
        if index != group.rank:
            buffer = torch.empty(1, dtype=torch.uint8, device=group.device)
            try:
                # On a connection that is closed a receive fails at once; on a good one it waits, for nothing.
                posted.append((buffer, dist.irecv(buffer, rank, group=group.process_group, tag=_TAG)))
            except RuntimeError:
                lost.append(rank)
    return lost


ANSWER_SECONDS = 5.0  # ranks that wait for the same one time out within a step of each other
_POLL_SECONDS, _POLL_SECONDS_PER_RANK = 0.2, 0.0005
_TIMEOUT_SIGNS = (
    *("Timed out waiting", "Application timeout caused pair closure"),
    "Watchdog caught collective operation timeout",
)
_NCCL_STARTS = "is setting up NCCL communicator"
"""At the first operation of a group: the members meet in the store."""
_NCCL_SYSTEM = "ncclSystemError"
"""A socket or a device of the network, as a rule, also where it says no more."""


class NoAnswerError(RuntimeError):
    """A collective has timed out; the message names the ranks that do not answer and their hosts."""


def is_timeout(error: BaseException) -> bool:
    """A collective or a message has waited for longer than distributed_timeout_minutes, as gloo and NCCL say it."""
    text = str(error)
    starts = _NCCL_STARTS in text and "timeout" in text.lower()
    return isinstance(error, RuntimeError) and (starts or any(sign in text for sign in _TIMEOUT_SIGNS))


def _is_nccls(error: BaseException) -> bool:
    """NCCL has failed between ranks, and not by this rank's device."""
    text = str(error)
    return _NCCL_SYSTEM in text or ("nccl" in text.lower() and is_connection_error(error))


@dataclass(frozen=True, kw_only=True)
class RollCall:
    """What each rank has to know beforehand to ask who is still there. `hosts`: of each rank, in words: `host 1 (node17)`.
    `key`: of this start of the run alone; a store outlives restarts. `store`: address and port."""

    rank: int
    hosts: tuple[str, ...]
    key: str
    store: tuple[str, int]

    @classmethod
    def open(cls, world: Group, launch: Launch) -> "RollCall | None":
        """Get ready; None where there is one rank, or no store that is known by its address.

        Collectives: a gather over the world.
        """
        if world.size == 1 or launch.store is None:
            return None
        mine = [f"host {launch.host} ({platform.node()})", time.time_ns()]
        everyone = world.gather_json(mine)
        hosts = tuple(str(host) for host, _ in everyone)
        return cls(rank=world.rank, hosts=hosts, key=f"megalite/roll-call/{everyone[0][1]}", store=launch.store)

    def missing(self, seconds: float = ANSWER_SECONDS) -> list[int] | None:
        """Answer, wait for the answers of others, and return the ranks that have given none.

        Over its own connection: those that there are may be what is broken. None: the store does not answer.
        """
        timeout = datetime.timedelta(seconds=seconds)
        everyone, here = set(range(len(self.hosts))), set[int]()
        # Of 4,096 ranks each reads a list of 20 KB: the store answers all of them.
        pause = max(_POLL_SECONDS, min(len(everyone) * _POLL_SECONDS_PER_RANK, seconds / 2))
        try:
            store = dist.TCPStore(*self.store, is_master=False, wait_for_workers=False, timeout=timeout)
            roll = dist.PrefixStore(self.key, store)
            roll.append("here", f"{self.rank} ")  # type: ignore[attr-defined]
            roll.add("count", 1)
            end = time.monotonic() + seconds
            while here != everyone:
                if roll.add("count", 0) > len(here):
                    here = {int(word) for word in roll.get("here").split()}
                elif time.monotonic() > end:
                    break
                else:
                    time.sleep(pause)
        except (RuntimeError, ValueError):  # torch's DistError is a RuntimeError
            if not here:
                return None
            # The store has ended with the rank that kept it, which was there until now.
        return sorted(everyone - here)

    def explain(self, error: BaseException, *, seconds: float = ANSWER_SECONDS) -> None:
        """Look at an error that ended this rank; return if it is not that a collective has timed out.

        Of gloo the connections say who is gone; of NCCL, which has no such, those count that do not answer.

        Raises NoAnswerError: it is that, or NCCL has lost a connection, and who does not answer."""
        text = str(error).partition("Exception raised from")[0].strip()  # behind it are frames of C++
        if is_timeout(error):
            raise NoAnswerError(f"{self._finding(self.missing(seconds), seconds)} ({text})") from error
        if isinstance(error, RuntimeError) and _is_nccls(error) and (missing := self.missing(seconds)):
            raise NoAnswerError(
                f"NCCL has lost a connection, and {self.named(missing)} do{'es' if len(missing) == 1 else ''} not answer "
                f"within {seconds:g} s: gone, cut off, or still waiting in NCCL; see what was printed there last ({text})"
            ) from error

    def _finding(self, missing: list[int] | None, seconds: float) -> str:
        waited = "a collective has waited for longer than distributed_timeout_minutes"
        if missing is None:
            address, port = self.store
            return (
                f"{waited}, and the store at {address}:{port} does not answer either: {self.hosts[self.rank]}, with rank "
                f"{self.rank}, is cut off, or {self.hosts[0]} is gone"
            )
        if not missing:
            return f"{waited}, but every rank still answers: one of them takes longer than that, or has left a collective out"
        return (
            f"{waited}, and {self.named(missing)} do{'es' if len(missing) == 1 else ''} not answer within "
            f"{seconds:g} s: gone, cut off, or at a standstill. Start the run again with --load to continue from the "
            "newest checkpoint"
        )

    def named(self, ranks: Sequence[int]) -> str:
        """`ranks 2, 3 on host 1 (node17)`, host by host."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        return " and ".join(
            f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))} on {host}"
            for host, some in by_host.items()
        )

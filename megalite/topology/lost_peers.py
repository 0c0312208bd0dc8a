"""Find the ranks that are gone after a collective failed (closed connections) or timed out (roll call over the store).

A host that dies closes its connections, and its peers notice at once. A cut cable closes no connection: a collective
times out. The ranks then report to the rendezvous store."""

import datetime
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalite.topology.group import Group, RemoteError
from megalite.topology.topology import Launch

_TAG = 0x6C6F7374  # tag of messages that no one sends
_NOTICE_SECONDS = 0.3  # from the end of a peer until gloo's event loop notices its closed connections

_CLOSED_SIGNS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed"),
    *("Connection refused", "remote process exited", "ncclRemoteError", "Application timeout caused pair closure"),
    *("Connection timed out", "No route to host", "Software caused connection abort", "Got completion from peer"),
    *("Connection closed by remote peer", "NCCL communicator was aborted"),
)


def is_connection_error(error: BaseException) -> bool:
    """Return whether a collective or a message failed because a connection to another rank broke."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CLOSED_SIGNS)


def lost_ranks(group: Group) -> list[int]:
    """Return the global ranks of a gloo group that have closed their connections to this rank; empty on other backends.

    Only for a run that has failed: pending receives remain in the group, so nothing may use it afterwards."""
    if group.size == 1 or dist.get_backend(group.process_group) != "gloo":
        return []
    time.sleep(_NOTICE_SECONDS)
    lost, posted = [], []
    for index, rank in enumerate(group.ranks):
        if index != group.rank:
            buffer = torch.empty(1, dtype=torch.uint8, device=group.device)
            try:
                # On a closed connection a receive fails at once; on an open one it stays pending.
                posted.append((buffer, dist.irecv(buffer, rank, group=group.process_group, tag=_TAG)))
            except RuntimeError:
                lost.append(rank)
    return lost


class PeerLostError(RuntimeError):
    """A peer of this rank is gone; the message names it."""


def is_failure_of_other_rank(error: BaseException) -> bool:
    """Return whether another rank failed: it closed a connection, or it reported an error."""
    return isinstance(error, (PeerLostError, RemoteError)) or is_connection_error(error)


def raise_if_peer_lost(error: BaseException, world: Group, replicas: Sequence[Group], *, step: int) -> None:
    """Examine an error that ended a step on this rank; return if it is not a broken connection.

    Raises PeerLostError: it is one; the message names the ranks that are gone, or else this rank's groups `replicas`."""
    if is_connection_error(error):
        several = [group for group in dict.fromkeys(replicas) if group.size > 1]
        # Do not bind the new error to a name: its traceback would reference it and keep every process group alive.
        raise PeerLostError(_message(world, several, lost_ranks(world), step)) from error


def _message(world: Group, replicas: Sequence[Group], lost: list[int], step: int) -> str:
    if not lost:
        peers = ", ".join(map(_shown, replicas)) or f"world {list(world.ranks)}"
        return (
            f"step {step}: a connection of rank {world.ranks[world.rank]} broke, to a peer in its {peers}; the "
            "other ranks' logs name the lost rank"
        )
    named = [_name(rank, replicas) for rank in lost]
    return (
        f"{'; '.join(named)} {'is' if len(named) == 1 else 'are'} gone: connections were closed in step {step}. "
        "The log of the first may contain the cause; start the run again with --load to continue from the newest checkpoint"
    )


def _name(rank: int, replicas: Sequence[Group]) -> str:
    own = next((group for group in replicas if rank in group.ranks), None)
    return f"rank {rank}" if own is None else f"rank {rank} of {_shown(own)}"


def _shown(group: Group) -> str:
    """Return a text such as `dp group [0, 2]`; with context parallelism the ranks differ in cp too."""
    return f"{'expert-dp' if 'expert-dp' in group.name else 'dp'} group {list(group.ranks)}"


ANSWER_SECONDS = 5.0  # ranks that wait for the same rank time out within a step of each other
_POLL_SECONDS, _POLL_SECONDS_PER_RANK = 0.2, 0.0005
_TIMEOUT_SIGNS = (
    *("Timed out waiting", "Application timeout caused pair closure"),
    "Watchdog caught collective operation timeout",
)
_NCCL_STARTS = "is setting up NCCL communicator"
"""In the message of a timeout at the first operation of a group, when its members meet in the store."""
_NCCL_SYSTEM = "ncclSystemError"
"""In the message of a failed socket or network device, as a rule, even without further text."""


class NoAnswerError(RuntimeError):
    """A collective timed out; the message names the ranks that do not answer and their hosts."""


def is_timeout(error: BaseException) -> bool:
    """Return whether the error is gloo's or NCCL's for an operation that took over distributed_timeout_minutes."""
    text = str(error)
    starts = _NCCL_STARTS in text and "timeout" in text.lower()
    return isinstance(error, RuntimeError) and (starts or any(sign in text for sign in _TIMEOUT_SIGNS))


def _is_nccl_connection_error(error: BaseException) -> bool:
    """Return whether NCCL failed between ranks, and not on this rank's device."""
    text = str(error)
    return _NCCL_SYSTEM in text or ("nccl" in text.lower() and is_connection_error(error))


@dataclass(frozen=True, kw_only=True)
class RollCall:
    """What a rank collects at the start in order to find missing ranks later. `hosts`: for each rank, its host, such as
    `host 1 (node17)`. `key`: unique to this start, as a store outlives restarts. `store`: address and port."""

    rank: int
    hosts: tuple[str, ...]
    key: str
    store: tuple[str, int]

    @classmethod
    def open(cls, world: Group, launch: Launch) -> "RollCall | None":
        """Prepare a roll call; return None for one rank, or if the address of the store is unknown.

        Collectives: a gather over the world."""
        if world.size == 1 or launch.store is None:
            return None
        everyone = world.gather_json([f"host {launch.host} ({platform.node()})", time.time_ns()])
        hosts = tuple(str(host) for host, _ in everyone)
        return cls(rank=world.rank, hosts=hosts, key=f"megalite/roll-call/{everyone[0][1]}", store=launch.store)

    def missing(self, seconds: float = ANSWER_SECONDS) -> list[int] | None:
        """Report this rank, wait for the others, and return the ranks that do not report; None: the store is down.

        Opens a new connection, as the existing ones may be broken."""
        timeout = datetime.timedelta(seconds=seconds)
        everyone, present = set(range(len(self.hosts))), set[int]()
        # With 4,096 ranks the store sends each of them a list of 20 KB.
        pause = max(_POLL_SECONDS, min(len(everyone) * _POLL_SECONDS_PER_RANK, seconds / 2))
        try:
            store = dist.TCPStore(*self.store, is_master=False, wait_for_workers=False, timeout=timeout)
            roll = dist.PrefixStore(self.key, store)
            roll.append("here", f"{self.rank} ")  # type: ignore[attr-defined]
            roll.add("count", 1)
            end = time.monotonic() + seconds
            while present != everyone:
                if roll.add("count", 0) > len(present):
                    present = {int(word) for word in roll.get("here").split()}
                elif time.monotonic() > end:
                    break
                else:
                    time.sleep(pause)
        except (RuntimeError, ValueError):  # torch's DistError is a RuntimeError
            if not present:
                return None
            # The store ended with rank 0, which hosted it and was alive until then.
        return sorted(everyone - present)

    def explain(self, error: BaseException, *, seconds: float = ANSWER_SECONDS) -> None:
        """Examine an error that ended this rank; return if it is neither a timeout nor a lost NCCL connection.

        gloo's connections show which peers are gone; with NCCL, the ranks that do not answer count as gone.

        Raises NoAnswerError: a collective timed out or NCCL lost a connection; names the ranks that do not answer."""
        text = str(error).partition("Exception raised from")[0].strip()  # C++ stack frames follow
        if is_timeout(error):
            raise NoAnswerError(f"{self._finding(self.missing(seconds), seconds)} ({text})") from error
        if isinstance(error, RuntimeError) and _is_nccl_connection_error(error) and (missing := self.missing(seconds)):
            raise NoAnswerError(
                f"NCCL has lost a connection, and {self._silent(missing, seconds)}, or still waiting in NCCL; see their last "
                f"output ({text})"
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
            return (
                f"{waited}, but every rank still answers: one of them takes longer than that, or skipped a collective"
            )
        return (
            f"{waited}, and {self._silent(missing, seconds)}, or stuck. Start the run again with --load to continue from the "
            "newest checkpoint"
        )

    def _silent(self, ranks: Sequence[int], seconds: float) -> str:
        """Return a text such as `ranks 2, 3 on host 1 (node17) do not answer within 5 s: gone, cut off`, host by host."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        named = " and ".join(
            f"rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))} on {host}" for host, own in by_host.items()
        )
        return f"{named} do{'es' if len(ranks) == 1 else ''} not answer within {seconds:g} s: gone, cut off"

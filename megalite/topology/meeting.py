"""Ranks that meet in a store which outlives them.

torchrun keeps one store over all restarts of its ranks. What the former ranks have left there under the same names,
addresses that nobody listens at any more, would be taken for the new ones'. So the ranks of a start first agree on a part of
the store that nobody has written in.
"""

import datetime
import time
import uuid

import torch.distributed as dist

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5


def fresh_part(
    store: dist.Store, *, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.PrefixStore:
    """A part of `store` that is new and the same on all ranks of this start.

    Each rank says a word that it has made up. Rank 0 answers all words that it finds with the name of a meeting, once more
    whenever one of them has changed: some are of former ranks. A rank goes to a meeting whose answer has its own word in
    it, and a meeting to which all have come is this start's.

    Raises:
        RuntimeError: not all ranks have come in time.
    """
    mine = uuid.uuid4().hex
    store.set(f"megalite/word/{rank}", mine)
    words = [f"megalite/word/{other}" for other in range(world_size)]
    answered: list[bytes] = []
    gone_to = ""
    end, pause = time.monotonic() + timeout.total_seconds(), _PAUSE_SECONDS
    while True:
        if rank == 0:
            said = store.multi_get(words)
            if said != answered:
                answered, meeting = said, uuid.uuid4().hex
                for other, heard in enumerate(said):
                    store.set(f"megalite/answer/{other}", f"{heard.decode()} {meeting}")
        word, meeting = store.get(f"megalite/answer/{rank}").decode().split()
        if word == mine:
            come = f"megalite/{meeting}/come"
            if store.add(come, int(gone_to != meeting)) == world_size:
                return dist.PrefixStore(f"megalite/{meeting}", store)
            gone_to = meeting
        if time.monotonic() > end:
            raise RuntimeError(
                f"not all {world_size} ranks have come within {timeout.total_seconds():g} s (distributed_timeout_minutes)"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

"""What the hosts of a run tell each other once one of them sees nothing move: small files in the run's folder.

A network that has failed is one of the things that a watching process reports, and the run's folder is shared anyway,
since every rank writes its part of a checkpoint there. If that fails too, each host reports its own ranks."""

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.watchdog.heartbeat import RankState, rank_from_json

ASK = "ask"  # file in the folder that asks every rank for what torch's flight recorder has


@dataclass(frozen=True)
class WatchedRank:
    """A rank of this host."""

    rank: int
    pid: int
    started: int  # start time of the process, as the kernel counts it
    error_file: str | None  # where torchrun looks for what ended the rank


@dataclass(frozen=True, kw_only=True)
class WatchPlan:
    """One host's part of a run."""

    folder: str  # private to the host and the run: heartbeats and stacks. The watching process removes it in the end
    seconds: float  # a run without progress for so long is ended
    patient_seconds: float  # the same where a rank has said that it may take long
    host: str
    hosts: tuple[str, ...]  # every host of the run by a name that is unlike all others'; `host` is one of them
    ranks: tuple[WatchedRank, ...]
    world_size: int
    report_folder: str | None  # the run's folder, where reports go and hosts tell each other what they see
    run: str  # a name that no other run, and no other start of this one, has
    network_seconds: float = 0.0
    """Without progress for less than this a run continues in which all wait and no rank is to blame: its ranks are on several
    networks, and the time-out of the collective names whom no one reaches."""
    flight_recorder: bool = False  # the ranks can be asked for what torch's flight recorder has

    @property
    def watcher(self) -> Path:
        """The file that says which process watches: its id and its start time."""
        return Path(self.folder, "watcher")

    def file(self, rank: int, kind: str) -> Path:
        """What a rank leaves: its `beat`, its `stacks`, and as JSON the newest entries of its `flight` recorder."""
        return Path(self.folder, f"rank-{rank}.{kind}")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "WatchPlan":
        """What `dataclasses.asdict` made of a plan, also by way of JSON."""
        ranks = tuple(WatchedRank(**rank) for rank in value["ranks"])
        return cls(**{**value, "hosts": tuple(value["hosts"]), "ranks": ranks})


_FRESH_SECONDS = 10.0  # how old what another host says may be, beside two rounds of reading
_ROUND_SECONDS, _HOST_SECONDS = 0.2, 0.005
"""From one reading of all hosts' files to the next, at least, and for each of them: hosts always read equally much."""


class Exchange:
    """This host's view of its ranks, written for the others, and theirs, read.

    A shared disk can hang, and may be the very reason why the run does: it is only touched by its own thread."""

    def __init__(self, plan: WatchPlan) -> None:
        self._plan = plan
        self._folder = None
        if plan.report_folder is not None and len(plan.hosts) > 1:
            self._folder = Path(plan.report_folder, f".hang-{plan.run}")
        self._round = max(_ROUND_SECONDS, _HOST_SECONDS * len(plan.hosts))
        self._said: Sequence[RankState] | None = None
        self._heard: dict[str, tuple[float, list[RankState]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def others(self) -> tuple[str, ...]:
        """The other hosts."""
        return tuple(host for host in self._plan.hosts if host != self._plan.host)

    @property
    def can_be_heard(self) -> bool:
        """There is a folder to meet in, and somebody to meet."""
        return self._folder is not None

    def tell(self, states: Sequence[RankState] | None) -> None:
        """Say what is seen here; None: the run continues, and there is nothing to say."""
        self._said = states
        if self._folder is not None and states is not None and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
            self._thread.start()

    def hear(self) -> dict[str, list[RankState]]:
        """What other hosts with ranks that stand still have said lately, by host."""
        oldest = time.monotonic() - _FRESH_SECONDS - 2 * self._round
        return {host: states for host, (since, states) in tuple(self._heard.items()) if since > oldest}

    def close(self) -> None:
        """Take back what was said; the last host to do so removes the folder."""
        self._said = None
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _work(self) -> None:
        assert self._folder is not None
        mine = self._folder / f"{self._plan.hosts.index(self._plan.host)}.json"
        seen: dict[str, str] = {}
        while not self._closed.wait(self._round):
            said = self._said
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                content = {"at": time.time(), "ranks": [asdict(state) for state in said or ()]}
                beside = mine.with_suffix(".new")
                beside.write_text(json.dumps(content))
                beside.replace(mine)
            for index, host in enumerate(self._plan.hosts):
                if host != self._plan.host:
                    self._read(self._folder / f"{index}.json", host, seen)
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
            self._folder.rmdir()  # fails while another host's file is there

    def _read(self, path: Path, host: str, seen: dict[str, str]) -> None:
        try:
            text = path.read_text()
            states = [rank_from_json(value) for value in json.loads(text)["ranks"]]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if not states:
            self._heard.pop(host, None)
        elif seen.get(host) != text:  # whatever its clock says: it is written again all the time
            seen[host] = text
            self._heard[host] = time.monotonic(), states

"""The watching process: reads heartbeats, and ends a run that stands still; and what the hosts of a run tell each other once one of
them sees nothing move: small files in the folder of the run.

A network that has failed is one of the things that a watching process reports, and the folder of the run is shared anyway, since
every rank writes its part of a checkpoint there. If that fails too, each host reports its own ranks."""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.watchdog.heartbeat import RankState, rank_from_json, read_rank
from megalite.watchdog.processes import ask_for_stacks, end_process, send
from megalite.watchdog.processes import state as process_state
from megalite.watchdog.report import Report, find_culprits, find_mismatched_operations, kernel_functions, write_report

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
        self._published: Sequence[RankState] | None = None
        self._read_from: dict[str, tuple[float, list[RankState]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def others(self) -> tuple[str, ...]:
        """The other hosts."""
        return tuple(host for host in self._plan.hosts if host != self._plan.host)

    @property
    def has_folder(self) -> bool:
        """There is a folder to meet in, and somebody to meet."""
        return self._folder is not None

    def publish(self, states: Sequence[RankState] | None) -> None:
        """Say what is seen here; None: the run continues, and there is nothing to say."""
        self._published = states
        if self._folder is not None and states is not None and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
            self._thread.start()

    def read_others(self) -> dict[str, list[RankState]]:
        """What other hosts with ranks that stand still have said lately, by host."""
        oldest = time.monotonic() - _FRESH_SECONDS - 2 * self._round
        return {host: states for host, (since, states) in tuple(self._read_from.items()) if since > oldest}

    def close(self) -> None:
        """Take back what was said; the last host to do so removes the folder."""
        self._published = None
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _work(self) -> None:
        assert self._folder is not None
        mine = self._folder / f"{self._plan.hosts.index(self._plan.host)}.json"
        seen: dict[str, str] = {}
        while not self._closed.wait(self._round):
            said = self._published
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
            self._read_from.pop(host, None)
        elif seen.get(host) != text:  # whatever its clock says: it is written again all the time
            seen[host] = text
            self._read_from[host] = time.monotonic(), states


_OTHERS_SECONDS = 1.5  # how long past its own limit a host waits for the others
_STACKS_SECONDS, _FLIGHT_SECONDS, _WRITE_SECONDS, _END_SECONDS = 1.2, 1.5, 0.8, 0.5
"""What each part of ending a run may take, so that all of it is done within five seconds."""


class Lifeline:
    """The pipe from the rank that started this process: it closes when that rank ends, however it does."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._text = descriptor, b""
        self.closed = False

    def line(self, seconds: float | None = None) -> str | None:
        """The next line, or None where none comes in time or the pipe is closed."""
        end = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._text:
            left = None if end is None else end - time.monotonic()
            if self.closed:
                time.sleep(max(0.0, left or 0.0))
                return None
            if left is not None and left <= 0:
                return None
            if select.select([self._descriptor], [], [], left)[0]:
                data = os.read(self._descriptor, 65536)
                self._text += data
                if not data:
                    self.closed = True
                    return None
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()


def watch(lifeline: Lifeline, say: Callable[[str], None]) -> None:
    """Watch the ranks of the plan that the first line holds, until the run ends or stands still.

    Further lines: `done`, the run has come to its end; `left RANK`, that rank has come to its own end."""
    first = lifeline.line()
    if first is None:
        return
    plan = WatchPlan.from_json(json.loads(first))
    # Not where this fails: the ranks then start another watch over the same files.
    with contextlib.closing(Exchange(plan)) as exchange:
        _Watch(plan, exchange, lifeline, say).run()
    shutil.rmtree(plan.folder, ignore_errors=True)


class _Watch:
    def __init__(self, plan: WatchPlan, exchange: Exchange, lifeline: Lifeline, say: Callable[[str], None]) -> None:
        self._plan, self._exchange, self._lifeline, self._say = plan, exchange, lifeline, say
        self._every = min(0.5, max(0.02, plan.seconds / 20))
        self._left: set[int] = set()
        self._failure_seen = False

    def run(self) -> None:
        silent, before = 0.0, None
        looked = time.monotonic()
        while self._keep_watching():
            states = self._look(self._plan.ranks)
            alive = [state for state in states if self._is_alive(state)]
            self._explain_failure(states)
            if not alive:
                return
            # What this process slept through itself, on a host that was suspended, does not count.
            now = time.monotonic()
            silent += min(now - looked, 4 * self._every)
            looked, beats = now, [state.beats for state in states]
            if beats != before or self._is_suspended(alive):
                silent, before = 0.0, beats
            patient = any(state.patient for state in alive)
            limit = self._plan.patient_seconds if patient else self._plan.seconds
            self._exchange.publish(states if silent >= limit / 2 else None)
            if silent < limit or not self._others_stand_still(silent, limit):
                continue
            # Below it, where all wait and no rank is to blame, it may be the network: what they wait for does not come through.
            if silent >= self._plan.network_seconds or find_culprits(self._known_states(states)).culprits:
                self._end_run(states, limit)
                return

    def _explain_failure(self, states: Sequence[RankState]) -> None:
        """Of ranks that began unlike operations one is ended by gloo or NCCL, not always the wrong one; say which is."""
        if not self._failure_seen and any(state.has_failed for state in states):
            self._failure_seen = True
            for rank, reason in find_mismatched_operations(states).items():
                self._say(f"megalite: rank {rank} does not fit the others: {reason}\n")

    def _keep_watching(self) -> bool:
        """Wait for the next look; False once there is none."""
        line = self._lifeline.line(min(0.05, self._every) if self._lifeline.closed else self._every)
        if line is not None and line.startswith("left"):
            self._left.add(int(line.split()[1]))
        return line != "done"

    def _look(self, ranks: Sequence[WatchedRank]) -> list[RankState]:
        return [
            read_rank(
                self._plan.file(each.rank, "beat"),
                rank=each.rank,
                host=self._plan.host,
                pid=each.pid,
                process=process_state(each.pid, each.started),
            )
            for each in ranks
        ]

    def _is_alive(self, state: RankState) -> bool:
        return state.process != "gone" and state.rank not in self._left

    def _is_suspended(self, alive: Sequence[RankState]) -> bool:
        """Somebody has stopped the whole run (Ctrl-Z), or looks into it with a debugger."""
        processes = {state.process for state in alive}
        everybody = len(self._plan.hosts) == 1 and processes == {"stopped"}
        return everybody or "traced" in processes

    def _others_stand_still(self, silent: float, limit: float) -> bool:
        """No other host has seen anything move for the same time, or nothing is to be learnt of them."""
        if silent >= limit + _OTHERS_SECONDS:
            return True
        heard = self._exchange.read_others()
        if len(heard) < len(self._exchange.others):
            return not self._exchange.has_folder
        return all(state.silent >= limit - 0.5 for states in heard.values() for state in states)

    def _known_states(self, mine: Sequence[RankState]) -> list[RankState]:
        """The ranks of this host, and those of others that have been heard of."""
        return [*mine, *(state for states in self._exchange.read_others().values() for state in states)]

    def _end_run(self, mine: Sequence[RankState], limit: float) -> None:
        states = sorted(self._known_states(mine), key=lambda state: state.rank)
        heard = {state.host for state in states}
        alive = [state for state in mine if self._is_alive(state)]
        kernel = kernel_functions(alive)
        with contextlib.suppress(OSError):
            Path(self._plan.folder, ASK).touch()
        asked = time.monotonic()
        stacks = ask_for_stacks(
            {state.rank: (state.pid, self._plan.file(state.rank, "stacks")) for state in alive}, seconds=_STACKS_SECONDS
        )
        report = Report(
            silent=min(state.silent for state in alive),
            limit=limit,
            verdict=find_culprits(states),
            states=states,
            stacks=stacks,
            flight=self._flight(alive, asked + _FLIGHT_SECONDS),
            kernel=kernel,
            unheard=[host for host in self._exchange.others if host not in heard],
            world_size=self._plan.world_size,
        )
        # A disk or a terminal that is stuck must not keep the run from its end.
        telling = threading.Thread(target=self._tell, args=(report,), daemon=True)
        telling.start()
        telling.join(_WRITE_SECONDS)
        self._write_errors(report)
        self._end(alive, report.verdict.culprits)

    def _flight(self, alive: Sequence[RankState], end: float) -> dict[int, list[dict[str, Any]]]:
        """What the ranks that have a flight recorder, and could answer, have written."""
        if not self._plan.flight_recorder:
            return {}
        paths = {state.rank: self._plan.file(state.rank, "flight") for state in alive}
        while time.monotonic() < end and not all(path.exists() for path in paths.values()):
            time.sleep(0.02)
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def _tell(self, report: Report) -> None:
        written, failed = None, ""
        if self._plan.report_folder is not None:
            name = time.strftime("hang-%Y%m%dT%H%M%SZ", time.gmtime())
            if len(self._plan.hosts) > 1:
                name = f"{name}-host{self._plan.hosts.index(self._plan.host)}"
            try:
                written = write_report(report, Path(self._plan.report_folder), name)
            except OSError as error:
                failed = f"    the report cannot be written: {error}\n"
        self._say(report.summary(written) + failed)
        if written is None:
            self._say(report.text())

    def _write_errors(self, report: Report) -> None:
        now = time.time()
        for rank in self._plan.ranks:
            if rank.error_file is not None and rank.rank not in self._left:
                with contextlib.suppress(OSError):
                    Path(rank.error_file).write_text(json.dumps(report.error_of(rank.rank, now)))

    def _end(self, alive: Sequence[RankState], culprits: Sequence[int]) -> None:
        # Those who wait go first: else they would still find that a connection has closed, and call that the error.
        for state in sorted(alive, key=lambda state: state.rank in culprits):
            end_process(state.pid)
        end = time.monotonic() + _END_SECONDS
        left = list(self._plan.ranks)
        while left and time.monotonic() < end:
            left = [rank for rank, state in zip(left, self._look(left)) if self._is_alive(state)]
            time.sleep(0.02)
        for rank in left:
            send(rank.pid, signal.SIGKILL)


def main() -> int:
    """`python -m megalite.watchdog.watch`: started by the first rank of a host, which writes the plan into its stdin."""
    # Ctrl-C and what a scheduler sends to every process of a job are for the ranks; when they have ended, so does this.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    watch(Lifeline(sys.stdin.fileno()), _say)
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

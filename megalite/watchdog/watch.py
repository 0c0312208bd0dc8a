"""Runs the watch process of a host: it reads heartbeats, and ends a run that hangs.

Once a host observes no progress, the hosts exchange their observations through small files in the run folder. They do
not use the network, because it may be the cause. The run folder is shared anyway, since every rank writes its part of a
checkpoint there. If that fails too, each host reports its own ranks."""

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

ASK = "ask"  # file in the plan's folder; when it appears, every rank dumps torch's flight recorder


@dataclass(frozen=True)
class WatchedRank:
    """A rank of this host."""

    rank: int
    pid: int
    started: int  # start time of the process, as the kernel counts it
    error_file: str | None  # from which torchrun reads why the rank failed


@dataclass(frozen=True, kw_only=True)
class WatchPlan:
    """One host's part of a run."""

    folder: str  # private to the host and the run: heartbeats and stacks; the watch process removes it at the end
    seconds: float  # longest time without progress
    patient_seconds: float  # longest time without progress while a rank is in a patient phase
    host: str
    hosts: tuple[str, ...]  # unique names of all hosts of the run, including `host`
    ranks: tuple[WatchedRank, ...]
    world_size: int
    report_folder: str | None  # the run folder, for reports and for the exchange between hosts
    run: str  # unique name of this start of this run
    network_seconds: float = 0.0
    """Shortest time without progress that ends a run in which all ranks wait and none is the culprit. On several
    networks the collective's timeout should come first, because its error names the unreachable peer."""
    flight_recorder: bool = False  # whether the ranks can dump torch's flight recorder

    def file(self, rank: int, kind: str) -> Path:
        """Return the path of a rank's `beat`, its `stacks`, or (JSON) the newest entries of its `flight` recorder."""
        return Path(self.folder, f"rank-{rank}.{kind}")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "WatchPlan":
        """Rebuild a plan from the result of `dataclasses.asdict`, also after a round trip through JSON."""
        ranks = tuple(WatchedRank(**rank) for rank in value["ranks"])
        return cls(**{**value, "hosts": tuple(value["hosts"]), "ranks": ranks})


_FRESH_SECONDS = 10.0  # greatest age of another host's file, in addition to two rounds of reading
_ROUND_SECONDS, _HOST_SECONDS = 0.2, 0.005
"""Least interval between two rounds of reading all hosts' files, and the interval per host: the load stays constant."""


class Exchange:
    """Publishes the states of this host's ranks to the other hosts, and reads theirs.

    Only a separate thread touches the shared disk, because the disk can hang and be the reason why the run hangs."""

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
        return tuple(host for host in self._plan.hosts if host != self._plan.host)

    @property
    def has_folder(self) -> bool:
        """Whether the run has a folder and other hosts."""
        return self._folder is not None

    def publish(self, states: Sequence[RankState] | None) -> None:
        """Publish the states of this host's ranks; None: the run makes progress."""
        self._published = states
        if self._folder is not None and states is not None and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
            self._thread.start()

    def read_others(self) -> dict[str, list[RankState]]:
        """Return the recently published states of other hosts without progress, by host."""
        oldest = time.monotonic() - _FRESH_SECONDS - 2 * self._round
        return {host: states for host, (since, states) in tuple(self._read_from.items()) if since > oldest}

    def close(self) -> None:
        """Remove the published file; the last host also removes the folder."""
        self._published = None
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _work(self) -> None:
        assert self._folder is not None
        own = self._folder / f"{self._plan.hosts.index(self._plan.host)}.json"
        seen: dict[str, str] = {}
        while not self._closed.wait(self._round):
            states = self._published
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                content = {"at": time.time(), "ranks": [asdict(state) for state in states or ()]}
                beside = own.with_suffix(".new")
                beside.write_text(json.dumps(content))
                beside.replace(own)
            for index, host in enumerate(self._plan.hosts):
                if host != self._plan.host:
                    self._read(self._folder / f"{index}.json", host, seen)
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
            self._folder.rmdir()  # fails while it contains another host's file

    def _read(self, path: Path, host: str, seen: dict[str, str]) -> None:
        try:
            text = path.read_text()
            states = [rank_from_json(value) for value in json.loads(text)["ranks"]]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if not states:
            self._read_from.pop(host, None)
        elif seen.get(host) != text:  # a change means that the host is alive; clocks of hosts may differ
            seen[host] = text
            self._read_from[host] = time.monotonic(), states


_OTHERS_SECONDS = 1.5  # how long a host waits for the others after its own limit
_STACKS_SECONDS, _FLIGHT_SECONDS, _WRITE_SECONDS, _END_SECONDS = 1.2, 1.5, 0.8, 0.5
"""Limits of the parts of ending a run, which together take less than five seconds."""


class Lifeline:
    """The pipe from the rank that started this process. It closes when that rank ends for any reason."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._text = descriptor, b""
        self.closed = False

    def line(self, seconds: float | None = None) -> str | None:
        """Return the next line, or None if none arrives in time or the pipe is closed."""
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
    """Read a plan from the first line, and watch its ranks until the run ends or hangs.

    Further lines: `done` when the run has ended; `left RANK` when one rank has ended."""
    first = lifeline.line()
    if first is None:
        return
    plan = WatchPlan.from_json(json.loads(first))
    with contextlib.closing(Exchange(plan)) as exchange:
        _Watch(plan, exchange, lifeline, say).run()
    # If `run` raises, the files stay: the ranks start another watch process over them.
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
            # Limit the interval: time in which the host was suspended does not count.
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
            # Without a culprit the network may be the cause; see `network_seconds`.
            if silent >= self._plan.network_seconds or find_culprits(self._known_states(states)).culprits:
                self._end_run(states, limit)
                return

    def _explain_failure(self, states: Sequence[RankState]) -> None:
        """Name the rank with the wrong operation: after a mismatch gloo or NCCL may end another rank than that."""
        if not self._failure_seen and any(state.has_failed for state in states):
            self._failure_seen = True
            for rank, reason in find_mismatched_operations(states).items():
                self._say(f"megalite: rank {rank} does not fit the others: {reason}\n")

    def _keep_watching(self) -> bool:
        """Wait until the heartbeats should be read again; return False once the run has ended."""
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
        """Return whether the whole run is stopped (Ctrl-Z), or a debugger is attached."""
        processes = {state.process for state in alive}
        everybody = len(self._plan.hosts) == 1 and processes == {"stopped"}
        return everybody or "traced" in processes

    def _others_stand_still(self, silent: float, limit: float) -> bool:
        """Return whether no other host has observed progress for the same time, or the others cannot be heard."""
        if silent >= limit + _OTHERS_SECONDS:
            return True
        heard = self._exchange.read_others()
        if len(heard) < len(self._exchange.others):
            return not self._exchange.has_folder
        return all(state.silent >= limit - 0.5 for states in heard.values() for state in states)

    def _known_states(self, own: Sequence[RankState]) -> list[RankState]:
        """Return the states of this host's ranks and those that other hosts have published."""
        return [*own, *(state for states in self._exchange.read_others().values() for state in states)]

    def _end_run(self, own: Sequence[RankState], limit: float) -> None:
        states = sorted(self._known_states(own), key=lambda state: state.rank)
        heard = {state.host for state in states}
        alive = [state for state in own if self._is_alive(state)]
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
        # A hung disk or terminal must not keep the run alive.
        publishing = threading.Thread(target=self._publish, args=(report,), daemon=True)
        publishing.start()
        publishing.join(_WRITE_SECONDS)
        self._write_errors(report)
        self._end(alive, report.verdict.culprits)

    def _flight(self, alive: Sequence[RankState], end: float) -> dict[int, list[dict[str, Any]]]:
        """Wait for the flight recorders' dumps, and return those that exist by rank."""
        if not self._plan.flight_recorder:
            return {}
        paths = {state.rank: self._plan.file(state.rank, "flight") for state in alive}
        while time.monotonic() < end and not all(path.exists() for path in paths.values()):
            time.sleep(0.02)
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def _publish(self, report: Report) -> None:
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
        # End waiting ranks before the culprits: otherwise they would report a closed connection as the error.
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
    """Run `python -m megalite.watchdog.watch`. The first rank of a host starts it, and writes the plan to its stdin."""
    # Ctrl-C and a scheduler's signals to all processes of a job concern the ranks. This process ends after them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    watch(Lifeline(sys.stdin.fileno()), _say)
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

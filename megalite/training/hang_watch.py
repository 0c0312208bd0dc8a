"""Starts and supervises the watch process of this host, and dumps torch's flight recorder for it."""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.config.errors import ConfigError, RankError
from megalite.config.parallel import ParallelConfig
from megalite.topology.group import Group
from megalite.topology.topology import Launch
from megalite.watchdog.heartbeat import UNWATCHED, FileHeartbeat, Heartbeat
from megalite.watchdog.processes import GONE, STOPPED, Handlers, host_key, network_key, start_time, supported
from megalite.watchdog.processes import state as process_state
from megalite.watchdog.report import condensed
from megalite.watchdog.watch import ASK, WatchedRank, WatchPlan

_DUMP = "_dump_fr_trace_json"
_RECORDER_LOOK_SECONDS = 0.1

_WATCHER = "megalite.watchdog.watch"  # a separate program, because it must run while this process is stopped
_ROLL_CALL_SECONDS = 20.0  # time in which ranks with a failed collective find the lost peers, and exit
_EXIT_SECONDS = 5.0
_CHECK_SECONDS = 5.0
_CHECKS = 2  # consecutive checks that must find the watch process ended or stopped
_FAULTS = {STOPPED: "is stopped", GONE: "has ended"}
_UNNOTICED = "a hang will not be noticed before collectives time out"


class FlightRecorder:
    """A thread that dumps the recorder to `path` once the watch process requests it in `folder`."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._asked, self._path = folder / ASK, path
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="megalite-flight", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closed.wait(_RECORDER_LOOK_SECONDS):
            if self._asked.exists():
                temporary = self._path.with_suffix(".new")
                temporary.write_text(json.dumps(last_entries()))
                temporary.replace(self._path)
                return

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def available() -> bool:
    """Return whether this build of torch can dump its recorder."""
    return hasattr(getattr(torch._C, "_distributed_c10d", None), _DUMP)


def last_entries() -> list[dict[str, Any]]:
    """Return `condensed` entries of this process's recorder. torch's JSON has no stacks, which need Python's lock."""
    return condensed(json.loads(getattr(torch._C._distributed_c10d, _DUMP)()))


@dataclass
class HangWatch:
    """The heartbeat of this rank and, on one rank of each host, the watch process. The default watches nothing."""

    heartbeat: Heartbeat = UNWATCHED
    rank: int = 0
    single_rank: bool = True
    _handlers: Handlers | None = None
    _recorder: FlightRecorder | None = None
    _watcher: "_Watcher | None" = None

    def close(self, *, agreed: bool) -> None:
        """End the heartbeat of this rank. `agreed`: the run ends on every rank; else the others stay watched."""
        self.heartbeat.close(failed=not agreed)
        if self._watcher is not None:
            self._watcher.close(self.rank, together=agreed or self.single_rank)
        if self._recorder is not None:
            self._recorder.close()
        if self._handlers is not None:
            self._handlers.close()


class _Watcher:
    """The watch process of this host, on the rank that starts it. A thread warns once if it has ended or is stopped."""

    def __init__(self, plan: WatchPlan, *, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self.process = _start(plan)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._check_process, name="megalite-watcher", daemon=True)
        self._thread.start()

    def _check_process(self) -> None:
        started, wrong = start_time(self.process.pid) or 0, 0
        while not self._closing.wait(min(_CHECK_SECONDS, max(0.1, self._plan.seconds / 8))):
            found = GONE if self.process.poll() is not None else process_state(self.process.pid, started)
            # A single check may fall into the moment in which a suspended job is continued.
            wrong = wrong + 1 if found in _FAULTS else 0
            if wrong == _CHECKS:
                self._say(f"warning: the process that watches the ranks of this host {_FAULTS[found]}: {_UNNOTICED}")
                return

    def close(self, rank: int, *, together: bool) -> None:
        """End the watch process if the run ends on all ranks (`together`); else only report that this rank has left."""
        self._closing.set()
        self._thread.join()
        process = self.process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            process.stdin.write(b"done\n" if together else f"left {rank}\n".encode())
            process.stdin.close()
        if together:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        elif process.poll() is None:
            # It outlives this rank. A set returncode keeps Popen from warning that the child still runs.
            process.returncode = 0
        if process.returncode != 0:
            shutil.rmtree(self._plan.folder, ignore_errors=True)


def begin_watch(
    parallel: ParallelConfig,
    *,
    launch: Launch,
    world: Group,
    run_dir: str | None,
    log: Callable[[str], None],
    say: Callable[[str], None],
) -> HangWatch:
    """Start a process on each host that watches the ranks of this run, unless hang_timeout_minutes is 0.

    `log` prints a line of the run, `say` a line of this rank.

    Collectives: a gather over the world."""
    if not parallel.hang_timeout:
        return HangWatch()
    if not supported():
        if parallel.hang_timeout_minutes is None:
            return HangWatch()
        raise ConfigError(
            f"hang_timeout_minutes {parallel.hang_timeout_minutes:g} needs Linux and this is {platform.system()}; "
            "use --hang-timeout-minutes 0"
        )
    host, folder = host_key(), None
    me: dict[str, Any] = {"host": host, "name": platform.node(), "error_file": launch.error_file}
    me |= {"network": network_key(), "pid": os.getpid(), "started": start_time(os.getpid())}
    if launch.local_rank == 0:
        try:
            folder = tempfile.mkdtemp(prefix="megalite-")
        except OSError as error:
            me["fault"] = f"{error.filename or tempfile.gettempdir()}: {error.strerror}"
    try:
        everyone = world.gather_json({**me, "folder": folder})
        leaders: dict[str, int] = {}  # by host: the rank that creates the folder and starts the watch process
        for rank, one in enumerate(everyone):
            if one["folder"] is not None:
                leaders.setdefault(one["host"], rank)
            if world.rank == 0 and "fault" in one:
                log(f"warning: {one['name']} is not watched, rank {rank} cannot write to {one['fault']}")
        leads = leaders.get(host) == world.rank
        if folder is not None and not leads:
            shutil.rmtree(folder)  # several launchers on one host
        if host not in leaders:
            return HangWatch()
        records = launch.flight_recorder and available()
        plan = _plan(everyone, leaders, host, parallel, run_dir=run_dir, flight_recorder=records)
        return _join(plan, world.rank, leads=leads, say=say)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _join(plan: WatchPlan, rank: int, *, leads: bool, say: Callable[[str], None]) -> HangWatch:
    """Start this rank's heartbeat, and on the leading rank the watch process."""
    try:
        heartbeat = FileHeartbeat(plan.file(rank, "beat"), rank=rank)
        handlers = Handlers(plan.file(rank, "stacks"))
    except OSError as error:
        raise RankError(
            f"rank {rank} cannot write its heartbeat to {plan.folder}: {error.strerror}; set TMPDIR to a folder with room, "
            "or use --hang-timeout-minutes 0"
        ) from None
    recorder = FlightRecorder(Path(plan.folder), plan.file(rank, "flight")) if plan.flight_recorder else None
    watcher = _Watcher(plan, say=say) if leads else None
    return HangWatch(heartbeat, rank, plan.world_size == 1, handlers, recorder, watcher)


def _plan(
    everyone: Sequence[Mapping[str, Any]],
    leaders: Mapping[str, int],
    host: str,
    parallel: ParallelConfig,
    *,
    run_dir: str | None,
    flight_recorder: bool,
) -> WatchPlan:
    names = [everyone[rank]["name"] for rank in leaders.values()]
    labels = {
        # Several containers may have the same name.
        key: name if names.count(name) == 1 else f"{name} (rank {rank})"
        for (key, rank), name in zip(leaders.items(), names, strict=True)
    }
    patience = {}
    if len({one["network"] for one in everyone}) > 1:
        patience["network_seconds"] = 60.0 * parallel.distributed_timeout_minutes + _ROLL_CALL_SECONDS
    return WatchPlan(
        folder=everyone[leaders[host]]["folder"],
        seconds=60.0 * parallel.hang_timeout,
        patient_seconds=60.0 * parallel.hang_save_timeout,
        host=labels[host],
        hosts=tuple(labels.values()),
        ranks=tuple(
            WatchedRank(rank, one["pid"], one["started"], one["error_file"])
            for rank, one in enumerate(everyone)
            if one["host"] == host
        ),
        world_size=len(everyone),
        report_folder=None if run_dir is None else str(Path(run_dir).absolute()),
        run=Path(everyone[min(leaders.values())]["folder"]).name,
        flight_recorder=flight_recorder,
        **patience,
    )


def _start(plan: WatchPlan) -> subprocess.Popen[bytes]:
    # A new session protects it from Ctrl-C and from signals to this process's group.
    process = subprocess.Popen(
        [sys.executable, "-m", _WATCHER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(plan)).encode() + b"\n")
    process.stdin.flush()
    return process

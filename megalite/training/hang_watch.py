"""Starts the process that watches this host's ranks, and says goodbye to it."""

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.config.errors import ConfigError, RankError
from megalite.config.parallel import ParallelConfig
from megalite.topology.group import Group
from megalite.topology.topology import Launch
from megalite.training.flight_recorder import FlightRecorder, available
from megalite.watchdog.heartbeat import UNWATCHED, FileHeartbeat, Heartbeat
from megalite.watchdog.plan import WatchedRank, WatchPlan
from megalite.watchdog.processes import host_key, network_key, start_time
from megalite.watchdog.signals import Handlers, supported

_WATCHER = "megalite.cli.hang_watch"
"""Run as a program: it must go on when this process is stopped."""
_ROLL_CALL_SECONDS = 20.0
"""What ranks whose collective has failed may take to find out who does not answer, and to leave."""
_GOODBYE_SECONDS = 5.0


@dataclass
class HangWatch:
    """The heartbeat of this rank, and on one rank of each host the process that looks at all of them.

    This one watches nothing.
    """

    heartbeat: Heartbeat = UNWATCHED
    rank: int = 0
    alone: bool = True
    """There is no other rank."""
    _handlers: Handlers | None = None
    _recorder: FlightRecorder | None = None
    _process: subprocess.Popen[bytes] | None = None

    def close(self, *, agreed: bool) -> None:
        """The run is at its end here.

        Args:
            agreed: on every rank; else the others are watched further.
        """
        self.heartbeat.close(failed=not agreed)
        if self._process is not None:
            assert self._process.stdin is not None
            together = agreed or self.alone
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b"done\n" if together else f"left {self.rank}\n".encode())
                self._process.stdin.close()
            if together:
                self._wait()
            else:
                # Nobody waits for it: it ends with the last rank, and a rank that has failed must be able to end first.
                self._process.returncode = 0
        if self._recorder is not None:
            self._recorder.close()
        if self._handlers is not None:
            self._handlers.close()

    def _wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def begin_watch(
    parallel: ParallelConfig,
    *,
    launch: Launch,
    world: Group,
    device: torch.device,
    run_dir: str | None,
    log: Callable[[str], None],
) -> HangWatch:
    """Watch the ranks of this run from a process of its own on each host, if hang_timeout_minutes says so.

    Args:
        run_dir: folder for the report, if the run has one.
        log: prints a line.

    Collectives: a gather over the world.

    Raises:
        ConfigError: it was asked for, on a system that it cannot work on.
        RankError: no file can be written in the host's folder of temporary files.
    """
    seconds = 60.0 * parallel.hang_timeout
    if not seconds:
        return HangWatch()
    if not supported():
        if parallel.hang_timeout_minutes is None:
            return HangWatch()
        raise ConfigError(
            f"hang_timeout_minutes {parallel.hang_timeout_minutes:g} needs Linux and this is {platform.system()}; "
            "use --hang-timeout-minutes 0"
        )
    me: dict[str, Any] = {"host": host_key(), "name": platform.node(), "error_file": launch.error_file}
    me["network"] = network_key()
    me |= {"pid": os.getpid(), "started": start_time(os.getpid()), "folder": None}
    if launch.local_rank == 0:
        try:
            me["folder"] = tempfile.mkdtemp(prefix="megalite-")
        except OSError as error:
            me["fault"] = f"{error.filename or tempfile.gettempdir()}: {error.strerror}"
    try:
        everyone = world.gather_json(me, device)
        leaders = _leaders(everyone)
        for rank, one in enumerate(everyone):
            if world.rank == 0 and "fault" in one:
                log(f"warning: {one['name']} is not watched, rank {rank} cannot write to {one['fault']}")
        if me["folder"] is not None and leaders[me["host"]] != world.rank:
            shutil.rmtree(me["folder"])  # two launchers on one host
        if me["host"] not in leaders:
            return HangWatch()
        records = launch.flight_recorder and available()
        plan = _plan(everyone, leaders, me["host"], seconds=seconds, run_dir=run_dir, flight_recorder=records)
        if len({one["network"] for one in everyone}) > 1:
            patience = 60.0 * parallel.distributed_timeout_minutes + _ROLL_CALL_SECONDS
            plan = dataclasses.replace(plan, network_seconds=patience)
        return _join(plan, world.rank, leads=leaders[me["host"]] == world.rank)
    except BaseException:
        if me["folder"] is not None:
            shutil.rmtree(me["folder"], ignore_errors=True)
        raise


def _join(plan: WatchPlan, rank: int, *, leads: bool) -> HangWatch:
    """Begin to beat, and on one rank of the host to watch."""
    try:
        heartbeat = FileHeartbeat(plan.heartbeat(rank), rank=rank)
        handlers = Handlers(plan.stacks(rank))
    except OSError as error:
        raise RankError(
            f"rank {rank} cannot write its heartbeat to {plan.folder}: {error.strerror}; set TMPDIR to a folder with room, "
            "or use --hang-timeout-minutes 0"
        ) from None
    recorder = FlightRecorder(Path(plan.folder), plan.flight(rank)) if plan.flight_recorder else None
    process = _start(plan) if leads else None
    return HangWatch(heartbeat, rank, plan.world_size == 1, handlers, recorder, process)


def _leaders(everyone: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of each host the rank whose folder is used and that starts the watching process."""
    leaders: dict[str, int] = {}
    for rank, one in enumerate(everyone):
        if one["folder"] is not None:
            leaders.setdefault(one["host"], rank)
    return leaders


def _plan(
    everyone: Sequence[Mapping[str, Any]],
    leaders: Mapping[str, int],
    host: str,
    *,
    seconds: float,
    run_dir: str | None,
    flight_recorder: bool,
) -> WatchPlan:
    names = [everyone[rank]["name"] for rank in leaders.values()]
    labels = {
        # Containers may all have one name.
        key: name if names.count(name) == 1 else f"{name} (rank {rank})"
        for (key, rank), name in zip(leaders.items(), names, strict=True)
    }
    return WatchPlan(
        folder=everyone[leaders[host]]["folder"],
        seconds=seconds,
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
    )


def _start(plan: WatchPlan) -> subprocess.Popen[bytes]:
    # A session of its own: neither Ctrl-C nor what a launcher sends to this process's group is for it.
    process = subprocess.Popen(
        [sys.executable, "-m", _WATCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(plan.to_json()).encode() + b"\n")
    process.stdin.flush()
    return process

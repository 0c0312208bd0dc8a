"""Launch the runs of a sweep with torchrun, as Slurm jobs or on another cluster, and store their results."""

import contextlib
import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.files import write_durably
from megalite.config import files
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.sweep.candidates import Run
from megalite.sweep.results import LOG, Result, Store, outcome, refused, steps_made
from megalite.sweep.spec import NodesSpec, SbatchSpec
from megalite.watchdog import processes


def training_command(folder: Path, program: Path | None) -> list[str]:
    """Return the command of a run with the config in `folder`, which training overwrites with the resolved config."""
    start = ["-m", "megalite.cli.main", "train"] if program is None else [str(program.resolve())]
    return [*start, "--config", str(folder / files.CONFIG_NAME)]


class Launched(ABC):
    """A started run; its status is checked at most once per `every` seconds."""

    def __init__(self, every: float = 0.0) -> None:
        self._every, self._looked = every, -math.inf
        self._started: float | None = None

    def mark_started(self) -> None:
        """Start the run's clock, at the first call: it no longer waits in a queue."""
        if self._started is None:
            self._started = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the run started."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def poll(self) -> int | None:
        """Return the exit status; None while the run waits or is active."""
        if time.monotonic() - self._looked < self._every:
            return None
        self._looked = time.monotonic()
        return self.look()

    @abstractmethod
    def look(self) -> int | None:
        """As `poll`, without a limit on its frequency."""

    @abstractmethod
    def end(self) -> None:
        """Stop all processes of the run."""


class Launcher(ABC):
    """Starts runs with the variables `environment`; script `program` replaces `megalite train`."""

    at_once = 1

    def __init__(self, *, environment: Mapping[str, str], program: Path | None = None) -> None:
        self._environment, self._program = dict(environment), program

    def fault(self, run: Run) -> str | None:
        """Return why the run cannot be launched here; None if it can."""
        return None

    @abstractmethod
    def start(self, run: Run, folder: Path, *, timeout: float) -> Launched:
        """Start a run from the config in `folder`, with its log there. Raises ConfigError if that fails."""

    def clear(self, folder: Path) -> None:
        """Stop what a killed sweep left of a run; local runs end with the sweep."""


class LocalLauncher(Launcher):
    """Starts `torchrun --standalone` on this machine, with any number of ranks."""

    def start(self, run: Run, folder: Path, *, timeout: float) -> "LocalRun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = ["--nproc-per-node", str(run.ranks)]
        command = [*torchrun, *ranks, *training_command(folder, self._program)]
        try:
            return LocalRun(command, folder / LOG, environment=self._environment)
        except OSError as error:
            raise ConfigError(f"cannot start {run.label}: {error.strerror}: {error.filename}") from None


class LocalRun(Launched):
    """A command under a guard, which ends with this process and stops all its descendants. Its output goes to `log`.
    `environment`: default that of this process."""

    def __init__(self, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        with log.open("ab") as file:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", processes.__name__, str(os.getpid()), *command],
                env=None if environment is None else dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only the sweep, which then stops its runs
            )
        self.mark_started()

    def look(self) -> int | None:
        return self._guard.poll()

    def end(self) -> None:
        self._guard.terminate()
        try:
            self._guard.wait(3 * processes.END_SECONDS)
        except subprocess.TimeoutExpired:
            processes.kill_below(self._guard.pid)
            self._guard.kill()
            self._guard.wait()


class NodesLauncher(Launcher):
    """Starts runs that have the same number of ranks on each node."""

    def __init__(self, spec: NodesSpec, *, environment: Mapping[str, str], program: Path | None = None) -> None:
        super().__init__(environment=environment, program=program)
        self.at_once, self._spec = spec.at_once, spec

    def fault(self, run: Run) -> str | None:
        nodes, per_node = nodes_of(run, self._spec)
        if nodes * per_node == run.ranks:
            return None
        most = self._spec.gpus_per_node
        return f"{run.ranks} ranks cannot be divided evenly over {nodes} nodes of {most}; use e.g. {nodes * most}"


def nodes_of(run: Run, spec: NodesSpec) -> tuple[int, int]:
    """Return (number of nodes, ranks per node)."""
    nodes = -(-run.ranks // spec.gpus_per_node)
    return nodes, run.ranks // nodes


SCRIPT, JOB, STATUS = "job.sh", "job-id", "exit-status"
_FREE_PORT = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
_SPECIAL = re.compile(r"[^\w@%+=:,./-]|^$")
_UNKNOWN_STATUS = 1  # for a job that disappeared without one: it was killed
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SUSPENDED")
_NO_ANSWER = "NO ANSWER"  # instead of a state: the job may wait or run
_LOOKS_AFTER_END = 3  # a shared file system may show a job's last files late
ANSWER_SECONDS = 60.0


class SbatchLauncher(NodesLauncher):
    _spec: SbatchSpec

    def script(self, run: Run, folder: Path, *, timeout: float) -> str:
        """Return the job's script: torchrun on each node, its exit status in a file."""
        (nodes, per_node), folder = nodes_of(run, self._spec), folder.resolve()
        options = {
            "job-name": f"sweep-{run.key}",
            "nodes": str(nodes),
            "ntasks-per-node": "1",
            "gpus-per-node": str(per_node),
            "time": str(max(math.ceil(timeout / 60.0), 1)),
            "output": str(folder / LOG).replace("%", "%%"),  # Slurm expands %j
            **self._spec.options,
        }
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(nodes), "--nproc-per-node", str(per_node)),
            *("--rdzv-backend", "c10d"),
        ]
        training = training_command(folder, self._program)
        lines = [
            "#!/bin/bash",
            # sbatch accepts both kinds of quotes, and # begins a comment. Values contain no quotes.
            *(f"#SBATCH --{name}={repr(word) if _SPECIAL.search(word) else word}" for name, word in options.items()),
            f"cd {shlex.quote(str(Path.cwd()))}",
            *self._spec.setup,
            *(f"export {name}={shlex.quote(value)}" for name, value in self._environment.items()),
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$({shlex.join([sys.executable, '-c', _FREE_PORT])})",  # this script runs on the first node
            f'srun --kill-on-bad-exit=1 {shlex.join(torchrun)} --rdzv-id "$SLURM_JOB_ID" '
            f'--rdzv-endpoint "$head:$port" {shlex.join(training)}',
            f"echo $? > {shlex.quote(str(folder / STATUS))}",
        ]
        return "\n".join(lines) + "\n"

    def start(self, run: Run, folder: Path, *, timeout: float) -> "Job":
        if any(letter in str(folder.resolve()) for letter in "'\"\\\n"):
            raise ConfigError(f"{folder.resolve()}: sbatch allows no quotes or backslashes here; change --output")
        (folder / SCRIPT).write_text(self.script(run, folder, timeout=timeout))
        answer = call("sbatch", "--parsable", str(folder / SCRIPT))
        job = answer.strip().partition(";")[0]
        if not job.isdecimal():
            raise ConfigError(f"sbatch printed {answer.strip()!r} instead of a job number such as 1234")
        (folder / JOB).write_text(job)
        return Job(job, folder, every=self._spec.poll_seconds)

    def clear(self, folder: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            try_call("scancel", (folder / JOB).read_text().strip())


class Job(Launched):
    def __init__(self, job: str, folder: Path, *, every: float) -> None:
        super().__init__(every)
        self._job, self._folder = job, folder
        self._missing = 0

    def look(self) -> int | None:
        """Return the exit status from the script's file after the job has left the queue."""
        state = _state(self._job)
        if state is not None:
            if state not in (*_WAITING, _NO_ANSWER):
                self.mark_started()
            return None
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / STATUS).read_text())
        self._missing += 1
        return _UNKNOWN_STATUS if self._missing >= _LOOKS_AFTER_END else None

    def end(self) -> None:
        try_call("scancel", self._job)


def _state(job: str) -> str | None:
    answer = try_call("squeue", "--noheader", "--jobs", job, "--format", "%T")
    if answer is None or (answer.returncode != 0 and "Invalid job id" not in answer.stderr):
        return _NO_ANSWER  # the controller is busy: retry
    return answer.stdout.strip().partition("\n")[0] or None


def try_call(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a cluster's command; None if it cannot start or times out."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    return None


def call(*command: str) -> str:
    """Run a cluster's command and return its output; raises ConfigError if it fails."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]}: {error.strerror}; use --launcher local here") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not finish within {ANSWER_SECONDS:g} s") from None
    if answer.returncode != 0:
        raise ConfigError(f"{command[0]} refused the job: {answer.stderr.strip() or answer.stdout.strip()}")
    return answer.stdout


_LOOK_SECONDS = 0.2  # between two checks of active runs


@dataclass(frozen=True, kw_only=True)
class Progress:
    run: Run
    steps: int
    seconds: float


@dataclass(frozen=True)
class _Active:
    run: Run
    folder: Path
    launched: Launched


Observer = Callable[[Sequence[Progress], Result | None], None]  # (active runs, new result)


def launchable(runs: Sequence[Run], launcher: Launcher) -> tuple[Run, ...]:
    return tuple(
        run if run.refused is not None else dataclasses.replace(run, refused=launcher.fault(run)) for run in runs
    )


def execute(
    runs: Sequence[Run],
    store: Store,
    launcher: Launcher,
    *,
    warm_up: int,
    timeout: float,
    limit: int | None,
    retry: bool,
    observe: Observer,
) -> None:
    """Run all runs without a result, in order; no process remains, however this ends. The first `warm_up` steps of a run
    are not measured; a run is stopped after `timeout` seconds; at most `limit` runs are launched; `retry` repeats failed
    ones. Raises ConfigError if a run cannot be started."""
    for run in runs:
        if run.refused is not None:
            store.append(refused(run))
    waiting = [run for run in runs if run.refused is None and not store.is_done(run.key, retry=retry)][:limit]
    waiting.reverse()
    active: list[_Active] = []
    try:
        while waiting or active:
            while waiting and len(active) < launcher.at_once:
                run = waiting.pop()
                folder = _prepare(run, store, launcher)
                active.append(_Active(run, folder, launcher.start(run, folder, timeout=timeout)))
            for each in list(active):
                result = _look(each, warm_up=warm_up, timeout=timeout)
                if result is not None:
                    active.remove(each)
                    store.append(result)
                    observe(_progress(active), result)
            observe(_progress(active), None)
            time.sleep(_LOOK_SECONDS)
    finally:
        for each in active:
            each.launched.end()


def _prepare(run: Run, store: Store, launcher: Launcher) -> Path:
    folder = store.run_folder(run)
    if folder.exists():
        launcher.clear(folder)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    config = replace(run.config, run_dir=str(folder))
    write_durably(folder / files.CONFIG_NAME, files.dump(config).encode())
    return folder


def _look(active: _Active, *, warm_up: int, timeout: float) -> Result | None:
    """Return the result of a run that has ended or exceeded its time, in which case it is stopped; else None."""
    status, seconds = active.launched.poll(), active.launched.seconds()
    timed_out = status is None and seconds > timeout
    if timed_out:
        active.launched.end()
    elif status is None:
        return None
    last, limit = status or os.EX_OK, timeout if timed_out else None
    return outcome(active.run, active.folder, status=last, timed_out=limit, seconds=seconds, warm_up=warm_up)


def _progress(active: Sequence[_Active]) -> list[Progress]:
    return [Progress(run=each.run, steps=steps_made(each.folder), seconds=each.launched.seconds()) for each in active]

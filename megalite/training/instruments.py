"""What a run is watched with: phases, their report, the profiler, the account of its time."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.pipeline.executor import Tracer
from megalite.training.device_memory import memory_now
from megalite.training.goodput import FAILED, FINISHED, STOPPED, Goodput, SessionLog
from megalite.training.out_of_memory import record_memory_history
from megalite.training.phases import PhaseClock, Together
from megalite.training.profiler import FOLDER, StepProfiler
from megalite.training.replica import Replica
from megalite.training.timings import IntervalReport, Timings


class Instruments:
    """Of one rank; every rank makes them and calls them alike.

    Args:
        started: time of day at which this start of the run began.
        step: where it stands.
        apart: ranks take steps without waiting for one another.
        log: prints a line; called on rank 0 alone.

    Collectives: those of `Timings`.
    """

    def __init__(
        self, replica: Replica, *, started: float, step: int, apart: bool, log: Callable[[str], None]
    ) -> None:
        self._replica, self._log = replica, log
        self._started, self._first = started, step
        topology, logging = replica.topology, replica.config.logging
        self.clock = PhaseClock(topology.device)
        self._timings = None
        if logging.timing_log_level:
            self._timings = Timings(self.clock, topology, apart=apart, threshold=logging.straggler_threshold)
        self._profiler: StepProfiler | None = None
        if logging.profile and topology.rank in logging.profile_ranks:
            assert logging.run_dir is not None, "validate() asks for it"
            self._profiler = StepProfiler(
                Path(logging.run_dir) / FOLDER,
                rank=topology.rank,
                first=step + logging.profile_step_start,
                last=step + logging.profile_step_end - 1,
                device=topology.device,
                clock=self.clock,
            )
        self._sessions: SessionLog | None = None

    @property
    def _times(self) -> bool:
        return self._timings is not None or self._profiler is not None

    def tracer(self, other: Tracer | None) -> Tracer | None:
        """What the executor tells of its computations."""
        if not self._times:
            return other
        return self.clock if other is None else Together(self.clock, other)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around what a step does beside its program."""
        return self.clock.phase(name) if self._times else nullcontext()

    def open(self, total_steps: int) -> None:
        """Before the first step, and before the sinks open their files: begin the account of this start of the run.

        Raises:
            ConfigError: a file cannot be written, on some ranks perhaps.
        """
        topology, config = self._replica.topology, self._replica.config
        if self._profiler is not None:
            self._profiler.make_folder()
            if self._profiler.last > total_steps:
                self._log(
                    f"step {self._profiler.last} is beyond the last step, {total_steps}: no profile will be written"
                )
        if config.logging.record_memory_history:
            record_memory_history(topology.device)
        if topology.rank != 0:
            return
        folder, checkpoint, layout = config.logging.run_dir, config.checkpoint, topology.layout
        axes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp", "ep")}
        try:
            self._sessions = SessionLog.open(
                None if folder is None else Path(folder),
                started=self._started,
                step=self._first,
                resumes=checkpoint.load is not None and not checkpoint.finetune,
                ranks=layout.world_size,
                layout=" ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "dp 1",
                log=self._log,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot write {error.filename or folder}: {error.strerror}; give a folder that can be written with "
                "--run-dir"
            ) from None

    @contextmanager
    def stall(self, name: str) -> Iterator[None]:
        """What runs inside holds the steps up: `evaluation` or `save`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.clock.add(name, seconds)
            if self._sessions is not None:
                self._sessions.spend(name, seconds)

    def begin(self, step: int) -> None:
        """Before a step."""
        if self._sessions is not None:
            self._sessions.ready()
        if self._profiler is not None:
            self._profiler.begin(step)

    def made(self, step: int, *, seconds: float, waited: float) -> None:
        """A step was made.

        Args:
            waited: part of it, for data.
        """
        self.clock.add("data_wait", waited)
        if self._sessions is not None:
            self._sessions.step(step, seconds)

    def finish(self, step: int) -> bool:
        """After a step and its report. True if a profile was written, which is no step's time."""
        if self._profiler is None or (said := self._profiler.finish(step)) is None:
            return False
        self._log(said)
        return True

    def interval(self, *, steps: int, seconds: float) -> IntervalReport:
        """What the line of an interval, which ends here, stands on.

        Collectives: those of `Timings.interval`.
        """
        report = IntervalReport({}, [])
        if self._timings is not None:
            report = self._timings.interval(steps=steps, seconds=seconds)
        fields = {**report.fields, **memory_now(self._replica.topology.device)}
        if self._sessions is not None:
            fields["goodput"] = self._sessions.note().fraction
        return IntervalReport(fields, report.lines)

    def close(self, *, finished: bool) -> None:
        """The run ends, also where an exception is on its way.

        Args:
            finished: its last step is done.
        """
        if self._profiler is not None:
            self._profiler.close()
        if self._sessions is None:
            return
        error = sys.exception()
        ended = FINISHED if finished else STOPPED
        if error is not None:
            ended = FAILED if isinstance(error, Exception) else STOPPED
        made = self._sessions.session.last_step > self._first
        found: Goodput = self._sessions.close(ended)
        if made and ended != FAILED:
            self._log(found.in_words())

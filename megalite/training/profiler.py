"""torch.profiler over chosen steps: a trace to look at and tables of what took longest."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megalite.config.errors import ConfigError
from megalite.training.phases import PhaseClock

FOLDER = "profile"
_ROWS = 40
"""Operations in a table."""


class StepProfiler:
    """Profiles the steps from `first` to `last` of this rank; both begin and finish are called for each step.

    In the step before, the profiler warms up: what its start costs is not in the trace. The file of rank
    R is `rank-R-steps-A-B.json`, Chrome's format, for ui.perfetto.dev; beside it a table for each device.

    Args:
        clock: gives computations and phases names while the profiler runs.
    """

    def __init__(
        self, folder: Path, *, rank: int, first: int, last: int, device: torch.device, clock: PhaseClock
    ) -> None:
        self._folder, self._rank, self._clock = folder, rank, clock
        self.first, self.last = first, last
        self._on_cuda = device.type == "cuda"
        self._running: torch.profiler.profile | None = None

    def make_folder(self) -> None:
        """Find out now whether the traces can be written.

        Raises:
            ConfigError: they cannot.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write profiles to {self._folder}: {error.strerror}; give a --run-dir that can be written, or "
                "remove --profile"
            ) from None

    def begin(self, step: int) -> None:
        """Before a step."""
        if step != self.first - 1:
            return
        self._running = torch.profiler.profile(
            activities=self._activities(),
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.last - self.first + 1, repeat=1),
            record_shapes=True,
            acc_events=True,
        )
        self._running.start()
        self._clock.named = True

    def finish(self, step: int) -> str | None:
        """After a step; after the last one the files are written. Returns what the log should say of it."""
        if self._running is None:
            return None
        if step < self.last:
            self._running.step()
            return None
        return self._write()

    def close(self) -> None:
        """The run ends; what was profiled until here is dropped."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def _write(self) -> str:
        running, self._running = self._running, None
        assert running is not None
        self._clock.named = False
        running.stop()
        trace = self._folder / f"rank-{self._rank}-steps-{self.first}-{self.last}.json"
        running.export_chrome_trace(str(trace))
        written = [trace]
        averages = running.key_averages()
        for device in ("cpu", "cuda") if self._on_cuda else ("cpu",):
            table = trace.with_name(f"{trace.stem}-{device}.txt")
            table.write_text(averages.table(sort_by=f"self_{device}_time_total", row_limit=_ROWS))
            written.append(table)
        names = " and ".join(path.name for path in written[1:])
        return f"profiled steps {self.first} to {self.last}: wrote {trace} for ui.perfetto.dev, tables in {names}"

    def _activities(self) -> Sequence[torch.profiler.ProfilerActivity]:
        known = torch.profiler.ProfilerActivity
        return [known.CPU, known.CUDA] if self._on_cuda else [known.CPU]

"""Exports checkpoints of a run as Hugging Face folders, on rank 0.

No other rank waits, and there are no collectives: a thread writes a folder during training, and the last folder is
written after the process groups are closed. So neither a slow disk nor a failed export delays or ends the run."""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from megalite.checkpoint.files import run_in_daemon
from megalite.config.errors import NOT_SAVED, ConfigError
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.training.replica import Replica
from megalite.training.stopping import Ending, StopRequests, StopRun

_PATIENCE = 5.0  # seconds that a run which ends early waits for the thread


def check_export(config: RunConfig) -> None:
    """Raise ConfigError if no Hugging Face family implements this model. `vocab_size` must be set."""
    choose_family = imported("megalite.conversion.huggingface.families:choose_family")
    choose_family(config.model, config.training.seq_length, None)


class Exporter:
    """Exports the checkpoints of one start of a run; does nothing on ranks other than 0. `total`: the run's last step.

    Collectives: `Group.raise_on_all_ranks` in the constructor."""

    def __init__(
        self, replica: Replica, progress: Progress, *, total: int, stops: StopRequests, log: Callable[[str], None]
    ) -> None:
        c, topology = replica.config.checkpoint, replica.topology
        assert c.export_hf is not None and c.save is not None
        self._target, self._checkpoints, self._every = Path(c.export_hf), Path(c.save), c.save_hf_interval
        self._total, self._stops, self._log = total, stops, log
        self._ema = replica.config.optimizer.eval_ema
        self._is_rank_0 = topology.rank == 0
        self._running: tuple[int, float, Future[Path]] | None = None
        self._given_up = False
        self.held: set[int] = set()
        """Steps of checkpoints that an export is reading; they must not be removed."""
        with topology.world.errors_on_all_ranks():
            if self._is_rank_0 and progress.step < total:
                imported("megalite.conversion.output:check_target")(self._target)
        if progress.step > 0:
            self.saved(progress.step)  # the previous start may have been killed during this export

    def saved(self, step: int) -> None:
        """Start an export if the complete checkpoint of this step is due for one."""
        self.poll()
        if not self._is_rank_0 or not self._every or step % self._every or step >= self._total:
            return
        target = self._target.with_name(f"{self._target.name}-step-{step:07d}")
        if _is_taken(target):
            self._log(f"{target} exists already")
        elif self._running is not None:
            self._log(f"warning: step {self._running[0]} is still being exported; {self._by_hand(step, target)}")
        elif (self._checkpoints / f"step-{step:07d}").is_dir():
            self.held.add(step)
            work = run_in_daemon(lambda: self._write(step, target, self._advance), "export")
            self._running = step, time.monotonic(), work

    def poll(self) -> None:
        """Log the outcome of the export in the background once it has ended."""
        if self._running is not None and self._running[2].done():
            (step, started, work), self._running = self._running, None
            self.held.discard(step)
            try:
                self._log(f"exported {work.result()} in {time.monotonic() - started:.1f} s")
            except Exception as error:
                target = self._target.with_name(f"{self._target.name}-step-{step:07d}")
                self._log(f"warning: {_describe(error)}; training continues. {self._by_hand(step, target)}")

    def finish(self, ending: Ending) -> Ending:
        """Write the last folder if the run finished. Call it after the process groups are closed. Returns the ending;
        on rank 0 it contains the error of a failed export."""
        if not self._is_rank_0 or ending.status != "finished" or ending.step is None:
            self.give_up()
            return ending
        try:
            while self._running is not None:
                self._stop_if_asked(0)
                time.sleep(0.05)
                self.poll()
            if _is_taken(self._target):
                self._log(f"{self._target} exists already")
                return ending
            started = time.monotonic()
            path = self._write(ending.step, self._target, self._stop_if_asked)
            self._log(f"exported {path} in {time.monotonic() - started:.1f} s")
        except StopRun as stop:
            self._stops.leave()
            self.give_up()
            return stop.request.ending(ending.step, "the export is not complete: the same command continues it")
        except Exception as error:
            message = f"{_describe(error)}; {self._by_hand(ending.step, self._target)}"
            self._log(f"error: {message}")
            return dataclasses.replace(ending, reason=f"{ending.reason}; {message}", exit_code=NOT_SAVED)
        return ending

    def give_up(self) -> None:
        """Cancel the export in the background; a later export to the same folder reuses its finished files."""
        self._given_up, end = True, time.monotonic() + _PATIENCE
        while self._running is not None and not self._running[2].done() and time.monotonic() < end:
            time.sleep(0.01)

    def _write(self, step: int, target: Path, advance: Callable[[int], None]) -> Path:
        export = imported("megalite.conversion.huggingface.weights:export_checkpoint")
        path: Path = export(self._checkpoints, step, target, advance, self._log, self._ema)
        return path

    def _advance(self, count: int) -> None:
        if self._given_up:
            raise ConfigError("the run ends before it is written")

    def _stop_if_asked(self, count: int) -> None:
        if (request := self._stops.request) is not None:
            raise StopRun(request)

    def _by_hand(self, step: int, target: Path) -> str:
        weights = " --weights ema" if self._ema else ""
        return f"megalite convert {self._checkpoints} {target} --to huggingface --step {step}{weights} makes it"


def _is_taken(target: Path) -> bool:
    try:
        return target.exists() and not (target.is_dir() and not any(target.iterdir()))
    except OSError:  # writing there reports it
        return False


def _describe(error: Exception) -> str:
    return f"cannot export: {error}" if isinstance(error, (ConfigError, OSError)) else f"cannot export: {error!r}"

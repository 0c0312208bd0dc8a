"""Hugging Face folders of a run, made from its checkpoints by rank 0 alone.

No other rank waits, and no collective is made: a folder during training is written in a thread, the last one when the
process groups are closed. So neither a slow disk nor an export that fails can hold or end the run; what it saved stays."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint.save import BackgroundSave
from megalite.config.errors import ConfigError
from megalite.config.exit_codes import NOT_SAVED
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.training.replica import Replica
from megalite.training.stopping import Ending, StopRequests, StopRun

_PATIENCE = 5.0
"""Seconds that a run which ends early gives a thread to notice it."""


def check_export(config: RunConfig) -> None:
    """Raise ConfigError if no family of Hugging Face's is this model (its vocab_size is known)."""
    choose_family = imported("megalite.conversion.huggingface.families:choose_family")
    choose_family(config.model, config.training.seq_length, None)


class Exporter:
    """Of one start; on ranks other than 0 it does nothing. `total`: the last step of the run.

    Collectives: `Group.agree`, when it is made."""

    def __init__(
        self, replica: Replica, progress: Progress, *, total: int, stops: StopRequests, log: Callable[[str], None]
    ) -> None:
        c, topology = replica.config.checkpoint, replica.topology
        assert c.export_hf is not None and c.save is not None
        self._target, self._checkpoints, self._every = Path(c.export_hf), Path(c.save), c.save_hf_interval
        self._total, self._stops, self._log = total, stops, log
        self._ema = replica.config.optimizer.eval_ema
        self._here = topology.rank == 0
        self._under_way: tuple[int, float, BackgroundSave] | None = None
        self._given_up = False
        self.held: set[int] = set()
        """Steps with checkpoints that are being read: none of them is removed."""
        with topology.world.errors_on_all_ranks():
            if self._here and progress.step < total:
                imported("megalite.conversion.output:check_target")(self._target)
        if progress.step > 0:
            self.saved(progress.step)  # the start before this one may have been killed in the midst of it

    def saved(self, step: int) -> None:
        """A checkpoint of this step is complete."""
        self.poll()
        if not self._here or not self._every or step % self._every or step >= self._total:
            return
        target = self._target.with_name(f"{self._target.name}-step-{step:07d}")
        if _is_taken(target):
            self._log(f"{target} is there already")
        elif self._under_way is not None:
            self._log(f"warning: step {self._under_way[0]} is still being exported; {self._by_hand(step, target)}")
        elif (self._checkpoints / f"step-{step:07d}").is_dir():
            self.held.add(step)
            work = BackgroundSave(lambda: self._write(step, target, self._advance))
            self._under_way = step, time.monotonic(), work

    def poll(self) -> None:
        """Say how the export under way has ended, if it has."""
        if self._under_way is not None and self._under_way[2].done:
            (step, started, work), self._under_way = self._under_way, None
            self.held.discard(step)
            try:
                self._log(f"exported {work.result()} in {time.monotonic() - started:.1f} s")
            except Exception as error:
                target = self._target.with_name(f"{self._target.name}-step-{step:07d}")
                self._log(f"warning: {_said(error)}; training continues. {self._by_hand(step, target)}")

    def finish(self, ending: Ending) -> Ending:
        """The run has ended and its process groups are closed: write the last folder, if it came to its last step. Returns
        the ending; on rank 0 it says what went wrong."""
        if not self._here or ending.status != "finished" or ending.step is None:
            self.give_up()
            return ending
        try:
            while self._under_way is not None:
                self._stop_if_asked(0)
                time.sleep(0.05)
                self.poll()
            if _is_taken(self._target):
                self._log(f"{self._target} is there already")
                return ending
            started = time.monotonic()
            path = self._write(ending.step, self._target, self._stop_if_asked)
            self._log(f"exported {path} in {time.monotonic() - started:.1f} s")
        except StopRun as stop:
            self._stops.leave()
            self.give_up()
            return stop.request.ending(ending.step, "the export is not complete: the same command continues it")
        except Exception as error:
            said = f"{_said(error)}; {self._by_hand(ending.step, self._target)}"
            self._log(f"error: {said}")
            return dataclasses.replace(ending, reason=f"{ending.reason}; {said}", exit_code=NOT_SAVED)
        return ending

    def give_up(self) -> None:
        """End what is under way; what is finished of it is kept for the same export later."""
        self._given_up, end = True, time.monotonic() + _PATIENCE
        while self._under_way is not None and not self._under_way[2].done and time.monotonic() < end:
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
    except OSError:  # who writes there will say it
        return False


def _said(error: Exception) -> str:
    return f"cannot export: {error}" if isinstance(error, (ConfigError, OSError)) else f"cannot export: {error!r}"

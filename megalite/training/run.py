"""`Run`: a replica with its data and its reports, from its first step to its end."""

import time
from collections.abc import Callable

from megalite.config.batch import batch_size, steps_left
from megalite.config.errors import ConfigError, RankError
from megalite.config.exit_codes import DONE
from megalite.data.tokenizers.base import Tokenizer
from megalite.data_parallel.lost_peers import raise_if_peer_lost
from megalite.optimizers.schedules import Progress, Schedules
from megalite.topology.roll_call import RollCall
from megalite.training.checkpointing import resume
from megalite.training.ending import Ending, Standing
from megalite.training.evaluation import Evaluator, meet, misses_evaluation, read_batches
from megalite.training.flipped_bits import compare_replicas
from megalite.training.instruments import Instruments
from megalite.training.loss_spikes import LossSpikes
from megalite.training.non_finite import NonFiniteError
from megalite.training.replica import Replica
from megalite.training.reporter import Reporter
from megalite.training.save_folder import SaveFolder, make_saver, take_save_folder
from megalite.training.saving import SaveError, Saver, save_and_stop
from megalite.training.setup import (
    Loaders,
    describe,
    in_words,
    open_data,
    open_reports,
    prepare_data,
)
from megalite.training.step import Stepper
from megalite.training.stopping import StopRequests, StopRun
from megalite.training.throughput import SpeedMeter
from megalite.training.trace import trace_writer


class Run:
    """A replica with its data and its reports."""

    def __init__(
        self,
        replica: Replica,
        tokenizer: Tokenizer | None,
        log: Callable[[str], None],
        stops: StopRequests | None = None,
        standing: Standing | None = None,
        *,
        started: float | None = None,
        roll: RollCall | None = None,
    ) -> None:
        started = time.time() if started is None else started
        self.replica = replica
        self.stops, self.standing = stops or StopRequests(), standing or Standing()
        self.config = config = replica.config
        self.log = log
        self._roll = roll
        self.fingerprint = None if tokenizer is None else tokenizer.fingerprint()
        describe(config, replica, log)
        self._heartbeat = replica.topology.world.heartbeat
        self._apart = replica.strategy.scope.size < replica.topology.world.size
        """Ranks take steps without waiting for all others."""
        self.loaders: Loaders = open_data(replica, tokenizer)
        self.progress = resume(replica, tokenizer=self.fingerprint, log=log)
        self.standing.step = self.progress.step
        for note in (*self.loaders.notes, *prepare_data(replica, self.loaders, self.progress)):
            log(note)
        self.traces = trace_writer(config, replica.topology, first=self.progress.step, log=log)
        self.instruments = Instruments(
            replica, started=started, step=self.progress.step, apart=self._apart, log=log
        )
        tracer = self.instruments.tracer(None if self.traces is None else self.traces.timer)
        self.stepper = Stepper(replica, Schedules(config), tracer=tracer, phase=self.instruments.phase)
        step, samples = self.progress.step, self.progress.samples
        self.total = step + steps_left(config, step=step, samples=samples)
        validates = config.training.eval_interval is not None
        self.validation = (
            Evaluator(replica, self.stepper, self.loaders.valid, self.stops) if validates else None
        )
        # Ranks that read no data do not know whether there is a test split.
        tests = replica.topology.world.gather_json(self.loaders.test is not None, replica.topology.device)
        self.test = Evaluator(replica, self.stepper, self.loaders.test, self.stops) if any(tests) else None
        self.folder: SaveFolder = take_save_folder(replica, self.progress, stops=self.stops, log=log)
        self.saver: Saver = make_saver(
            replica, self.progress, total=self.total, tokenizer=self.fingerprint, log=log
        )
        for step in sorted(self.traces.steps if self.traces else ()):
            if step > self.total:
                log(f"step {step} is beyond the last step, {self.total}: it will not be traced")
        self.reporter = Reporter(
            log=log,
            sinks=open_reports(replica, self.instruments, step=self.progress.step, total=self.total, log=log),
            spikes=LossSpikes.resumed(config, reads=replica.topology.rank == 0),
            meter=SpeedMeter(
                config, world_size=replica.topology.layout.world_size, device=replica.topology.device
            ),
            log_interval=config.logging.log_interval,
            total_steps=self.total,
            device=replica.topology.device,
            instruments=self.instruments,
        )

    def go(self) -> Ending:
        """Step to the end of the run, or until it is asked to stop."""
        guard = self.folder.guard
        try:
            ending = self._to_the_end()
        except Exception as error:
            if guard is not None and self.stops.request is None:
                guard.failed(self.progress.step + 1, error)
            elif guard is not None:
                guard.left()
            raise
        else:
            if guard is not None:
                guard.ended()
            return ending
        finally:
            self.folder.release()

    def _to_the_end(self) -> Ending:
        try:
            ending = self._go()
            self.replica.strategy.finish()
            self._log_notes()
            return ending
        except (ConfigError, NonFiniteError) as error:
            if not isinstance(error, RankError):  # every rank is here: what is being saved was sound
                self._settle()
            raise
        except RuntimeError as error:
            if self._roll is not None:
                self._roll.explain(error)
            raise_if_peer_lost(error, self.replica.strategy, self.replica.topology.device)
            raise
        finally:
            for loader in (self.loaders.train, self.loaders.valid, self.loaders.test):
                if loader is not None:
                    loader.close()
            self.instruments.close(finished=self.progress.step >= self.total)
            self.reporter.close()
            self.replica.strategy.close()

    def _settle(self) -> None:
        try:
            self.saver.wait()
        except SaveError as error:
            self.log(f"warning: {error}")

    def _go(self) -> Ending:
        try:
            self.stops.started()
            return self._train()
        except StopRun as stop:
            # All ranks have agreed to stop here, between two steps or two batches of an evaluation.
            self.stops.leave()
            save = self.saver if self.standing.moved else None
            self._heartbeat.phase("saving", patient=True)
            with self.instruments.stall("save"):
                return save_and_stop(stop.request, save, self.progress, log=self.log)

    def _train(self) -> Ending:
        config = self.config
        if self.progress.step >= self.total:
            self.log(f"the checkpoint is at {in_words(config, self.progress)}: nothing to do")
            # It may have been stopped between its last checkpoint and this.
            if self.validation is not None and misses_evaluation(self.replica, step=self.progress.step):
                self._evaluate()
            self._evaluate_test()
            return Ending.finished(self.progress.step)
        self._prepare(self.progress)
        # Also on resuming: the first line then shows that the layout changed nothing.
        self._evaluate()
        self.reporter.restart_clock()
        while self.progress.step < self.total:
            self._step()
            step = self.progress.step
            if not self._apart:  # else the next save, where ranks meet, hears of the last one
                self.saver.poll()
            self._log_notes()
            compare_replicas(self.replica, step)
            if self._evaluates_at(step):
                self._evaluate()
            if config.checkpoint.save_interval and step % config.checkpoint.save_interval == 0:
                self._heartbeat.phase("saving", patient=True)
                with self.instruments.stall("save"):
                    self.saver.begin(self.progress)
                self.reporter.restart_clock()
                if self._apart and step < self.total:
                    meet(self.stops, self.replica.topology)
            if config.training.exit_interval and step % config.training.exit_interval == 0:
                self.log(f"stopping at step {step}: exit_interval is {config.training.exit_interval}")
                break
        self._heartbeat.phase("saving", patient=True)
        with self.instruments.stall("save"):
            self.saver.finish(self.progress)
        if self.progress.step == self.total:
            self._evaluate_test()
            return Ending.finished(self.progress.step)
        reason = f"exit_interval {config.training.exit_interval}"
        return Ending(status="stopped", reason=reason, step=self.progress.step, exit_code=DONE)

    def _log_notes(self) -> None:
        for notes in (
            self.loaders.index_notes,
            self.replica.strategy.notes,
            self.replica.optimizer.notes,
        ):
            while notes:
                self.log(notes.pop(0))

    def _step(self) -> None:
        try:
            self._take_step()
        except (ConfigError, NonFiniteError) as error:
            if self._apart and not isinstance(error, RankError):  # other ranks know nothing of it
                raise RankError(str(error), exit_code=error.exit_code) from error
            raise

    def _take_step(self) -> None:
        before, size = self.progress, batch_size(self.config, self.progress.samples)
        after = Progress(before.step + 1, before.samples + size)
        self._heartbeat.begin_step(after.step)
        microbatches, waited = read_batches(
            self.loaders.train,
            before.samples,
            size,
            topology=self.replica.topology,
            scope=self.replica.strategy.scope,
            stops=None if self._apart else self.stops,
        )
        # While the step computes, what comes after it is read.
        self._prepare(after)
        if self.traces is not None:
            self.traces.begin(after.step)
        self.instruments.begin(after.step)
        result = self.stepper.step(microbatches, before=before, batch_size=size)
        bubble = None
        if self.traces is not None:
            bubble = self.traces.finish(after.step, self.replica.schedule_of(size))
        self.progress = after
        self.standing.step, self.standing.moved = after.step, True
        self.reporter.step(
            result, after=after, batch_size=size, bubble_fraction=bubble, data_wait_seconds=waited
        )
        if self.instruments.finish(after.step):
            self.reporter.restart_clock()

    def _prepare(self, at: Progress) -> None:
        """Begin to read what the run needs once it stands there."""
        if self.loaders.train is not None and at.step < self.total:
            self.loaders.train.prefetch(at.samples, batch_size(self.config, at.samples))
        if self.validation is not None and (at == self.progress or self._evaluates_at(at.step)):
            self.validation.prepare()
        if self.test is not None and at.step == self.total:
            self.test.prepare()

    def _evaluates_at(self, step: int) -> bool:
        every = self.config.training.eval_interval
        return every is not None and (step % every == 0 or step == self.total)

    def _evaluate(self) -> None:
        if self.validation is not None:
            self._heartbeat.phase("evaluating")
            with self.instruments.stall("evaluation"):
                loss = self.validation.loss()
            self.reporter.evaluation(loss, at=self.progress)

    def _evaluate_test(self) -> None:
        if self.test is not None:
            self._heartbeat.phase("evaluating")
            self.test.prepare()
            with self.instruments.stall("evaluation"):
                loss = self.test.loss()
            self.reporter.evaluation(loss, at=self.progress, split="test")

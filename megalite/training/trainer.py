"""`Trainer`: one run, from its config to its end."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from megalite.config.batch import batch_size, steps_left
from megalite.config.errors import ConfigError, RankError
from megalite.config.exit_codes import DONE
from megalite.config.rules.run import ELASTIC
from megalite.config.run import RunConfig
from megalite.config.validate import check_rules, validate
from megalite.data_parallel.peers import raise_if_peer_lost
from megalite.optimizers.schedules import Progress, Schedules
from megalite.partition.pipeline import layout_of
from megalite.tokenizers.base import Tokenizer
from megalite.topology.group import Group
from megalite.topology.lost_peers import RollCall
from megalite.topology.topology import Launch, Topology, check_backend, start_distributed, stop_distributed
from megalite.training.ending import Ending, forget_ending, write_ending
from megalite.training.evaluation import Evaluator, meet, misses_evaluation, read_batches
from megalite.training.hang_watch import HangWatch, begin_watch
from megalite.training.instruments import Instruments
from megalite.training.memory import check_memory_history, explaining_out_of_memory, keep_freed_memory
from megalite.training.non_finite import NonFiniteError
from megalite.training.replica import Programs, Replica, build_modules, build_replica
from megalite.training.reporter import LossSpikes, Reporter, SpeedMeter
from megalite.training.resume import resume
from megalite.training.save_folder import make_saver, take_save_folder
from megalite.training.saving import SaveError, save_and_stop
from megalite.training.setup import describe, in_words, open_data, open_reports, prepare_data, resolve
from megalite.training.state_tensors import compare_replicas
from megalite.training.step import Stepper
from megalite.training.stopping import StopRequest, StopRequests, StopRun
from megalite.training.trace import trace_writer

TakeLayout = Callable[..., tuple[RunConfig, frozenset[str]]]
"""`planner.elastic.take_layout`: the layout of an elastic run for the ranks that have come."""


class Trainer:
    """Runs the training that a config describes, on all ranks of the launch; each of them makes one.

    Args:
        explicit: settings that the user gave by name.
        fixed: those of them that an elastic run must not change.
        log: prints a line; called on rank 0 alone.
        stops: what may end the run early, listening; default: nothing.
        watched: end this process if no rank progresses for hang_timeout_minutes.
        started: time of day from which the wall clock of goodput counts; default: now.
        take_layout: chooses the layout; an elastic run needs it.
    """

    replica: Replica
    progress: Progress
    """Where the run stands; set once it has looked for a checkpoint."""
    total: int
    """Steps at the end of the run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        explicit: frozenset[str] = frozenset(),
        fixed: frozenset[str] = frozenset(),
        log: Callable[[str], None],
        stops: StopRequests | None = None,
        watched: bool = False,
        started: float | None = None,
        take_layout: TakeLayout | None = None,
    ) -> None:
        self.config, self._explicit, self._fixed = config, explicit, fixed
        self._started = time.time() if started is None else started
        self._watched, self._take_layout = watched, take_layout
        self.launch = Launch.from_environment()
        self.log = log if self.launch.rank == 0 else _silent
        self.stops = stops or StopRequests()
        self._run_dir: Path | None = None
        if self.launch.rank == 0:
            self._run_dir = None if config.logging.run_dir is None else Path(config.logging.run_dir)
        else:
            self.stops.file = None
        self._step_reached: int | None = None
        """None until the run has looked for a checkpoint."""
        self._moved = False
        """A step was made in this start."""

    def fit(self) -> Ending:
        """Set up, train, and leave in `<run_dir>/exit.json` (rank 0) how it ended, also where this raises.

        Until its first step a run has nothing to lose: a stop then ends it wherever it is, also on a rank whose
        collective breaks because the others have left.

        Raises:
            ConfigError: bad input, or data that cannot be read; the same on every rank.
            NonFiniteError: the loss or a gradient became NaN or infinite, or weights that were to be saved.
            SaveError: a checkpoint could not be written.
            RestartLoopError: the same step has failed again and again.
        """
        forget_ending(self._run_dir)
        self.stops.last_words = lambda request, text: self._leave(request.ending(self._step_reached, text))
        try:
            with explaining_out_of_memory(self.config, self._explicit, self.launch), ExitStack() as stack:
                tokenizer = self._build(stack)
                self._open(stack, tokenizer)
                ending = self._train()
                self.replica.strategy.finish()
                self._log_notes()
        except StopRun as stop:
            ending = self._stopped_at_start(stop.request)
        except BaseException as error:
            request = self.stops.request
            if request is None or self._moved or not isinstance(error, RuntimeError):
                self._leave(Ending.failed(error, self._step_reached))
                raise
            ending = self._stopped_at_start(request)
        self._leave(ending)
        return ending

    # ---- setting up

    def _build(self, stack: ExitStack) -> Tokenizer | None:
        """The process groups, the resolved config and this rank's replica; returns the tokenizer."""
        asked, launch = self.config, self.launch
        parallel, device = asked.parallel, launch.device(asked.training.device)
        # Before any rank waits for another: what the settings alone make impossible is the same on all of them.
        if parallel.elastic:  # its layout is open until the ranks have met
            check_rules(asked, self._explicit, *ELASTIC).raise_all()
        else:
            validate(asked, launch.world_size, self._explicit, startable=True)
        check_backend(parallel.distributed_backend, device)
        check_memory_history(asked, device)
        if device.type == "cpu" and asked.compute.keep_cpu_memory:
            keep_freed_memory()
        timeout = parallel.distributed_timeout_minutes
        start_distributed(launch, device, backend=parallel.distributed_backend, timeout_minutes=timeout)
        watch = HangWatch()
        stack.push(lambda _, error, __: watch.close(agreed=_all_ranks_end(error)))
        stack.push(lambda _, error, __: stop_distributed(agreed=_all_ranks_end(error)))
        world = Group("world", tuple(range(launch.world_size)), launch.rank)
        if self._watched:
            run_dir = asked.logging.run_dir
            watch = begin_watch(
                parallel, launch=launch, world=world, device=device, run_dir=run_dir, log=self.log, say=self.stops.say
            )
            world = dataclasses.replace(world, heartbeat=watch.heartbeat)
        self._roll = RollCall.open(world, launch, device)
        found: Exception | None = None
        try:
            config, explicit = asked, self._explicit
            if parallel.elastic:
                assert self._take_layout is not None, "an elastic run needs the planner's take_layout"
                config, explicit = self._take_layout(
                    asked, explicit=explicit, fixed=self._fixed, world=world, device=device, log=self.log
                )
            config, tokenizer = resolve(config, world_size=launch.world_size, explicit=explicit)
            programs, layout = Programs(config), layout_of(config)
        except Exception as error:
            found = error
        world.agree(found, device)
        topology = Topology.create(
            layout,
            rank=launch.rank,
            device=device,
            backend=config.parallel.distributed_backend,
            timeout_minutes=config.parallel.distributed_timeout_minutes,
            heartbeat=watch.heartbeat,
        )
        try:
            modules = build_modules(config, topology, programs)
        except ConfigError as error:
            found = error  # of kernels, which one stage may need and another not
        world.agree(found, device)
        self.replica = build_replica(config, topology, programs, modules, asked=asked)
        self.config = self.replica.config
        return tokenizer

    def _open(self, stack: ExitStack, tokenizer: Tokenizer | None) -> None:
        """Data, the checkpoint that the run continues from, reports, and the folder that it saves to."""
        replica, log = self.replica, self.log
        config, topology = replica.config, replica.topology
        fingerprint = None if tokenizer is None else tokenizer.fingerprint()
        describe(config, replica, log)
        self._heartbeat = topology.world.heartbeat
        self._apart = replica.strategy.scope.size < topology.world.size
        """Ranks take steps without waiting for all others."""
        self.loaders = open_data(replica, tokenizer)
        self.progress = resume(replica, tokenizer=fingerprint, log=log)
        step, samples = self.progress.step, self.progress.samples
        self._step_reached = step
        for note in (*self.loaders.notes, *prepare_data(replica, self.loaders, self.progress)):
            log(note)
        self.traces = trace_writer(config, topology, first=step, log=log)
        self.instruments = Instruments(replica, started=self._started, step=step, apart=self._apart, log=log)
        tracer = self.instruments.tracer(None if self.traces is None else self.traces.timer)
        self.stepper = Stepper(replica, Schedules(config), tracer=tracer, phase=self.instruments.phase)
        self.total = step + steps_left(config, step=step, samples=samples)
        self.validation = None
        if config.training.eval_interval is not None:
            self.validation = Evaluator(replica, self.stepper, self.loaders.valid, self.stops)
        # Ranks that read no data do not know whether there is a test split.
        tests = topology.world.gather_json(self.loaders.test is not None, topology.device)
        self.test = Evaluator(replica, self.stepper, self.loaders.test, self.stops) if any(tests) else None
        self._folder = take_save_folder(replica, self.progress, stops=self.stops, log=log)
        self.saver = make_saver(replica, self.progress, total=self.total, tokenizer=fingerprint, log=log)
        for traced in sorted(self.traces.steps if self.traces else ()):
            if traced > self.total:
                log(f"step {traced} is beyond the last step, {self.total}: it will not be traced")
        self.reporter = Reporter(
            log=log,
            sinks=open_reports(replica, self.instruments, step=step, total=self.total, log=log),
            spikes=LossSpikes.resumed(config, reads=topology.rank == 0),
            meter=SpeedMeter(config, world_size=topology.layout.world_size, device=topology.device),
            log_interval=config.logging.log_interval,
            total_steps=self.total,
            device=topology.device,
            instruments=self.instruments,
        )
        # The last that is pushed runs first.
        stack.push(self._leave_folder)
        stack.callback(self._close)
        stack.push(self._explain)

    # ---- the loop

    def _train(self) -> Ending:
        """Step to the end of the run, or until it is asked to stop."""
        config = self.config
        try:
            self.stops.started()
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
                if not self._apart:  # otherwise the next save, where ranks meet, learns of the last one
                    self.saver.poll()
                self._log_notes()
                compare_replicas(self.replica, step)
                if self._evaluates_at(step):
                    self._evaluate()
                if config.checkpoint.save_interval and step % config.checkpoint.save_interval == 0:
                    self._save()
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
        except StopRun as stop:
            # All ranks have agreed to stop here, between two steps or two batches of an evaluation.
            self.stops.leave()
            saver = self.saver if self._moved else None
            self._heartbeat.phase("saving", patient=True)
            with self.instruments.stall("save"):
                return save_and_stop(stop.request, saver, self.progress, log=self.log)

    def _step(self) -> None:
        before, size = self.progress, batch_size(self.config, self.progress.samples)
        after = Progress(before.step + 1, before.samples + size)
        self._heartbeat.begin_step(after.step)
        try:
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
            self._step_reached, self._moved = after.step, True
            self.reporter.step(result, after=after, batch_size=size, bubble_fraction=bubble, data_wait_seconds=waited)
            if self.instruments.finish(after.step):
                self.reporter.restart_clock()
        except (ConfigError, NonFiniteError) as error:
            if self._apart and not isinstance(error, RankError):  # other ranks know nothing of it
                raise RankError(str(error), exit_code=error.exit_code) from error
            raise

    def _save(self) -> None:
        self._heartbeat.phase("saving", patient=True)
        with self.instruments.stall("save"):
            self.saver.begin(self.progress)
        self.reporter.restart_clock()
        if self._apart and self.progress.step < self.total:
            meet(self.stops, self.replica.topology)

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

    def _log_notes(self) -> None:
        for notes in (self.loaders.index_notes, self.replica.strategy.notes, self.replica.optimizer.notes):
            while notes:
                self.log(notes.pop(0))

    # ---- ending

    def _explain(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The run fails: finish the save under way, or find out which rank is gone."""
        if isinstance(error, (ConfigError, NonFiniteError)):
            if not isinstance(error, RankError):  # every rank is here: what is being saved was sound
                try:
                    self.saver.wait()
                except SaveError as failed:
                    self.log(f"warning: {failed}")
        elif isinstance(error, RuntimeError):
            if self._roll is not None:
                self._roll.explain(error)
            raise_if_peer_lost(error, self.replica.strategy, self.replica.topology.device)

    def _close(self) -> None:
        for loader in (self.loaders.train, self.loaders.valid, self.loaders.test):
            if loader is not None:
                loader.close()
        self.instruments.close(finished=self.progress.step >= self.total)
        self.reporter.close()
        self.replica.strategy.close()

    def _leave_folder(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guard = self._folder.guard
        try:
            if guard is not None and error is None:
                guard.ended()
            elif guard is not None and isinstance(error, Exception):
                if self.stops.request is None:
                    guard.failed(self.progress.step + 1, error)
                else:
                    guard.left()
        finally:
            self._folder.release()

    def _leave(self, ending: Ending) -> None:
        write_ending(self._run_dir, ending, make_folder=self._moved)

    def _stopped_at_start(self, request: StopRequest) -> Ending:
        said = "before the first step: there is nothing to save"
        self.log(f"{request.cause}: stopping {said}")
        return request.ending(self._step_reached, said)


def _all_ranks_end(error: BaseException | None) -> bool:
    """All ranks come to this end alike, so that they can leave in order."""
    if isinstance(error, (ConfigError, NonFiniteError)):
        return not isinstance(error, RankError)
    return error is None


def _silent(line: str) -> None:
    """Ranks other than 0."""

"""Runs one training from its config to its end (`Trainer`)."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from megalite.config.batch import batch_size, sequence_length, steps_left
from megalite.config.errors import DONE, ConfigError, RankError, TakenError
from megalite.config.registry import import_modules, imported
from megalite.config.rules.run import ELASTIC
from megalite.config.run import RunConfig, saves_at
from megalite.config.training import LOSSES
from megalite.config.validate import check_rules, validate
from megalite.optimizers.schedules import Progress, Schedules
from megalite.partition.pipeline import layout_of
from megalite.tokenizers.base import Tokenizer
from megalite.topology.group import Group
from megalite.topology.lost_peers import RollCall, raise_if_peer_lost
from megalite.topology.topology import Launch, Topology, check_backend, start_distributed, stop_distributed
from megalite.training.callbacks import Callback, Callbacks, write_line
from megalite.training.evaluation import Evaluator, ReadAhead, raise_stop_on_all_ranks, read_batches
from megalite.training.hang_watch import HangWatch, begin_watch
from megalite.training.instruments import Instruments
from megalite.training.memory import explaining_out_of_memory, keep_freed_memory
from megalite.training.non_finite import NonFiniteError
from megalite.training.records import last_records
from megalite.training.replica import Programs, Replica, build_modules, build_replica
from megalite.training.reporter import LossSpikes, Reporter, SpeedMeter
from megalite.training.setup import (
    Tokenize,
    describe,
    fetch_remote_files,
    open_data,
    open_reports,
    prepare_data,
    resolve,
    tokenize_texts,
    with_parts,
    within_device,
)
from megalite.training.step import Stepper
from megalite.training.stopping import Ending, RunFolder, StopRequest, StopRequests, StopRun

if TYPE_CHECKING:
    from megalite.training.copies import Exporter
    from megalite.training.save_folder import SaveFolder
    from megalite.training.saving import Saver

TakeLayout = Callable[..., tuple[RunConfig, frozenset[str]]]
"""Type of `planner.elastic.take_layout`, which chooses the layout of an elastic run for its number of ranks."""


class Trainer:
    """Runs the training that a config describes. Every rank of the launch creates one; without torchrun the run has one
    rank, as in a notebook: `Trainer(configure(...)).fit()`.

    Args:
        dataset: replaces `config.data`: a registered name or function, or an argument of `data.sources.as_source`, for
            training only; or a mapping from train, valid and test to such datasets.
        model: replaces `config.model.block`: a registered layer or its name; or `config.model`: a ModelConfig.
        optimizer: replaces `config.optimizer.optimizer`: a registered class or its name.
        loss: replaces `config.training.loss`: a registered function or its name.
        callbacks: called on rank 0.
        explicit: settings that the user set by name.
        fixed: the explicit settings that an elastic run must not change.
        log: called on rank 0; default: write to standard output.
        stops: requests that may end the run early, inside `listen`; default: none.
        watched: end this process if no rank progresses for hang_timeout_minutes.
        started: time of day at which the wall-clock time of goodput starts; default: now.
        take_layout: chooses the layout; required for an elastic run.
        tokenize: creates token files; required for a run on text."""

    replica: Replica
    progress: Progress
    """Steps and samples so far; set after the search for a checkpoint."""
    total: int
    """Number of the last step."""

    def __init__(
        self,
        config: RunConfig,
        *,
        dataset: Any = None,
        model: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        callbacks: Sequence[Callback] = (),
        explicit: frozenset[str] = frozenset(),
        fixed: frozenset[str] = frozenset(),
        log: Callable[[str], None] = write_line,
        stops: StopRequests | None = None,
        watched: bool = False,
        started: float | None = None,
        take_layout: TakeLayout | None = None,
        tokenize: Tokenize | None = None,
    ) -> None:
        if not isinstance(config, RunConfig):
            raise ConfigError(
                f"a Trainer takes a RunConfig, not a {type(config).__name__}; write Trainer(configure(**settings))"
            )
        import_modules(config.training.imports)
        self.config = with_parts(config, dataset=dataset, model=model, optimizer=optimizer, loss=loss)
        self._explicit, self._fixed = explicit, fixed
        self._started = time.time() if started is None else started
        self._watched, self._take_layout, self._tokenize = watched, take_layout, tokenize
        self.launch = Launch.from_environment()
        self.log = log if self.launch.rank == 0 else lambda line: None
        self._callbacks = Callbacks(callbacks, self)
        self.stops = stops or StopRequests()
        self._run_folder = RunFolder(config.logging.run_dir if self.launch.rank == 0 else None)
        if self.launch.rank != 0:
            self.stops.file = None
        self._step_reached: int | None = None
        """None until the search for a checkpoint."""
        self._stepped = False
        """This start has made a step."""

    def fit(self) -> Ending:
        """Set up and train. Write the ending to `<run_dir>/exit.json` on rank 0, also when this raises.

        Before its first step a run has nothing to save, so a stop request ends it at once, also on a rank with a
        collective that fails because the other ranks have left.

        Raises:
            ConfigError: bad input, or data that cannot be read; the same on every rank.
            NonFiniteError: the loss, a gradient, or a weight to be saved is NaN or infinite.
            SaveError: a checkpoint could not be written.
            RestartLoopError: the same step has failed in several starts."""
        with suppress(TakenError):  # `_build` raises it again, after errors in the settings
            self._run_folder.take()
        leave = self._run_folder.leave
        self.stops.before_forced_exit = lambda request, text: leave(request.ending(self._step_reached, text))
        try:
            with explaining_out_of_memory(self.config, self._explicit, self.launch), ExitStack() as stack:
                self._open(stack, self._build(stack))
                ending = self._train()
                self.replica.strategy.finish()
                self._log_notes()
                self._callbacks.end(ending)
            if self._exporter is not None:
                ending = self._exporter.finish(ending)
        except StopRun as stop:
            ending = self._stopped_at_start(stop.request)
        except BaseException as error:
            request = self.stops.request
            if request is None or self._stepped or not isinstance(error, RuntimeError):
                taken = isinstance(error, TakenError)  # exit.json belongs to the run that has locked the folder
                leave(None if taken else Ending.failed(error, self._step_reached))
                raise
            ending = self._stopped_at_start(request)
        leave(ending)
        return ending

    def stop(self, why: str) -> None:
        """Save and end the run on all ranks after the current step. For callbacks."""
        self.log(f"asked to stop: {why}")
        self.stops.asked = True

    # ---- setting up

    def _build(self, stack: ExitStack) -> Tokenizer | None:
        """Create the process groups, the resolved config and this rank's replica; return the tokenizer."""
        config, explicit, launch = self.config, self._explicit, self.launch
        parallel, device = config.parallel, launch.device(config.training.device)
        # Check the settings, which are equal on all ranks, before any rank waits for another.
        if parallel.elastic:  # the layout follows after the ranks have connected
            check_rules(config, explicit, *ELASTIC).raise_all()
        else:
            validate(config, launch.world_size, explicit, startable=True)
        check_backend(parallel.distributed_backend, device)
        if config.logging.record_memory_history and device.type != "cuda":
            raise ConfigError(
                f"record_memory_history has no effect on {device.type}: only CUDA's allocator keeps one; remove it"
            )
        if device.type == "cpu" and config.compute.keep_cpu_memory:
            keep_freed_memory()
        timeout = parallel.distributed_timeout_minutes
        launch = launch.recorded(parallel.distributed_backend, device, config.logging.run_dir)
        start_distributed(launch, device, backend=parallel.distributed_backend, timeout_minutes=timeout)
        watch = HangWatch()
        # Closed last, because leaving the process groups can hang too.
        stack.push(lambda _, error, __: watch.close(agreed=_all_ranks_end(error)))
        stack.push(lambda _, error, __: stop_distributed(agreed=_all_ranks_end(error)))
        world = Group("world", tuple(range(launch.world_size)), launch.rank, device=device)
        if self._watched:
            run_dir, say = config.logging.run_dir, self.stops.say
            watch = begin_watch(parallel, launch=launch, world=world, run_dir=run_dir, log=self.log, say=say)
            world = dataclasses.replace(world, heartbeat=watch.heartbeat)
        self._roll = RollCall.open(world, launch)
        with world.errors_on_all_ranks():
            self._run_folder.take()
        if config.checkpoint.load is not None:
            config = imported("megalite.training.resume:choose_checkpoint")(config, world=world, log=self.log)
        config = fetch_remote_files(config, world=world, log=self.log, explicit=explicit)
        with world.errors_on_all_ranks(Exception):
            if parallel.elastic:
                assert self._take_layout is not None, "an elastic run needs the planner's take_layout"
                config, explicit = self._take_layout(
                    config, explicit=explicit, fixed=self._fixed, world=world, log=self.log
                )
            config, tokenizer = resolve(config, world_size=launch.world_size, explicit=explicit)
            if config.checkpoint.export_hf is not None:
                imported("megalite.training.copies:check_export")(config)
        config = tokenize_texts(config, self._tokenize, world=world, log=self.log)
        config = within_device(config, world=world, log=self.log)
        with world.errors_on_all_ranks(Exception):
            programs, layout = Programs(config), layout_of(config)
        group_type = (
            imported("megalite.topology.sanitizer:SanitizedGroup") if parallel.sanitize_communication else Group
        )
        topology = Topology.create(
            layout,
            rank=launch.rank,
            device=device,
            backend=config.parallel.distributed_backend,
            timeout_minutes=config.parallel.distributed_timeout_minutes,
            heartbeat=watch.heartbeat,
            group_type=group_type,
            shared_memory=parallel.shared_memory_collectives,
            separate_gathers=config.parallel.strategy.shards_parameters,
            max_ctas=parallel.max_ctas,
        )
        with world.errors_on_all_ranks():  # stages may need different kernels
            modules = build_modules(config, topology, programs)
        self.replica = build_replica(config, topology, programs, modules, asked=self.config)
        self.config = config
        return tokenizer

    def _open(self, stack: ExitStack, tokenizer: Tokenizer | None) -> None:
        """Open data, load a checkpoint, and open reports and the folder for checkpoints."""
        replica, config, log = self.replica, self.config, self.log
        topology = replica.topology
        fingerprint = None if tokenizer is None else tokenizer.fingerprint()
        describe(replica, log)
        self._heartbeat = topology.world.heartbeat
        independent = self._independent = replica.strategy.scope.size < topology.world.size
        """Whether ranks step without waiting for all others."""
        self.loaders, self._reading = open_data(replica, tokenizer), ReadAhead(topology.device)
        self.progress = Progress(0, 0)
        if config.checkpoint.load is not None:
            self.progress = imported("megalite.training.resume:resume")(replica, tokenizer=fingerprint, log=log)
        step = self._step_reached = self.progress.step
        for note in (*self.loaders.notes, *prepare_data(replica, self.loaders, self.progress)):
            log(note)
        self.instruments = Instruments(replica, started=self._started, step=step, independent=independent, log=log)
        self.stepper = Stepper(replica, Schedules(config), tracer=self.instruments.tracer, phase=self.instruments.phase)
        self.total = step + steps_left(config, step=step, samples=self.progress.samples)
        # Ranks that read no data have no loaders: ask all ranks for a test split, and the size of the validation split.
        valid = self.loaders.valid
        found = topology.world.gather_json([self.loaders.test is not None, None if valid is None else valid.samples])
        tests, samples = zip(*found, strict=True)
        evaluates, whole = config.training.eval_interval is not None, max(filter(None, samples), default=None)
        self.validation = Evaluator(replica, self.stepper, valid, self.stops, whole) if evaluates else None
        self.test = Evaluator(replica, self.stepper, self.loaders.test, self.stops) if any(tests) else None
        self._folder: SaveFolder | None = None
        stack.push(lambda _, error, __: self._leave_folder(error))  # runs last, after waiting for the saver
        self._open_folder(fingerprint)
        self.reporter = Reporter(
            log=log,
            sinks=[*open_reports(replica, self.instruments, step=step, total=self.total, log=log), self._callbacks],
            spikes=LossSpikes.resumed(config) if topology.rank == 0 else None,
            meter=SpeedMeter(config, world_size=topology.world.size, device=topology.device),
            log_interval=config.logging.log_interval,
            total_steps=self.total,
            skips=config.training.iterations_to_skip,
            device=topology.device,
            is_cross_entropy=config.training.loss in LOSSES.builtin,
            instruments=self.instruments,
        )
        stack.callback(self._close)
        stack.push(lambda _, error, __: self._explain(error))
        stack.push(lambda _, error, __: self._exporter.give_up() if error and self._exporter else None)
        self._callbacks.start()

    def _open_folder(self, tokenizer: str | None) -> None:
        with self.replica.topology.world.errors_on_all_ranks():
            self.stops.refuse_old_file()
            self._run_folder.take(make=True)
        self.saver: Saver | None = None
        self._exporter: Exporter | None = None
        if self.config.checkpoint.save is None:
            self.log("no checkpoint will be saved; --save-interval N with --run-dir (or --save) would save some")
        else:
            self._folder = imported("megalite.training.save_folder:SaveFolder")(
                self.replica, self.progress, log=self.log
            )
            self.saver = self._folder.make_saver(total=self.total, tokenizer=tokenizer)
            self.saver.saved = self._callbacks.checkpoint
        if self.config.checkpoint.export_hf is not None:
            assert self.saver is not None, "export_hf sets `save`"
            self._exporter = self.saver.exporter = imported("megalite.training.copies:Exporter")(
                self.replica, self.progress, total=self.total, stops=self.stops, log=self.log
            )

    # ---- the loop

    def _train(self) -> Ending:
        """Run all steps, or until a stop request."""
        try:
            self.stops.started()
            if self.progress.step >= self.total:
                return self._find_nothing_to_do()
            self._prepare(self.progress)
            # Evaluate also after resuming: the first line shows that a new layout changed nothing.
            self._evaluate()
            self.reporter.restart_clock()
            while self.progress.step < self.total:
                self._step()
                if self._after_step(self.progress.step):
                    break
            self._save(last=True)
            if self.progress.step == self.total:
                self._evaluate_test()
                return Ending.finished(self.progress.step)
            reason = f"exit_interval {self.config.training.exit_interval}"
            return Ending(status="stopped", reason=reason, step=self.progress.step, exit_code=DONE)
        except StopRun as stop:
            # All ranks have agreed to stop, between two steps or two batches of an evaluation.
            self.stops.leave()
            return self._save_and_stop(stop.request)

    def _find_nothing_to_do(self) -> Ending:
        """Finish a run with a checkpoint at or after its end: make evaluations that a stop may have prevented."""
        training, topology, step = self.config.training, self.replica.topology, self.progress.step
        where = f"step {step} of {training.train_iters}"
        if training.train_iters is None:
            where = f"step {step}, {self.progress.samples} samples of {training.train_samples}"
        self.log(f"the checkpoint is at {where}: nothing to do")
        if self.validation is not None:
            run_dir = self.config.logging.run_dir if topology.rank == 0 else None
            known = run_dir is None or any(record["step"] == step for record in last_records(run_dir, "valid"))
            if not topology.world.broadcast_json(known):
                self._evaluate()
        self._evaluate_test()
        return Ending.finished(step)

    def _step(self) -> None:
        before, size = self.progress, batch_size(self.config, self.progress.samples)
        after = Progress(before.step + 1, before.samples + size)
        self._heartbeat.begin_step(after.step)
        try:
            microbatches, waited = read_batches(
                *(self.loaders.train, before.samples, size, sequence_length(self.config, before.step)),
                topology=self.replica.topology,
                scope=self.replica.strategy.scope,
                stops=None if self._independent else self.stops,
            )
            self._reading.waited(waited)
            read_next = partial(self._prepare, after)
            if after.step in self.config.training.iterations_to_skip:
                read_next()
                self.replica.scaler.skip(size)
                self.progress, self._step_reached, self._stepped = after, after.step, True
                self.instruments.count_step(after.step, seconds=0.0, waited=waited)
                self.reporter.restart_clock()
                self.log(f"step {after.step}: skipped with its {size} samples, as iterations_to_skip says")
                return
            if self._reading.early:
                read_next()
            self.instruments.begin(after.step)
            result = self.stepper.step(microbatches, before=before, batch_size=size, meanwhile=read_next)
            traces = self.instruments.traces
            bubble = None if traces is None else traces.finish(after.step, self.replica.schedule_of(size))
            self.progress, self._step_reached, self._stepped = after, after.step, True
            self.reporter.step(
                result,
                after=after,
                batch_size=size,
                bubble_fraction=bubble,
                data_wait_seconds=waited,
                params_norm=self.stepper.params_norm if self.config.logging.log_params_norm else None,
            )
            if self.instruments.finish(after.step):
                self.reporter.restart_clock()
        except (ConfigError, NonFiniteError) as error:
            if self._independent and not isinstance(error, RankError):  # other ranks do not raise it
                raise RankError(str(error), exit_code=error.exit_code) from error
            raise

    def _after_step(self, step: int) -> bool:
        """Save, compare replicas and evaluate if due. Returns True if the run must stop after this step."""
        t = self.config.training
        if self._exporter is not None:
            self._exporter.poll()
        if self.saver is not None and not self._independent:  # otherwise the next save completes the last one
            self.saver.poll()
        self._log_notes()
        compares = self.config.data_parallel.check_replicas_interval
        if compares and step % compares == 0:
            imported("megalite.training.state_tensors:compare_replicas")(self.replica, step)
        if self._evaluates_at(step):
            self._evaluate()
        if saves_at(self.config, step):
            self._save()
        if t.exit_interval and step % t.exit_interval == 0:
            self.log(f"stopping at step {step}: exit_interval is {t.exit_interval}")
            return True
        return False

    def _save(self, *, last: bool = False) -> None:
        if self.saver is not None:
            self._heartbeat.phase("saving", patient=True)
            with self.instruments.stall("save"):
                (self.saver.finish if last else self.saver.begin)(self.progress)
            self.reporter.restart_clock()
        if not last and self._independent and self.progress.step < self.total:
            raise_stop_on_all_ranks(self.stops, self.replica.topology)

    def _save_and_stop(self, request: StopRequest) -> Ending:
        """Save and stop after all ranks have agreed on it."""
        step = self.progress.step
        if not self._stepped:
            outcome = "no step has been made since the start: there is nothing to save"
        elif self.saver is None:
            outcome = "nothing is saved, since neither --save nor --save-interval was given"
        else:
            outcome = f"saved in {self.saver.name}"
            self.log(f"{request.cause}: saving step {step}, and stopping")
            self._save(last=True)
        self.log(f"{request.cause}: stopped at step {step}; {outcome}")
        return request.ending(step, outcome)

    def _prepare(self, at: Progress) -> None:
        """Prefetch the data that the run reads after progress `at`."""
        if self.loaders.train is not None and at.step < self.total:
            size, length = batch_size(self.config, at.samples), sequence_length(self.config, at.step)
            self.loaders.train.prefetch(at.samples, size, length)
        if self.validation is not None and (at == self.progress or self._evaluates_at(at.step)):
            self.validation.prepare()
        if self.test is not None and at.step == self.total:
            self.test.prepare()

    def _evaluates_at(self, step: int) -> bool:
        every = self.config.training.eval_interval
        return every is not None and (step % every == 0 or step == self.total)

    def _evaluate(self) -> None:
        if self.validation is not None:
            self._report_loss(self.validation, "valid")

    def _evaluate_test(self) -> None:
        if self.test is not None:
            self.test.prepare()
            self._report_loss(self.test, "test")

    def _report_loss(self, evaluator: Evaluator, split: str) -> None:
        self._heartbeat.phase("evaluating")
        with self.instruments.stall("evaluation"):
            loss = evaluator.loss()
        self.reporter.evaluation(loss, at=self.progress, split=split)

    def _log_notes(self) -> None:
        for notes in (self.loaders.index_notes, self.replica.strategy.notes, self.replica.optimizer.notes):
            while notes:
                self.log(notes.pop(0))

    # ---- ending

    def _explain(self, error: BaseException | None) -> None:
        """After an error, complete a background save, or find out which rank is lost."""
        if isinstance(error, (ConfigError, NonFiniteError)):
            raised_by_all = not isinstance(error, RankError) or self.replica.topology.world.size == 1
            if self.saver is not None and raised_by_all:  # the copy is valid
                try:
                    self.saver.wait()
                except ConfigError as failed:
                    self.log(f"warning: {failed}")
        elif isinstance(error, RuntimeError):
            if self._roll is not None:
                self._roll.explain(error)
            strategy = self.replica.strategy
            raise_if_peer_lost(error, strategy.groups.world, strategy.groups.between_replicas, step=strategy.step)

    def _close(self) -> None:
        for loader in (self.loaders.train, self.loaders.valid, self.loaders.test):
            if loader is not None:
                loader.close()
        self.instruments.close(finished=self.progress.step >= self.total)
        self.reporter.close()
        self.replica.strategy.close()

    def _leave_folder(self, error: BaseException | None) -> None:
        if self._folder is not None:
            at_start = self.stops.starting and isinstance(error, ConfigError)  # due to settings or disk, not to a step
            self._folder.leave(error, step=self.progress.step + 1, stopping=at_start or self.stops.request is not None)

    def _stopped_at_start(self, request: StopRequest) -> Ending:
        outcome = "before the first step: there is nothing to save"
        self.log(f"{request.cause}: stopping {outcome}")
        return request.ending(self._step_reached, outcome)


def _all_ranks_end(error: BaseException | None) -> bool:
    """Return whether all ranks end in this way, so that they can shut down together."""
    if isinstance(error, (ConfigError, NonFiniteError)):
        return not isinstance(error, RankError)
    return error is None

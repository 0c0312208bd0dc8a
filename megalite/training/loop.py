"""The run: set up, resume, step, evaluate, save, until done."""

import os
from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint.commit import correct_latest, remove_unfinished
from megalite.checkpoint.files import lock_folder
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.config.batch import batch_size, steps_left
from megalite.config.errors import ConfigError, RankError
from megalite.config.run import RunConfig
from megalite.data.tokenizers.base import Tokenizer
from megalite.data_parallel.lost_peers import raise_if_peer_lost
from megalite.data_parallel.replica_check import check_replicas
from megalite.optimizers.schedules import Progress, Schedules
from megalite.planner.pipeline import layout_of
from megalite.topology.group import Group
from megalite.topology.roll_call import RollCall
from megalite.topology.topology import Launch, Topology, check_backend, start_distributed, stop_distributed
from megalite.training.checkpointing import load, refuse_foreign_checkpoints, same_folder
from megalite.training.cpu_memory import keep_freed_memory
from megalite.training.elastic import check_start, take_layout
from megalite.training.evaluation import Evaluator, read_batches
from megalite.training.programs import Programs
from megalite.training.replica import Replica, build_modules, build_replica
from megalite.training.reporter import Reporter
from megalite.training.saving import SaveError, Saver
from megalite.training.setup import (
    Loaders,
    describe,
    make_save_folder,
    open_data,
    open_sinks,
    prepare_data,
    resolve,
)
from megalite.training.sinks import MetricSink
from megalite.training.step import NonFiniteError, Stepper
from megalite.training.throughput import SpeedMeter
from megalite.training.trace import TraceWriter


def train(
    config: RunConfig,
    *,
    explicit: frozenset[str],
    fixed: frozenset[str] = frozenset(),
    log: Callable[[str], None],
) -> None:
    """Run the training that `config` describes, on all ranks of the launch; each of them calls this.

    Args:
        explicit: settings that the user gave by name.
        fixed: those of them that an elastic run must not change.
        log: prints a line; called on rank 0 alone.

    Raises:
        ConfigError: bad input, or data that cannot be read; the same on every rank.
        NonFiniteError: the loss or a gradient became NaN or infinite.
        SaveError: a checkpoint could not be written.
    """
    launch = Launch.from_environment()
    device = launch.device(config.training.device)
    parallel = config.parallel
    # Before any rank waits for another: what the settings alone make impossible is the same on all of them.
    check_start(config, launch.world_size, explicit)
    check_backend(parallel.distributed_backend, device)
    if device.type == "cpu" and config.compute.keep_cpu_memory:
        keep_freed_memory()
    start_distributed(
        launch,
        device,
        backend=parallel.distributed_backend,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )
    agreed = False
    try:
        world = Group("world", tuple(range(launch.world_size)), launch.rank)
        roll = RollCall.open(world, launch, device)
        found: Exception | None = None
        try:
            config, explicit = take_layout(
                config, explicit=explicit, fixed=fixed, world=world, device=device, log=log
            )
            config, tokenizer = resolve(config, world_size=launch.world_size, explicit=explicit)
            programs, layout = Programs(config), layout_of(config)
        except Exception as error:
            found = error
        world.agree(found, device)
        p = config.parallel
        topology = Topology.create(
            layout,
            rank=launch.rank,
            device=device,
            backend=p.distributed_backend,
            timeout_minutes=p.distributed_timeout_minutes,
        )
        try:
            modules = build_modules(config, topology, programs)
        except ConfigError as error:
            found = error  # of kernels, which one stage may need and another not
        world.agree(found, device)
        replica = build_replica(config, topology, programs, modules)
        _Run(replica, tokenizer, log if launch.rank == 0 else _silent, roll).go()
        agreed = True
    except (ConfigError, NonFiniteError) as error:
        agreed = not isinstance(error, RankError)
        raise
    finally:
        stop_distributed(agreed=agreed)


def _silent(line: str) -> None:
    """Ranks other than 0."""


class _Run:
    """A replica with its data and its reports."""

    def __init__(
        self,
        replica: Replica,
        tokenizer: Tokenizer | None,
        log: Callable[[str], None],
        roll: RollCall | None = None,
    ) -> None:
        self.replica = replica
        self.config = config = replica.config
        self.log = log
        self._roll = roll
        self.fingerprint = None if tokenizer is None else tokenizer.fingerprint()
        describe(config, replica, log)
        self._apart = replica.strategy.scope.size < replica.topology.world.size
        """Ranks take steps without waiting for all others."""
        self.loaders: Loaders = open_data(replica, tokenizer)
        self.progress = self._resume()
        for note in (*self.loaders.notes, *prepare_data(replica, self.loaders, self.progress)):
            log(note)
        self.traces = self._traces()
        tracer = None if self.traces is None else self.traces.timer
        self.stepper = Stepper(replica, Schedules(config), tracer=tracer)
        step, samples = self.progress.step, self.progress.samples
        self.total = step + steps_left(config, step=step, samples=samples)
        validates = config.training.eval_interval is not None
        self.validation = Evaluator(replica, self.stepper, self.loaders.valid) if validates else None
        # Ranks that read no data do not know whether there is a test split.
        tests = replica.topology.world.gather_json(self.loaders.test is not None, replica.topology.device)
        self.test = Evaluator(replica, self.stepper, self.loaders.test) if any(tests) else None
        self._lock: int | None = None
        self.saver = self._make_saver()
        for step in sorted(self.traces.steps if self.traces else ()):
            if step > self.total:
                log(f"step {step} is beyond the last step, {self.total}: it will not be traced")
        self.reporter = Reporter(
            log=log,
            sinks=self._open_sinks(),
            meter=SpeedMeter(
                config, world_size=replica.topology.layout.world_size, device=replica.topology.device
            ),
            log_interval=config.logging.log_interval,
            total_steps=self.total,
            device=replica.topology.device,
        )

    def _resume(self) -> Progress:
        checkpoint = self.config.checkpoint
        if checkpoint.load is None:
            return Progress(0, 0)
        try:
            return load(self.replica, Path(checkpoint.load), tokenizer=self.fingerprint, log=self.log)
        except CheckpointMissing as error:
            if not checkpoint.fresh_if_missing:
                raise CheckpointMissing(
                    f"{error}; give --load the folder of a run's checkpoints, or add --fresh-if-missing to start from "
                    "step 0 where there are none"
                ) from None
            self.log(f"no checkpoint in {checkpoint.load}: starting from step 0, as fresh_if_missing says")
            return Progress(0, 0)

    def _make_saver(self) -> Saver:
        """Ready to save; there is a folder for it, with room."""
        config, topology = self.config, self.replica.topology
        found: ConfigError | None = None
        if topology.rank == 0:
            try:
                make_save_folder(config)
                self._lock_save_folder()
                refuse_foreign_checkpoints(config, self.progress)
                if self._goes_on() and self.progress.step > 0:
                    correct_latest(Path(str(config.checkpoint.save)), self.progress.step)
                if config.checkpoint.save is not None:
                    remove_unfinished(Path(config.checkpoint.save))
            except ConfigError as error:
                found = error
            except OSError as error:
                found = ConfigError(f"cannot write to {config.checkpoint.save}: {error.strerror}")
        topology.world.agree(found, topology.device)
        saver = Saver(self.replica, tokenizer=self.fingerprint, log=self.log)
        if self._goes_on():
            saver.saved_at = self.progress.step
        first, every = self.progress.step + 1, config.checkpoint.save_interval
        steps = [step for step in range(first, self.total + 1) if every and step % every == 0]
        if first <= self.total:
            saver.preflight(steps if steps[-1:] == [self.total] else [*steps, self.total])
        return saver

    def _lock_save_folder(self) -> None:
        """Two runs that save into one folder would remove each other's unfinished files (rank 0)."""
        folder = self.config.checkpoint.save
        if folder is None:
            self.log(
                "no checkpoint will be saved; --save-interval N with --run-dir (or --save) would save some"
            )
            return
        try:
            self._lock = lock_folder(Path(folder))
        except BlockingIOError:
            raise ConfigError(
                f"another run is saving into {folder}: wait for it, end it (also ranks that a killed launcher has left "
                "behind), or give another --save"
            ) from None

    def _goes_on(self) -> bool:
        """The run has resumed from the folder that it saves to."""
        checkpoint = self.config.checkpoint
        return same_folder(checkpoint.load, checkpoint.save) and not checkpoint.finetune

    def _traces(self) -> TraceWriter | None:
        logging = self.config.logging
        if not logging.trace:
            return None
        assert logging.run_dir is not None, "validate() asks for it"
        steps = [self.progress.step + step for step in logging.trace_steps]
        folder = Path(logging.run_dir)
        return TraceWriter(self.replica.topology, steps=steps, folder=folder, log=self.log)

    def _open_sinks(self) -> list[MetricSink]:
        """Rank 0's sinks; the others have none, but hear of it if rank 0 cannot write."""
        topology = self.replica.topology
        sinks: list[MetricSink] = []
        found: ConfigError | None = None
        if topology.rank == 0:
            try:
                sinks = open_sinks(self.config, step=self.progress.step, log=self.log)
            except ConfigError as error:
                found = error
        topology.world.agree(found, topology.device)
        return sinks

    def go(self) -> None:
        """Step to the end of the run."""
        try:
            self._go()
            self.replica.strategy.finish()
            self._log_notes()
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
            self.reporter.close()
            self.replica.strategy.close()
            if self._lock is not None:
                os.close(self._lock)

    def _settle(self) -> None:
        try:
            self.saver.wait()
        except SaveError as error:
            self.log(f"warning: {error}")

    def _go(self) -> None:
        config = self.config
        if self.progress.step >= self.total:
            self.log(f"the checkpoint is at {self._standing()}: nothing to do")
            # It may have been stopped between its last checkpoint and this.
            self._evaluate_test()
            return
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
            every = config.data_parallel.check_replicas_interval
            if every and step % every == 0 and self.replica.strategy.replicas_agree:
                check_replicas(self.replica.strategy, step=step, world=self.replica.topology.world)
            if self._evaluates_at(step):
                self._evaluate()
            if config.checkpoint.save_interval and step % config.checkpoint.save_interval == 0:
                self.saver.begin(self.progress)
                self.reporter.restart_clock()
            if config.training.exit_interval and step % config.training.exit_interval == 0:
                self.log(f"stopping at step {step}: exit_interval is {config.training.exit_interval}")
                break
        self.saver.finish(self.progress)
        if self.progress.step == self.total:
            self._evaluate_test()

    def _log_notes(self) -> None:
        for notes in (
            self.loaders.index_notes,
            self.replica.strategy.notes,
            self.replica.optimizer.notes,
        ):
            while notes:
                self.log(notes.pop(0))

    def _standing(self) -> str:
        """Where the checkpoint is in the run as it was asked for: it may be beyond it."""
        training, (step, samples) = self.config.training, (self.progress.step, self.progress.samples)
        if training.train_iters is not None:
            return f"step {step} of {training.train_iters}"
        return f"step {step}, {samples} samples of {training.train_samples}"

    def _step(self) -> None:
        try:
            self._take_step()
        except (ConfigError, NonFiniteError) as error:
            if self._apart and not isinstance(error, RankError):  # other ranks know nothing of it
                raise RankError(str(error)) from error
            raise

    def _take_step(self) -> None:
        before, size = self.progress, batch_size(self.config, self.progress.samples)
        after = Progress(before.step + 1, before.samples + size)
        microbatches, waited = read_batches(
            self.loaders.train,
            before.samples,
            size,
            topology=self.replica.topology,
            scope=self.replica.strategy.scope,
        )
        # While the step computes, what comes after it is read.
        self._prepare(after)
        if self.traces is not None:
            self.traces.begin(after.step)
        result = self.stepper.step(microbatches, before=before, batch_size=size)
        bubble = None
        if self.traces is not None:
            bubble = self.traces.finish(after.step, self.replica.schedule_of(size))
        self.progress = after
        self.reporter.step(
            result, after=after, batch_size=size, bubble_fraction=bubble, data_wait_seconds=waited
        )

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
            self.reporter.evaluation(self.validation.loss(), at=self.progress)

    def _evaluate_test(self) -> None:
        if self.test is not None:
            self.test.prepare()
            self.reporter.evaluation(self.test.loss(), at=self.progress, split="test")

"""`train`: set up, then hand over to a `Run`; however it ends, `exit.json` says how."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from megalite.config.errors import ConfigError, RankError
from megalite.config.run import RunConfig
from megalite.planner.pipeline import layout_of
from megalite.topology.group import Group
from megalite.topology.roll_call import RollCall
from megalite.topology.topology import Launch, Topology, check_backend, start_distributed, stop_distributed
from megalite.training.cpu_memory import keep_freed_memory
from megalite.training.elastic import check_start, take_layout
from megalite.training.ending import Ending, Standing
from megalite.training.hang_watch import HangWatch, begin_watch
from megalite.training.leaving import run_and_tell
from megalite.training.non_finite import NonFiniteError
from megalite.training.out_of_memory import check_memory_history, explaining_out_of_memory
from megalite.training.programs import Programs
from megalite.training.replica import build_modules, build_replica
from megalite.training.run import Run
from megalite.training.setup import (
    resolve,
)
from megalite.training.stopping import StopRequests


def train(
    config: RunConfig,
    *,
    explicit: frozenset[str],
    fixed: frozenset[str] = frozenset(),
    log: Callable[[str], None],
    stops: StopRequests | None = None,
    watched: bool = False,
) -> Ending:
    """Run the training that `config` describes, on all ranks of the launch; each of them calls this.

    Rank 0 leaves how it ended in `<run_dir>/exit.json`, also where it raises.

    Args:
        explicit: settings that the user gave by name.
        fixed: those of them that an elastic run must not change.
        log: prints a line; called on rank 0 alone.
        stops: what may end the run early, listening; default: nothing.
        watched: end this process if no rank progresses for hang_timeout_minutes.

    Raises:
        ConfigError: bad input, or data that cannot be read; the same on every rank.
        NonFiniteError: the loss or a gradient became NaN or infinite, or weights that were to be saved.
        SaveError: a checkpoint could not be written.
        RestartLoopError: the same step has failed again and again.
    """
    started = time.time()
    launch = Launch.from_environment()
    first, standing = launch.rank == 0, Standing()
    run_dir = Path(config.logging.run_dir) if first and config.logging.run_dir is not None else None
    stops = stops or StopRequests()
    if not first:
        stops.file = None
    log = log if first else _silent

    def run() -> Ending:
        with explaining_out_of_memory(config, explicit, launch):
            return _train(
                config, launch, explicit, log, stops, standing, started=started, watched=watched, fixed=fixed
            )

    return run_and_tell(
        run,
        run_dir=run_dir,
        stops=stops,
        standing=standing,
        log=log,
    )


def _train(
    config: RunConfig,
    launch: Launch,
    explicit: frozenset[str],
    log: Callable[[str], None],
    stops: StopRequests,
    standing: Standing,
    *,
    started: float,
    watched: bool,
    fixed: frozenset[str],
) -> Ending:
    device = launch.device(config.training.device)
    parallel = config.parallel
    # Before any rank waits for another: what the settings alone make impossible is the same on all of them.
    check_start(config, launch.world_size, explicit)
    check_backend(parallel.distributed_backend, device)
    check_memory_history(config, device)
    if device.type == "cpu" and config.compute.keep_cpu_memory:
        keep_freed_memory()
    start_distributed(
        launch,
        device,
        backend=parallel.distributed_backend,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )
    agreed, watch = False, HangWatch()
    try:
        world = Group("world", tuple(range(launch.world_size)), launch.rank)
        if watched:
            run_dir = config.logging.run_dir
            watch = begin_watch(parallel, launch=launch, world=world, device=device, run_dir=run_dir, log=log)
            world = dataclasses.replace(world, heartbeat=watch.heartbeat)
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
            heartbeat=watch.heartbeat,
        )
        try:
            modules = build_modules(config, topology, programs)
        except ConfigError as error:
            found = error  # of kernels, which one stage may need and another not
        world.agree(found, device)
        replica = build_replica(config, topology, programs, modules)
        ending = Run(replica, tokenizer, log, stops, standing, started=started, roll=roll).go()
        agreed = True
        return ending
    except (ConfigError, NonFiniteError) as error:
        agreed = not isinstance(error, RankError)
        raise
    finally:
        try:
            stop_distributed(agreed=agreed)
        finally:
            watch.close(agreed=agreed)


def _silent(line: str) -> None:
    """Ranks other than 0."""

"""All kinds of ranks of a layout rehearsed, and what follows for the whole world."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from threading import Thread

from megalite.config.errors import ConfigError
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.partition.pipeline import layout_of
from megalite.rehearsal.proof import asymmetries, deadlock, mismatches
from megalite.rehearsal.run import Rehearsal, rehearse
from megalite.topology.layout import ParallelLayout
from megalite.training.replica import Programs


def check(config: RunConfig, layout: ParallelLayout, rank: int | None) -> None:
    """Raise a ConfigError for what cannot be rehearsed."""
    if config.parallel.strategy.weights == "stale":
        raise ConfigError(
            f"dp_strategy {config.parallel.dp_strategy} cannot be rehearsed: its servers are threads that step by what arrives; rehearse "
            "--dp-strategy parameter-server, or run it on gloo"
        )
    p, optimizer = config.parallel, config.optimizer.optimizer
    if OPTIMIZERS.facts(optimizer).matrices_apart and (p.tp > 1 or p.strategy.shards_states):
        raise ConfigError(
            f"optimizer {optimizer} cannot be rehearsed with tp {p.tp} and dp_strategy {p.dp_strategy}: it asks the other ranks "
            "which parts of matrices they have, and there are none; rehearse --tp 1 --dp-strategy all-reduce, or --optimizer adam"
        )
    if rank is not None and not 0 <= rank < layout.world_size:
        raise ConfigError(f"--rank {rank} is not one of {layout.world_size} ranks; give 0 to {layout.world_size - 1}")


def corners(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """For each place of a pipeline the first and the last of the ranks that stand there."""
    found = []
    for place in range(layout.pp):
        last = layout.rank(tp=layout.tp - 1, cp=layout.cp - 1, dp=layout.dp - 1, pp=place)
        found.append(tuple(dict.fromkeys((layout.rank(pp=place), last))))
    return found


@dataclass(frozen=True)
class World:
    """What was found about all ranks."""

    rehearsals: list[Rehearsal]
    faults: list[str]
    """Empty: operations match in all groups, and nothing deadlocks."""


def rehearse_world(
    config: RunConfig, *, workers: int = 1, done: Callable[[int, int], None] = lambda count, total: None
) -> World:
    """Rehearse both corners of each place of the pipelines, and hold them against each other.

    Ranks at one place run the same program on parts of equal size; that its two corners do the same, event by event,
    stands for all that are between them. Groups along tp, cp, dp and ep are among ranks of one place, so their operations
    match where the corners do; those that join places (pipeline edges, embeddings, the world) are compared among the
    rehearsed ranks, which are two whole pipelines.

    Args:
        workers: processes.
        done: called with how many of how many ranks have been rehearsed.
    """
    layout = layout_of(config)
    places = corners(layout)
    ranks = [rank for place in places for rank in place]
    found: dict[int, Rehearsal] = {}
    for rehearsal in _rehearsed(config, ranks, workers):
        found[rehearsal.rank] = rehearsal
        done(len(found), len(ranks))
    journals = {rank: found[rank].journal for rank in ranks}
    faults: list[str] = []
    for first, *others in places:
        for other in others:
            faults += asymmetries((first, journals[first]), (other, journals[other]))
    faults += mismatches(journals)
    for index in {0, -1}:
        stuck = deadlock({place[index]: journals[place[index]] for place in places})
        faults += [] if stuck is None else [stuck]
    return World([found[rank] for rank in ranks], list(dict.fromkeys(faults)))


def _rehearsed(config: RunConfig, ranks: list[int], workers: int) -> Iterator[Rehearsal]:
    if workers == 1 or len(ranks) == 1:
        programs = Programs(config)
        yield from (rehearse(config, rank, programs) for rank in ranks)
        return
    # Spawned: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(ranks)), context, _begin, (config,)) as pool:
        yield from pool.map(_in_worker, ranks)


_worker: list[tuple[RunConfig, Programs]] = []


def _begin(config: RunConfig) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    _worker.append((config, Programs(config)))


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(rank: int) -> Rehearsal:
    config, programs = _worker[0]
    return rehearse(config, rank, programs)

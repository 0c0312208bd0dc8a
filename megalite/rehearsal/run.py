"""Rehearse a training step of one rank without a device and peers; rehearse all kinds of ranks and check the whole
world."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.safetensors_file import require_planned
from megalite.checkpoint.save import SavedTensor, planned_files, save_together
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.data.loader import Microbatch
from megalite.optimizers.schedules import Progress, Schedules
from megalite.partition.pipeline import layout_of
from megalite.preprocess.workers import WorkerPool
from megalite.rehearsal.communication import (
    Journal,
    RehearsedGroup,
    asymmetries,
    deadlock,
    mismatches,
    rehearsed_topology,
)
from megalite.rehearsal.device import Device
from megalite.topology.layout import ParallelLayout
from megalite.training.replica import Programs, Replica, build_replica, consensus
from megalite.training.saving import HostCopies, tensors_to_save
from megalite.training.step import Stepper


@dataclass(frozen=True, kw_only=True)
class Save:
    """One rank's work for a checkpoint after a step."""

    files: dict[str, int]  # name -> bytes of each written file
    copies_bytes: int  # host memory for the copies of an asynchronous save
    peak_bytes: int  # peak device memory, including the steps
    first: int  # index of its first operation
    synchronisations: Counter[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Measurements of one rank's step."""

    rank: int
    journal: Journal  # of two steps, and a save
    second_step: int  # index of its first operation
    parameters: int  # number of elements on the rank
    built_bytes: int  # live before the first step: parameters, gradients, initial optimizer states
    build_peak_bytes: int
    peak_bytes: int
    peak_place: str
    end_bytes: int  # live after the step
    host_bytes: int  # peak of pinned host memory
    kernels: Counter[str]
    synchronisations: Counter[tuple[str, str]]
    late_reads: dict[str, tuple[int, int]]
    save: Save


def rehearse(config: RunConfig, rank: int, programs: Programs | None = None) -> Rehearsal:
    """Build rank `rank` of a validated config with a vocab_size, run its first two steps, and save. Kernels and
    synchronisations are those of the second step, as the first creates states that later ones have."""
    config = replace(config, seq_length_warmup=None)  # a step of full length
    layout = layout_of(config)
    device = Device()
    journal = Journal(device)
    topology = rehearsed_topology(layout, rank, journal, separate_gathers=config.parallel.strategy.shards_parameters)
    with device.entered():
        replica = build_replica(config, topology, programs or Programs(config))
        built, build_peak = device.memory.live, device.memory.peak
        stepper = Stepper(replica, Schedules(config))
        size = config.training.global_batch_size
        assert size is not None
        progress = Progress(0, 0)
        for _ in range(2):
            first = len(journal.operations)
            device.kernels.clear()
            device.synchronisations.clear()
            device.late_reads.clear()
            device.running = "start of the step"
            stepper.step(_batch(config, replica), before=progress, batch_size=size)
            progress = Progress(progress.step + 1, progress.samples + size)
        # In a V schedule, a rank's first and last stage share the embedding.
        owned = {parameter for stage in replica.stages.values() for parameter in stage.parameters()}
        return Rehearsal(
            rank=rank,
            journal=journal,
            second_step=first,
            parameters=sum(parameter.numel() for parameter in owned),
            built_bytes=built,
            build_peak_bytes=build_peak,
            peak_bytes=device.memory.peak,
            peak_place=device.memory.peak_place,
            end_bytes=device.memory.live,
            host_bytes=device.host.peak,
            kernels=device.kernels.copy(),
            synchronisations=device.synchronisations.copy(),
            late_reads=device.late_reads.copy(),
            save=_save(replica, journal),  # last, as it changes the device's counts
        )


def _save(replica: Replica, journal: Journal) -> Save:
    """Rehearse a save without a disk: plan, checks, copies, and the exchanges between ranks."""
    device, first = journal.device, len(journal.operations)
    device.running = "save"
    device.synchronisations.clear()
    config, host = replica.config.checkpoint, replica.topology.host
    assert isinstance(host, RehearsedGroup)
    background = dataclasses.replace(host, name="background", queue="background")  # a separate host group

    def together(plan: Sequence[SavedTensor], tensors: Sequence[torch.Tensor]) -> None:
        def write() -> None:
            for entry, tensor in zip(plan, tensors, strict=True):
                require_planned(entry.record(entry.key), tensor)
                if entry.is_stored and not config.async_save:
                    device.synchronise("copies to the host")

        staging = Path(config.save or "checkpoints") / ".rehearsed"
        no_disk: dict[str, Any] = {"begin": lambda needed: None, "write": write, "publish": lambda: None}
        save_together(staging, plan, host=None, **no_disk, world=background)

    with consensus(replica, saved=True):
        plan, tensors = tensors_to_save(replica, 2, newest="")
        copies_bytes = sum(tensor.nbytes for tensor in tensors)
        if config.async_save:
            tensors = HostCopies().copy(tensors)
            device.synchronisations["training/saving.py", "waits for the copies"] += 1
        else:
            together(plan, tensors)
    if config.async_save:
        together(plan, tensors)
    return Save(
        files=planned_files(plan, replica.topology.rank),
        copies_bytes=copies_bytes,
        peak_bytes=device.memory.peak,
        first=first,
        synchronisations=device.synchronisations.copy(),
    )


def _batch(config: RunConfig, replica: Replica) -> Sequence[Microbatch]:
    """Return microbatches of zeros on the host."""
    training, parallel = config.training, config.parallel
    assert training.global_batch_size is not None and parallel.dp is not None
    if not replica.reads_data:
        return []
    b, s = training.micro_batch_size, training.seq_length // parallel.cp
    tokens = torch.zeros(b, s, dtype=torch.int64)
    starts = tuple((0,) for _ in range(b)) if replica.finds_documents else None
    spans = None if replica.balance is None or starts is None else replica.balance(training.seq_length, starts)
    mtp = tokens.expand(config.model.mtp_num_layers, b, s)
    one = Microbatch(
        tokens,
        tokens,
        torch.ones(b, s),
        tuple(range(b)),
        starts,
        mtp_labels=mtp,
        mtp_mask=torch.ones(mtp.shape),
        spans=spans,
    )
    return [one] * (training.global_batch_size // (b * parallel.dp))


def check(config: RunConfig, layout: ParallelLayout, rank: int | None) -> None:
    """Raise ConfigError for a config or rank that cannot be rehearsed."""
    if config.parallel.strategy.weights == "stale":
        raise ConfigError(
            f"dp_strategy {config.parallel.dp_strategy} cannot be rehearsed: its servers' steps depend on arrival times; rehearse "
            "--dp-strategy parameter-server, or run it on gloo"
        )
    p, optimizer = config.parallel, config.optimizer.optimizer
    if OPTIMIZERS.facts(optimizer).separate_matrices and (p.tp > 1 or p.strategy.shards_states):
        raise ConfigError(
            f"optimizer {optimizer} cannot be rehearsed with tp {p.tp} and dp_strategy {p.dp_strategy}: it requests other ranks' "
            "parts of matrices; rehearse --tp 1 --dp-strategy all-reduce, or --optimizer adam"
        )
    if rank is not None and not 0 <= rank < layout.world_size:
        raise ConfigError(f"--rank {rank} is not one of {layout.world_size} ranks; use 0 to {layout.world_size - 1}")


def corners(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """Return the first and the last rank of each pipeline rank."""
    found = []
    for place in range(layout.pp):
        last = layout.rank(tp=layout.tp - 1, cp=layout.cp - 1, dp=layout.dp - 1, pp=place)
        found.append(tuple(dict.fromkeys((layout.rank(pp=place), last))))
    return found


def rehearse_world(
    config: RunConfig, *, workers: int = 1, done: Callable[[int, int], None] = lambda count, total: None
) -> tuple[list[Rehearsal], list[str]]:
    """Rehearse both corners of each pipeline rank and compare them. Return the rehearsals and the faults; without faults,
    operations match in all groups and nothing deadlocks.

    Ranks of one pipeline rank run the same program on parts of equal size, so if both corners have equal events, the
    ranks between them do too. Groups along tp, cp, dp and ep are within one pipeline rank, so their operations match
    if the corners do; groups across pipeline ranks (edges, embeddings, the world) are compared among the rehearsed
    ranks, which are two whole pipelines. `workers`: processes; `done`: called with (number rehearsed, total)."""
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
    return [found[rank] for rank in ranks], list(dict.fromkeys(faults))


def _rehearsed(config: RunConfig, ranks: list[int], workers: int) -> Iterator[Rehearsal]:
    if workers == 1 or len(ranks) == 1:
        yield from map(_rehearsing(config), ranks)
        return
    count = min(workers, len(ranks))
    remedy = f"use fewer: --workers {count // 2}"
    with WorkerPool[RunConfig, int, Rehearsal](count, _rehearsing, config, remedy=remedy) as pool:
        for _, rehearsal in pool.map(iter(ranks), lambda rank: 0):
            yield rehearsal


def _rehearsing(config: RunConfig) -> Callable[[int], Rehearsal]:
    return partial(rehearse, config, programs=Programs(config))

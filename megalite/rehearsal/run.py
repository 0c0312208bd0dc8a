"""One training step of one rank, without a device and without peers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.data.loader import Microbatch
from megalite.optimizers.schedules import Progress, Schedules
from megalite.partition.pipeline import layout_of
from megalite.rehearsal.device import Device
from megalite.rehearsal.groups import Journal, rehearsed_topology
from megalite.training.replica import Programs, Replica, build_replica
from megalite.training.step import Stepper


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What one rank does in one step."""

    rank: int
    journal: Journal
    """Of two steps."""
    second_step: int
    """The first operation of the second."""
    parameters: int
    """Elements that it holds."""
    built_bytes: int
    """Live once parameters, gradients and optimizer states that exist before the first step are there."""
    build_peak_bytes: int
    peak_bytes: int
    peak_place: str
    end_bytes: int
    """Live after the step."""
    host_bytes: int
    """Pinned in host memory at the peak."""
    kernels: Counter[str]
    synchronisations: Counter[tuple[str, str]]


def rehearse(config: RunConfig, rank: int, programs: Programs | None = None) -> Rehearsal:
    """Build rank `rank` of a validated config with its vocab_size set, and run its first two steps.

    Kernels and synchronisations are those of the second: the first makes states that later ones have.
    """
    config = replace(config, seq_length_warmup=None)  # a step of full length
    layout = layout_of(config)
    device = Device()
    journal = Journal(device)
    topology = rehearsed_topology(layout, rank, journal, gathers_apart=config.parallel.strategy.shards_parameters)
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
            device.running = "start of the step"
            stepper.step(_batch(config, replica), before=progress, batch_size=size)
            progress = Progress(progress.step + 1, progress.samples + size)
        end = device.memory.live
    # In a V the first and the last stage share the embedding.
    held = {parameter for stage in replica.stages.values() for parameter in stage.parameters()}
    return Rehearsal(
        rank=rank,
        journal=journal,
        second_step=first,
        parameters=sum(parameter.numel() for parameter in held),
        built_bytes=built,
        build_peak_bytes=build_peak,
        peak_bytes=device.memory.peak,
        peak_place=device.memory.peak_place,
        end_bytes=end,
        host_bytes=device.host.peak,
        kernels=device.kernels,
        synchronisations=device.synchronisations,
    )


def _batch(config: RunConfig, replica: Replica) -> Sequence[Microbatch]:
    """Microbatches of zeros on the host."""
    training, parallel = config.training, config.parallel
    assert training.global_batch_size is not None and parallel.dp is not None
    if not replica.reads_data:
        return []
    b, s = training.micro_batch_size, training.seq_length // parallel.cp
    tokens = torch.zeros(b, s, dtype=torch.int64)
    starts = tuple((0,) for _ in range(b)) if replica.finds_documents else None
    spans = None if replica.balance is None or starts is None else replica.balance(training.seq_length, starts)
    further = tokens.expand(config.model.mtp_num_layers, b, s)
    one = Microbatch(
        tokens,
        tokens,
        torch.ones(b, s),
        tuple(range(b)),
        starts,
        further_labels=further,
        further_mask=torch.ones(further.shape),
        spans=spans,
    )
    return [one] * (training.global_batch_size // (b * parallel.dp))

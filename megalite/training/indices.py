"""Large indices are made once a node, before the ranks that read data need them."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megalite.config.errors import ConfigError
from megalite.data.blended import Indexed
from megalite.data.sample_source import SampleSource
from megalite.topology.group import Group

_EPOCHS = 2
"""Whose indices are there before the first step: batches cross from one epoch to the next, and prefetch runs ahead."""


@dataclass(frozen=True)
class Need:
    """Samples [first, stop) of a dataset will be read."""

    source: SampleSource
    first: int
    stop: int


def leads_node(world: Group, device: torch.device, *, node: str | None = None) -> bool:
    """This rank is the first of its host.

    Told from the hosts' names rather than from LOCAL_RANK, which two launchers on one host may both count from 0.

    Args:
        node: name of this host, if it is not to be asked.

    Collectives: a gather over the world.
    """
    names = world.gather_json(platform.node() if node is None else node, device)
    return names.index(names[world.rank]) == world.rank


def prepare_indices(
    needs: Sequence[Need], notes: list[str], *, world: Group, device: torch.device, leads: bool
) -> list[str]:
    """Make the large indices on the disk, each once: rank 0 makes them all, where all nodes see them if the file system is
    shared; then the first rank of each other node makes those that it does not see.

    Of each dataset the first two epochs are made; the first rank of a node, where it reads data, makes each later one in
    the background during the epoch before.

    A rank that finds none later (where the folder cannot be written, or has been emptied since) makes its own in memory:
    the samples are the same.

    Args:
        needs: what will be read; nothing on ranks that have opened no data.
        notes: what the datasets of this rank have to say, filled as they do, also after this.
        leads: this rank is the first of its node.

    Returns:
        what the log should say: the notes of all ranks.

    Raises:
        ConfigError: an index cannot be made, or cannot be kept where the user wants it; the same on every rank.

    Collectives: three gathers over the world.
    """
    for turn in (world.rank == 0, leads and world.rank != 0):
        error: ConfigError | None = None
        try:
            for need in needs if turn else ():
                if isinstance(need.source, Indexed):
                    need.source.prepare(need.first, need.stop, epochs=_EPOCHS)
        except ConfigError as found:
            error = found
        world.agree(error, device)
    everything = world.gather_json(notes, device)
    notes.clear()
    return list(dict.fromkeys(note for of_rank in everything for note in of_rank))

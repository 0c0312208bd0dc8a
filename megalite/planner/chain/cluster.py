"""Machines with devices in them: fast links inside a machine, a network between machines."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.values import nearest
from megalite.planner.hardware.reading import OR_ZERO, build, read_yaml

_KIND = "chain cluster"
_NAME = re.compile(r"(\d{1,4})x(\d{1,3})(?:@(\d{1,4}(?:\.\d{1,3})?))?", re.ASCII)
_MOST_DEVICES = 256


@dataclass(frozen=True, kw_only=True)
class ChainCluster:
    """Equal machines with equal devices. Bandwidths are one way; both ways run at once."""

    name: str
    machines: int
    gpus_per_machine: int
    link_gb_per_s: float
    """Between two devices of a machine, GB/s."""
    ring_gb_per_s: float
    """That an all-reduce among the devices of a machine reaches, GB/s: several rings run at once."""
    network_gb_per_s: float
    """Of a machine, for all of its devices together, GB/s: what an all-reduce reaches."""
    message_gb_per_s: float
    """The same for messages from stage to stage, which often go through another library, GB/s."""
    memory_gb: float
    """Of a device, GB."""
    latency_us: float = field(default=0.0, metadata=OR_ZERO)
    """Of every message between devices."""

    @property
    def num_gpus(self) -> int:
        """Of all machines."""
        return self.machines * self.gpus_per_machine

    @property
    def empty(self) -> tuple[int, ...]:
        """Free devices per machine, before anything is placed."""
        return (self.gpus_per_machine,) * self.machines


def v100_cluster(machines: int, gpus_per_machine: int, network_gbit: float = 25.0) -> ChainCluster:
    """V100s of 16 GB with NVLink, and Ethernet between machines.

    25 GB/s between two devices is DAPPLE's own constant; four rings of that for an all-reduce are assumed; Ethernet
    counts with its nominal rate. Nothing of this was measured.
    """
    return ChainCluster(
        name=f"{machines}x{gpus_per_machine}@{network_gbit:g}",
        machines=machines,
        gpus_per_machine=gpus_per_machine,
        link_gb_per_s=25.0,
        ring_gb_per_s=100.0,
        network_gb_per_s=network_gbit / 8.0,
        message_gb_per_s=min(1.0, network_gbit / 8.0),
        memory_gb=16.0,
    )


PAPER = {"A": (2, 8, 25.0), "B": (16, 1, 25.0), "C": (16, 1, 10.0)}
"""Configurations of the DAPPLE paper: machines, devices in each, Gbit/s."""


def read_cluster(name_or_path: str) -> ChainCluster:
    """A cluster by name or from a YAML file with the fields of `ChainCluster`.

    Names: `A`, `B` and `C` of the DAPPLE paper, `2x8` (machines x devices, 25 Gbit/s) and `16x1@10` (Gbit/s said).

    Raises:
        ConfigError: neither a name nor a file, or a field of the file is unknown, missing or out of range.
    """
    path = Path(name_or_path)
    match = _NAME.fullmatch(name_or_path)
    if name_or_path in PAPER:
        cluster = v100_cluster(*PAPER[name_or_path])
    elif match is not None:
        cluster = v100_cluster(int(match[1]), int(match[2]), float(match[3] or 25.0))
        if not cluster.num_gpus or not cluster.network_gb_per_s:
            raise ConfigError(f"cluster {name_or_path} has a 0 in it; write e.g. 2x8 or 16x1@10")
    elif path.is_file():
        cluster = build(ChainCluster, read_yaml(path, kind=_KIND), f"{_KIND} {path}")
    else:
        raise ConfigError(
            f"there is no cluster {name_or_path}{nearest(name_or_path, PAPER)} (use {', '.join(PAPER)}, machines x "
            f"devices such as 2x8, with Gbit/s as in 16x1@10, or the path of a YAML file)"
        )
    if cluster.num_gpus > _MOST_DEVICES:
        raise ConfigError(
            f"cluster {name_or_path} has {cluster.num_gpus} devices; chains are planned for at most {_MOST_DEVICES}"
        )
    return cluster

"""What the ranks run on: device, threads, and how ranks are spread over nodes."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.config.errors import ConfigError
from megalite.topology.group import Group


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The same on every rank."""

    device_type: str
    device_name: str
    memory_bytes: int
    """Of one rank: a GPU's, or its equal share of the node's."""
    multiprocessors: int
    """Of a GPU; 1 on a CPU."""
    threads: int
    """That torch computes with, a rank."""
    cores: int
    """Of a node that these processes may use."""
    nodes: int
    ranks_per_node: int
    accelerators_per_node: int
    """GPUs of a node, also those that measure nothing; on a CPU its ranks."""
    torch_version: str

    @property
    def ranks(self) -> int:
        """All."""
        return self.nodes * self.ranks_per_node

    @property
    def crowded(self) -> bool:
        """Ranks and their threads outnumber the cores."""
        return self.shares_cores and self.ranks_per_node * self.threads > self.cores

    @property
    def ranks_per_core(self) -> float:
        """Where they outnumber the cores; else 1."""
        return self.ranks_per_node * self.threads / self.cores if self.crowded else 1.0

    @property
    def shares_cores(self) -> bool:
        """Ranks of a node compete for its cores and its memory's bandwidth."""
        return self.device_type == "cpu" and self.ranks_per_node > 1


def describe_machine(world: Group, device: torch.device, *, node: str | None = None) -> Machine:
    """Asks every rank for its host and its device.

    Args:
        node: name of this host, if it is not to be asked.

    Raises:
        ConfigError: devices or numbers of threads differ, or the ranks of nodes are unequal in number or not consecutive;
            the same on every rank.

    Collectives: a gather over the world.
    """
    name, memory, multiprocessors = device_facts(device)
    mine = [platform.node() if node is None else node, name, torch.get_num_threads()]
    rows = world.gather_json(mine, device)
    per_node = _ranks_per_node([row[0] for row in rows])
    for rank, row in enumerate(rows):
        for what, index in (("device", 1), ("number of threads", 2)):
            if row[index] != rows[0][index]:
                raise ConfigError(
                    f"the {what} is {rows[0][index]} on rank 0 and {row[index]} on rank {rank}; profile machines that are "
                    f"alike, one cluster file for each kind"
                )
    return Machine(
        device_type=device.type,
        device_name=name,
        memory_bytes=memory // (per_node if device.type == "cpu" else 1),
        multiprocessors=multiprocessors,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        nodes=len(rows) // per_node,
        ranks_per_node=per_node,
        accelerators_per_node=per_node if device.type == "cpu" else torch.cuda.device_count(),
        torch_version=torch.__version__,
    )


def _ranks_per_node(hosts: Sequence[str]) -> int:
    """Ranks of each node, from the host of each rank.

    Raises:
        ConfigError: not the same number on each, or ranks of one are not consecutive.
    """
    count = hosts.count(hosts[0])
    blocks = [hosts[start : start + count] for start in range(0, len(hosts), count)]
    if any(len(set(block)) > 1 or len(block) < count for block in blocks) or len(set(hosts)) != len(blocks):
        counts = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
        raise ConfigError(
            f"ranks are spread unevenly over nodes, or not one node after the other ({counts}); start the same number on "
            f"each, e.g. torchrun --nproc-per-node {min(hosts.count(host) for host in hosts)}"
        )
    return count


def device_facts(device: torch.device) -> tuple[str, int, int]:
    """(name, bytes of memory, multiprocessors)."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return facts.name, int(facts.total_memory), int(facts.multi_processor_count)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _cpu_name(Path("/proc/cpuinfo")), memory, 1


def _cpu_name(facts: Path) -> str:
    """The processor's model where Linux says it, else its architecture."""
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine() or "CPU"

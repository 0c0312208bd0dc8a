"""What a chain plan starts from: the measured layers of a model, and machines with devices in them."""

import dataclasses
import math
import re
import reprlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config.errors import ConfigError
from megalite.config.records import OR_ZERO, build, read_yaml
from megalite.config.values import nearest

_CLUSTER_KIND = "chain cluster"
_NAME = re.compile(r"(\d{1,4})x(\d{1,3})(?:@(\d{1,4}(?:\.\d{1,3})?))?", re.ASCII)
_MOST_DEVICES = 256


@dataclass(frozen=True, kw_only=True)
class ChainCluster:
    """Equal machines with equal devices. Bandwidths are one way; both ways run at once."""

    name: str
    machines: int
    gpus_per_machine: int
    link_gb_per_s: float  # between two devices of a machine, GB/s
    ring_gb_per_s: float  # that an all-reduce among the devices of a machine reaches, GB/s: several rings run at once
    network_gb_per_s: float  # of a machine, for all of its devices together, GB/s: what an all-reduce reaches
    message_gb_per_s: float  # the same for messages from stage to stage, which often go through another library, GB/s
    memory_gb: float  # of a device, GB
    latency_us: float = field(default=0.0, metadata=OR_ZERO)  # of every message between devices

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

    Raises ConfigError: neither a name nor a file, or a field of the file is unknown, missing or out of range.
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
        cluster = build(ChainCluster, read_yaml(path, kind=_CLUSTER_KIND), f"{_CLUSTER_KIND} {path}")
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


Array = npt.NDArray[np.float64]
_PROFILE_KIND = "chain profile"
_MOST_LAYERS = 512


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, at the profile's batch size."""

    name: str
    forward_ms: float = field(metadata=OR_ZERO)
    backward_ms: float = field(metadata=OR_ZERO)  # gradients of input and weights
    output_bytes: float = field(metadata=OR_ZERO)
    """What it hands to the next layer; the gradient that comes back is as large."""
    activation_bytes: float = field(metadata=OR_ZERO)  # what it keeps from its forward to its backward
    parameter_bytes: float = field(metadata=OR_ZERO)  # of the weights alone; gradients are as large


@dataclass(frozen=True, kw_only=True)
class _Header:
    """The file without its layers."""

    name: str
    batch_size: int
    state_factor: float = 4.0
    provenance: str = "not stated"


@dataclass(frozen=True, kw_only=True)
class ChainProfile:
    """A chain of layers; times and bytes grow in proportion to the samples of a slice."""

    name: str
    batch_size: int  # samples with which times and activations were measured
    smallest_batch: int  # a slice of fewer samples takes as long as one of this many: less does not fill the device
    state_factor: float  # bytes held per byte of parameters: 4 for weights, gradients and Adam's two moments alike
    provenance: str  # where the numbers are from
    layers: tuple[Layer, ...]

    def _sums(self, name: str) -> Array:
        values = [getattr(layer, name) for layer in self.layers]
        return np.concatenate([[0.0], np.cumsum(values)])

    @cached_property
    def forward(self) -> Array:
        """[layers + 1]: seconds a sample of all layers before each."""
        return self._sums("forward_ms") / (1000.0 * self.batch_size)

    @cached_property
    def backward(self) -> Array:
        """[layers + 1]: as `forward`."""
        return self._sums("backward_ms") / (1000.0 * self.batch_size)

    @cached_property
    def activations(self) -> Array:
        """[layers + 1]: bytes a sample kept by all layers before each."""
        return self._sums("activation_bytes") / self.batch_size

    @cached_property
    def parameters(self) -> Array:
        """[layers + 1]: parameter bytes of all layers before each."""
        return self._sums("parameter_bytes")

    @cached_property
    def outputs(self) -> Array:
        """[layers + 1]: bytes a sample that cross the cut before each layer; nothing at both ends."""
        values = np.array([0.0, *(layer.output_bytes for layer in self.layers)]) / self.batch_size
        values[-1] = 0.0
        return values

    def slice_samples(self, microbatch: int, replicas: int) -> int:
        """Samples that the time of the slowest replica counts: whole ones, and `smallest_batch` at least."""
        return max(math.ceil(microbatch / replicas), self.smallest_batch)


def read_profile(path: str | Path) -> ChainProfile:
    """The profile in a YAML file.

    Keys: `name`, `batch_size`, `layers`, and if wanted `smallest_batch` (default: `batch_size`), `state_factor` (4)
    and `provenance`. A layer has all fields of `Layer`; `repeat: 12` makes twelve of it.

    Raises ConfigError: the file cannot be read, or names a key that is unknown, missing, of another type or out of
    range.
    """
    path = Path(path)
    return parse_profile(read_yaml(path, kind=_PROFILE_KIND), source=f"{_PROFILE_KIND} {path}")


def parse_profile(tree: dict[str, Any], *, source: str = _PROFILE_KIND) -> ChainProfile:
    """The profile that a mapping spells; raises as `read_profile`."""
    rows = tree.get("layers")
    if not isinstance(rows, list) or not rows:
        found = "it is missing" if rows is None else f"got {reprlib.repr(rows)}"
        raise ConfigError(
            f"{source}: layers must be a list with a mapping for each layer, such as `- {{name: conv, forward_ms: 1.5, "
            f"...}}`; {found}"
        )
    header = {key: value for key, value in tree.items() if key not in ("layers", "smallest_batch")}
    head = build(_Header, header, source)
    smallest = tree.get("smallest_batch")
    if smallest is not None:
        smallest = _whole(smallest, f"{source}: smallest_batch")
        if smallest > head.batch_size:
            raise ConfigError(
                f"{source}: smallest_batch {smallest} is above batch_size {head.batch_size}, with which the times were "
                f"measured; use at most {head.batch_size}"
            )
    layers: list[Layer] = []
    for index, row in enumerate(rows):
        layers.extend(_layers(row, f"{source}: layer {index}"))
    if len(layers) > _MOST_LAYERS:
        raise ConfigError(
            f"{source}: there are {len(layers)} layers; use at most {_MOST_LAYERS}, by joining neighbours into blocks"
        )
    if not any(layer.forward_ms + layer.backward_ms for layer in layers):
        raise ConfigError(f"{source}: every forward_ms and backward_ms is 0; at least one must be above 0")
    return ChainProfile(
        name=head.name,
        batch_size=head.batch_size,
        smallest_batch=smallest or head.batch_size,
        state_factor=head.state_factor,
        provenance=head.provenance,
        layers=tuple(layers),
    )


def _layers(row: Any, where: str) -> list[Layer]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} takes a mapping such as `name: conv`, got {reprlib.repr(row)}")
    if isinstance(row.get("name"), str):
        where = f"{where} ({row['name']})"
    fields = dict(row)
    repeat = _whole(fields.pop("repeat", 1), f"{where}: repeat")
    if repeat > _MOST_LAYERS:
        raise ConfigError(f"{where}: repeat is {repeat}; use at most {_MOST_LAYERS}")
    layer = build(Layer, fields, where)
    if repeat == 1:
        return [layer]
    return [dataclasses.replace(layer, name=f"{layer.name}.{number}") for number in range(repeat)]


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} takes a whole number from 1, such as 8; got {reprlib.repr(value)}")
    return value

"""Inputs of a chain plan: profiles of layers, measured or synthetic twins of the DAPPLE paper's models, and clusters."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config.errors import ConfigError, nearest, shortened
from megalite.config.reading import OR_ZERO, build, find_file, read_yaml

_NAME = re.compile(r"(\d{1,4})x(\d{1,3})(?:@(\d{1,4}(?:\.\d{1,3})?))?", re.ASCII)
_MOST_DEVICES = 256


@dataclass(frozen=True, kw_only=True)
class ChainCluster:
    """Equal machines with equal devices. Bandwidths are per direction; both directions work at the same time."""

    name: str
    machines: int
    gpus_per_machine: int
    link_gb_per_s: float  # between two devices of a machine, GB/s
    ring_gb_per_s: float  # of an all-reduce among a machine's devices, GB/s: several rings run at once
    network_gb_per_s: float  # of an all-reduce between machines, GB/s per machine
    message_gb_per_s: float  # of messages between stages, which often use another library, GB/s per machine
    memory_gb: float  # per device, GB
    latency_us: float = field(default=0.0, metadata=OR_ZERO)  # of each message between devices

    @property
    def num_gpus(self) -> int:
        return self.machines * self.gpus_per_machine

    @property
    def empty(self) -> tuple[int, ...]:
        """Free devices per machine, before anything is placed."""
        return (self.gpus_per_machine,) * self.machines


def v100_cluster(machines: int, gpus_per_machine: int, network_gbit: float = 25.0) -> ChainCluster:
    """Return V100s of 16 GB with NVLink and Ethernet. 25 GB/s between two devices is DAPPLE's constant; four such rings
    per all-reduce are assumed; Ethernet counts at its nominal rate. None of this was measured."""
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


# Configurations of the DAPPLE paper: machines, devices per machine, Gbit/s.
PAPER = {"A": (2, 8, 25.0), "B": (16, 1, 25.0), "C": (16, 1, 10.0)}


def read_cluster(name_or_path: str) -> ChainCluster:
    """Read a cluster by name or from a YAML file with the fields of `ChainCluster`. Names: `A`, `B` and `C` of the DAPPLE
    paper, `2x8` (machines x devices, 25 Gbit/s) and `16x1@10` (with Gbit/s)."""
    match = _NAME.fullmatch(name_or_path)
    if name_or_path in PAPER:
        cluster = v100_cluster(*PAPER[name_or_path])
    elif match is not None:
        cluster = v100_cluster(int(match[1]), int(match[2]), float(match[3] or 25.0))
        if not cluster.num_gpus or not cluster.network_gb_per_s:
            raise ConfigError(f"cluster {name_or_path} has a 0 in it; write e.g. 2x8 or 16x1@10")
    elif Path(name_or_path).is_file():
        tree = read_yaml(Path(name_or_path), kind="chain cluster")
        cluster = build(ChainCluster, tree, f"chain cluster {name_or_path}")
    else:
        raise ConfigError(f"no cluster {name_or_path}{nearest(name_or_path, PAPER)}; use A, B, C, 2x8, 16x1@10, a file")
    if cluster.num_gpus > _MOST_DEVICES:
        raise ConfigError(f"cluster {name_or_path} has {cluster.num_gpus} devices; use at most {_MOST_DEVICES}")
    return cluster


Array = npt.NDArray[np.float64]
_MOST_LAYERS = 512
_EXAMPLE = "{name: conv, forward_ms: 1.5, ..}"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, at the profile's batch size."""

    name: str
    forward_ms: float = field(metadata=OR_ZERO)
    backward_ms: float = field(metadata=OR_ZERO)  # gradients of input and weights
    output_bytes: float = field(metadata=OR_ZERO)  # sent to the next layer; its gradient is as large
    activation_bytes: float = field(metadata=OR_ZERO)  # stored from the forward to the backward
    parameter_bytes: float = field(metadata=OR_ZERO)  # of the weights alone; gradients are as large


@dataclass(frozen=True, kw_only=True)
class _Row(Layer):
    """A layer in a file, with a repeat count."""

    repeat: int = field(default=1, metadata={"most": float(_MOST_LAYERS)})


def _read_layers(rows: Any, where: str) -> tuple[Layer, ...]:
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{where} takes a list of mappings such as {_EXAMPLE}, got {shortened(rows)}")
    layers: list[Layer] = []
    for index, row in enumerate(rows):
        named = f" ({row['name']})" if isinstance(row, dict) and isinstance(row.get("name"), str) else ""
        values = vars(build(_Row, row, f"{where}[{index}]{named}"))
        name, repeat = values.pop("name"), values.pop("repeat")
        layers += [Layer(name=f"{name}.{copy}" if repeat > 1 else name, **values) for copy in range(repeat)]
    if len(layers) > _MOST_LAYERS:
        raise ConfigError(f"{where}: {len(layers)} layers are too many; merge some, to have at most {_MOST_LAYERS}")
    if not any(layer.forward_ms + layer.backward_ms for layer in layers):
        raise ConfigError(f"{where}: every forward_ms and backward_ms is 0; at least one must be above 0")
    return tuple(layers)


@dataclass(frozen=True, kw_only=True)
class ChainProfile:
    """A chain of layers; times and bytes are proportional to the samples of a slice."""

    name: str
    batch_size: int  # samples in the measured times and activations
    smallest_batch: int  # a slice of fewer samples takes as long as one of this many
    state_factor: float = 4.0  # bytes stored per byte of parameters: 4 for weights, gradients and Adam's two moments
    provenance: str = "not stated"  # source of the numbers
    layers: tuple[Layer, ...] = field(metadata={"read": _read_layers, "example": f"[{_EXAMPLE}]"})

    def _sums(self, name: str) -> Array:
        values = [getattr(layer, name) for layer in self.layers]
        return np.concatenate([[0.0], np.cumsum(values)])

    # Each has length [layers + 1]: the sum over all layers before a cut.

    @cached_property
    def forward(self) -> Array:
        """Seconds per sample."""
        return self._sums("forward_ms") / (1000.0 * self.batch_size)

    @cached_property
    def backward(self) -> Array:
        """Seconds per sample."""
        return self._sums("backward_ms") / (1000.0 * self.batch_size)

    @cached_property
    def activations(self) -> Array:
        """Stored bytes per sample."""
        return self._sums("activation_bytes") / self.batch_size

    @cached_property
    def parameters(self) -> Array:
        """Bytes."""
        return self._sums("parameter_bytes")

    @cached_property
    def outputs(self) -> Array:
        """Bytes per sample that cross each cut; 0 at both ends."""
        values = np.array([0.0, *(layer.output_bytes for layer in self.layers)]) / self.batch_size
        values[-1] = 0.0
        return values

    def slice_samples(self, microbatch: int, replicas: int) -> int:
        """Return the samples that determine the slowest replica's time: a whole number of at least `smallest_batch`."""
        return max(math.ceil(microbatch / replicas), self.smallest_batch)


def read_profile(path: str | Path) -> ChainProfile:
    """Read a profile from a YAML file. Keys: `name`, `batch_size`, `layers`, and optionally `smallest_batch` (default:
    `batch_size`), `state_factor` (4) and `provenance`. A layer has the fields of `Layer`; `repeat: 12` repeats it. Raises
    ConfigError that names an unknown, missing or illegal key."""
    return parse_profile(read_yaml(Path(path), kind="chain profile"), source=f"chain profile {path}")


def parse_profile(tree: dict[str, Any], *, source: str = "chain profile") -> ChainProfile:
    """Build a profile from a mapping; raises as `read_profile`."""
    profile = build(ChainProfile, {"smallest_batch": tree.get("batch_size"), **tree}, source)
    smallest, batch = profile.smallest_batch, profile.batch_size
    if smallest > batch:
        raise ConfigError(f"{source}: smallest_batch {smallest} is above batch_size {batch}; use at most {batch}")
    return profile


_TWINS = Path(__file__).parent / "twins"
TWINS = tuple(sorted(path.stem for path in _TWINS.glob("*.yaml")))


def find_profile(name_or_path: str) -> ChainProfile:
    """Return a twin by name, or the profile in a file. A twin has its model's published totals; its activations are the
    published memory per device minus the parameters' state; its file says how layers share them. Raises ConfigError."""
    return read_profile(find_file(name_or_path, _TWINS, kind="chain profile"))

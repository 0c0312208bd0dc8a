"""What a chain plan starts from: measured layers or synthetic twins of the DAPPLE paper's models, and machines."""

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.errors import ConfigError
from megalite.config.reading import OR_ZERO, build, read_yaml
from megalite.config.values import nearest

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
        return self.machines * self.gpus_per_machine

    @property
    def empty(self) -> tuple[int, ...]:
        """Free devices per machine, before anything is placed."""
        return (self.gpus_per_machine,) * self.machines


def v100_cluster(machines: int, gpus_per_machine: int, network_gbit: float = 25.0) -> ChainCluster:
    """V100s of 16 GB with NVLink, and Ethernet between machines. 25 GB/s between two devices is DAPPLE's own constant;
    four rings of that for an all-reduce are assumed; Ethernet counts with its nominal rate. Nothing of this was
    measured."""
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


# Configurations of the DAPPLE paper: machines, devices in each, Gbit/s.
PAPER = {"A": (2, 8, 25.0), "B": (16, 1, 25.0), "C": (16, 1, 10.0)}


def read_cluster(name_or_path: str) -> ChainCluster:
    """A cluster by name or from a YAML file with the fields of `ChainCluster`. Names: `A`, `B` and `C` of the DAPPLE
    paper, `2x8` (machines x devices, 25 Gbit/s) and `16x1@10` (Gbit/s said)."""
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


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, at the profile's batch size."""

    name: str
    forward_ms: float = field(metadata=OR_ZERO)
    backward_ms: float = field(metadata=OR_ZERO)  # gradients of input and weights
    output_bytes: float = field(metadata=OR_ZERO)  # handed to the next layer; its gradient is as large
    activation_bytes: float = field(metadata=OR_ZERO)  # what it keeps from its forward to its backward
    parameter_bytes: float = field(metadata=OR_ZERO)  # of the weights alone; gradients are as large


@dataclass(frozen=True, kw_only=True)
class _Header:
    name: str
    batch_size: int  # samples with which times and activations were measured
    state_factor: float = 4.0  # bytes held per byte of parameters: 4 for weights, gradients and Adam's two moments
    provenance: str = "not stated"  # where the numbers are from


@dataclass(frozen=True, kw_only=True)
class ChainProfile(_Header):
    """A chain of layers; times and bytes grow in proportion to the samples of a slice."""

    smallest_batch: int  # a slice of fewer samples takes as long as one of this many: less does not fill the device
    layers: tuple[Layer, ...]

    def _sums(self, name: str) -> Array:
        values = [getattr(layer, name) for layer in self.layers]
        return np.concatenate([[0.0], np.cumsum(values)])

    # [layers + 1] each: of all layers before a cut.

    @cached_property
    def forward(self) -> Array:
        """Seconds a sample."""
        return self._sums("forward_ms") / (1000.0 * self.batch_size)

    @cached_property
    def backward(self) -> Array:
        """Seconds a sample."""
        return self._sums("backward_ms") / (1000.0 * self.batch_size)

    @cached_property
    def activations(self) -> Array:
        """Bytes a sample that are kept."""
        return self._sums("activation_bytes") / self.batch_size

    @cached_property
    def parameters(self) -> Array:
        """Bytes."""
        return self._sums("parameter_bytes")

    @cached_property
    def outputs(self) -> Array:
        """Bytes a sample that cross the cut; nothing at both ends."""
        values = np.array([0.0, *(layer.output_bytes for layer in self.layers)]) / self.batch_size
        values[-1] = 0.0
        return values

    def slice_samples(self, microbatch: int, replicas: int) -> int:
        """Samples that the time of the slowest replica counts: whole ones, and `smallest_batch` at least."""
        return max(math.ceil(microbatch / replicas), self.smallest_batch)


def read_profile(path: str | Path) -> ChainProfile:
    """The profile in a YAML file. Keys: `name`, `batch_size`, `layers`, and if wanted `smallest_batch` (default:
    `batch_size`), `state_factor` (4) and `provenance`. A layer has all fields of `Layer`; `repeat: 12` makes twelve of
    it. Raises ConfigError naming the key that is unknown, missing, of another type or out of range."""
    return parse_profile(read_yaml(Path(path), kind="chain profile"), source=f"chain profile {path}")


def parse_profile(tree: dict[str, Any], *, source: str = "chain profile") -> ChainProfile:
    """The profile that a mapping spells; raises as `read_profile`."""
    rows = tree.get("layers")
    if not isinstance(rows, list) or not rows:
        found = "it is missing" if rows is None else f"got {reprlib.repr(rows)}"
        raise ConfigError(f"{source}: layers must be mappings such as {{name: conv, forward_ms: 1.5}}; {found}")
    header = build(_Header, {key: tree[key] for key in tree if key not in ("layers", "smallest_batch")}, source)
    batch = header.batch_size
    smallest = (
        batch if tree.get("smallest_batch") is None else _whole(tree["smallest_batch"], f"{source}: smallest_batch")
    )
    if smallest > batch:
        raise ConfigError(f"{source}: smallest_batch {smallest} is above batch_size {batch}; use at most {batch}")
    layers = tuple(layer for index, row in enumerate(rows) for layer in _layers(row, f"{source}: layer {index}"))
    if len(layers) > _MOST_LAYERS:
        raise ConfigError(f"{source}: there are {len(layers)} layers; join some, to have at most {_MOST_LAYERS}")
    if not any(layer.forward_ms + layer.backward_ms for layer in layers):
        raise ConfigError(f"{source}: every forward_ms and backward_ms is 0; at least one must be above 0")
    return ChainProfile(**vars(header), smallest_batch=smallest, layers=layers)


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


class _Totals(NamedTuple):
    parameters: float  # elements, 4 bytes each
    milliseconds: float  # forward and backward of a microbatch of `batch` on one V100
    forward_share: float
    batch: int
    state_factor: float
    memory_gb: float  # of one device that holds all, with activations of one microbatch
    global_batch: int


class _Shape(NamedTuple):
    name: str
    work: float
    parameters: float
    output_mb: float  # at the profile's batch size: 10^6 bytes, not a share
    kept: float  # of the activations that are kept


_TOTALS: Mapping[str, _Totals] = MappingProxyType(
    {
        "vgg-19": _Totals(137e6, 144.0, 1 / 3, 32, 3.0, 5.6, 1024),
        "amoebanet-36": _Totals(933e6, 168.0, 0.32, 1, 3.0, 20.0, 128),
        "bert-24": _Totals(335e6, 172.0, 0.376, 2, 4.0, 6.0, 128),
        "xlnet-36": _Totals(500e6, 301.0, 0.41, 1, 4.0, 12.0, 128),
        "bert-48": _Totals(637e6, 344.0, 0.376, 2, 4.0, 11.4, 64),
        "gnmt-16": _Totals(291e6, 249.0, 1 / 3, 64, 2.0, 3.9, 1024),
        # 70 MB of activations a picture, as the planner's own settings have it.
        "resnet-50": _Totals(25e6, 100.0, 1 / 3, 32, 2.0, 2.44, 2048),
    }
)


_PUBLISHED = "totals as published for a V100 with the DAPPLE paper (arXiv 2007.01045) and its profiles"
_SOURCES = MappingProxyType(
    {
        "bert-24": "time and parameters scaled from the DAPPLE paper's profile of another batch; memory assumed",
        "resnet-50": "time, parameters and activations of the DAPPLE planner's own settings",
    }
)
"""Where totals are not as published."""


def _vgg() -> list[_Shape]:
    """Sixteen convolutions of 3x3 on 224 x 224 pictures, pooled after 2, 4, 8, 12 and 16, and three dense layers."""
    shapes, channels, side = [], 3, 224
    for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for number in range(1, count + 1):
            weights = 9 * channels * width
            area = side * side
            side = side // 2 if number == count else side
            # Four bytes of each of 32 pictures; what a pooling layer gives is a quarter of its input.
            output = 4e-6 * 32 * width * side * side
            shapes.append(_Shape(f"conv-{width}.{number}", weights * area, weights, output, width * area))
            channels = width
    for number, (inputs, outputs) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000)), start=1):
        weights = inputs * outputs
        shapes.append(_Shape(f"dense.{number}", weights, weights, 4e-6 * 32 * outputs, outputs))
    return shapes


def _resnet() -> list[_Shape]:
    """A convolution of 7x7, sixteen blocks of 1x1, 3x3 and 1x1 in four groups, and a dense layer."""
    first = 49 * 3 * 64
    shapes = [_Shape("conv", first * 112**2, first, 4e-6 * 32 * 64 * 56**2, 64 * 112**2)]
    channels = 64
    for width, side, count in ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)):
        for number in range(1, count + 1):
            weights = channels * width + 9 * width * width + 4 * width * width
            weights += 4 * channels * width if number == 1 else 0  # the shortcut changes channels
            channels = 4 * width
            area = side * side
            kept = (2 * width + channels) * area
            shapes.append(_Shape(f"block-{width}.{number}", weights * area, weights, 4e-6 * 32 * channels * area, kept))
    return [*shapes, _Shape("dense", 2048 * 1000, 2048 * 1000, 4e-6 * 32 * 1000, 1000)]


def _transformer(layers: int, output_mb: float, embedding: float) -> list[_Shape]:
    """Equal layers after an embedding that costs no time and holds as many weights as that many layers."""
    body = [_Shape(f"layer.{number}", 1.0, 1.0, output_mb, 1.0) for number in range(layers)]
    return [_Shape("embedding", 0.0, embedding, output_mb, 0.0), *body]


def _amoebanet() -> list[_Shape]:
    """Three thirds of cells, each with twice the channels of the one before: the last holds three quarters of the
    weights; time grows by 40 % from the first cell to the last; a cell hands on two tensors."""
    shapes = []
    for number in range(36):
        third = number // 12
        shapes.append(_Shape(f"cell.{number}", 1.0 + 0.4 * number / 35, 4.0**third, 9.6 / 2.0**third, 0.5**third))
    return shapes


def _gnmt() -> list[_Shape]:
    """Eight encoder and eight decoder LSTMs, the latter with attention as a second input (half as much again); the
    embedding stands first, the softmax last, each with the weights of four encoder layers."""
    encoder = [_Shape(f"encoder.{number}", 1.0, 1.0, 18.4, 1.0) for number in range(8)]
    decoder = [_Shape(f"decoder.{number}", 1.35, 1.5, 18.4, 1.5) for number in range(8)]
    encoder[0] = encoder[0]._replace(parameters=5.0)
    decoder[-1] = decoder[-1]._replace(parameters=5.5, work=1.7)
    return [*encoder, *decoder]


_SHAPES: Mapping[str, Callable[[], list[_Shape]]] = MappingProxyType(
    {
        "vgg-19": _vgg,
        "amoebanet-36": _amoebanet,
        "bert-24": lambda: _transformer(24, 4.3, 2.5),
        "xlnet-36": lambda: _transformer(36, 4.2, 2.5),
        "bert-48": lambda: _transformer(48, 4.3, 2.5),
        "gnmt-16": _gnmt,
        "resnet-50": _resnet,
    }
)

TWINS = tuple(_TOTALS)


def find_profile(name_or_path: str) -> ChainProfile:
    """A twin by its name, or the profile in a file. Raises ConfigError: there is neither, or `read_profile` refuses the
    file."""
    if name_or_path in TWINS:
        return twin(name_or_path)
    if not Path(name_or_path).is_file():
        raise ConfigError(f"no chain profile {name_or_path}{nearest(name_or_path, TWINS)}; use {', '.join(TWINS)}")
    return read_profile(name_or_path)


def global_batch(name: str) -> int:
    """The samples of a step that the paper trains the model with."""
    return _TOTALS[name].global_batch


def twin(name: str) -> ChainProfile:
    """The synthetic profile of a model: its layers' shares by the rule of its architecture, its totals as published.
    The activations that are kept are what the published memory of a device leaves beside the parameters' state."""
    totals, shapes = _TOTALS[name], _SHAPES[name]()
    kept = totals.memory_gb * 1e9 - 4.0 * totals.parameters * totals.state_factor
    per_work = totals.milliseconds / sum(shape.work for shape in shapes)
    per_weight = 4.0 * totals.parameters / sum(shape.parameters for shape in shapes)
    per_kept = kept / sum(shape.kept for shape in shapes)
    return ChainProfile(
        name=name,
        batch_size=totals.batch,
        smallest_batch=totals.batch,
        state_factor=totals.state_factor,
        provenance=f"synthetic: {_SOURCES.get(name, _PUBLISHED)}; shares of the layers by a rule, not measured",
        layers=tuple(
            Layer(
                name=shape.name,
                forward_ms=round(shape.work * per_work * totals.forward_share, 6),
                backward_ms=round(shape.work * per_work * (1.0 - totals.forward_share), 6),
                output_bytes=round(shape.output_mb * 1e6),
                activation_bytes=round(shape.kept * per_kept),
                parameter_bytes=round(shape.parameters * per_weight),
            )
            for shape in shapes
        ),
    )

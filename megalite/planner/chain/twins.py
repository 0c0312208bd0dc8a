"""Synthetic twins of the models in the DAPPLE paper: published totals, spread over the layers by a simple rule."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.config.values import nearest
from megalite.planner.chain.inputs import ChainProfile, Layer, read_profile


class _Totals(NamedTuple):
    """Of the whole model."""

    parameters: float  # elements, 4 bytes each
    milliseconds: float  # forward and backward of a microbatch of `batch` on one V100
    forward_share: float
    batch: int
    state_factor: float
    memory_gb: float  # of one device that holds all, with activations of one microbatch
    global_batch: int


class _Shape(NamedTuple):
    """A layer relative to the others."""

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
    }
)


_PUBLISHED = "totals as published for a V100 with the DAPPLE paper (arXiv 2007.01045) and its profiles"
_SOURCES = MappingProxyType(
    {"bert-24": "time and parameters scaled from the DAPPLE paper's profile of another batch; memory assumed"}
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
    }
)

TWINS = tuple(_TOTALS)  # names of the six models


def find_profile(name_or_path: str) -> ChainProfile:
    """A twin by its name, or the profile in a file. Raises ConfigError: there is neither, or `read_profile` refuses the
    file."""
    if name_or_path in TWINS:
        return twin(name_or_path)
    if not Path(name_or_path).is_file():
        raise ConfigError(
            f"there is no chain profile {name_or_path}{nearest(name_or_path, TWINS)} (give a YAML file, or one of "
            f"{', '.join(TWINS)})"
        )
    return read_profile(name_or_path)


def global_batch(name: str) -> int:
    """The samples of a step that the paper trains the model with."""
    return _TOTALS[name].global_batch


def twin(name: str) -> ChainProfile:
    """The synthetic profile of a model: its layers' shares by the rule of its architecture, its totals as published.

    The activations that are kept are what the published memory of a device leaves beside the parameters' state.
    """
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

"""The parts of `megalite inspect` that read tensors and need torch: statistics, and differences of two checkpoints.

At most one block of each checkpoint is in memory at a time."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from megalite.checkpoint.folders import FoundCheckpoint
from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import Manifest, Slice, TensorEntry, file_key, flat_boxes
from megalite.cli.display import short, table
from megalite.config.errors import CheckpointError, plural

BLOCK = 1 << 22
"""Elements read at once from each of at most two tensors: 32 MiB in float64."""

_CPU = torch.device("cpu")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes. Comparing as integers is bitwise, also for NaN and -0."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite elements of a tensor; None if it has none. `std` is the population standard deviation."""

    elements: int
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Difference:
    """How the elements of a tensor differ between two checkpoints.

    Args:
        elements: number of elements.
        differing: number of elements with different bits or, if the dtypes differ, different values.
        non_finite: number of differing elements with a NaN or an infinity on either side.
        max_abs: largest |a - b| over the elements that are finite on both sides.
        rms: square root of the mean of (a - b)^2 over the elements that are finite on both sides."""

    elements: int
    differing: int
    non_finite: int
    max_abs: float
    rms: float

    @property
    def size(self) -> tuple[bool, float, int]:
        """Sort key: a difference with NaN or infinity is larger than any finite difference."""
        return (self.non_finite > 0, self.max_abs, self.differing)


@dataclass(frozen=True)
class Comparison:
    """How the tensors of two checkpoints differ, by key."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    declared: dict[str, tuple[TensorEntry, TensorEntry]]
    """Key -> both entries, if dtype or global shape differ."""
    differing: dict[str, Difference]
    """Key -> difference of the elements, largest first. Contains only tensors of equal shape."""
    compared: int
    """Number of tensors that have the same shape in both checkpoints."""

    @property
    def same(self) -> bool:
        return not (self.only_first or self.only_second or self.declared or self.differing)


def blocks(shape: Sequence[int], limit: int = BLOCK) -> Iterator[Slice]:
    """Yield slices of at most `limit` elements that tile `shape`, in row-major order."""
    size = math.prod(shape)
    for start in range(0, size, limit):
        yield from flat_boxes(shape, start, min(start + limit, size))


def statistics(checkpoint: Checkpoint, key: str) -> Statistics:
    """Return statistics of one tensor in float64. Mean and std are merged block by block (Chan, Golub, LeVeque 1979)."""
    entry = checkpoint.entry(key)
    nan = inf = count = 0
    least, most, mean, squares = math.inf, -math.inf, 0.0, 0.0
    for bounds in blocks(entry.global_shape):
        values = checkpoint.read(key, bounds, device=_CPU, dtype=torch.float64).flatten()
        nan += int(values.isnan().sum())
        inf += int(values.isinf().sum())
        values = values[values.isfinite()]
        new = values.numel()
        if not new:
            continue
        least, most = min(least, values.min().item()), max(most, values.max().item())
        centre = values.mean().item()
        squares += (values - centre).square().sum().item() + (centre - mean) ** 2 * count * new / (count + new)
        count += new
        mean += (centre - mean) * new / count
    elements = math.prod(entry.global_shape)
    if not count:
        return Statistics(elements, nan, inf, None, None, None, None)
    return Statistics(elements, nan, inf, least, most, mean, math.sqrt(squares / count))


def compare(first: Checkpoint, second: Checkpoint, keys: Sequence[str], *, trust_hashes: bool) -> Comparison:
    """Compare the tensors of two checkpoints, which may have different layouts.

    Args:
        keys: keys of the tensors to compare; each is in at least one of the checkpoints.
        trust_hashes: treat tensors with the same slices in files of equal sha256 as equal without reading them. Only
            valid for verified checkpoints."""
    declared, found = {}, {}
    compared = 0
    for key in keys:
        if not (first.has(key) and second.has(key)):
            continue
        one, other = first.entry(key), second.entry(key)
        if (one.dtype, one.global_shape) != (other.dtype, other.global_shape):
            declared[key] = (one, other)
        if one.global_shape != other.global_shape:
            continue
        compared += 1
        if trust_hashes and _same_files(first, one, second, other):
            continue
        difference = _difference(first, second, key)
        if difference.differing:
            found[key] = difference
    largest = sorted(found, key=lambda key: found[key].size, reverse=True)
    return Comparison(
        only_first=tuple(key for key in keys if not second.has(key)),
        only_second=tuple(key for key in keys if not first.has(key)),
        declared=declared,
        differing={key: found[key] for key in largest},
        compared=compared,
    )


def _same_files(first: Checkpoint, one: TensorEntry, second: Checkpoint, other: TensorEntry) -> bool:
    """Return whether both tensors consist of the same slices in files with the same sha256."""

    def places(checkpoint: Checkpoint, entry: TensorEntry) -> list[tuple[str, Slice]]:
        return [(checkpoint.manifest.files[part.file].sha256, part.slice) for part in entry.parts]

    return one.dtype == other.dtype and places(first, one) == places(second, other)


def _difference(first: Checkpoint, second: Checkpoint, key: str) -> Difference:
    shape = first.entry(key).global_shape
    differing = non_finite = finite = 0
    largest = squares = 0.0
    for bounds in blocks(shape):
        one = first.read(key, bounds, device=_CPU).flatten()
        other = second.read(key, bounds, device=_CPU).flatten()
        unequal = _unequal(one, other)
        a, b = one.double(), other.double()
        usable = a.isfinite() & b.isfinite()
        finite += int(usable.sum())
        differing += int(unequal.sum())
        non_finite += int((unequal & ~usable).sum())
        gap = (a - b)[unequal & usable].abs()
        if gap.numel():
            largest = max(largest, gap.max().item())
            squares += gap.square().sum().item()
    rms = math.sqrt(squares / finite) if finite else 0.0
    return Difference(math.prod(shape), differing, non_finite, largest, rms)


def _unequal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements with different bits or, between dtypes, different values (NaN equals NaN)."""
    if one.dtype == other.dtype:
        bits = _BITS[one.element_size()]
        return one.view(bits) != other.view(bits)
    a, b = one.double(), other.double()
    return (a != b) & ~(a.isnan() & b.isnan())


_SHOWN = 20  # maximum rows of a list of differences
_IGNORED = (
    "config.checkpoint",
    "config.logging",
    "config.data.tokenizer_model",
    "config.data.vocab_file",
    "config.data.merge_file",
)
"""Fields of the manifest with paths and the like. They do not make two checkpoints different."""


def tensor_statistics(found: FoundCheckpoint, pattern: str) -> dict[str, dict[str, Any]]:
    """Return statistics of the tensors with a file key (`layers.0.norm.weight`, `exp_avg/...`) that matches."""
    checkpoint = _open(found)
    rows = {}
    for key in _matching(checkpoint.keys(), pattern, f"{found.path} has no"):
        entry = checkpoint.entry(key)
        shape = {"shape": list(entry.global_shape), "dtype": entry.dtype}
        rows[file_key(key)] = shape | _plain(asdict(statistics(checkpoint, key)))
    return rows


def _open(found: FoundCheckpoint) -> Checkpoint:
    assert found.manifest is not None, "callers report damaged checkpoints"
    return Checkpoint(found.path, found.manifest)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _matching(keys: list[str], pattern: str, subject: str) -> list[str]:
    matching = [key for key in keys if fnmatchcase(file_key(key), pattern)]
    if not matching:
        names = [file_key(key) for key in keys]
        near = difflib.get_close_matches(pattern, names, n=1) or names[:1]
        hint = f"; it has {near[0]}, for instance" if near else ""
        wider = f"*{pattern.strip('*')}*"
        remedy = f"; try '{wider}'" if wider not in (pattern, "**") else ""
        raise CheckpointError(f"--tensors {pattern}: {subject} tensor of such a name{hint}{remedy}")
    return matching


class CheckpointDiff:
    """Differences of two checkpoints in manifest fields and tensors. `pattern`: compare only matching tensors and no
    fields; None: compare everything. `trust_hashes`: see `compare`. Raises CheckpointError if no tensor matches or if a
    file contradicts the manifest."""

    def __init__(
        self, first: FoundCheckpoint, second: FoundCheckpoint, *, pattern: str | None, trust_hashes: bool
    ) -> None:
        self._paths = (first.path, second.path)
        one, other = _open(first), _open(second)
        keys = sorted({*one.keys(), *other.keys()})
        if pattern is not None:
            keys = _matching(keys, pattern, "neither checkpoint has a")
        fields = {} if pattern is not None else _differing_fields(one.manifest, other.manifest)
        self.ignored = {
            name: values
            for name, values in fields.items()
            if f"{name}.".startswith(tuple(f"{each}." for each in _IGNORED))
        }
        self.fields = {name: values for name, values in fields.items() if name not in self.ignored}
        self.tensors: Comparison = compare(one, other, keys, trust_hashes=trust_hashes)

    @property
    def same(self) -> bool:
        """Whether nothing differs except ignored fields."""
        return not self.fields and self.tensors.same

    def data(self) -> dict[str, Any]:
        tensors = self.tensors
        return {
            "first": str(self._paths[0]),
            "second": str(self._paths[1]),
            "same": self.same,
            "fields": {name: list(values) for name, values in self.fields.items()},
            "fields_not_counted": {name: list(values) for name, values in self.ignored.items()},
            "only_first": list(tensors.only_first),
            "only_second": list(tensors.only_second),
            "declared": {
                key: [{"dtype": entry.dtype, "shape": list(entry.global_shape)} for entry in entries]
                for key, entries in tensors.declared.items()
            },
            "differing": {key: _plain(asdict(found)) for key, found in tensors.differing.items()},
            "compared": tensors.compared,
        }

    def text(self) -> str:
        """Return the differences as text; the last line is a summary."""
        tensors = self.tensors
        lines = [f"A  {self._paths[0]}", f"B  {self._paths[1]}"]
        for title, fields in (
            ("fields that differ (A | B):", self.fields),
            ("paths and the like that differ and do not count (A | B):", self.ignored),
        ):
            if fields:
                rows = [[name, short(a), "|", short(b)] for name, (a, b) in fields.items()]
                lines += [title, *table(rows, indent=2)]
        for which, keys in (("A", tensors.only_first), ("B", tensors.only_second)):
            if keys:
                lines += [f"only in {which}:", *_shown([f"  {key}" for key in keys])]
        if tensors.declared:
            rows = [[key, _kind(a), "|", _kind(b)] for key, (a, b) in tensors.declared.items()]
            lines += ["dtype or shape (A | B):", *_shown(table(rows, indent=2))]
        if tensors.differing:
            rows = [["tensor", "largest", "rms", "elements", "", "NaN or Inf"]]
            for key, found in tensors.differing.items():
                beyond = f"{found.non_finite:,}" if found.non_finite else ""
                numbers = (f"{found.max_abs:.3g}", f"{found.rms:.3g}", f"{found.differing:,}")
                rows.append([key, *numbers, f"of {found.elements:,}", beyond])
            shown = _shown(table(rows, right={1, 2, 3, 5}, indent=2), head=1)
            lines += ["values, the largest difference first:", *shown]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        tensors = self.tensors
        if self.same:
            but = ", except fields that do not count" if self.ignored else ""
            return f"equal: {plural(tensors.compared, 'tensor')}, bit for bit{but}"
        counts = [
            (len(self.fields), "field", ""),
            (len(tensors.only_first), "tensor", " only in A"),
            (len(tensors.only_second), "tensor", " only in B"),
            (len(tensors.declared), "tensor", " of another dtype or shape"),
        ]
        parts = [f"{plural(count, what)}{where}" for count, what, where in counts if count]
        parts.append(f"values of {len(tensors.differing)} of the {tensors.compared} tensors in both")
        return f"different: {', '.join(parts)}"


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.global_shape)}"


def _shown(lines: list[str], head: int = 0) -> list[str]:
    """Truncate a list of lines. `head`: number of heading lines."""
    limit = _SHOWN + head
    return lines if len(lines) <= limit else [*lines[:limit], f"  ... and {len(lines) - limit} more (--json has all)"]


def _differing_fields(one: Manifest, other: Manifest) -> dict[str, tuple[Any, Any]]:
    """Return dotted name -> both values of each field that differs; None for a missing field."""
    sides = []
    for manifest in (one, other):
        flat: dict[str, Any] = {"step": manifest.step, "tokenizer": manifest.tokenizer}
        for name in ("counters", "layout", "config"):
            flat |= _flat(name, getattr(manifest, name))
        sides.append(flat)
    names = [*sides[0], *(name for name in sides[1] if name not in sides[0])]
    return {
        name: (sides[0].get(name), sides[1].get(name)) for name in names if sides[0].get(name) != sides[1].get(name)
    }


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flat(f"{prefix}.{name}", inner)
    return flat

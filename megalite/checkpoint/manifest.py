"""Read and write a checkpoint's manifest: its tensors, the slices of each in each file, and every file's sha256.

Imports no torch, because inspecting, planning and converting use it without. The text is canonical JSON with its own
sha256, which detects an edited or damaged manifest."""

import hashlib
import itertools
import json
import math
import re
from collections import Counter, UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megalite.checkpoint.files import FileEntry
from megalite.config.errors import CheckpointError
from megalite.config.registry import gc_paused

# Equal to topology.layout.Slice. Defined here too, because packages of one row do not import each other.
Slice = tuple[tuple[int, int], ...]
"""Per dimension, the half-open range [start, stop)."""


def volume(bounds: Slice) -> int:
    return math.prod(stop - start for start, stop in bounds)


def overlap(one: Slice, other: Slice) -> Slice | None:
    """Return the intersection of two slices of one tensor, or None if it is empty."""
    bounds = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return bounds if all(start < stop for start, stop in bounds) else None


def within(bounds: Slice, shape: Sequence[int], *, may_be_empty: bool = False) -> bool:
    """Return whether a slice lies inside a tensor of this shape and, unless `may_be_empty`, is not empty."""
    return len(bounds) == len(shape) and all(
        0 <= start <= stop <= size and (start < stop or may_be_empty)
        for (start, stop), size in zip(bounds, shape, strict=True)
    )


def relative(bounds: Slice, origin: Slice) -> tuple[slice, ...]:
    """Return the index of `bounds` in a tensor that contains the slice `origin`, a superset of `bounds`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(bounds, origin, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Slice]:
    """Return boxes that cover elements [start, stop) of a flattened tensor, in order. They are the end of a row, whole
    rows and the start of a row; incomplete rows are split recursively."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    boxes = _in_row(shape, first - 1, row - (first * row - start), row)
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    return boxes + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> list[Slice]:
    return [((index, index + 1), *box) for box in flat_boxes(shape[1:], start, stop)]


def tiling_fault(shape: Sequence[int], slices: Sequence[Slice]) -> str | None:
    """Return how `slices` fail to cover every element of `shape` exactly once, or None if they do.

    The sum of a box's corners with alternating signs is the mixed difference of its indicator function, so the boxes
    tile the tensor if and only if their corners add up to the corners of the whole. This takes time linear in the
    number of boxes; comparing pairs would be quadratic."""
    for bounds in slices:
        if not within(bounds, shape):
            return f"slice {list(bounds)} is empty or does not lie in shape {tuple(shape)}"
    corners: Counter[tuple[int, ...]] = Counter()
    whole: Slice = tuple((0, size) for size in shape)
    for bounds, weight in itertools.chain(((bounds, 1) for bounds in slices), [(whole, -1)]):
        for ends in itertools.product((0, 1), repeat=len(shape)):
            corner = tuple(bound[end] for bound, end in zip(bounds, ends, strict=True))
            corners[corner] += -weight if sum(ends) % 2 else weight
    if not any(corners.values()):
        return None
    excess = sum(volume(bounds) for bounds in slices) - math.prod(shape)
    what = "overlap" if excess > 0 else "leave a gap" if excess < 0 else "overlap and leave a gap"
    return f"its {len(slices)} parts {what} in shape {tuple(shape)}"


FORMAT_VERSION = 3
"""The version that is written. Older versions are read: version 2 has no hash blocks; version 1 also has no `code`, and
at most one part of a tensor per file."""
LEAST_BLOCK = 1 << 20
"""Minimum bytes of a hash block. Very many small blocks would be slow to hash."""
MANIFEST_NAME = "manifest.json"
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8}
"""Bytes per element, by safetensors' name of the dtype."""
MAX_DIMS = 8
MAX_FAULT = 1000
"""Maximum characters of a fault in an error message."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}\.safetensors")
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,511}")
_STATE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointMissing(CheckpointError):
    """No checkpoint exists at the given place (as opposed to a damaged one)."""


def weight_key(name: str) -> str:
    """Return the manifest key of a model weight. Its key in the safetensors file is `name`."""
    return f"weight:{name}"


def optimizer_key(state: str, name: str) -> str:
    """Return the manifest key of an optimizer state (`main_param`, `exp_avg`, ...). Its key in the file is `state/name`."""
    return f"optimizer.{state}:{name}"


def file_key(key: str) -> str:
    """Return the key of a tensor inside its safetensors file."""
    group, colon, name = key.partition(":")
    if colon and _TENSOR_NAME.fullmatch(name) and name != "__metadata__":  # reserved in safetensors
        if group == "weight":
            return name
        prefix, dot, state = group.partition(".")
        if dot and prefix == "optimizer" and _STATE_NAME.fullmatch(state):
            return f"{state}/{name}"
    raise CheckpointError(f"{key!r} is not a tensor key: expected weight:<name> or optimizer.<state>:<name>")


def part_keys(key: str, files: Sequence[str]) -> list[str]:
    """Return the key of each part of a tensor inside its file: its `file_key`, and the suffix `#k` for the k-th part in
    the same file, counted from 0, if k > 0."""
    before: Counter[str] = Counter()
    keys = []
    for file in files:
        count = before[file]
        before[file] += 1
        keys.append(f"{file_key(key)}#{count}" if count else file_key(key))
    return keys


@dataclass(frozen=True)
class Part:
    """The slice of a tensor that one file holds."""

    file: str
    slice: Slice


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: parameter name, dtype (a key of `ITEM_SIZES`), global shape, and the parts that tile it."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's manifest.

    Args:
        tensors: entries by `weight_key` or `optimizer_key`.
        counters: plain JSON: consumed samples, loss scaler and the other state of a resumed run.
        config: the resolved run config.
        layout: the parallel layout of the writing run; for information only, any layout can read the checkpoint.
        code: plain JSON: software versions of the writing run, and its kernels.
        tokenizer: sha256 of the tokenizer's files, if the run has one."""

    step: int
    files: dict[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    counters: dict[str, Any]
    config: dict[str, Any]
    layout: dict[str, Any]
    megalite_version: str
    code: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        try:
            with gc_paused():
                # asdict copies everything and takes longer than writing a small checkpoint.
                return seal({**vars(self), **plain_parts(self.files, self.tensors)})
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST_NAME}: counters, config and layout must be plain JSON: {error}") from None

    @classmethod
    def from_json(cls, text: str, *, source: str = MANIFEST_NAME) -> "Manifest":
        """Parse a manifest and run all checks that need no other file."""
        try:
            with gc_paused():
                return _parse_manifest(_unseal(text))
        except _Fault as fault:
            raise CheckpointError(f"{source}: {_presentable(str(fault))}") from None


def plain_parts(files: Mapping[str, FileEntry], tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return both as plain JSON, under `files` and `tensors`."""
    return {
        "files": {name: vars(entry) for name, entry in files.items()},
        "tensors": {
            key: {**vars(entry), "parts": [vars(part) for part in entry.parts]} for key, entry in tensors.items()
        },
    }


class _Entries(UserDict[str, Any]):
    """Tensor entries by key, parsed from their JSON text on first access."""

    def __getitem__(self, key: str) -> TensorEntry:
        if isinstance(self.data[key], str):
            self.data[key] = _parse_tensor(key, json.loads(self.data[key]))
        return self.data[key]


def in_pieces(manifest: Manifest) -> list[Any]:
    """Return a sound manifest as plain JSON, with each tensor entry as a separate text."""
    with gc_paused():
        plain = plain_parts(manifest.files, manifest.tensors)
        return [
            {**vars(manifest), **plain, "tensors": {}},
            {key: _canonical(one) for key, one in plain["tensors"].items()},
        ]


def from_pieces(body: dict[str, Any], texts: dict[str, str]) -> Manifest:
    """Build the manifest from the result of `in_pieces`."""
    return replace(_parse_manifest(body), tensors=_Entries(texts))


def listed_files(text: str) -> dict[str, FileEntry]:
    """Return the files that a manifest lists. Checks the manifest's own sha256 and this field only."""
    try:
        with gc_paused():
            files = _typed(_unseal(text).get("files"), dict, "files")
            return {name: _parse_file(name, value) for name, value in files.items()}
    except _Fault as fault:
        raise CheckpointError(f"{MANIFEST_NAME}: {_presentable(str(fault))}") from None


def seal(body: dict[str, Any]) -> str:
    """Return the canonical JSON of `body` with an additional field, the sha256 of that JSON."""
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body).encode()).hexdigest()})


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _presentable(text: str) -> str:
    """Shorten a text and escape control characters: a manifest may come from an untrusted source."""
    text = text if len(text) <= MAX_FAULT else f"{text[:MAX_FAULT]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class _Fault(Exception):
    """A fault in a manifest; the caller adds the file's name."""


def _unseal(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text, object_pairs_hook=unique_keys)
        if not isinstance(body, dict):
            raise _Fault("not a JSON object")
        body.pop("sha256", None)
        sound = seal(body) == text
    except (ValueError, RecursionError) as error:
        raise _Fault(f"not valid JSON: {error}") from None
    if not sound:
        raise _Fault("does not match its own sha256: edited or damaged")
    return body


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys, of which `json.loads` keeps the last. Pass it as `object_pairs_hook`."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return result


def _parse_manifest(body: dict[str, Any]) -> Manifest:
    version = body.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise _Fault(f"format_version is {version!r}; this version of megalite reads 1 to {FORMAT_VERSION}")
    if version == 1:
        body.setdefault("code", {})
    fields = _fields(body, Manifest.__dataclass_fields__, "the manifest")
    tokenizer = fields["tokenizer"]
    if tokenizer is not None and not (isinstance(tokenizer, str) and _SHA256.fullmatch(tokenizer)):
        raise _Fault(f"tokenizer must be null or a sha256, not {tokenizer!r}")
    files = {name: _parse_file(name, value) for name, value in _typed(fields["files"], dict, "files").items()}
    tensors = {key: _parse_tensor(key, value) for key, value in _typed(fields["tensors"], dict, "tensors").items()}
    _check_room(tensors, files)
    return Manifest(
        step=_integer(fields["step"], "step"),
        files=files,
        tensors=tensors,
        counters=_typed(fields["counters"], dict, "counters"),
        config=_typed(fields["config"], dict, "config"),
        layout=_typed(fields["layout"], dict, "layout"),
        megalite_version=_typed(fields["megalite_version"], str, "megalite_version"),
        code=_typed(fields["code"], dict, "code"),
        tokenizer=tokenizer,
        format_version=version,
    )


def _parse_file(name: str, value: Any) -> FileEntry:
    if not _FILE_NAME.fullmatch(name) or ".." in name:
        raise _Fault(f"{name[:120]!r} is not the name of a .safetensors file in the checkpoint's own folder")
    fields = _fields(
        {"block": 0, **_typed(value, dict, f"file {name}")}, FileEntry.__dataclass_fields__, f"file {name}"
    )
    sha256 = fields["sha256"]
    if not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise _Fault(f"file {name}: {sha256!r} is not a sha256")
    length, block = (_integer(fields[of], f"{of} of {name}") for of in ("length", "block"))
    if 0 < block < LEAST_BLOCK:
        raise _Fault(f"block of {name} is {block}; it must be 0, or {LEAST_BLOCK} or more")
    return FileEntry(length, sha256, block)


def _parse_tensor(key: str, value: Any) -> TensorEntry:
    try:
        file_key(key)
    except CheckpointError as error:
        raise _Fault(str(error)) from None
    fields = _fields(value, TensorEntry.__dataclass_fields__, key)
    if fields["name"] != key.partition(":")[2]:
        raise _Fault(f"{key}: its name field says {fields['name']!r}")
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise _Fault(f"{key}: dtype {dtype!r} is not one of {', '.join(ITEM_SIZES)}")
    shape = tuple(
        _integer(size, f"{key}: global_shape") for size in _typed(fields["global_shape"], list, f"{key}: shape")
    )
    if len(shape) > MAX_DIMS or 0 in shape:
        raise _Fault(f"{key}: global_shape {shape} must have at most {MAX_DIMS} dimensions, none of size 0")
    parts = tuple(_parse_part(key, part) for part in _typed(fields["parts"], list, f"{key}: parts"))
    fault = tiling_fault(shape, [part.slice for part in parts])
    if fault:
        raise _Fault(f"{key}: {fault}")
    return TensorEntry(fields["name"], dtype, shape, parts)


def _parse_part(key: str, value: Any) -> Part:
    fields = _fields(value, Part.__dataclass_fields__, f"a part of {key}")
    bounds = []
    for pair in _typed(fields["slice"], list, f"{key}: slice"):
        ends = [_integer(end, f"{key}: slice") for end in _typed(pair, list, f"{key}: slice")]
        if len(ends) != 2:
            raise _Fault(f"{key}: a slice has {ends} where [start, stop] belongs")
        bounds.append((ends[0], ends[1]))
    return Part(_typed(fields["file"], str, f"{key}: file"), tuple(bounds))


def _check_room(tensors: dict[str, TensorEntry], files: dict[str, FileEntry]) -> None:
    """Check that each file is large enough for its tensors, before memory is allocated for a declared shape."""
    needed: Counter[str] = Counter()
    for key, entry in tensors.items():
        for part in entry.parts:
            if part.file not in files:
                raise _Fault(f"{key}: a part is in {part.file[:120]!r}, which is not listed under files")
            needed[part.file] += volume(part.slice) * ITEM_SIZES[entry.dtype]
    for name, size in needed.items():
        if size > files[name].length:
            raise _Fault(f"the tensors in {name} take {size} bytes, the file has {files[name].length}")


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}


def _fields(value: Any, names: Iterable[str], where: str) -> dict[str, Any]:
    found, expected = set(_typed(value, dict, where)), set(names)
    if found != expected:
        wrong = sorted(expected - found) or sorted(found - expected)
        raise _Fault(f"{where}: {'lacks' if expected - found else 'has unknown'} fields {', '.join(wrong)[:200]}")
    return dict(value)


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise _Fault(f"{where} must be {_KINDS[kind]}, not {type(value).__name__}")
    return value


def _integer(value: Any, where: str) -> int:
    # isinstance would accept bool.
    if type(value) is not int or not 0 <= value < 2**63:
        raise _Fault(f"{where}: {str(value)[:80]!r} is not an integer from 0 to 2**63 - 1")
    return value

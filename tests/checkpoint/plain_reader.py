"""Read a checkpoint without megalite: the manifest as JSON, the files with safetensors' own loader."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class PlainCheckpoint:
    tensors: dict[str, torch.Tensor]
    """Manifest key -> full tensor."""
    counters: dict[str, Any]
    manifest: dict[str, Any]


def key_in_file(key: str, part: int) -> str:
    """Name of part number `part` of the manifest's `key` in a file with several parts of it."""
    group, _, name = key.partition(":")
    state = group.removeprefix("optimizer").removeprefix(".") if group != "weight" else ""
    base = f"{state}/{name}" if state else name
    return f"{base}#{part}" if part else base


def read_plainly(path: Path) -> PlainCheckpoint:
    """Assemble every tensor from its parts; each element must be covered exactly once."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = {name: load_file(path / name) for name in manifest["files"]}
    tensors = {}
    for key, entry in manifest["tensors"].items():
        seen: Counter[str] = Counter()
        full: torch.Tensor | None = None
        times = torch.zeros(entry["global_shape"], dtype=torch.uint8)
        for part in entry["parts"]:
            stored = files[part["file"]].pop(key_in_file(key, seen[part["file"]]))
            seen[part["file"]] += 1
            if full is None:
                full = torch.empty(entry["global_shape"], dtype=stored.dtype)
            place = tuple(slice(start, stop) for start, stop in part["slice"])
            full[place] = stored
            times[place] += 1
        assert full is not None and bool((times == 1).all()), f"{path}: the parts of {key} do not tile it"
        tensors[key] = full
    assert not any(files.values()), f"{path}: tensors that are not in the manifest"
    return PlainCheckpoint(tensors, manifest["counters"], manifest)


def differing(one: PlainCheckpoint, other: PlainCheckpoint) -> list[str]:
    """Keys of tensors with different bytes, and names of different counters."""
    keys = sorted(one.tensors.keys() ^ other.tensors.keys())
    for key in one.tensors.keys() & other.tensors.keys():
        a, b = one.tensors[key], other.tensors[key]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bytes(a), _bytes(b)):
            keys.append(key)
    counters = sorted(
        name
        for name in one.counters.keys() | other.counters.keys()
        if one.counters.get(name) != other.counters.get(name)
    )
    return sorted(keys) + counters


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

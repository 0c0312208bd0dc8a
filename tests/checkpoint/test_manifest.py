"""The manifest: round trip, keys, detection of damage, and exact tiling."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.files import FileEntry
from megalite.checkpoint.manifest import (
    Manifest,
    Part,
    TensorEntry,
    file_key,
    flat_boxes,
    optimizer_key,
    tiling_fault,
    weight_key,
)
from megalite.config.errors import CheckpointError

W = "weight:w"
FILE = "weights-00000.safetensors"


def small_manifest() -> Manifest:
    parts = (Part(FILE, ((0, 2), (0, 6))), Part("weights-00001.safetensors", ((2, 4), (0, 6))))
    return Manifest(
        step=12,
        files={part.file: FileEntry(1000, "a" * 64) for part in parts},
        tensors={W: TensorEntry("w", "BF16", (4, 6), parts)},
        counters={"consumed_samples": 96, "scaler": {"scale": 65536.0, "good_steps": 3}, "note": "é\ud800"},
        config={"model": {"hidden_size": 6, "dropout": 0.1, "norm": None}},
        layout={"tp": 2},
        megalite_version="0.1.0",
        tokenizer="b" * 64,
    )


def test_manifest_round_trip() -> None:
    manifest = small_manifest()
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    assert Manifest.from_json(text).to_json() == text


def test_tensor_keys() -> None:
    assert file_key(weight_key("a.b")) == "a.b"
    assert file_key(optimizer_key("exp_avg", "a.b")) == "exp_avg/a.b"
    for wrong in (
        "a.b",
        "weight:",
        "optimizer:a",
        "optimizer.:a",
        "optimizer.A b:a",
        "weight:../a",
        "weight:__metadata__",
    ):
        with pytest.raises(CheckpointError, match="is not a tensor key"):
            file_key(wrong)


def test_every_flipped_bit_of_a_manifest_is_an_error() -> None:
    data = small_manifest().to_json().encode()
    choose = random.Random(0)
    for _ in range(1500):
        flipped = bytearray(data)
        flipped[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            Manifest.from_json(flipped.decode("utf-8", errors="replace"))


def test_counters_must_be_plain_json() -> None:
    for value in (torch.ones(2), float("nan"), Path("x"), b"bytes", {1, 2}):
        manifest = Manifest(
            step=1, files={}, tensors={}, counters={"x": value}, config={}, layout={}, megalite_version="0"
        )
        with pytest.raises(CheckpointError, match="plain JSON"):
            manifest.to_json()


def covered_once(shape: tuple[int, ...], slices: list[Any]) -> bool:
    counts = torch.zeros(shape)
    for bounds in slices:
        counts[tuple(slice(*pair) for pair in bounds)] += 1
    return bool((counts == 1).all())


def test_tiling_check_equals_counting_elements() -> None:
    """All sets of up to three boxes in a small grid, and random tilings with and without a change."""
    ranges = list(itertools.combinations(range(3), 2))
    boxes = list(itertools.product(ranges, ranges))
    for count in (1, 2, 3):
        for chosen in itertools.combinations_with_replacement(boxes, count):
            assert (tiling_fault((2, 2), list(chosen)) is None) == covered_once((2, 2), list(chosen)), chosen
    choose = random.Random(1)
    for _ in range(300):
        shape = tuple(choose.randint(2, 5) for _ in range(3))
        slices = [tuple((0, size) for size in shape)]
        for _ in range(choose.randint(0, 6)):  # split a box in two, so that the boxes seldom form a grid
            box = slices.pop(choose.randrange(len(slices)))
            dim = choose.randrange(3)
            start, stop = box[dim]
            middle = choose.randint(start + 1, stop - 1) if stop - start > 1 else stop
            ends = [(start, middle), (middle, stop)]
            slices += [(*box[:dim], pair, *box[dim + 1 :]) for pair in ends if pair[0] < pair[1]]
        assert tiling_fault(shape, slices) is None
        moved = slices.copy()
        place = choose.randrange(len(moved))
        moved[place] = tuple(tuple(sorted(choose.sample(range(size + 1), 2))) for size in shape)  # type: ignore[misc]
        assert (tiling_fault(shape, moved) is None) == covered_once(shape, moved)


def test_tiling_of_many_parts_is_fast() -> None:
    size = 20_000
    assert tiling_fault((size, 3), [((row, row + 1), (0, 3)) for row in range(size)]) is None
    gap = [((row, row + 1), (0, 3)) for row in range(size) if row != 777]
    assert "leave a gap" in str(tiling_fault((size, 3), gap))
    assert "overlap" in str(tiling_fault((2,), [((0, 2),), ((1, 2),)]))
    assert "overlap and leave a gap" in str(tiling_fault((2,), [((0, 1),), ((0, 1),)]))


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 1, 2, 3)])
def test_range_of_a_flattened_tensor_as_boxes(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    values = np.arange(size).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        boxes = flat_boxes(shape, start, stop)
        parts = [values[tuple(slice(*bounds) for bounds in box)].ravel() for box in boxes]
        assert np.array_equal(np.concatenate([[], *parts]), np.arange(start, stop)), (start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        around = flat_boxes(shape, 0, start) + boxes + flat_boxes(shape, stop, size)
        assert tiling_fault(shape, around) is None

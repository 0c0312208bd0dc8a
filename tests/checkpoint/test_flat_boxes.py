"""A range of a flattened tensor as boxes."""

import itertools

import numpy as np
import pytest

from megalite.checkpoint.tiling import flat_boxes, tiling_fault


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 1, 2, 3)])
def test_every_range(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    values = np.arange(size).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        boxes = flat_boxes(shape, start, stop)
        parts = [values[tuple(slice(*bounds) for bounds in box)].ravel() for box in boxes]
        assert np.array_equal(np.concatenate([[], *parts]), np.arange(start, stop)), (start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        around = flat_boxes(shape, 0, start) + boxes + flat_boxes(shape, stop, size)
        assert tiling_fault(shape, around) is None

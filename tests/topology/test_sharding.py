"""Slices of full tensors."""

import pytest

from megalite.topology.layout import ShardSpec


def test_split_and_whole() -> None:
    whole = ShardSpec.whole("w", (4, 6))
    assert whole.slice == ((0, 4), (0, 6))
    part = ShardSpec.split("w", (4, 6), dim=1, index=2, parts=3)
    assert part.slice == ((0, 4), (4, 6))
    assert part.shape == (4, 2)
    with pytest.raises(ValueError, match=r"w: dimension 0 of \(4, 6\) does not divide by 3"):
        ShardSpec.split("w", (4, 6), dim=0, index=0, parts=3)


def test_a_slice_outside_the_tensor_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        ShardSpec(name="w", global_shape=(4,), slice=((2, 5),))

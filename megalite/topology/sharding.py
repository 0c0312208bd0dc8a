"""`ShardSpec`: which slice of a full tensor a rank holds. No torch: planner, manifest and converter use it too."""

from dataclasses import dataclass

Slice = tuple[tuple[int, int], ...]
"""Per dimension, the half-open range [start, stop)."""


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A tensor's name and global shape, neither of which depends on the layout, and the local slice of it."""

    name: str
    global_shape: tuple[int, ...]
    slice: Slice

    def __post_init__(self) -> None:
        assert len(self.slice) == len(self.global_shape), (self.name, self.slice, self.global_shape)
        for (start, stop), size in zip(self.slice, self.global_shape, strict=True):
            assert 0 <= start <= stop <= size, (self.name, self.slice, self.global_shape)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "ShardSpec":
        """The spec of a tensor that is held in full."""
        return cls(name=name, global_shape=tuple(shape), slice=tuple((0, size) for size in shape))

    @classmethod
    def split(
        cls, name: str, global_shape: tuple[int, ...], *, dim: int, index: int, parts: int
    ) -> "ShardSpec":
        """Part `index` of `parts` equal parts along `dim`.

        Raises:
            ValueError: the dimension does not divide.
        """
        size = global_shape[dim]
        if size % parts:
            raise ValueError(f"{name}: dimension {dim} of {tuple(global_shape)} does not divide by {parts}")
        step = size // parts
        bounds = [(0, extent) for extent in global_shape]
        bounds[dim] = (index * step, (index + 1) * step)
        return cls(name=name, global_shape=tuple(global_shape), slice=tuple(bounds))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local slice."""
        return tuple(stop - start for start, stop in self.slice)

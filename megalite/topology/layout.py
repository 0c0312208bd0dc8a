"""Map ranks to coordinates and list the ranks of every process group (`ParallelLayout`). Arithmetic only, no torch.

The rank order and the groups are Megatron-LM's (core/parallel_state.py, RankGenerator), so that a launch script
places the same ranks on the same nodes."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from megalite.config.errors import ConfigError

RankLists = tuple[tuple[int, ...], ...]


class Coordinate(NamedTuple):
    """Position of a rank on the dense axes."""

    tp: int
    cp: int
    dp: int
    pp: int


_DENSE_AXES: Mapping[str, frozenset[str]] = MappingProxyType(
    {kind: frozenset(kind.split("-")) for kind in ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-dp-cp")}
    | {"world": frozenset({"tp", "cp", "dp", "pp"}), "model": frozenset({"tp", "pp"})}
    | {"embedding": frozenset({"pp"})}
    | {kind: frozenset({kind}) for kind in ("cp-heads", "cp-keys")}
)
"""Kind -> the axes along which the ranks of a group differ. An `embedding` group has only some ranks of a pipeline."""
_EXPERT_AXES: Mapping[str, frozenset[str]] = MappingProxyType(
    {"ep": frozenset({"ep"}), "expert-tp": frozenset({"tp"}), "expert-dp": frozenset({"dp"})}
)


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """A grid of tp·cp·dp·pp ranks, with a second grid for experts over the same ranks: etp·ep·edp·pp.

    In the default order, global rank = tp + TP·(cp + CP·(dp + DP·pp)).

    Raises ConfigError: a size below 1."""

    KINDS: ClassVar[tuple[str, ...]] = (
        *("world", "tp", "cp", "dp", "pp", "dp-cp", "model", "tp-cp", "tp-dp-cp"),
        *("cp-heads", "cp-keys", "embedding", "ep", "expert-tp", "expert-dp"),
    )
    """The kinds of group in every layout; `model` is tp-pp, one replica of the network."""

    INSTANCE_KINDS: ClassVar[tuple[str, ...]] = ("intra-dp-cp", "inter-dp-cp", "intra-expert-dp", "inter-expert-dp")
    """Further kinds if there are several instances: intra groups shard among themselves, and an inter group contains the
    ranks with the same index in all instances."""

    ORDERS: ClassVar[tuple[str, ...]] = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    cp_heads: int = 1  # consecutive cp ranks that exchange heads; groups of them exchange keys and values
    instances: int = 1
    """Number of equal parts, of consecutive ranks, into which each dp-cp and expert-dp group is cut for sharding."""
    order: str = "tp-cp-ep-dp-pp"
    placement: tuple[int, ...] | None = None
    """Pipeline rank of each virtual stage; None: round-robin."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dp", "ep"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis} is {getattr(self, axis)}; a parallel size is at least 1")
        assert self.cp_heads >= 1 and self.cp % self.cp_heads == 0, (self.cp, self.cp_heads)
        assert self.order in self.ORDERS, self.order
        # Config rules refuse an expert grid that does not divide a stage or that has different pipelines.
        block = self.expert_tp * self.ep
        assert self.tp * self.cp * self.dp % block == 0, self
        own_pipelines = self.order == "tp-cp-ep-pp-dp" and self._separate_experts and self.pp > 1
        assert not own_pipelines or block == self.tp * self.cp, self
        assert self.cp * self.dp % self.instances == self.expert_dp % self.instances == 0, self

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.KINDS + (self.INSTANCE_KINDS if self.instances > 1 else ())

    @property
    def _separate_experts(self) -> bool:
        """Whether experts have a separate grid; otherwise they use the dense one with cp folded into dp."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @cached_property
    def _dense_strides(self) -> dict[str, tuple[int, int]]:
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return _strides(sizes, [axis for axis in self.order.split("-") if axis != "ep"])

    @cached_property
    def _context_strides(self) -> dict[str, tuple[int, int]]:
        """The dense grid with cp split into two axes."""
        stride = self._dense_strides["cp"][1]
        parts = {"cp-heads": (self.cp_heads, stride), "cp-keys": (self.cp // self.cp_heads, stride * self.cp_heads)}
        found: dict[str, tuple[int, int]] = {}
        for axis, step in self._dense_strides.items():
            found |= parts if axis == "cp" else {axis: step}
        return found

    @cached_property
    def _expert_strides(self) -> dict[str, tuple[int, int]]:
        sizes = {"tp": self.expert_tp, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        return _strides(sizes, [axis for axis in self.order.split("-") if axis != "cp"])

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank` on the dense axes."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        strides = self._dense_strides
        return Coordinate(**{axis: rank // strides[axis][1] % strides[axis][0] for axis in Coordinate._fields})

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates; the inverse of `coordinate`."""
        place = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        return sum(index * self._dense_strides[axis][1] for axis, index in place.items())

    def groups(self, kind: str, limit: int | None = None) -> RankLists:
        """Return the groups of one kind: disjoint rank lists, each ascending, in ascending order of their first rank.

        An `embedding` group contains the ranks of a pipeline with the first and the last stage, which share the tied
        embedding. In a V-shaped schedule both stages are on one rank. `limit`: the greatest number of groups to build."""
        if kind in self.INSTANCE_KINDS:
            whole = self.groups(kind[len("intra-") :], limit)
            return tuple(sorted(part for ranks in whole for part in self._parts(kind, ranks)))[:limit]
        strides, axes = self._grid(kind)
        members = self._members(kind)
        firsts = itertools.islice(_offsets(strides, strides.keys() - axes), limit)
        return tuple(tuple(first + member for member in members) for first in firsts)

    def inside(self, kind: str) -> str:
        """Return the kind of group, for dp-cp or expert-dp, that contains the ranks of one instance."""
        return f"intra-{kind}" if self.instances > 1 else kind

    def group_count(self, kind: str) -> int:
        """Return the number of groups of one kind."""
        if kind in self.INSTANCE_KINDS:
            size = self.expert_dp if "expert" in kind else self.cp * self.dp
            return self.group_count(kind[len("intra-") :]) * len(self._parts(kind, tuple(range(size))))
        strides, axes = self._grid(kind)
        return math.prod(size for axis, (size, _) in strides.items() if axis not in axes)

    def group_of(self, kind: str, rank: int) -> tuple[int, ...] | None:
        """Return the group of a kind that contains `rank`, or None, without building the others."""
        if kind in self.INSTANCE_KINDS:
            whole = self.group_of(kind[len("intra-") :], rank)
            assert whole is not None, kind
            return next(part for part in self._parts(kind, whole) if rank in part)
        strides, axes = self._grid(kind)
        first = rank - sum(rank // strides[axis][1] % strides[axis][0] * strides[axis][1] for axis in axes)
        found = tuple(first + member for member in self._members(kind))
        return found if rank in found else None

    def _parts(self, kind: str, ranks: tuple[int, ...]) -> RankLists:
        """Cut the ranks of a dp-cp or expert-dp group into groups of one of `INSTANCE_KINDS`."""
        size = len(ranks) // self.instances
        if kind.startswith("intra"):
            return tuple(ranks[first : first + size] for first in range(0, len(ranks), size))
        return tuple(ranks[place::size] for place in range(size))

    def _grid(self, kind: str) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
        """Return the grid of a kind of group, and the axes along which the ranks of a group differ."""
        if not self._separate_experts:
            kind = {"expert-tp": "tp", "expert-dp": "dp-cp"}.get(kind, kind)
        if kind in _EXPERT_AXES:
            return self._expert_strides, _EXPERT_AXES[kind]
        if kind in ("cp-heads", "cp-keys"):
            return self._context_strides, _DENSE_AXES[kind]
        return self._dense_strides, _DENSE_AXES[kind]

    def _members(self, kind: str) -> list[int]:
        """Return the offsets of a group's ranks from the first rank of their part of the grid."""
        strides, axes = self._grid(kind)
        members = list(_offsets(strides, axes))
        first, last = (0, self.pp - 1) if self.placement is None else (self.placement[0], self.placement[-1])
        return [members[place] for place in sorted({first, last})] if kind == "embedding" else members

    def pipeline_edges(self) -> RankLists:
        """Return the pairs (sender, receiver) of neighbours in every pipeline, in both directions, without repeats.

        Neighbours hold consecutive stages; without a placement, the last and the first rank are neighbours too."""
        hops = list(itertools.pairwise(range(self.pp) if self.placement is None else self.placement))
        if self.placement is None:
            hops.append((self.pp - 1, 0))
        both = [pair for here, there in hops if here != there for pair in ((here, there), (there, here))]
        return tuple(dict.fromkeys((ranks[here], ranks[there]) for ranks in self.groups("pp") for here, there in both))


def _strides(sizes: dict[str, int], fastest_first: list[str]) -> dict[str, tuple[int, int]]:
    """Return {axis: (size, stride)} of a grid; the first axis varies fastest."""
    strides, stride = {}, 1
    for axis in fastest_first:
        strides[axis] = (sizes[axis], stride)
        stride *= sizes[axis]
    return strides


def _offsets(strides: dict[str, tuple[int, int]], axes: Set[str]) -> Iterator[int]:
    """Yield the ranks at coordinate 0 of all other axes, ascending. `strides` lists the fastest axis first."""
    ranges = [range(0, size * step, step) for axis, (size, step) in reversed(strides.items()) if axis in axes]
    return map(sum, itertools.product(*ranges))


Span = tuple[int, int]  # half-open range of true positions
Spans = tuple[Span, ...]  # one rank's part of a sequence, in ascending order, which is the order of its rows


def sequence_spans(seq_length: int, *, cp_rank: int, cp_size: int) -> Spans:
    """Return the spans of true positions of rank `cp_rank`, in the order of its rows.

    The sequence is cut into 2·cp equal chunks, and rank r gets chunks r and 2·cp-1-r. The queries of an early chunk
    attend to few keys, those of a late chunk to many, so every rank has the same number of visible (query, key) pairs
    against the keys of every other rank. A single rank gets the span (0, s).

    Source: zigzag order of ring attention (arXiv 2310.01889 with the load balance of arXiv 2311.09431)."""
    assert 0 <= cp_rank < cp_size, (cp_rank, cp_size)
    if cp_size == 1:
        return ((0, seq_length),)
    length, rest = divmod(seq_length, 2 * cp_size)
    assert rest == 0, f"sequence of {seq_length} in {2 * cp_size} chunks"
    return tuple((chunk * length, (chunk + 1) * length) for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank))


SHORTEST_CHUNK = 128
"""Least number of positions in a chunk of `balanced_spans`, with more than two per rank: fewer do not fill a tile."""


def balanced_spans(
    seq_length: int,
    cp_size: int,
    document_starts: tuple[tuple[int, ...], ...],
    windows: tuple[int | None, ...] = (None,),
) -> tuple[Spans, ...]:
    """Return each cp rank's spans for samples with these documents, so that all ranks have about as many visible pairs.

    The sequence is cut into up to 8·cp equal chunks. In descending order of visible pairs, each chunk goes to the rank with
    the fewest pairs so far among those with room; every rank gets equally many chunks. A rank gets the same positions of
    all samples, so pairs are summed over the samples, and over `windows`, one for each layer.

    Source: longest processing time first (Graham 1969), with equal counts."""
    own = seq_length // cp_size
    counts = (n for n in (8, 4) if own % n == 0 and own // n >= SHORTEST_CHUNK)
    length = own // next(counts, 2)
    chunks = [(first, first + length) for first in range(0, seq_length, length)]
    layers = Counter(windows)
    areas = [
        sum(
            times * visible_pairs(chunk, starts, window)
            for starts in document_starts
            for window, times in layers.items()
        )
        for chunk in chunks
    ]
    assigned: list[list[Span]] = [[] for _ in range(cp_size)]
    loads = [0] * cp_size
    for index in sorted(range(len(chunks)), key=lambda index: (-areas[index], index)):
        rank = min(
            (rank for rank in range(cp_size) if len(assigned[rank]) * length < own),
            key=lambda rank: (loads[rank], rank),
        )
        assigned[rank].append(chunks[index])
        loads[rank] += areas[index]
    return joined_spans(tuple(map(tuple, assigned)), 1)


def visible_pairs(queries: Span, starts: tuple[int, ...], window: int | None = None) -> int:
    """Count the visible (query, key) pairs of a span of queries: keys of the query's document up to itself, at most
    `window`."""

    def of_first(tokens: int) -> int:
        """Count the pairs of a document's first tokens."""
        growing = tokens if window is None else min(tokens, window)
        return growing * (growing + 1) // 2 + (tokens - growing) * growing

    documents = starts[bisect_right(starts, queries[0]) - 1 : bisect_left(starts, queries[1])]
    pairs = zip(documents, (*documents[1:], queries[1]), strict=True)
    return sum(of_first(stop - first) - of_first(max(queries[0] - first, 0)) for first, stop in pairs)


@lru_cache(maxsize=1024)
def joined_spans(by_rank: tuple[Spans, ...], size: int) -> tuple[Spans, ...]:
    """Join the spans of each `size` consecutive ranks; adjacent spans become one."""
    found = []
    for first in range(0, len(by_rank), size):
        spans: list[Span] = []
        for span in sorted(chain.from_iterable(by_rank[first : first + size])):
            if spans and spans[-1][1] == span[0]:
                span = spans.pop()[0], span[1]
            spans.append(span)
        found.append(tuple(spans))
    return tuple(found)


Slice = tuple[tuple[int, int], ...]  # per dimension, the half-open range [start, stop)


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A tensor's name and global shape, which do not depend on the layout, and the local slice of it."""

    name: str
    global_shape: tuple[int, ...]
    slice: Slice

    def __post_init__(self) -> None:
        assert len(self.slice) == len(self.global_shape), (self.name, self.slice, self.global_shape)
        for (start, stop), size in zip(self.slice, self.global_shape, strict=True):
            assert 0 <= start <= stop <= size, (self.name, self.slice, self.global_shape)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "ShardSpec":
        """Return the spec of a tensor that is complete on this rank."""
        return cls(name=name, global_shape=tuple(shape), slice=tuple((0, size) for size in shape))

    @classmethod
    def split(cls, name: str, global_shape: tuple[int, ...], *, dim: int, index: int, parts: int) -> "ShardSpec":
        """Return part `index` of `parts` equal parts along `dim`. Raises ValueError: the size is not divisible."""
        size = global_shape[dim]
        if size % parts:
            raise ValueError(f"{name}: dimension {dim} of {tuple(global_shape)} does not divide by {parts}")
        step = size // parts
        bounds = [(0, extent) for extent in global_shape]
        bounds[dim] = (index * step, (index + 1) * step)
        return cls(name=name, global_shape=tuple(global_shape), slice=tuple(bounds))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.slice)

    def stacked(self, index: int, count: int) -> "ShardSpec":
        """Return the slice at `index` of a leading dimension over `count` such tensors."""
        shape, bounds = (count, *self.global_shape), ((index, index + 1), *self.slice)
        return ShardSpec(name=self.name, global_shape=shape, slice=bounds)

"""What goes into strategies and comes out of them: groups and options, ranges to optimize, norms."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megalite.config.optimizer import HOST_PIECE
from megalite.config.parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket, Placed
from megalite.data_parallel.facts import BucketKind
from megalite.kernels.optimizer_ops import l2norm
from megalite.topology.group import Group
from megalite.topology.host_memory import HostMemory


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """A flat range of a bucket that this rank updates.

    `main_param` is what the optimizer steps, in the gradient's precision: the bucket's own memory where parameters
    have that precision, else a copy of it. `main_param.grad` is the matching range of the bucket's gradient.
    """

    bucket: Bucket
    start: int
    stop: int
    main_param: torch.nn.Parameter
    counts_in_norm: bool
    """Some other rank holds the same gradient and has it counted, unless this is true."""
    host: HostMemory | None = None
    """Where main parameters and optimizer states are, if not on the device."""
    host_main: torch.Tensor | None = None
    """The main parameters there, where they are apart from the model's: then `main_param` is one NaN for all elements."""

    @property
    def main(self) -> torch.Tensor:
        """The values of the main parameters, to be read and written between updates."""
        return self.main_param.data if self.host_main is None else self.host_main

    @property
    def grad(self) -> torch.Tensor:
        assert self.main_param.grad is not None
        return self.main_param.grad

    @property
    def is_copy(self) -> bool:
        """The main parameters are apart from the model's."""
        return self.main_param.dtype != self.bucket.data.dtype

    def on_device(self) -> Iterator[torch.Tensor]:
        """The main parameters in pieces that visit the device, or as they are there."""
        if self.host is None or self.host_main is None:
            yield self.main_param.data
        else:
            for (values,) in self.host.stream([[piece] for piece in self.host_main.split(HOST_PIECE)], back=False):
                yield values


def placed_in(shard: OptimizerShard) -> list[Placed]:
    return [placed for placed, _, _ in shard.bucket.within(shard.start, shard.stop)]


@dataclass(frozen=True, kw_only=True)
class StrategyGroups:
    """The groups that gradients are combined over."""

    dp: Group
    """Ranks with other samples; dp·cp where there is context parallelism. Of several instances those of this one."""
    tp: Group
    embedding: Group | None
    """First and last rank of the pipeline; None in between."""
    expert_dp: Group  # ranks that hold the same part of the same experts, and other tokens
    expert_tp: Group = field(default_factory=lambda: Group.solo("expert-tp"))
    """Ranks that hold the parts of the same experts."""
    world: Group = field(default_factory=lambda: Group.solo("world"))
    """All ranks: for what all must decide alike."""
    inter_dp: Group = field(default_factory=lambda: Group.solo("inter-dp-cp"))
    """The ranks at the place that this one has in its `dp`, in all instances."""
    inter_expert_dp: Group = field(default_factory=lambda: Group.solo("inter-expert-dp"))
    gathers: Group | None = None
    """Those of `dp` again, if parameters have another communicator; those of `expert_dp` are `expert_gathers`."""
    expert_gathers: Group | None = None

    def replicas(self, kind: BucketKind) -> Group:
        """The ranks with the same bucket of this kind and other samples; of several instances those of this one."""
        return self.expert_dp if kind.expert else self.dp

    def gathers_of(self, kind: BucketKind) -> Group:
        """`replicas` for parameters."""
        return (self.expert_gathers if kind.expert else self.gathers) or self.replicas(kind)

    def instances(self, kind: BucketKind) -> Group:
        """The ranks with the same part of such a bucket where the ranks of `replicas` have one each: one of an instance."""
        return self.inter_expert_dp if kind.expert else self.inter_dp

    def own_weights(self, kind: BucketKind) -> tuple[Group, Group]:
        """Where replicas have different weights: the ranks at this one's place in all of them, and those of this one. A
        replica is an instance, or without such one rank."""
        across = self.instances(kind)
        return (across, self.replicas(kind)) if across.size > 1 else (self.replicas(kind), _ALONE)

    def first_copy(self, kind: BucketKind) -> bool:
        """Of what tp ranks or the two ends of a pipeline hold alike in such a bucket, this rank has the copy that counts."""
        first_end = not kind.tied or self.embedding is None or self.embedding.rank == 0
        return first_end and (kind.split_over_tp or (self.expert_tp if kind.expert else self.tp).rank == 0)

    def place(self, kind: BucketKind) -> tuple[int, int]:
        """This rank's among all ranks with the same bucket, and how many these are."""
        inside, across = self.replicas(kind), self.instances(kind)
        return across.rank * inside.size + inside.rank, across.size * inside.size


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What all strategies get alike."""

    bucket_size: int  # elements
    grad_dtype: torch.dtype
    overlap: bool  # reduce buckets while the last backward still runs
    overlap_param_gather: bool = True  # gather updated parameters while the next forward runs
    settings: DataParallelConfig = field(default_factory=DataParallelConfig)
    wire_dtype: torch.dtype | None = None  # None: gradients travel in their own type
    by_rank: bool = False  # sums over ranks are made in the order of ranks
    host_fraction: float = 0.0  # share of main parameters and optimizer states in host memory
    split_main: bool = False
    """bf16: between updates main parameters are kept as the 16 bits that the model's lack."""
    l2norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] = l2norm
    """The kernel for the norm of gradients, fp64 []."""
    measures_noise: bool = False  # gradients are squared before they are summed over data-parallel ranks


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Of the gradient, with the loss scale still in it."""

    shown: float  # for the log: the same on every rank
    clipping: float  # of the gradient that this rank's update goes by


_ALONE = Group.solo("replica")


class GradientNoise:
    """The gradient noise scale B = S/|G|² in samples: a batch far below it wastes steps, one far above it samples.

    G is the gradient of the expected loss and S the trace of the covariance of one sample's gradient. A mean gradient over
    b samples has the expected squared norm |G|² + S/b, so that two batch sizes give both: that of one data-parallel rank
    and that of all of them. Each step's estimates are noisy and may be negative; averages over steps are kept of the two
    apart, as their ratio would be biased. Source: arXiv 1812.06162, appendix A.1.

    `ranks`: data-parallel ranks, at least 2, which have equal parts of a batch."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # Both start from 0 and lack the same factor, which their ratio does not have.
        self._signal = self._noise = 0.0

    def update(self, whole: float, parts: float, samples: int) -> None:
        """Take in a step over `samples`. `whole`: squared norm of the gradient. `parts`: Σ over data-parallel ranks of
        the squared norms of what they add to it."""
        # Each rank adds its samples' share of the mean: their own mean is as many times that as there are ranks.
        small = self._ranks * parts
        signal = (self._ranks * whole - small) / (self._ranks - 1)
        noise = samples * (small - whole) / (self._ranks - 1)
        self._signal += (signal - self._signal) / NOISE_STEPS
        self._noise += (noise - self._noise) / NOISE_STEPS

    @property
    def scale(self) -> float | None:
        """B; None while the averages are no estimates of what cannot be negative."""
        return self._noise / self._signal if self._signal > 0.0 and self._noise >= 0.0 else None

    def state(self) -> dict[str, float]:
        return {"signal": self._signal, "noise": self._noise}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Load a saved state; both are of the model and the data, whatever the layout was. Without one start over."""
        self._signal, self._noise = float(state.get("signal", 0.0)), float(state.get("noise", 0.0))


NOISE_STEPS = 100  # steps that the averages of the gradient noise scale remember


PIECE = 1 << 20  # elements that are worked on at a time

_HIGHEST = (1 << 15) - 1


def free_main(main: torch.nn.Parameter) -> None:
    """Let one NaN stand for all elements: reading it shows that what was meant is elsewhere."""
    main.data = main.data.new_full((1,), math.nan).expand(main.numel())


class SplitMain:
    """The main parameters of a range of a bucket, kept between updates as the 16 bits that the model's weights lack.

    Then `main` is one NaN that stands for all its elements; `unfold` gives it memory and the exact values, `fold` takes
    them up and frees it.

    `main`: fp32, flat. `weights`: bf16, of the same elements: `main` rounded to the nearest, whenever `fold` or
    `unfold` is called."""

    def __init__(self, main: torch.nn.Parameter, weights: torch.Tensor) -> None:
        assert main.dtype == torch.float32 and weights.dtype == torch.bfloat16
        self._main, self._weights = main, weights
        self._low = torch.zeros(main.numel(), dtype=torch.int16, device=main.device)
        self._ties = torch.zeros(0, dtype=torch.int64, device=main.device)
        self.fold()

    def fold(self) -> None:
        """Keep what `main` lacks in the weights, and free it."""
        bits = self._main.data.view(torch.int32)
        ties = torch.empty_like(bits, dtype=torch.bool)
        for start, stop in self._pieces():
            low = bits[start:stop] - self._high(start, stop)
            torch.eq(low, _HIGHEST + 1, out=ties[start:stop])
            # NaN alone is further from its rounded value: it stays one.
            self._low[start:stop] = low.clamp_(-_HIGHEST - 1, _HIGHEST)
        self._ties = ties.nonzero().view(-1)  # here the host waits for the device: once, not for each piece
        # Not a storage of size 0: torch does not let go of memory that numpy has seen, and reading it would be reading
        # anything.
        free_main(self._main)
        self.in_memory = False

    def unfold(self) -> None:
        bits = torch.empty_like(self._low, dtype=torch.int32)
        for start, stop in self._pieces():
            torch.add(self._high(start, stop), self._low[start:stop], out=bits[start:stop])
        bits[self._ties] += 1
        self._main.data = bits.view(torch.float32)
        self.in_memory = True

    def _pieces(self) -> Iterator[tuple[int, int]]:
        size = self._weights.numel()
        return ((start, min(start + PIECE, size)) for start in range(0, size, PIECE))

    def _high(self, start: int, stop: int) -> torch.Tensor:
        return self._weights[start:stop].view(torch.int16).to(torch.int32).bitwise_left_shift_(16)


@contextlib.contextmanager
def unfolded(splits: Sequence[SplitMain]) -> Iterator[None]:
    """Inside, the main parameters are in memory, also if they are so already; what they are at the end is kept."""
    opened = [split for split in splits if not split.in_memory]
    for split in opened:
        split.unfold()
    try:
        yield
    finally:
        for split in opened:
            split.fold()

"""Define the inputs and outputs of data-parallel strategies: groups, options, optimizer shards, norms."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megalite.config.optimizer import HOST_PIECE
from megalite.config.parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.facts import BucketKind
from megalite.kernels.optimizer_ops import l2norm
from megalite.topology.group import Group
from megalite.topology.host_memory import HostMemory


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """A flat range of a bucket that this rank updates.

    The optimizer steps `main_param`, in the gradient's precision: the memory of the bucket if parameters have that
    precision, else a copy of it. `main_param.grad` is the matching range of the bucket's gradient."""

    bucket: Bucket
    start: int
    stop: int
    main_param: torch.nn.Parameter
    counts_in_norm: bool
    """Whether this rank adds the gradient to the norm; if not, another rank with the same gradient does."""
    host: HostMemory | None = None
    """Host memory with the main parameters and optimizer states, if they are offloaded."""
    host_main: torch.Tensor | None = None
    """The offloaded main parameters, if they are a copy: then `main_param` is one NaN that is expanded to all elements."""

    @property
    def main(self) -> torch.Tensor:
        """The values of the main parameters, for reading and writing between updates."""
        return self.main_param.data if self.host_main is None else self.host_main

    @property
    def grad(self) -> torch.Tensor:
        assert self.main_param.grad is not None
        return self.main_param.grad

    @property
    def is_copy(self) -> bool:
        """Whether the main parameters are separate from the model's."""
        return self.main_param.dtype != self.bucket.data.dtype

    def on_device(self) -> Iterator[torch.Tensor]:
        """Yield the main parameters on the device, in pieces if they are offloaded."""
        if self.host is None or self.host_main is None:
            yield self.main_param.data
        else:
            for (values,) in self.host.stream([[piece] for piece in self.host_main.split(HOST_PIECE)], back=False):
                yield values


@dataclass(frozen=True, kw_only=True)
class StrategyGroups:
    """The groups over which gradients are combined."""

    dp: Group
    """Ranks with other samples (dp·cp with context parallelism); with several instances, only those of this instance."""
    tp: Group
    embedding: Group | None
    """First and last rank of the pipeline; None in between."""
    expert_dp: Group  # ranks with the same part of the same experts, and other tokens
    expert_tp: Group = field(default_factory=lambda: Group.solo("expert-tp"))
    """Ranks with the parts of the same experts."""
    world: Group = field(default_factory=lambda: Group.solo("world"))
    """All ranks: for decisions that must be the same everywhere."""
    inter_dp: Group = field(default_factory=lambda: Group.solo("inter-dp-cp"))
    """The ranks with this rank's index in the `dp` groups of all instances."""
    inter_expert_dp: Group = field(default_factory=lambda: Group.solo("inter-expert-dp"))
    gathers: Group | None = None
    """The ranks of `dp` on a separate communicator for parameters; `expert_gathers` has those of `expert_dp`."""
    expert_gathers: Group | None = None

    @property
    def between_replicas(self) -> tuple[Group, ...]:
        """The groups over which this rank exchanges gradients or weights."""
        return self.dp, self.expert_dp, self.inter_dp, self.inter_expert_dp

    def replicas(self, kind: BucketKind) -> Group:
        """Return the ranks with the same bucket of this kind and other samples, in this instance."""
        return self.expert_dp if kind.expert else self.dp

    def gathers_of(self, kind: BucketKind) -> Group:
        """Return the ranks of `replicas` on the communicator for parameters."""
        return (self.expert_gathers if kind.expert else self.gathers) or self.replicas(kind)

    def instances(self, kind: BucketKind) -> Group:
        """Return the ranks, one per instance, with the same shard of a bucket that is sharded over `replicas`."""
        return self.inter_expert_dp if kind.expert else self.inter_dp

    def weight_replicas(self, kind: BucketKind) -> tuple[Group, Group]:
        """Return, for strategies in which replicas have different weights, the ranks with this rank's index in all
        replicas, and the ranks of this replica. A replica is an instance, or one rank if there is only one instance."""
        across = self.instances(kind)
        return (across, self.replicas(kind)) if across.size > 1 else (self.replicas(kind), _ALONE)

    def first_copy(self, kind: BucketKind) -> bool:
        """Return whether this rank has the copy that counts, if tp ranks or both ends of a pipeline have equal copies."""
        first_end = not kind.tied or self.embedding is None or self.embedding.rank == 0
        return first_end and (kind.split_over_tp or (self.expert_tp if kind.expert else self.tp).rank == 0)

    def replica_position(self, kind: BucketKind) -> tuple[int, int]:
        """Return this rank's index among all ranks with the same bucket, and their number."""
        inside, across = self.replicas(kind), self.instances(kind)
        return across.rank * inside.size + inside.rank, across.size * inside.size


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of all strategies."""

    bucket_size: int  # elements
    grad_dtype: torch.dtype
    overlap: bool  # reduce buckets while the last backward still runs
    overlap_param_gather: bool = True  # gather updated parameters while the next forward runs
    settings: DataParallelConfig = field(default_factory=DataParallelConfig)
    wire_dtype: torch.dtype | None = None  # None: gradients travel in their own type
    by_rank: bool = False  # sums over ranks add in the order of ranks
    host_fraction: float = 0.0  # share of main parameters and optimizer states in host memory
    split_main: bool = False
    """With bf16: between updates, store only the 16 bits of main parameters that the model's parameters lack."""
    l2norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] = l2norm
    """The kernel for the norm of gradients, fp64 []."""
    measures_noise: bool = False  # compute the norm of gradients before the sum over data-parallel ranks too


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Gradient norms, which still include the loss scale."""

    logged: float  # the same on every rank
    clipping: float  # norm of the gradient that this rank's update uses


_ALONE = Group.solo("replica")


class GradientNoise:
    """The gradient noise scale B = S/|G|² in samples: a batch far below it wastes steps, one far above it samples.

    G is the gradient of the expected loss and S the trace of the covariance of one sample's gradient. A mean gradient over
    b samples has the expected squared norm |G|² + S/b, so two batch sizes determine both: the samples of one data-parallel
    rank and of all ranks. Estimates from one step are noisy and may be negative. S and |G|² are averaged over steps
    separately, as an average of their ratio would be biased. Source: arXiv 1812.06162, appendix A.1.

    `ranks`: number of data-parallel ranks, at least 2, with equal parts of a batch."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # Both averages start from 0; the factor of this bias cancels in their ratio.
        self._signal = self._noise = 0.0

    def update(self, whole: float, parts: float, samples: int) -> None:
        """Add a step over `samples` to the averages. `whole`: squared norm of the gradient. `parts`: Σ over data-parallel
        ranks of the squared norm of the rank's part of the gradient."""
        # A rank's part is 1/ranks of the mean gradient of its samples.
        small = self._ranks * parts
        signal = (self._ranks * whole - small) / (self._ranks - 1)
        noise = samples * (small - whole) / (self._ranks - 1)
        self._signal += (signal - self._signal) / NOISE_STEPS
        self._noise += (noise - self._noise) / NOISE_STEPS

    @property
    def scale(self) -> float | None:
        """B; None if an average is negative, and so not yet an estimate."""
        return self._noise / self._signal if self._signal > 0.0 and self._noise >= 0.0 else None

    def state(self) -> dict[str, float]:
        return {"signal": self._signal, "noise": self._noise}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Load a saved state, which does not depend on the layout; an empty one starts over."""
        self._signal, self._noise = float(state.get("signal", 0.0)), float(state.get("noise", 0.0))


NOISE_STEPS = 100  # time constant, in steps, of the averages of the gradient noise scale


PIECE = 1 << 20  # elements that are processed at a time

_HIGHEST = (1 << 15) - 1


def free_main(main: torch.nn.Parameter) -> None:
    """Replace the values by one NaN that is expanded to all elements, so that a read by mistake shows."""
    main.data = main.data.new_full((1,), math.nan).expand(main.numel())


class SplitMain:
    """Stores the main parameters of a range of a bucket, between updates, as the 16 bits that the bf16 weights lack.

    `unfold` allocates `main` with the exact values; `fold` splits them again and frees it: `main` is then one NaN that is
    expanded to all elements.

    `main`: fp32, flat. `weights`: bf16, of the same elements; they must equal `main` rounded to nearest at each `fold` and
    `unfold`."""

    def __init__(self, main: torch.nn.Parameter, weights: torch.Tensor) -> None:
        assert main.dtype == torch.float32 and weights.dtype == torch.bfloat16
        self._main, self._weights = main, weights
        self._low = torch.zeros(main.numel(), dtype=torch.int16, device=main.device)
        self._ties = torch.zeros(0, dtype=torch.int64, device=main.device)
        self.fold()

    def fold(self) -> None:
        """Store the bits of `main` that the weights lack, and free `main`."""
        bits = self._main.data.view(torch.int32)
        ties = torch.empty_like(bits, dtype=torch.bool)
        for start, stop in self._pieces():
            low = bits[start:stop] - self._high(start, stop)
            torch.eq(low, _HIGHEST + 1, out=ties[start:stop])
            # Only NaN differs more from its rounded value; it stays NaN.
            self._low[start:stop] = low.clamp_(-_HIGHEST - 1, _HIGHEST)
        self._ties = ties.nonzero().view(-1)  # the host waits for the device here: once, not for each piece
        # Not a storage of size 0: torch does not free memory that numpy has used, and reads would return arbitrary values.
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
    """Unfold the main parameters in the block, if they are not unfolded already, and fold their new values at its end."""
    opened = [split for split in splits if not split.in_memory]
    for split in opened:
        split.unfold()
    try:
        yield
    finally:
        for split in opened:
            split.fold()

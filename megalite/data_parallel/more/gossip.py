"""Gossip: every step each replica averages its weights with a few others, and no step waits for all."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.local_weights import LocalWeights, all_kept, swap
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.optimizers.base import Optimizer, Update
from megalite.topology.group import Work
from megalite.topology.topology import Topology


def peers_of(graph: str, rank: int, size: int, turn: int) -> tuple[int, ...]:
    """The ranks that `rank` averages with in a turn (from 0), ascending; the graph is symmetric.

    `ring`: both neighbours. `one-peer`: for a power of two the rank that differs in one bit, another bit each turn
    (after log2(size) turns of averaging alone all have the mean); for other even numbers a rank of the other half, all
    of them in turn. An odd number has no such pairs.
    """
    if graph == "ring":
        return tuple(sorted({(rank - 1) % size, (rank + 1) % size} - {rank}))
    if size & (size - 1) == 0:
        return (rank ^ (1 << turn % (size.bit_length() - 1)),) if size > 1 else ()
    assert size % 2 == 0, "one-peer gossip needs pairs"
    half = size // 2
    return ((turn + rank) % half + half if rank < half else (rank - half - turn) % half,)


@dataclass(frozen=True, eq=False)
class _Meeting:
    """Values in flight between a rank and its peers."""

    own: torch.Tensor
    """As they are sent."""
    received: dict[int, torch.Tensor]
    works: list[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def pull(self, dtype: torch.dtype) -> torch.Tensor:
        """w·Σ_j (v_j - v_i) over peers j in the order of ranks, w = 1/(peers + 1): to v_i it makes the average.

        Of values as they were sent, on both sides: the pulls of all ranks sum to 0, so rounding moves no mean.
        """
        self.wait()
        own, total = self.own.to(dtype), torch.zeros_like(self.own, dtype=dtype)
        for _, values in sorted(self.received.items()):
            total += values.to(dtype) - own
        return total.mul_(1.0 / (len(self.received) + 1))


class Gossip(LocalWeights):
    """Weights W_ij = 1/3 on a ring, 1/2 between two; g_i is taken at x_i, and

    - d-psgd (arXiv 1705.09056): x_i = step from Σ_j W_ij x_j by g_i, whatever optimizer takes the step. The weights of
      before the step travel, while forward and backward run.
    - decentlam (arXiv 2104.11981): m_i = μ·m_i + (x_i - Σ_j W_ij (x_j - γ·g_j))/γ, x_i = x_i - γ·m_i at the rate γ.
      Averaging then does not disturb the momentum, which in d-psgd magnifies what replicas differ by. m has two parts: of
      gradients, which is the SGD optimizer's own momentum, and of averaging, which is kept times γ: u_i = μ·u_i - (what
      averaging adds to x_i - γ·g_i), x_i = x_i - u_i. So a rate that changes divides nothing, and may become 0. The half
      steps travel after the backward. On a ring alone: with peers that change, u grows without bound from 6 replicas on.

    A bf16 wire rounds what travels, not what is kept: x_i moves by W·(bf16(x_j) - bf16(x_i)). The mean over replicas is
    moved by nothing but the gradients; single replicas stay about one bf16 step apart.

    Wire: per step and rank the bytes of the main parameters (in the wire's format) once for each peer; memory for as much
    again while they travel, and a copy for decentlam.

    Args:
        momentum: μ of decentlam, the optimizer's.
    """

    def __init__(self, stages: Mapping[int, torch.nn.Module], *, momentum: float, **common: Any) -> None:
        super().__init__(stages, **common)
        corrects = self.settings.gossip_algorithm == "decentlam" and not self.alone
        self._momentum = momentum
        self._lags = {bucket: copy.zero_() for bucket, copy in self._copies().items()} if corrects else {}
        """decentlam: u of each bucket."""
        self._meetings: dict[Bucket, _Meeting] = {}

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> DataParallelStrategy:
        return cls(stages, momentum=config.optimizer.sgd_momentum, **common)

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        self._part()
        super().begin_step(step, loss_scale=loss_scale)
        if self.local > 0 and not self._lags and not self.alone:
            for shard in self.shards:
                # Main parameters stand still until the update: no copy.
                self._meet(shard.bucket, shard.main_param.data)

    def _part(self) -> None:
        for meeting in self._meetings.values():
            meeting.wait()
        self._meetings.clear()

    def _local_phase(self, local: int) -> str:
        return "mix"

    def _meet(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Send `values`, which must stay as they are, to this turn's peers."""
        channel, wire = self.channel(bucket), self.options.wire_dtype
        sent = values if wire is None else values.to(wire)
        peers = peers_of(self.settings.gossip_graph, channel.rank, channel.size, self.local - 1)
        received = {peer: torch.empty_like(sent) for peer in peers}
        works = swap(channel, dict.fromkeys(peers, sent), received)
        self._meetings[bucket] = _Meeting(sent, received, works)

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        if self._lags and self.local > 0:
            for shard in self.shards:
                main, grad = shard.main_param.data, shard.main_param.grad
                assert grad is not None
                self._meet(shard.bucket, torch.add(main, grad, alpha=-update.lr))
        for shard in self.shards:
            meeting = self._meetings.pop(shard.bucket, None)
            if meeting is not None:
                main = shard.main_param.data
                pull = meeting.pull(main.dtype)
                if self._lags:
                    self._lags[shard.bucket].mul_(self._momentum).sub_(pull)
                else:
                    main += pull
        optimizer.step(update)
        if self._lags and self.local > 0:
            for shard in self.shards:
                shard.main_param.data -= self._lags[shard.bucket]

    def states(self) -> list[FlatState]:
        return super().states() + all_kept("gossip_momentum", self._lags)

    def close(self) -> None:
        # A peer may be gone, which is known by then.
        with contextlib.suppress(RuntimeError):
            self._part()
        super().close()

"""Local SGD, DiLoCo and gossip: replicas step by themselves, then exchange weights now and then, or with a few
others."""

import contextlib
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.local_weights import LocalWeights, MeanInFlight, Replicas, all_kept, rank_mean, swap
from megalite.data_parallel.shards import StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.data_parallel.wire import WorkList
from megalite.kernels.integers import Integers
from megalite.optimizers.base import Optimizer, Update
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.topology import Topology

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def fragment_of(name: str, fragments: int) -> int:
    """The fragment that a tensor belongs to: layers go round them; what is in no layer is in the first.

    By name alone, so that it is the same in every layout and for both copies of a tied embedding.
    """
    layer = _LAYER.search(name)
    return int(layer.group(1)) % fragments if layer else 0


class PeriodicAveraging(LocalWeights):
    """Every `sync_interval` H updates the mean over ranks of what each of them sends; `sync_delay` D updates later it is used,
    and the exchange is in flight between. Any optimizer takes the steps; its states stay each rank's own.

    Fragment f of P = `sync_fragments` is exchanged in the updates (f+1)·H/P, and every H after. P must divide H, and D be
    less than H/P.

    What is in flight is finished before a checkpoint or an evaluation, which changes no number: its result waits for its
    time, in the checkpoint if need be.

    Wire: 2·(d-1)/d of the bytes of the main parameters (in the wire's format) in H steps, a fragment's at a time.
    """

    exchange = "exchange"  # the name of a step with one
    anchored = False  # weights that all have had are kept; where what is sent is rounded they are anyway
    waiting: str  # the name of the state that waits where there is a delay

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, groups: StrategyGroups, options: StrategyOptions
    ) -> None:
        self._fragments: dict[Bucket, int] = {}
        self._count, self._delay = options.settings.sync_fragments, options.settings.sync_delay
        super().__init__(stages, groups=groups, options=options)
        anchored = self.anchored or self.options.wire_dtype is not None
        self._anchors = self._copies() if anchored and not self.alone else {}
        delayed = self._mains() if self._delay and not self.alone else {}
        self._arrived = {bucket: torch.zeros_like(main) for bucket, main in delayed.items()}
        """What waits for its time; what it holds at others says nothing."""
        self._in_flight: dict[Bucket, MeanInFlight] = {}
        self._due: dict[int, int] = {}  # fragment -> the local update in which its mean is used

    @abstractmethod
    def _outgoing(self, bucket: Bucket, main: torch.Tensor) -> torch.Tensor:
        """What is averaged: new memory."""

    def _arrive(self, bucket: Bucket, mean: torch.Tensor) -> None:
        """The mean of what was sent is there, before its time."""
        self._arrived[bucket].copy_(mean)

    @abstractmethod
    def _use_mean(self, bucket: Bucket, main: torch.Tensor, mean: torch.Tensor) -> None:
        """Use the mean; with a delay, what `_arrive` has kept."""

    def _make_buckets(self, parameters: Sequence[ShardedParameter]) -> list[Bucket]:
        found: list[Bucket] = []
        for fragment in range(self._count):
            own = [p for p in parameters if fragment_of(p.info.spec.name, self._count) == fragment]
            buckets = super()._make_buckets(own) if own else []
            self._fragments |= dict.fromkeys(buckets, fragment)
            found += buckets
        return found

    def _sent_in(self, local: int) -> list[int]:
        interval = self.settings.sync_interval
        each = interval // self._count
        return [f for f in range(self._count) if local > 0 and local % interval == (f + 1) * each % interval]

    def _local_phase(self, local: int) -> str:
        names = {self.exchange: self._sent_in(local)}
        if self._delay:
            names = {"send": self._sent_in(local), "use": self._sent_in(local - self._delay)}
        words = [name if self._count == 1 else f"{name} {which}" for name, found in names.items() for which in found]
        return ", ".join(words) or "local"

    # ---- weights

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        optimizer.step(update)
        if self.alone:
            return
        if self.local == 0:
            for bucket, anchor in self._anchors.items():
                anchor.copy_(self._mains()[bucket])
        for in_flight in self._in_flight.values():
            in_flight.advance()
        for fragment in self._sent_in(self.local):
            self._due[fragment] = self.local + self._delay
            for bucket, main in self._mains_of(fragment) if self._delay else ():
                sent = self._outgoing(bucket, main)
                self._in_flight[bucket] = MeanInFlight(self.between(bucket), sent, wire_dtype=self.options.wire_dtype)
        for fragment in [f for f, due in self._due.items() if due <= self.local]:
            del self._due[fragment]
            for bucket, main in self._mains_of(fragment):
                if self._delay:
                    self._finish(bucket)
                    mean = self._arrived[bucket]
                else:
                    mean = self._outgoing(bucket, main)
                    rank_mean(self.between(bucket), mean, wire_dtype=self.options.wire_dtype)
                self._use_mean(bucket, main, mean)

    def _mains_of(self, fragment: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        return ((bucket, main) for bucket, main in self._mains().items() if self._fragments[bucket] == fragment)

    def _finish(self, bucket: Bucket) -> None:
        in_flight = self._in_flight.pop(bucket, None)
        if in_flight is not None:
            self._arrive(bucket, in_flight.result())

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """As all with own weights, once the exchanges in flight are finished."""
        for in_flight in self._in_flight.values():
            in_flight.advance()
        for bucket in list(self._in_flight):
            self._finish(bucket)
        with super().consensus():
            yield

    def close(self) -> None:
        for in_flight in self._in_flight.values():
            # A peer may be gone, which is known by then.
            with contextlib.suppress(RuntimeError):
                in_flight.posted.wait()
        super().close()

    # ---- what is saved

    def states(self) -> list[FlatState]:
        return super().states() + all_kept("anchor", self._anchors) + all_kept(self.waiting, self._arrived)

    def counters(self) -> dict[str, Any]:
        due = {"due": sorted(self._due.items()), "sync_fragments": self._count} if self._due else {}
        return super().counters() | due

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Means that were to be used by a run with other fragments, or with no delay, are left: nothing is lost, for
        weights are still as far from each other, and the next exchange says so."""
        super().load_counters(counters)
        self._due = {}
        if self._delay and not self.alone and counters.get("sync_fragments") == self._count:
            self._due = {int(fragment): int(due) for fragment, due in counters["due"]}


class LocalSGD(PeriodicAveraging):
    """Every H updates x_i = mean over ranks of x_j (arXiv 1805.09767). With `sync_warmup_steps` it is post-local SGD
    (arXiv 1808.07217). With `average_optimizer_state` the optimizer's states become their mean too.

    With a delay it is asynchronous model averaging, after Bagua's (arXiv 2107.01499): x_i += mean_j(s_j) - s_i, where s_i
    are the weights with which the exchange began. There a thread repeats it as fast as it can; here the updates in which it
    begins and ends are given, and so the numbers are.

    A bf16 wire would round the weights themselves; so what travels is each rank's difference from the last common
    weights a: x = a + mean(bf16(x_i - a)), the mean rounded to bf16 too. That costs a copy of the weights. Averaged
    states of the optimizer are rounded to bf16 by it.

    Wire: with averaged states, as much again for each of them. After an exchange without delay replicas are equal to the bit.
    """

    exchange, waiting = "weights", "sync_change"

    def _outgoing(self, bucket: Bucket, main: torch.Tensor) -> torch.Tensor:
        if self._delay:
            self._arrived[bucket].copy_(main)
        return main - self._anchors[bucket] if self._anchors else main.clone()

    def _whole(self, bucket: Bucket, mean: torch.Tensor) -> torch.Tensor:
        return self._anchors[bucket].add_(mean) if self._anchors else mean

    def _arrive(self, bucket: Bucket, mean: torch.Tensor) -> None:
        change = self._arrived[bucket]
        torch.sub(self._whole(bucket, mean), change, out=change)

    def _use_mean(self, bucket: Bucket, main: torch.Tensor, mean: torch.Tensor) -> None:
        if self._delay:
            main += mean
        else:
            main.copy_(self._whole(bucket, mean))

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        super()._step(optimizer, update)
        if self.settings.average_optimizer_state and self._sent_in(self.local) and not self.alone:
            for shard in self.shards:
                for values in optimizer.state(shard.main_param).values():
                    rank_mean(self.between(shard.bucket), values, wire_dtype=self.options.wire_dtype)


class DiLoCo(PeriodicAveraging):
    """With Δ = mean over ranks of (a - x_i) from the common anchor a (arXiv 2311.08105):

        m = μ·m + Δ,   a = a - η·(Δ + μ·m),   x_i = a

    that is SGD with Nesterov momentum, η = `outer_lr`, μ = `outer_momentum`. A lone rank takes no outer steps: it is the
    inner optimizer. With fragments and a delay it is streaming DiLoCo (arXiv 2501.18512): a fragment's outer step is taken
    when its Δ is used, and x_i = α·x_i + (1-α)·a, α = `sync_mix`.

    Memory: two copies of the main parameters, three with a delay.
    """

    anchored, waiting = True, "outer_mean"

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        self._momenta = {bucket: torch.zeros_like(anchor) for bucket, anchor in self._anchors.items()}

    def _outgoing(self, bucket: Bucket, main: torch.Tensor) -> torch.Tensor:
        return self._anchors[bucket] - main

    def _use_mean(self, bucket: Bucket, main: torch.Tensor, mean: torch.Tensor) -> None:
        beta, mix = self.settings.outer_momentum, self.settings.sync_mix
        anchor, momentum = self._anchors[bucket], self._momenta[bucket]
        momentum.mul_(beta).add_(mean)
        anchor.add_(mean.add(momentum, alpha=beta), alpha=-self.settings.outer_lr)
        if mix == 0.0:
            main.copy_(anchor)
        else:
            main.mul_(mix).add_(anchor, alpha=1.0 - mix)

    def states(self) -> list[FlatState]:
        return super().states() + all_kept("outer_momentum", self._momenta)


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


def _integers(values: torch.Tensor, replicas: Replicas) -> Integers:
    """Of a part of the values."""
    return Integers(values.numel() // replicas.inside.size, values.dtype, values.device)


def _pull(own: torch.Tensor, others: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """w·Σ_j (v_j - v_i) over peers j in the order of ranks, w = 1/(peers + 1): to v_i it makes the average.

    Of values as they were sent, on both sides: the pulls of all ranks sum to 0, so rounding moves no mean.
    """
    own, total = own.to(dtype), torch.zeros_like(own, dtype=dtype)
    for _, values in sorted(others.items()):
        total += values.to(dtype) - own
    return total.mul_(1.0 / (len(others) + 1))


class Gossip(LocalWeights):
    """Weights W_ij = 1/3 on a ring, 1/2 between two; g_i is taken at x_i, and

    - d-psgd (arXiv 1705.09056): x_i = step from Σ_j W_ij x_j by g_i, whatever optimizer takes the step. The weights of
      before the step travel, while forward and backward run.
    - decentlam (arXiv 2104.11981): m_i = μ·m_i + (x_i - Σ_j W_ij (x_j - γ·g_j))/γ, x_i = x_i - γ·m_i at the rate γ.
      Averaging then does not disturb the momentum, which in d-psgd magnifies what replicas differ by. m has two parts: of
      gradients, which is the SGD optimizer's own momentum, and of averaging, which is kept times γ: u_i = μ·u_i - (what
      averaging adds to x_i - γ·g_i), x_i = x_i - u_i. So a rate that changes divides nothing, and may become 0. The half
      steps travel after the backward. On a ring alone: with peers that change, u grows without bound from 6 replicas on.
    - choco-sgd (arXiv 1902.00340, at consensus step size 1): d-psgd, of which 8-bit integers travel. Each rank keeps a
      public copy of its weights and of those of its peers, p_j, the same bits on all that have one: p_i += C(x_i - p_i),
      C as in `Integers`, x_i += Σ_j W_ij (p_j - p_i), then the step. What C leaves out stays in x_i - p_i and
      travels later. Before, and again when the number of replicas changes, all have the same weights and p is these. On a
      ring alone: there are only two peers to know.

    A bf16 wire rounds what travels, not what is kept: x_i moves by W·(bf16(x_j) - bf16(x_i)). The mean over replicas is
    moved by nothing but the gradients; single replicas stay about one bf16 step apart.

    Wire: per step and rank the bytes of the main parameters (in the wire's format) once for each peer, with choco-sgd a byte
    of each and a scale for every 2048; memory for as much again while they travel, a copy for decentlam, and for
    choco-sgd one of this rank's and of each peer's.
    """

    def __init__(self, stages: Mapping[int, torch.nn.Module], *, momentum: float, **common: Any) -> None:
        super().__init__(stages, **common)
        corrects = self.settings.gossip_algorithm == "decentlam" and not self.alone
        self._momentum = momentum
        self._lags = {bucket: torch.zeros_like(main) for bucket, main in self._mains().items()} if corrects else {}
        """decentlam: u of each bucket."""
        us, known = self.replicas, self.settings.gossip_algorithm == "choco-sgd" and not self.alone
        held = {us.rank, *peers_of("ring", us.rank, us.size, 0)} if known else ()
        self._public = {replica: self._copies() for replica in held}  # choco-sgd: p, by replica
        self._same_replicas = True
        """The checkpoint that was loaded, if any, has the public copies of as many replicas."""
        self._meetings: dict[Bucket, tuple[WorkList, torch.Tensor, dict[int, torch.Tensor]]] = {}
        """In flight between this rank and its peers: own values as they are sent, with the parts that other ranks of the
        replica send, and what is received."""

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> DataParallelStrategy:
        return cls(stages, momentum=config.optimizer.sgd_momentum, **common)

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        self._part()
        super().begin_step(step, loss_scale=loss_scale)
        if self.local > 0 and not self._lags and not self.alone:
            for bucket, main in self._mains().items():
                self._meet(bucket, main)  # it stands still until the update: no copy

    def _part(self) -> None:
        for works, _, _ in self._meetings.values():
            works.wait()
        self._meetings.clear()

    def _local_phase(self, local: int) -> str:
        return "mix"

    def _meet(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Send `values`, which must stay as they are, to this turn's peers."""
        replicas, wire = self.between(bucket), self.options.wire_dtype
        if self._public:
            integers, parts = _integers(values, replicas), replicas.inside.size
            sent = torch.empty(parts * integers.nbytes, dtype=torch.uint8, device=values.device)
            change = values - self._public[replicas.across.rank][bucket]
            for part, row in zip(change.view(parts, -1), sent.view(parts, -1), strict=True):
                integers.encode(part, row)
        else:
            sent = values if wire is None else values.to(wire)
        peers = peers_of(self.settings.gossip_graph, replicas.across.rank, replicas.across.size, self.local - 1)
        own = replicas.part(sent)
        received = {peer: torch.empty_like(own) for peer in peers}
        works = swap(replicas.across, dict.fromkeys(peers, own), received)
        self._meetings[bucket] = WorkList(works), sent, received

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        lags = self._lags if self.local > 0 else {}
        for shard in self.shards:
            if lags:
                self._meet(shard.bucket, torch.add(shard.main_param.data, shard.grad, alpha=-update.lr))
        for bucket, (works, own, received) in self._meetings.items():
            main, replicas = self._mains()[bucket], self.between(bucket)
            works.wait()
            others = {peer: replicas.gather(part) for peer, part in received.items()}
            if self._public:
                integers, parts = _integers(main, replicas), replicas.inside.size
                for peer, rows in {self.replicas.rank: own, **others}.items():
                    copy = self._public[peer][bucket].view(parts, -1)
                    for part, row in zip(copy, rows.view(parts, -1), strict=True):
                        integers.decode(row, part, factor=1.0)
                own = self._public[self.replicas.rank][bucket]
                others = {peer: self._public[peer][bucket] for peer in others}
            pull = _pull(own, others, main.dtype)
            if lags:
                lags[bucket].mul_(self._momentum).sub_(pull)
            else:
                main += pull
        self._meetings.clear()
        optimizer.step(update)
        for bucket, lag in lags.items():
            self._mains()[bucket].sub_(lag)
        if self.local == 0:
            self._publish()

    def _publish(self) -> None:
        """All replicas have these weights, and know it."""
        for copies in self._public.values():
            for bucket, main in self._mains().items():
                copies[bucket].copy_(main)

    # ---- what is saved

    def states(self) -> list[FlatState]:
        found = super().states() + all_kept("gossip_momentum", self._lags)
        own, left = self.replicas.rank, (self.replicas.rank - 1) % self.replicas.size
        for replica, copies in self._public.items():
            side = "own" if replica == own else "left" if replica == left else "right"
            found += all_kept(f"gossip_{side}", copies)
        return found

    def counters(self) -> dict[str, Any]:
        return super().counters() | ({"gossip_replicas": self.replicas.size} if self._public else {})

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        super().load_counters(counters)
        size = self.replicas.size
        self._same_replicas = counters.get("gossip_replicas", size) == size

    def loaded(self) -> None:
        super().loaded()
        if not self._same_replicas:
            self._publish()  # from which all start, the mean, is not the mean of any copies to the bit

    def close(self) -> None:
        # A peer may be gone, which is known by then.
        with contextlib.suppress(RuntimeError):
            self._part()
        super().close()

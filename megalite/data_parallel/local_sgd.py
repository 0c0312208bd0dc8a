"""Implement local SGD, DiLoCo and gossip: replicas step independently and exchange weights periodically, or only with a
few others."""

import contextlib
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.local_weights import LocalWeights, MeanInFlight, Replicas, flat_states, rank_mean, swap
from megalite.data_parallel.shards import StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.kernels.quantization import Integers
from megalite.optimizers.base import Optimizer, Update
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import WorkList
from megalite.topology.topology import Topology

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def fragment_of(name: str, fragments: int) -> int:
    """Return the fragment of a tensor: round-robin over layers; tensors outside layers are in the first one.

    It depends only on the name, so it is the same in every layout and for both copies of a tied embedding."""
    layer = _LAYER.search(name)
    return int(layer.group(1)) % fragments if layer else 0


class PeriodicAveraging(LocalWeights):
    """Averages a value over ranks every `sync_interval` H updates, and uses the mean `sync_delay` D updates later; the
    exchange is in flight in between. Any optimizer can take the steps; each rank has its own optimizer states.

    Fragment f of P = `sync_fragments` is exchanged in update (f+1)·H/P, and every H updates after. P must divide H, and D
    be less than H/P.

    An exchange in flight is finished before a checkpoint or an evaluation. This changes no number, as the mean is stored,
    also in the checkpoint, until its update.

    Wire: 2·(d-1)/d of the bytes of the main parameters (in the wire's format) in H steps, a fragment's at a time."""

    exchange = "exchange"  # phase of a step with an exchange
    anchored = False  # store the last common weights; with a narrow wire they are always stored
    delayed_state: str  # name of the state that stores a mean until its update

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, groups: StrategyGroups, options: StrategyOptions
    ) -> None:
        self._fragments: dict[Bucket, int] = {}
        self._count, self._delay = options.settings.sync_fragments, options.settings.sync_delay
        super().__init__(stages, groups=groups, options=options)
        anchored = self.anchored or self.options.wire_dtype is not None
        self._anchors = self._copies() if anchored and not self.is_single else {}
        delayed = self._mains() if self._delay and not self.is_single else {}
        self._arrived = {bucket: torch.zeros_like(main) for bucket, main in delayed.items()}
        """Means that wait for their update; meaningless for buckets without one."""
        self._in_flight: dict[Bucket, MeanInFlight] = {}
        self._due: dict[int, int] = {}  # fragment -> the local update in which its mean is used

    @abstractmethod
    def _outgoing(self, bucket: Bucket, main: torch.Tensor) -> torch.Tensor:
        """Return the value to average, in new memory."""

    def _arrive(self, bucket: Bucket, mean: torch.Tensor) -> None:
        """Store a mean that arrived before its update."""
        self._arrived[bucket].copy_(mean)

    @abstractmethod
    def _use_mean(self, bucket: Bucket, main: torch.Tensor, mean: torch.Tensor) -> None:
        """Update `main` by the mean; with a delay, by the value that `_arrive` stored."""

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
        if self.is_single:
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
        """Finish the exchanges in flight, and then provide the mean model."""
        for in_flight in self._in_flight.values():
            in_flight.advance()
        for bucket in list(self._in_flight):
            self._finish(bucket)
        with super().consensus():
            yield

    def close(self) -> None:
        for in_flight in self._in_flight.values():
            # A lost peer has been reported already.
            with contextlib.suppress(RuntimeError):
                in_flight.posted.wait()
        super().close()

    # ---- saved states

    def states(self) -> list[FlatState]:
        anchors, means = flat_states("anchor", self._anchors), flat_states(self.delayed_state, self._arrived)
        return super().states() + anchors + means

    def counters(self) -> dict[str, Any]:
        due = {"due": sorted(self._due.items()), "sync_fragments": self._count} if self._due else {}
        return super().counters() | due

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load saved counters. Pending means are dropped if this run has no delay or another number of fragments: nothing
        is lost, as the next exchange averages the same differences."""
        super().load_counters(counters)
        self._due = {}
        if self._delay and not self.is_single and counters.get("sync_fragments") == self._count:
            self._due = {int(fragment): int(due) for fragment, due in counters["due"]}


class LocalSGD(PeriodicAveraging):
    """Sets x_i = mean over ranks of x_j every H updates (arXiv 1805.09767). With `sync_warmup_steps` it is post-local SGD
    (arXiv 1808.07217). With `average_optimizer_state` the optimizer's states are averaged too.

    With a delay it is asynchronous model averaging, after Bagua's (arXiv 2107.01499): x_i += mean_j(s_j) - s_i, with the
    weights s_i at the start of the exchange. Bagua repeats it in a thread, as fast as it can. Here an exchange starts and
    ends in fixed updates, so results are deterministic.

    A bf16 wire would round the weights themselves. Each rank therefore sends its difference from the last common weights
    a: x = a + mean(bf16(x_i - a)), with the mean rounded to bf16 too. That costs a copy of the weights. The optimizer's
    states are rounded to bf16 when averaged.

    Wire: with averaged states, as much again for each of them. After an exchange without delay replicas are bit-equal.
    """

    exchange, delayed_state = "weights", "sync_change"

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
        if self.settings.average_optimizer_state and self._sent_in(self.local) and not self.is_single:
            for shard in self.shards:
                for values in optimizer.state(shard.main_param).values():
                    rank_mean(self.between(shard.bucket), values, wire_dtype=self.options.wire_dtype)


class DiLoCo(PeriodicAveraging):
    """Takes outer steps along Δ = mean over ranks of (a - x_i) from the common anchor a (arXiv 2311.08105):

        m = μ·m + Δ,   a = a - η·(Δ + μ·m),   x_i = a

    This is SGD with Nesterov momentum, η = `outer_lr`, μ = `outer_momentum`. A single replica takes no outer steps and
    equals the inner optimizer. With fragments and a delay it is streaming DiLoCo (arXiv 2501.18512): a fragment's outer
    step is taken when its Δ is used, and x_i = α·x_i + (1-α)·a, α = `sync_mix`.

    Memory: two copies of the main parameters, three with a delay."""

    anchored, delayed_state = True, "outer_mean"

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
        return super().states() + flat_states("outer_momentum", self._momenta)


def peers_of(graph: str, rank: int, size: int, turn: int) -> tuple[int, ...]:
    """Return the ranks with which `rank` averages in a turn (from 0), ascending; the graph is symmetric.

    `ring`: both neighbours. `one-peer`: for a power of two the rank that differs in one bit, another bit each turn
    (averaging alone gives all ranks the mean after log2(size) turns); for other even sizes a rank of the other half,
    each of them in turn. Odd sizes are not supported."""
    if graph == "ring":
        return tuple(sorted({(rank - 1) % size, (rank + 1) % size} - {rank}))
    if size & (size - 1) == 0:
        return (rank ^ (1 << turn % (size.bit_length() - 1)),) if size > 1 else ()
    assert size % 2 == 0, "one-peer gossip needs pairs"
    half = size // 2
    return ((turn + rank) % half + half if rank < half else (rank - half - turn) % half,)


def _integers(values: torch.Tensor, replicas: Replicas) -> Integers:
    """Return the 8-bit coder for one rank's part of the values."""
    return Integers(values.numel() // replicas.inside.size, values.dtype, values.device)


def _pull(own: torch.Tensor, others: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return w·Σ_j (v_j - v_i) over peers j in the order of ranks, w = 1/(peers + 1); added to v_i it gives the average.

    Both v are values as sent, so the results of all ranks sum to 0 and rounding does not change the mean."""
    own, total = own.to(dtype), torch.zeros_like(own, dtype=dtype)
    for _, values in sorted(others.items()):
        total += values.to(dtype) - own
    return total.mul_(1.0 / (len(others) + 1))


class Gossip(LocalWeights):
    """Averages weights with peers in each step: W_ij = 1/3 on a ring, 1/2 between two. Gradients g_i are taken at x_i.

    - d-psgd (arXiv 1705.09056): x_i = step from Σ_j W_ij x_j by g_i, with any optimizer. During forward and backward,
      ranks send the weights that they have before the step.
    - decentlam (arXiv 2104.11981): m_i = μ·m_i + (x_i - Σ_j W_ij (x_j - γ·g_j))/γ, x_i = x_i - γ·m_i at the rate γ.
      Then averaging does not disturb the momentum, which in d-psgd magnifies the differences between replicas. m has two
      parts. That of gradients is the momentum of the SGD optimizer. That of averaging is stored times γ: u_i = μ·u_i -
      (change of x_i - γ·g_i by averaging), x_i = x_i - u_i, so that no division by the rate occurs and it may become 0.
      Ranks send x - γ·g after the backward. Only on a ring: with changing peers u diverges from 6 replicas on.
    - choco-sgd (arXiv 1902.00340, at consensus step size 1): d-psgd that sends 8-bit integers. Each rank stores a public
      copy p_j of its weights and of each peer's, bit-equal on all ranks with a copy: p_i += C(x_i - p_i), C as in
      `Integers`, x_i += Σ_j W_ij (p_j - p_i), then the step. The rounding error of C stays in x_i - p_i and is sent later.
      At the start, and when the number of replicas changes, all have the same weights and p equals them. Only on a ring,
      which has two peers.

    A bf16 wire rounds the values sent, not the weights: x_i changes by W·(bf16(x_j) - bf16(x_i)). Only gradients change
    the mean over replicas; single replicas stay about one bf16 step apart.

    Wire: per step and rank the bytes of the main parameters (in the wire's format) for each peer; with choco-sgd one byte
    per element and a scale for every 2048. Memory: as much again while sending; a copy of the weights for decentlam, and
    for choco-sgd one for this rank and one for each peer."""

    def __init__(self, stages: Mapping[int, torch.nn.Module], *, momentum: float, **common: Any) -> None:
        super().__init__(stages, **common)
        corrects = self.settings.gossip_algorithm == "decentlam" and not self.is_single
        self._momentum = momentum
        self._momenta = {bucket: torch.zeros_like(main) for bucket, main in self._mains().items()} if corrects else {}
        """decentlam: u of each bucket."""
        rank, size = self.replicas.rank, self.replicas.size
        with_copies = self.settings.gossip_algorithm == "choco-sgd" and not self.is_single
        known = {rank, *peers_of("ring", rank, size, 0)} if with_copies else ()
        self._public = {replica: self._copies() for replica in known}  # choco-sgd: p, by replica
        self._same_replicas = True
        """Whether the loaded checkpoint, if any, is of as many replicas, so that its public copies can be used."""
        self._exchanges: dict[Bucket, tuple[WorkList, torch.Tensor, dict[int, torch.Tensor]]] = {}
        """Exchanges in flight: works, this replica's values as sent (also the parts that its other ranks send), and the
        parts received, by peer."""

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> DataParallelStrategy:
        return cls(stages, momentum=config.optimizer.sgd_momentum, **common)

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        self._finish_exchanges()
        super().begin_step(step, loss_scale=loss_scale)
        if self.local > 0 and not self._momenta and not self.is_single:
            for bucket, main in self._mains().items():
                self._start_exchange(bucket, main)  # without a copy: it does not change before the update

    def _finish_exchanges(self) -> None:
        for works, _, _ in self._exchanges.values():
            works.wait()
        self._exchanges.clear()

    def _local_phase(self, local: int) -> str:
        return "mix"

    def _start_exchange(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Start to exchange `values`, which must not change meanwhile, with this turn's peers."""
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
        self._exchanges[bucket] = WorkList(works), sent, received

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        momenta = self._momenta if self.local > 0 else {}
        for shard in self.shards:
            if momenta:
                self._start_exchange(shard.bucket, torch.add(shard.main_param.data, shard.grad, alpha=-update.lr))
        for bucket, (works, own, received) in self._exchanges.items():
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
            if momenta:
                momenta[bucket].mul_(self._momentum).sub_(pull)
            else:
                main += pull
        self._exchanges.clear()
        optimizer.step(update)
        for bucket, momentum in momenta.items():
            self._mains()[bucket].sub_(momentum)
        if self.local == 0:
            self._publish()

    def _publish(self) -> None:
        """Set all public copies to this rank's weights, which all replicas have."""
        for copies in self._public.values():
            for bucket, main in self._mains().items():
                copies[bucket].copy_(main)

    # ---- saved states

    def states(self) -> list[FlatState]:
        found = super().states() + flat_states("gossip_momentum", self._momenta)
        own, left = self.replicas.rank, (self.replicas.rank - 1) % self.replicas.size
        for replica, copies in self._public.items():
            side = "own" if replica == own else "left" if replica == left else "right"
            found += flat_states(f"gossip_{side}", copies)
        return found

    def counters(self) -> dict[str, Any]:
        return super().counters() | ({"gossip_replicas": self.replicas.size} if self._public else {})

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        super().load_counters(counters)
        size = self.replicas.size
        self._same_replicas = counters.get("gossip_replicas", size) == size

    def after_load(self) -> None:
        super().after_load()
        if not self._same_replicas:
            self._publish()  # all start from the mean, which may differ in its last bits from a mean of the copies

    def close(self) -> None:
        # A lost peer has been reported already.
        with contextlib.suppress(RuntimeError):
            self._finish_exchanges()
        super().close()

"""Support replicas with different weights, with their mean as the model; exchange means and messages between them."""

import contextlib
import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.shards import Norms, OptimizerShard
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState, flat_state
from megalite.data_parallel.wire import Channel, WireCounter
from megalite.optimizers.base import Optimizer, Update
from megalite.topology.group import Work, WorkList


@dataclass(frozen=True)
class Replicas:
    """Replicas with different weights, from the view of one rank. Each rank exchanges its part of a flat tensor with other
    replicas, and the ranks of a replica gather the results: a rank sends 1/(ranks of a replica) of the bytes to others."""

    across: Channel  # the ranks with this rank's index in all replicas
    inside: Channel  # the ranks of this replica, which have the same weights

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, a view."""
        return tensor.view(self.inside.size, -1)[self.inside.rank]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks of this replica."""
        if self.inside.size == 1:
            return part
        whole = part.new_empty(self.inside.size * part.numel())
        self.inside.gather_raw(whole, part)
        return whole


def rank_mean(replicas: Replicas, tensor: torch.Tensor, *, wire_dtype: torch.dtype | None) -> None:
    """Average the flat `tensor` over replicas, in place, with the same bits on each rank; its size is a multiple of the
    number of ranks.

    Each rank adds its part of the values as sent, in fp64 and in the order of ranks, and the rounded means are gathered: as
    many bytes as a ring all-reduce. The mean of equal values of up to 32 bits is exactly that value.

    `wire_dtype`: rounds the values, and the means, before they are sent; None: no rounding."""
    channel = replicas.across
    if channel.size > 1:
        part = replicas.part(tensor)
        sent = part if wire_dtype is None else part.to(wire_dtype)
        mean = _mean(channel.exchange_raw(sent).view(channel.size, -1))
        whole = torch.empty_like(sent)
        channel.gather_raw(whole, mean)
        tensor.copy_(replicas.gather(whole))


def _mean(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].double()
    for row in rows[1:]:
        total += row
    return (total / rows.shape[0]).to(rows.dtype)


def swap(channel: Channel, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> list[Work]:
    """Start to send a tensor to each peer and to receive one from each; sent tensors must not change meanwhile.

    All ranks handle pairs in the same order, and in each pair the lower rank sends first: if a backend runs messages one
    by one, none waits for one that is queued behind it."""
    works = []
    for peer in sorted(outgoing):
        if channel.rank < peer:
            works.append(channel.send_async(outgoing[peer], to=peer))
        works.append(channel.receive_async(incoming[peer], source=peer))
        if channel.rank > peer:
            works.append(channel.send_async(outgoing[peer], to=peer))
    return works


class MeanInFlight:
    """Computes the same bits as `rank_mean` while the ranks compute and use their group for other operations.

    It needs no thread: the constructor posts the messages, and the first call of `advance` the gather. All ranks call
    `advance` at the same point in their order of collectives.

    `tensor`: must not be written any more."""

    def __init__(self, replicas: Replicas, tensor: torch.Tensor, *, wire_dtype: torch.dtype | None) -> None:
        channel, part = replicas.across, replicas.part(tensor)
        assert channel.size > 1, "needs several replicas"
        self._replicas, self._channel = replicas, channel
        self._sent = (part if wire_dtype is None else part.to(wire_dtype)).view(channel.size, -1)
        self._received = torch.empty_like(self._sent)
        self._received[channel.rank] = self._sent[channel.rank]
        outgoing, incoming = dict(enumerate(self._sent)), dict(enumerate(self._received))
        del outgoing[channel.rank]
        self.posted = WorkList(swap(channel, outgoing, incoming))
        self._gathers = False

    def advance(self) -> None:
        """Wait for the parts, and start the gather, on the first call."""
        if not self._gathers:
            self.posted.wait()
            self._received = _mean(self._received)
            # Reuse the buffer of the sent parts.
            self.posted = WorkList([self._channel.gather_raw_async(self._sent.view(-1), self._received)])
            self._gathers = True

    def result(self) -> torch.Tensor:
        """Return the mean, in the wire's format; all ranks of a replica call it at the same point."""
        self.advance()
        self.posted.wait()
        return self._replicas.gather(self._sent.view(-1))


def flat_states(name: str, values: Mapping[Bucket, torch.Tensor]) -> list[FlatState]:
    return [flat_state(name, bucket, each) for bucket, each in values.items()]


class OwnWeights(DataParallelStrategy):
    """Defines the model as the mean of the replicas' weights; a checkpoint contains all replicas' weights and the mean.

    A run resumes bit for bit with the same number of replicas. With another number, each replica starts from the mean.
    """

    replicas_agree = False

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        self._inside_consensus = False
        self._own: dict[Bucket, torch.Tensor] = {}
        self._means: dict[Bucket, torch.Tensor] = {}
        self._noted = 0
        super().__init__(stages, **common)
        assert not self.options.split_main, "a replica's own weights and the mean would need other low bits"
        self.replicas, _ = self.groups.weight_replicas(self.all_buckets()[0].kind)
        """The ranks with this rank's index in all replicas."""
        self.is_single = self.replicas.size == 1  # no other replica, so no exchange

    def between(self, bucket: Bucket) -> Replicas:
        """Return the replicas of a bucket."""
        return Replicas(*map(self._channel, self.groups.weight_replicas(bucket.kind)))

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Make `data`, inside the block, the mean of the replicas' main parameters, rounded once: the same bits on every
        rank. Logs the distance from it. Its bytes are not counted, as they belong to no step.

        Collectives: an exchange and a gather of all parameters over the replicas; a sum of two numbers over the world.
        """
        assert not self._inside_consensus, "the mean would look like a replica's own weights"
        self._inside_consensus = True
        try:
            for shard in self.shards:
                self._put_mean(shard)
            self._note_distance()
            yield
        finally:
            self.publish_parameters()
            for bucket, own in self._own.items():
                bucket.data.copy_(own)
            self._own.clear()
            self._means.clear()
            self._inside_consensus = False

    def _put_mean(self, shard: OptimizerShard) -> None:
        bucket = shard.bucket
        groups, uncounted = self.groups.weight_replicas(bucket.kind), WireCounter()
        replicas = Replicas(*(self.new_channel(group, uncounted) for group in groups))
        if shard.is_copy:
            mean = self._means[bucket] = shard.main_param.data.clone()
            rank_mean(replicas, mean, wire_dtype=None)
            bucket.data.copy_(mean)
        else:
            self._own[bucket] = bucket.data.clone()
            rank_mean(replicas, bucket.data, wire_dtype=None)

    def _note_distance(self) -> None:
        """Log ||x_i - mean|| of the replicas' weights, root mean square over replicas, as a share of ||mean||."""
        if self.is_single or self._noted == self.step:
            return
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for shard in self.shards:
            if self._counts_here(shard.bucket):
                own = self._own.get(shard.bucket, shard.main_param.data)
                mean = self._means.get(shard.bucket, shard.bucket.data)
                sums[0] += torch.linalg.vector_norm(own - mean).double().square()
                sums[1] += torch.linalg.vector_norm(mean).double().square()
        self.groups.world.all_reduce(sums)
        with self.groups.world.heartbeat.synchronise():
            apart, whole = sums.tolist()
        self._noted = self.step
        if apart > 0.0 and whole > 0.0:
            share = math.sqrt(apart / whole)
            self.notes.append(f"consensus distance after step {self.step}: {share:.3e} of the weights' norm")

    def _counts_here(self, bucket: Bucket) -> bool:
        """Return whether this rank, of those in its replica with equal values, is the one that counts."""
        _, same = self.groups.weight_replicas(bucket.kind)
        return same.rank == 0 and self.groups.first_copy(bucket.kind)

    @property
    def optimizer_placement(self) -> Placement:
        return Placement.PRIVATE

    def states(self) -> list[FlatState]:
        own = {shard.bucket: self._own.get(shard.bucket, shard.main_param.data) for shard in self.shards}
        return super().states() + flat_states("replica_param", own) + flat_states("main_param", self._means)

    def after_load(self) -> None:
        self.publish_parameters()


class LocalWeights(OwnWeights):
    """Steps each replica's weights by its own gradient. A replica is a data-parallel rank with its tp and pp ranks.

    With several instances (`dp_instances`) each instance is a replica: gradients are all-reduced inside it in every step,
    so its ranks have the same weights, and only the exchanges go to other instances (hierarchical SGD).

    A replica's gradient is its part of the gradient of the global mean, times the number of replicas. That equals the
    gradient of the mean over its samples if all samples have equally many tokens. It is clipped by the replica's norm;
    the log shows the root mean square of all norms. All ranks get all norms, so any overflow skips the step everywhere.

    Time is counted in updates: a step that fp16 skips is not counted, and its exchange happens in the next one. In the
    first `sync_warmup_steps` updates gradients are all-reduced, and replicas stay equal.

    Needs the same replicas for every bucket (no context or expert parallelism), whole main parameters (not split ones),
    and an optimizer that steps by gradients and has no sums over the world."""

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        self.settings = self.options.settings
        self._updates: int | None = None
        self._skipped = 0

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        # Every replica has a separate norm.
        return dataclasses.replace(super()._make_shard(bucket), counts_in_norm=self._counts_here(bucket))

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        super().begin_step(step, loss_scale=loss_scale)
        if self._updates is None:  # a new run, or a checkpoint of another strategy
            self._updates = step - 1
        self._skipped = step - 1 - self._updates

    def phase(self, step: int) -> str:
        local = self._local_updates(step)
        return "gradients" if local <= 0 else self._local_phase(local)

    def _local_updates(self, step: int) -> int:
        """Return the number of local updates up to `step`, inclusive; 0 or less in the warm-up."""
        return step - self._skipped - self.settings.sync_warmup_steps

    @abstractmethod
    def _local_phase(self, local: int) -> str:
        """Return what update number `local` after the warm-up (from 1) exchanges."""

    @property
    def local(self) -> int:
        return self._local_updates(self.step)

    # ---- gradients

    def _reduce(self, bucket: Bucket) -> Work:
        replicas = self.between(bucket)
        work = replicas.inside.all_reduce_async(bucket.grad)
        if self.local > 0:
            return work
        if replicas.inside.size == 1:
            return replicas.across.all_reduce_async(bucket.grad)
        return replicas.across.all_reduce_after(work, bucket.grad)

    def norm_terms(self) -> torch.Tensor:
        own, replicas = self.local_norm_squared(), self.replicas
        if self.local <= 0:
            return own.view(1) if replicas.rank == 0 else torch.zeros_like(own).view(1)
        terms = own.new_zeros(replicas.size)
        terms[replicas.rank] = own
        return terms

    def norms(self, sums: Sequence[float]) -> Norms:
        if self.local <= 0:
            return super().norms(sums)
        size = self.replicas.size
        logged, own = size * sum(sums), sums[self.replicas.rank]
        return Norms(
            logged=math.sqrt(logged) if logged >= 0.0 else math.nan,
            clipping=size * math.sqrt(own) if own >= 0.0 else math.nan,
        )

    # ---- weights

    def update(self, optimizer: Optimizer, update: Update) -> None:
        assert self._updates is not None, "begin_step comes first"
        if self.local > 0:
            update = dataclasses.replace(update, factor=update.factor * self.replicas.size)
        self._step(optimizer, self._scale_gradients(update))
        self.publish_parameters()
        self._updates += 1

    @abstractmethod
    def _step(self, optimizer: Optimizer, update: Update) -> None:
        """Step the optimizer and run the exchanges of this update."""

    def _mains(self) -> dict[Bucket, torch.Tensor]:
        return {shard.bucket: shard.main_param.data for shard in self.shards}

    def _copies(self) -> dict[Bucket, torch.Tensor]:
        return {bucket: main.clone() for bucket, main in self._mains().items()}

    # ---- saved states

    def counters(self) -> dict[str, Any]:
        return {} if self._updates is None else {"local_updates": self._updates}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self._updates = int(counters["local_updates"]) if "local_updates" in counters else None

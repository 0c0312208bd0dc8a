"""Replicas with different weights, the mean of which is the model; and means and messages between them."""

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
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState, kept
from megalite.data_parallel.wire import Channel, WireCounter, WorkList
from megalite.optimizers.base import Optimizer, Update
from megalite.topology.group import Work


@dataclass(frozen=True)
class Replicas:
    """Replicas with different weights, as one rank sees them. Each rank exchanges its part of a flat tensor, and the ranks
    of a replica gather what they have got: 1/(ranks of a replica) of the bytes goes to other replicas."""

    across: Channel  # the ranks at this one's place in all replicas
    inside: Channel  # those of this replica, which have the same weights

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's; a view."""
        return tensor.view(self.inside.size, -1)[self.inside.rank]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks of this replica."""
        if self.inside.size == 1:
            return part
        whole = part.new_empty(self.inside.size * part.numel())
        self.inside.gather_raw(whole, part)
        return whole


def rank_mean(replicas: Replicas, tensor: torch.Tensor, *, wire_dtype: torch.dtype | None) -> None:
    """In place: the mean over replicas, with the same bits on each rank. Flat; its size is a multiple of the number of ranks.

    Each rank adds up its part of the values as they were sent, in fp64 and in the order of ranks, and the rounded means
    are gathered: as many bytes as a ring all-reduce. The mean of equal values of up to 32 bits is that value to the bit.

    `wire_dtype`: what is sent is rounded to it, on both ways; None: nothing is."""
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
    """Send a tensor to each of some ranks and receive one from each of them; what is sent must stay as it is meanwhile.

    Each rank takes its pairs in the same order and in each pair the lower rank sends first: where a backend runs
    messages one by one, none waits for one that is queued behind it."""
    works = []
    for peer in sorted(outgoing):
        if channel.rank < peer:
            works.append(channel.send_async(outgoing[peer], to=peer))
        works.append(channel.receive_async(incoming[peer], source=peer))
        if channel.rank > peer:
            works.append(channel.send_async(outgoing[peer], to=peer))
    return works


class MeanInFlight:
    """`rank_mean`, to the bit, while the ranks compute and use their group for other things.

    No thread: its messages are posted when it is made, its gather by the first call of `advance` after, which all ranks
    make at the same place among their collectives.

    `tensor`: not to be written any more."""

    def __init__(self, replicas: Replicas, tensor: torch.Tensor, *, wire_dtype: torch.dtype | None) -> None:
        channel, part = replicas.across, replicas.part(tensor)
        assert channel.size > 1, "one rank has no other to wait for"
        self._replicas, self._channel = replicas, channel
        self._sent = (part if wire_dtype is None else part.to(wire_dtype)).view(channel.size, -1)
        self._received = torch.empty_like(self._sent)
        self._received[channel.rank] = self._sent[channel.rank]
        outgoing, incoming = dict(enumerate(self._sent)), dict(enumerate(self._received))
        del outgoing[channel.rank]
        self.posted = WorkList(swap(channel, outgoing, incoming))
        self._gathers = False

    def advance(self) -> None:
        """Start the gather, once the parts are here."""
        if not self._gathers:
            self.posted.wait()
            self._received = _mean(self._received)
            # The buffer that was sent is free now.
            self.posted = WorkList([self._channel.gather_raw_async(self._sent.view(-1), self._received)])
            self._gathers = True

    def result(self) -> torch.Tensor:
        """The mean, in the number format of the wire; all ranks of a replica call it at the same place too."""
        self.advance()
        self.posted.wait()
        return self._replicas.gather(self._sent.view(-1))


def all_kept(name: str, values: Mapping[Bucket, torch.Tensor]) -> list[FlatState]:
    return [kept(name, bucket, each) for bucket, each in values.items()]


class OwnWeights(DataParallelStrategy):
    """The model is the mean of the replicas' weights; a checkpoint keeps every replica's own and the mean.

    A run that continues with as many replicas does so to the bit. With another number each starts from the mean.
    """

    replicas_agree = False

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        self._inside_consensus = False
        self._own: dict[Bucket, torch.Tensor] = {}
        self._means: dict[Bucket, torch.Tensor] = {}
        self._noted = 0
        super().__init__(stages, **common)
        assert not self.options.split_main, "a replica's own weights and the mean would need other low bits"
        self.replicas, _ = self.groups.own_weights(self.all_buckets()[0].kind)
        """This rank's own, and those at its place in the others."""
        self.alone = self.replicas.size == 1  # there is no other replica, and nothing to exchange

    def between(self, bucket: Bucket) -> Replicas:
        """The replicas that hold a bucket."""
        return Replicas(*map(self._channel, self.groups.own_weights(bucket.kind)))

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, `data` is the mean of the replicas' main parameters, rounded once: the same bits on every rank. The
        log gets the distance from it. What is sent for it is not counted: it is no part of any step.

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
        groups, uncounted = self.groups.own_weights(bucket.kind), WireCounter()
        replicas = Replicas(*(self.new_channel(group, uncounted) for group in groups))
        if shard.is_copy:
            mean = self._means[bucket] = shard.main_param.data.clone()
            rank_mean(replicas, mean, wire_dtype=None)
            bucket.data.copy_(mean)
        else:
            self._own[bucket] = bucket.data.clone()
            rank_mean(replicas, bucket.data, wire_dtype=None)

    def _note_distance(self) -> None:
        """||x_i - mean|| of all replicas' weights, root mean square over replicas, as a share of ||mean||."""
        if self.alone or self._noted == self.step:
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
        """Of the ranks of its replica that hold the same, this one has it counted."""
        _, same = self.groups.own_weights(bucket.kind)
        return same.rank == 0 and self.groups.first_copy(bucket.kind)

    @property
    def optimizer_placement(self) -> Placement:
        return Placement.PRIVATE

    def states(self) -> list[FlatState]:
        own = {shard.bucket: self._own.get(shard.bucket, shard.main_param.data) for shard in self.shards}
        return super().states() + all_kept("replica_param", own) + all_kept("main_param", self._means)

    def loaded(self) -> None:
        self.publish_parameters()


class LocalWeights(OwnWeights):
    """Each data-parallel rank (with its tp and pp ranks: a replica) steps its own weights by its own gradient.

    With several instances (`dp_instances`) each of them is a replica: inside it gradients are all-reduced in every step, so
    that its ranks have the same weights, and only what is exchanged goes to other instances (hierarchical SGD).

    A replica's gradient is its part of the global mean's times the number of replicas: what the mean over its own samples
    gives where every sample has as many tokens. It is clipped by the replica's own norm; the log shows the root mean
    square of all. Each rank knows all replicas' norms, so an overflow anywhere skips the step everywhere.

    Time is counted in updates: a step that fp16 skips is none, and what was due in it happens in the next one. In the
    first `sync_warmup_steps` updates gradients are all-reduced, and replicas stay equal.

    Needs the same replicas for every bucket (no context or expert parallelism), whole main parameters (not split ones),
    and an optimizer that goes by gradients and makes no sums over the world.
    """

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        self.settings = self.options.settings
        self._updates: int | None = None
        self._skipped = 0

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        # Every replica's gradient counts, in a separate norm.
        return dataclasses.replace(super()._make_shard(bucket), counts_in_norm=self._counts_here(bucket))

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        super().begin_step(step, loss_scale=loss_scale)
        if self._updates is None:  # a new run, or one that another strategy began
            self._updates = step - 1
        self._skipped = step - 1 - self._updates

    def phase(self, step: int) -> str:
        local = self._local_updates(step)
        return "gradients" if local <= 0 else self._local_phase(local)

    def _local_updates(self, step: int) -> int:
        """Updates by own gradients, with that of `step`; 0 or less in the warm-up."""
        return step - self._skipped - self.settings.sync_warmup_steps

    @abstractmethod
    def _local_phase(self, local: int) -> str:
        """What is exchanged in the update with the number `local` after the warm-up, from 1."""

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
        shown, own = size * sum(sums), sums[self.replicas.rank]
        return Norms(
            shown=math.sqrt(shown) if shown >= 0.0 else math.nan,
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
        """Step the optimizer and exchange what is due."""

    def _mains(self) -> dict[Bucket, torch.Tensor]:
        return {shard.bucket: shard.main_param.data for shard in self.shards}

    def _copies(self) -> dict[Bucket, torch.Tensor]:
        return {bucket: main.clone() for bucket, main in self._mains().items()}

    # ---- what is saved

    def counters(self) -> dict[str, Any]:
        return {} if self._updates is None else {"local_updates": self._updates}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self._updates = int(counters["local_updates"]) if "local_updates" in counters else None

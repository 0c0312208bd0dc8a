"""Implement parameter servers: servers add the workers' gradients, step, and send parameters back."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import Bucket, ParameterWaits
from megalite.data_parallel.facts import Placement, message_elements
from megalite.data_parallel.server import LEADER, Kind, Ledger, Link, Order, Request, Server, by_arrival, by_rank
from megalite.data_parallel.shards import Norms, OptimizerShard
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.data_parallel.wire import Channel, pipelined
from megalite.data_parallel.zero import DistributedOptimizer
from megalite.optimizers.base import Optimizer, Update
from megalite.topology.group import DONE, Group, Work, WorkList, add_in_order
from megalite.topology.topology import ServerGroups, Topology, server_groups

SERVER = 0  # index of the server in its group


class OneServer(DataParallelStrategy):
    """Makes the first rank of each group with the same buckets both worker and server: only it has main parameters and
    optimizer states."""

    shards_over_dp = True

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        size = bucket.data.numel()
        return (0 if self._serves(bucket) else size), size

    def _serves(self, bucket: Bucket) -> bool:
        return self.groups.replicas(bucket.kind).rank == SERVER

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        whole = values.contiguous()
        if not self._serves(shard.bucket):
            whole = values.new_empty(shard.bucket.data.numel())
        self.groups.replicas(shard.bucket.kind).broadcast(whole, source=SERVER)
        return whole


class ParameterServer(OneServer):
    """Lets workers push gradients to a server and pull parameters from it, in chunks (as in Li et al., OSDI 2014).

    A bucket is pushed as soon as the last backward has filled it. The server adds chunk by chunk, in the order of ranks,
    with its own part rounded like the received ones. Once the norm is known, it steps its parameters and sends them in
    the order of the next forward. Workers start that forward, and each module waits for its parameters.

    Wire, of B bytes of gradients and P of parameters: a worker sends B; the server sends (d-1)·P and receives (d-1)·B, so
    its link is the bottleneck. d is the expert-dp size for experts, which have other servers."""

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        self._sending: list[Work] = []  # the server's messages in flight
        overlap = self.options.overlap_param_gather and self.has_replicas
        self._arrivals = ParameterWaits(stages, self.all_buckets(), overlap=overlap)

    def _reduce(self, bucket: Bucket) -> Work:
        channel, chunks = self.channel(bucket), self._chunks(bucket.grad, self.options.wire_dtype)
        if channel.size == 1:
            return DONE
        if self._serves(bucket):
            return channel.in_background(lambda: _add_pushes(chunks, channel))
        sent = [channel.rounded(chunk) for chunk in chunks]
        return WorkList([channel.send_async(chunk, to=SERVER) for chunk in sent], sent)

    def _chunks(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> Sequence[torch.Tensor]:
        """Split a flat tensor into messages of `server_chunk_mb`, for elements that are sent as `dtype`."""
        return tensor.split(message_elements(self.options.settings.server_chunk_mb, (dtype or tensor.dtype).itemsize))

    def update(self, optimizer: Optimizer, update: Update) -> None:
        # The last step's parameters may still be in flight, from the memory that the optimizer writes now.
        self.wait_for_parameters()
        super().update(optimizer, update)

    def publish_parameters(self) -> None:
        super().publish_parameters()
        for bucket in self._arrivals.first_needed_first:
            channel, parts = self.channel(bucket), self._chunks(bucket.data, None)
            if self._serves(bucket):
                workers = range(1, channel.size)
                self._sending += [channel.send_async(part, to=worker) for part in parts for worker in workers]
            else:
                works = [channel.receive_async(part, source=SERVER) for part in parts]
                self._arrivals.expect(bucket, WorkList(works))
        self._arrivals.wait_unless_overlapped()

    def wait_for_parameters(self) -> None:
        self._arrivals.wait()
        WorkList(self._sending).wait()
        self._sending = []


def _add_pushes(chunks: Sequence[torch.Tensor], channel: Channel) -> None:
    for chunk, parts, work in pipelined(_receive_parts(chunk, channel) for chunk in chunks):
        work.wait()
        add_in_order(chunk, parts)


def _receive_parts(chunk: torch.Tensor, channel: Channel) -> tuple[torch.Tensor, torch.Tensor, Work]:
    """Return the chunk, the tensor [size, m] that receives all ranks' parts in the wire's type, and their work."""
    parts = chunk.new_empty(channel.size, chunk.numel(), dtype=channel.wire_dtype or chunk.dtype)
    works = [channel.receive_async(parts[rank], source=rank) for rank in range(1, channel.size)]
    parts[SERVER].copy_(chunk)
    return chunk, parts, WorkList(works)


class ShardedParameterServer(DistributedOptimizer):
    """Makes every rank a worker and the server of its share of the keys, like co-located servers of BytePS (OSDI 2020).

    A key is a chunk of at most `server_chunk_mb`, and rank k mod d serves key k. In a bucket, the keys of one server are
    neighbours, so a rank steps one range. A bucket is about as long as d keys, one for each server. A bucket with a
    longer tensor has several rounds of d keys; the next round is in flight while one is added.

    Push: an exchange of one round's keys (all-to-all) and a sum of the parts in the order of ranks. Pull: an all-gather
    of each bucket, in the order of the next forward. Gradients are pushed in the order of the last backward: priorities
    would not help, as no server steps before the norm of all gradients is known.

    The sums, the range that each rank steps and the bytes are those of ZeRO-1 (`distributed-optimizer`). The difference
    is the granularity: buckets of d keys instead of `ddp_bucket_size`, so pushes start earlier and parameters arrive in
    smaller pieces; at most two rounds of keys are buffered; and sums add in the order of ranks on every backend."""

    def _reduce(self, bucket: Bucket) -> Work:
        channel = self.channel(bucket)
        if channel.size == 1:
            return DONE
        return channel.in_background(lambda: self._push(bucket.grad.view(channel.size, -1), channel))

    def _push(self, served: torch.Tensor, channel: Channel) -> None:
        """Exchange the keys of `served` [servers, n] round by round, and add those of this server."""
        width = (self.options.wire_dtype or self.options.grad_dtype).itemsize
        rounds = served.split(message_elements(self.options.settings.server_chunk_mb, width), dim=1)
        started = ((keys, *channel.exchange_raw_async(channel.rounded(keys).contiguous())) for keys in rounds)
        for keys, parts, work in pipelined(started):
            work.wait()
            add_in_order(keys[channel.rank], parts.view(channel.size, -1))


class AsyncParameterServer(OneServer):
    """Lets each worker push gradients and pull weights when it is ready (bounded staleness: see `Ledger`).

    A worker's step: pull the newest weights; forward and backward over its part of the batch; clip by the norm of its
    estimate of the gradient, which is n times its part (n workers); push. The server makes one optimizer update per push,
    with the learning rate of that step / `divisor`. So n pushes without staleness are about one synchronous step, with
    moments that decay at each push. With max_staleness 0 all pushes of a step are for the same weights and are applied in
    the order of ranks: the algorithm is synchronous and deterministic. Otherwise results depend on timing. For an
    evaluation or a checkpoint all workers meet: the server has then applied the pushes of all steps.

    The decisions of a step (clipping, a NaN loss) are made by each copy of the model separately: see `scope`.
    Wire: a worker sends the gradient, the server the weights in the model's type, for each worker on another rank.
    Server memory: see `Server`; workers have no main parameters and no optimizer state.

    `scope`: the tp and pp ranks of one copy of the model."""

    replicas_agree = False

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, scope: Group, servers: ServerGroups | None, **common: Any
    ) -> None:
        super().__init__(stages, **common)
        self._scope, self._groups_of_servers = scope, servers
        self._workers = self.groups.dp.size
        self._server: Server | None = None
        self._link: Link | None = None
        self._optimizer: Optimizer | None = None
        self.order: Order = by_rank if self.options.settings.max_staleness == 0 else by_arrival
        """Order in which pushes and pulls are served; replace it only before the first step."""
        if self._workers > 1:
            self.notes.append(
                "async-parameter-server: losses and norms of steps are of the samples of data-parallel rank 0; those of "
                "evaluations are of all samples, with weights that are equal on all workers"
            )

    @classmethod
    def from_config(
        cls, stages: Mapping[int, torch.nn.Module], config: RunConfig, topology: Topology, **common: Any
    ) -> DataParallelStrategy:
        servers = None
        if topology.dp.size > 1:
            servers = server_groups(topology, timeout_minutes=config.parallel.distributed_timeout_minutes)
        return cls(stages, scope=topology.model, servers=servers, **common)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        return 0, bucket.data.numel() if self._serves(bucket) else 0

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        shard = super()._make_shard(bucket)
        if self.groups.dp.size > 1 and not shard.is_copy:
            # The server steps it while the worker of this rank computes with its pulled weights.
            shard.main_param.data = shard.main_param.data.clone()
        return shard

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def scope(self) -> Group:
        return self._scope

    def phase(self, step: int) -> str:
        return "push and pull"

    # ---- a worker's step

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        self.step = step
        if self._workers > 1:
            # Before gradients are zeroed: the last push may still be in flight.
            self._ask(Request(Kind.PULL, step))
        super().begin_step(step, loss_scale=loss_scale)

    def _reduce(self, bucket: Bucket) -> Work:
        return DONE

    def norm_terms(self) -> torch.Tensor:
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for bucket in self.all_buckets():
            if self._counts(bucket):
                total += self.options.l2norm([bucket.grad]).square()
        return total

    def norms(self, sums: Sequence[float]) -> Norms:
        part = super().norms(sums)
        return Norms(logged=self._workers * part.logged, clipping=self._workers * part.clipping)

    def update(self, optimizer: Optimizer, update: Update) -> None:
        if self._workers == 1:
            super().update(optimizer, update)
            return
        gradients = [bucket.grad for bucket in self.all_buckets()]
        for gradient in gradients:
            gradient.mul_(update.factor * self._workers)
        end = self._connected()
        if end is self._link:
            wire = self.options.wire_dtype
            self.wire_counter.add(sum(g.numel() * (wire or g.dtype).itemsize for g in gradients))
        end.push(Request(Kind.PUSH, update.step, update.lr, update.weight_decay), gradients)

    # ---- the server

    def _connected(self) -> Link | Server:
        """Return this rank's end of the exchange; created at the first call, after weights have been loaded."""
        groups, settings, wire = self._groups_of_servers, self.options.settings, self.options.wire_dtype
        if self._link is None and self._server is None:
            assert groups is not None and self._optimizer is not None
            chunk = int(settings.server_chunk_mb * 1e6)
            links = [Link(pair, chunk_bytes=chunk, wire_dtype=wire) for pair in groups.pairs]
            if self.groups.dp.rank > 0:
                self._link = links[0]
            else:
                assert groups.servers is not None
                self._server = Server(
                    self.shards,
                    self._optimizer,
                    links=links,
                    servers=groups.servers,
                    ledger=Ledger(self._workers, settings.max_staleness),
                    order=self.order,
                    staleness_aware=settings.staleness_aware_lr,
                    wire_dtype=wire,
                )
        end = self._link or self._server
        assert end is not None
        return end

    def _ask(self, request: Request) -> None:
        self._connected().ask(request, [bucket.data for bucket in self.all_buckets()])

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        if self._workers == 1:
            yield
            return
        self._ask(Request(Kind.MEET))
        self._note()
        try:
            yield
        finally:
            if self._server is not None:
                self._server.resume()

    def finish(self) -> None:
        if self._workers > 1:
            self._ask(Request(Kind.LEAVE))
            self._note()
            if self._server is not None:
                self._server.join()
            self._server = self._link = None

    def _note(self) -> None:
        """On the leader, add a note on the staleness of pushes since the last report."""
        if self._server is not None:
            report = self._server.take_report()
            if self._server.servers.rank == LEADER and report.staleness:
                self.notes.append(report.line())

    # ---- saved states

    def states(self) -> list[FlatState]:
        copies = [shard for shard in self.shards if shard.is_copy]
        return [
            FlatState("main_param", each.bucket, each.main_param.data, Placement.SHARDED, each.start, "parameter")
            for each in copies
        ]

    def after_load(self) -> None:
        for shard in self.shards:
            if not shard.is_copy:
                shard.main_param.data.copy_(shard.bucket.data[shard.start : shard.stop])

    def take_wire_bytes(self) -> float:
        return super().take_wire_bytes() + (0 if self._server is None else self._server.take_sent())

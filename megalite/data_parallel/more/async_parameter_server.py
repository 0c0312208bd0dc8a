"""Data parallelism by an asynchronous parameter server: each worker pushes gradients and pulls weights when it is ready."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.run import RunConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.more.server import LEADER, Server
from megalite.data_parallel.more.server_link import (
    ByArrival,
    ByRank,
    Kind,
    Ledger,
    Order,
    Request,
    ServerEnd,
    WorkerEnd,
)
from megalite.data_parallel.shards import Norms, OptimizerShard
from megalite.data_parallel.strategy import DataParallelStrategy, FlatState
from megalite.optimizers.base import Optimizer, Update
from megalite.topology.group import DONE, Group, Work
from megalite.topology.topology import ServerGroups, Topology, server_groups


class AsyncParameterServer(DataParallelStrategy):
    """Data-parallel rank 0 is the server, and a worker like the others (bounded staleness: see `Ledger`).

    A worker's step: pull the newest weights; forward and backward over its own part of the batch; clip by the norm of its
    own estimate of the gradient, which is n times its part (n workers); push. The server makes of each push one optimizer
    update with the learning rate of that step / `divisor`, so n pushes without staleness are about one synchronous step,
    with moments that decay at each push. With max_staleness 0 all pushes of a step are of the same weights and are
    applied in the order of ranks: a synchronous algorithm, the same in each run. Else the result depends on timing; what
    is evaluated and saved is what all workers have agreed on in a meeting, when the pushes of all steps have been applied.

    The decisions of a step (clipping, a loss that is NaN) are those of one copy of the model: see `scope`.
    Wire: a worker sends the gradient, the server the weights in the model's type, for each worker but the server's own.
    Server memory: see `Server`; workers have no main parameters and no optimizer state.
    """

    shards_over_dp = True
    replicas_agree = False

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, scope: Group, servers: ServerGroups | None, **common: Any
    ) -> None:
        """
        Args:
            scope: tp and pp: one copy of the model.
            servers: None for one worker.
        """
        super().__init__(stages, **common)
        settings = self.options.settings
        self._scope, self._groups_of_servers = scope, servers
        self._workers = self.groups.dp.size
        self._server: Server | None = None
        self._link: WorkerEnd | None = None
        self._optimizer: Optimizer | None = None
        self.order: Order = ByRank() if settings.max_staleness == 0 else ByArrival()
        """In which pushes and pulls are served; another one must be set before the first step."""
        if self._workers > 1:
            self.notes.append(
                "async-parameter-server: losses and norms of steps are of the samples of data-parallel rank 0; those of "
                "evaluations are of all, with the weights that all workers then have"
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
        return 0, bucket.data.numel() if self.groups.dp.rank == 0 else 0

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        shard = super()._make_shard(bucket)
        if self.groups.dp.size > 1 and not shard.is_copy:
            # The server steps it while this rank's worker computes with the weights that it has pulled.
            shard.main_param.data = shard.main_param.data.clone()
        return shard

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def scope(self) -> Group:
        return self._scope

    def phase(self, step: int) -> str:
        return "push and pull"

    def role(self, group: Group, index: int) -> str:
        return "the parameter server" if index == 0 else "a worker"

    # ---- a worker's step

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        self.step = step
        if self._workers > 1:
            # First: a gradient may still be on its way.
            self._ask(Request(kind=Kind.PULL, step=step))
        super().begin_step(step, loss_scale=loss_scale)

    def _reduce(self, bucket: Bucket) -> Work:
        return DONE

    def norm_terms(self) -> torch.Tensor:
        total = torch.zeros(1, dtype=torch.float64, device=self.all_buckets()[0].data.device)
        for bucket in self.all_buckets():
            if self._counts(bucket):
                total += self.options.l2norm([bucket.grad]).square()
        return total

    def norms(self, sums: Sequence[float]) -> Norms:
        part = super().norms(sums)
        return Norms(shown=self._workers * part.shown, clipping=self._workers * part.clipping)

    def update(self, optimizer: Optimizer, update: Update) -> None:
        if self._workers == 1:
            super().update(optimizer, update)
            return
        gradients = [bucket.grad for bucket in self.all_buckets()]
        for gradient in gradients:
            gradient.mul_(update.factor * self._workers)
        request = Request(kind=Kind.PUSH, step=update.step, lr=update.lr, weight_decay=update.weight_decay)
        self._connect()
        if self._link is not None:
            wire = self.options.wire_dtype
            self.wire_counter.add(sum(g.numel() * (wire or g.dtype).itemsize for g in gradients))
            self._link.push(request, gradients, wire)
        else:
            assert self._server is not None
            self._server.push(request, gradients)

    # ---- the server

    def _connect(self) -> None:
        """Once weights have been loaded: this rank's end of the exchange."""
        groups, wire = self._groups_of_servers, self.options.wire_dtype
        if self._server is not None or self._link is not None:
            return
        assert groups is not None and self._optimizer is not None
        chunk = int(self.options.settings.server_chunk_mb * 1e6)
        if self.groups.dp.rank > 0:
            self._link = WorkerEnd(groups.pairs[0], chunk_bytes=chunk)
            return
        assert groups.servers is not None
        self._server = Server(
            self.shards,
            self._optimizer,
            links=[ServerEnd(pair, chunk_bytes=chunk) for pair in groups.pairs],
            servers=groups.servers,
            ledger=Ledger(self._workers, self.options.settings.max_staleness),
            order=self.order,
            staleness_aware=self.options.settings.staleness_aware_lr,
            wire_dtype=wire,
        )

    def _ask(self, request: Request) -> None:
        self._connect()
        if self._link is not None:
            self._link.ask(request, [bucket.data for bucket in self.all_buckets()])
        else:
            assert self._server is not None
            self._server.ask(request)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        if self._workers == 1:
            yield
            return
        self._ask(Request(kind=Kind.MEET))
        self._note()
        try:
            yield
        finally:
            if self._server is not None:
                self._server.resume()

    def finish(self) -> None:
        if self._workers > 1:
            self._ask(Request(kind=Kind.LEAVE))
            if self._server is not None:
                self._note()
                self._server.join()
            self._server = self._link = None

    def _note(self) -> None:
        """On the rank that decides, say how stale the pushes since the last report were."""
        groups = self._groups_of_servers
        if self._server is not None and groups is not None and groups.servers is not None:
            report = self._server.take_report()
            if groups.servers.rank == LEADER and report.staleness:
                self.notes.append(report.line())

    # ---- what is saved and counted

    def states(self) -> list[FlatState]:
        return [
            FlatState(
                *("main_param", shard.bucket, shard.main_param.data, Placement.SHARDED, shard.start),
                default="parameter",
            )
            for shard in self.shards
            if shard.is_copy
        ]

    def loaded(self) -> None:
        for shard in self.shards:
            if not shard.is_copy:
                shard.main_param.data.copy_(shard.bucket.data[shard.start : shard.stop])

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        group = self.groups.replicas(shard.bucket.kind)
        whole = values if group.rank == 0 else values.new_empty(shard.bucket.data.numel())
        group.broadcast(whole)
        return whole

    def wire(self) -> float:
        return super().wire() + (0 if self._server is None else self._server.take_sent())

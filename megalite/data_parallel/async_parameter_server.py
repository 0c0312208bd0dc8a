"""Data parallelism by an asynchronous parameter server: workers push gradients and pull weights at their own pace."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.config.data_parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.server import LEADER, Server
from megalite.data_parallel.server_link import Request, ServerEnd, WorkerEnd
from megalite.data_parallel.shards import Norms, OptimizerShard
from megalite.data_parallel.staleness import ByArrival, ByRank, Kind, Ledger, Order
from megalite.data_parallel.states import FlatState, Placement
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.optimizers.base import Optimizer
from megalite.optimizers.flat import Update
from megalite.topology.group import DONE, Group, Work
from megalite.topology.topology import ServerGroups

_MB = 1_000_000


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
        self,
        stages: Mapping[int, torch.nn.Module],
        *,
        settings: DataParallelConfig,
        scope: Group,
        servers: ServerGroups | None,
        **common: Any,
    ) -> None:
        """
        Args:
            scope: tp and pp: one copy of the model.
            servers: None for one worker.
        """
        super().__init__(stages, **common)
        self._settings, self._scope, self._groups_of_servers = settings, scope, servers
        self._workers = self.groups.dp.size
        self._server: Server | None = None
        self._link: WorkerEnd | None = None
        self._optimizer: Optimizer | None = None
        self.order: Order = ByRank() if settings.max_staleness == 0 else ByArrival()
        """In which pushes and pulls are served; who wants another says so before the first step."""
        if self._workers > 1:
            self.notes.append(
                "async-parameter-server: losses and norms of steps are of the samples of data-parallel rank 0; those of "
                "evaluations are of all, with the weights that all workers then have"
            )

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """All of it on rank 0, nothing elsewhere."""
        return 0, bucket.data.numel() if self.groups.dp.rank == 0 else 0

    def _make_shard(self, bucket: Bucket) -> OptimizerShard:
        shard = super()._make_shard(bucket)
        if self.groups.dp.size > 1 and not shard.is_copy:
            # The server steps it while this rank's worker computes with the weights that it has pulled.
            shard.main_param.data = shard.main_param.data.clone()
        return shard

    def attach(self, optimizer: Optimizer) -> None:
        """The server steps it."""
        self._optimizer = optimizer

    @property
    def scope(self) -> Group:
        """The ranks of this copy of the model."""
        return self._scope

    def phase(self, step: int) -> str:
        """Always the same."""
        return "push and pull"

    def role(self, group: Group, index: int) -> str:
        """As in the synchronous one."""
        return "the parameter server" if index == 0 else "a worker"

    # ---- a worker's step

    def begin_step(self, step: int, *, loss_scale: float = 1.0) -> None:
        """Wait until no worker is more than max_staleness steps behind, and pull."""
        self.step = step
        if self._workers > 1:
            # First: a gradient may still be on its way.
            self._ask(Request(kind=Kind.PULL, step=step))
        super().begin_step(step, loss_scale=loss_scale)

    def _reduce(self, bucket: Bucket) -> Work:
        return DONE

    def norm_terms(self) -> torch.Tensor:
        """Of this worker's part; the sum over `scope` is given to `norms`."""
        total = torch.zeros(1, dtype=torch.float64, device=self.all_buckets()[0].data.device)
        for bucket in self.all_buckets():
            if self._counts(bucket):
                total += self.options.l2norm([bucket.grad]).square()
        return total

    def norms(self, sums: Sequence[float]) -> Norms:
        """Of the estimate."""
        part = super().norms(sums)
        return Norms(shown=self._workers * part.shown, clipping=self._workers * part.clipping)

    def update(self, optimizer: Optimizer, update: Update) -> None:
        """Push the estimate, clipped; the weights stay what they are until the next pull."""
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
            self._link.push(request, gradients)
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
        chunk = int(self._settings.server_chunk_mb * _MB)
        if self.groups.dp.rank > 0:
            self._link = WorkerEnd(groups.pairs[0], chunk_bytes=chunk, wire_dtype=wire)
            return
        assert groups.servers is not None
        self._server = Server(
            self.shards,
            self._optimizer,
            links=[ServerEnd(pair, chunk_bytes=chunk) for pair in groups.pairs],
            servers=groups.servers,
            ledger=Ledger(self._workers, self._settings.max_staleness),
            order=self.order,
            staleness_aware=self._settings.staleness_aware_lr,
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
        """A meeting: all pushes have been applied, all workers have the same weights, and the server rests."""
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
        """Leave together: until then the server may be needed. `notes` get the last report."""
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
        """The main parameters, where they are apart from the weights: of the server alone."""
        return [
            FlatState(
                name="main_param",
                bucket=shard.bucket,
                start=shard.start,
                values=shard.main_param.data,
                placement=Placement.SHARDED,
                default="parameter",
            )
            for shard in self.shards
            if shard.is_copy
        ]

    def loaded(self) -> None:
        """Where main parameters have the weights' type, the loaded weights are theirs."""
        for shard in self.shards:
            if not shard.is_copy:
                shard.main_param.data.copy_(shard.bucket.data[shard.start : shard.stop])

    def gather(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """The server's, on all."""
        group = self.groups.replicas(shard.bucket.kind)
        whole = values if group.rank == 0 else values.new_empty(shard.bucket.data.numel())
        group.broadcast(whole)
        return whole

    def wire(self) -> float:
        """Gradients as a worker, weights as the server."""
        return super().wire() + (0 if self._server is None else self._server.take_sent())

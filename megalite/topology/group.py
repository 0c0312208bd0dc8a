"""Provide the ranks of a parallel group, their collectives (`Group`), and autograd functions made from collectives.

A group of one rank needs no process group: its collectives are identities, so a single process runs the same code
without a branch."""

import contextlib
import datetime
import functools
import json
import zlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megalite.config.errors import CheckpointError, ConfigError
from megalite.topology.host_memory import HostCopy
from megalite.watchdog.heartbeat import UNWATCHED, Heartbeat, Lane

if TYPE_CHECKING:  # imported only for groups that use it
    from megalite.topology.shared_memory import SharedMemory

CPU = torch.device("cpu")
_PIECE = 1 << 16  # elements that stay in a CPU's cache while the rows are added to them


def add_in_order(output: torch.Tensor, parts: torch.Tensor) -> None:
    """Write ((parts[0] + parts[1]) + parts[2]) + ... of `parts` [size, ...] to `output` [...], which is contiguous.

    Additions use the precision of `output`, or fp32 if that has 16 bits. `torch.sum` cannot be used: with many rows it
    adds several partial sums."""
    whole, rows = output.view(-1), parts.view(parts.shape[0], -1).unbind()
    step = _PIECE if output.device.type == "cpu" else max(1, whole.numel())
    for start in range(0, whole.numel(), step):
        piece = whole[start : start + step]
        narrow = piece.dtype in (torch.bfloat16, torch.float16)
        total = torch.empty_like(piece, dtype=torch.float32) if narrow else piece
        total.copy_(rows[0][start : start + step])
        for row in rows[1:]:
            total.add_(row[start : start + step])
        if narrow:
            piece.copy_(total)


# torch 2.13 renamed both; 2.11 has only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """An operation in flight: `wait()` returns when its result may be used (on CUDA: by the current stream)."""

    def wait(self) -> Any: ...


@dataclass(eq=False)
class WorkList:
    """Works that started together (none for a group of one rank), and tensors that must stay alive until all are done.

    The first `wait` runs `finish` after them."""

    works: Sequence[Work] = ()
    kept: Sequence[torch.Tensor] = ()
    finish: Callable[[], Any] | None = None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        finish, self.finish = self.finish, None
        self.works, self.kept = (), ()
        if finish is not None:
            finish()


DONE: Work = WorkList()


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that take part in one kind of communication, from the view of one of them.

    Args:
        name: the kind, e.g. `"tp"`; it appears in error messages.
        ranks: global ranks, ascending (or sender, receiver for a pipeline edge).
        rank: this process's index in `ranks`.
        process_group: torch's handle; None for one rank.
        heartbeat: is notified of every operation.
        memory: shared memory that replaces `process_group` in collectives of equal parts.
        device: device of the exchanged tensors; the CPU for gloo."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None = None
    heartbeat: Heartbeat = UNWATCHED
    memory: "SharedMemory | None" = None
    device: torch.device = CPU
    size: int = field(init=False)
    _lane: Lane = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))
        heartbeat = self.heartbeat if self.size > 1 else UNWATCHED
        object.__setattr__(self, "_lane", heartbeat.lane(self.name, self.ranks))

    @classmethod
    def solo(cls, name: str) -> "Group":
        """Return the group of one process: every collective is the identity."""
        return cls(name=name, ranks=(0,), rank=0)

    @property
    def _uses_gloo(self) -> bool:
        return dist.get_backend(self.process_group) == "gloo"

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum") -> None:
        """Replace `tensor` by the sum (or max, min) over ranks, in place."""
        self.all_reduce_async(tensor, op=op).wait()

    def all_reduce_async(self, tensor: torch.Tensor, *, op: str = "sum") -> Work:
        """Start `all_reduce`; `tensor` must not be read or written before `wait()`."""
        if self.size == 1:
            return DONE
        if (memory := self.memory) is not None:
            return self._lane.start(lambda: memory.all_reduce(tensor, op), "all_reduce", tensor.nbytes)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        return self._start("all_reduce", tensor.nbytes, dist.all_reduce, tensor, reduce_op)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """Gather the parts [n, ...] of all ranks, in rank order, into `output` [size·n, ...]."""
        self.all_gather_async(output, part).wait()

    def all_gather_async(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        """Start `all_gather`. `part` may be this rank's part of `output`."""
        if self.size == 1:
            if output.data_ptr() != part.data_ptr():
                output.copy_(part)
            return DONE
        if (memory := self.memory) is not None:
            return self._lane.start(lambda: memory.all_gather(output, part), "all_gather", part.nbytes)
        return self._start("all_gather", part.nbytes, _all_gather_single, output, part)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write this rank's part of the sum over ranks of `tensor` [size·n, ...] to `output` [n, ...]."""
        self.reduce_scatter_async(output, tensor).wait()

    def reduce_scatter_async(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Start `reduce_scatter`. `output` may be this rank's part of `tensor`.

        gloo's reduce-scatter moves as many bytes as an all-reduce. Exchanging the parts and adding them here, in rank
        order, moves half of that and is deterministic."""
        if self.size == 1:
            if output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            return DONE
        if not self._uses_gloo:
            return self._start("reduce_scatter", tensor.nbytes, _reduce_scatter_single, output, tensor)
        if (memory := self.memory) is not None:
            part = output.detach().view(-1)
            return self._lane.start(
                lambda: memory.exchange(tensor, lambda start, stop, rows: add_in_order(part[start:stop], rows)),
                "reduce_scatter",
                tensor.nbytes,
            )
        received = torch.empty_like(tensor)
        work = self._start_exchange(received, tensor, "reduce_scatter")
        parts = received.view(self.size, *output.shape)
        return WorkList([work], finish=lambda: add_in_order(output, parts))

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        """Send each rank its part of the rows of `tensor`; `output` gets the received parts in rank order.
        `output_splits`: rows received from each rank, possibly 0. `input_splits`: rows sent to each rank."""
        self.all_to_all_async(output, tensor, output_splits, input_splits).wait()

    def all_to_all_async(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Work:
        """Start `all_to_all`; neither tensor may be read or written before `wait()`."""
        if self.size == 1:
            output.copy_(tensor)
            return DONE
        splits = list(output_splits), list(input_splits)
        return self._start("all_to_all", 0, dist.all_to_all_single, output, tensor, *splits)

    def all_to_all_equal(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Send part i of `tensor` [size, ...] to rank i; `output` [size, ...] gets part i from rank i."""
        self.all_to_all_equal_async(output, tensor).wait()

    def all_to_all_equal_async(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Start `all_to_all_equal`; neither tensor may be read or written before `wait()`."""
        if self.size == 1:
            output.copy_(tensor)
            return DONE
        return self._start_exchange(output, tensor, "all_to_all")

    def _start_exchange(self, output: torch.Tensor, tensor: torch.Tensor, operation: str) -> Work:
        return self._start(operation, tensor.nbytes, dist.all_to_all_single, output, tensor)

    def _start(self, operation: str, size: int, call: Callable[..., Work | None], *arguments: Any) -> Work:
        """Start `call` over the group; `size`: see `Lane.start`."""
        begin = functools.partial(call, *arguments, group=self.process_group, async_op=True)
        return self._lane.start(lambda: _started(begin()), operation, size)

    def rotate_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send `tensor` to the next rank of the ring, and return the tensor of the previous rank, of the same shape. Before
        `wait()`, `tensor` must not be written and the received tensor not be read."""
        if self.size == 1:
            return tensor, DONE
        received = torch.empty_like(tensor)
        next_rank, previous = (self.ranks[(self.rank + step) % self.size] for step in (1, -1))
        # One batch: NCCL runs the operations of a group one after the other. If every rank posted its send first, each
        # could wait for a receive that is queued behind a send.
        messages = [
            dist.P2POp(dist.isend, tensor, next_rank, self.process_group),
            dist.P2POp(dist.irecv, received, previous, self.process_group),
        ]
        work = self._lane.start(lambda: WorkList(dist.batch_isend_irecv(messages), [tensor]), "rotate", tensor.nbytes)
        return received, work

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Copy the tensor of the rank with index `source` to every rank, in place."""
        if self.size > 1:
            self._start("broadcast", tensor.nbytes, dist.broadcast, tensor, self.ranks[source]).wait()

    def send_async(self, tensor: torch.Tensor, *, to: int) -> Work:
        """Send to the rank with index `to`; the k-th send matches the receiver's k-th receive."""
        return self._lane.start(
            lambda: _started(dist.isend(tensor, self.ranks[to], group=self.process_group)), "send", tensor.nbytes
        )

    def receive_async(self, tensor: torch.Tensor, *, source: int) -> Work:
        """Receive into `tensor` from the rank with index `source`."""
        return self._lane.start(
            lambda: _started(dist.irecv(tensor, self.ranks[source], group=self.process_group)), "receive", tensor.nbytes
        )

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's `value` (small, plain JSON), in rank order, on every rank."""
        if self.size == 1:
            return [value]
        # Pad on the host, so that each gather takes one copy to the device and one wait for it.
        payload = json.dumps(value).encode()
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.device)
        self.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64, device=self.device))
        counts = self._read(lengths).tolist()
        longest = max(counts)
        padded = torch.frombuffer(bytearray(payload.ljust(longest)), dtype=torch.uint8).to(self.device)
        everything = torch.empty(self.size * longest, dtype=torch.uint8, device=self.device)
        self.all_gather(everything, padded)
        rows = self._read(everything).view(self.size, longest)
        return [json.loads(row[:count].numpy().tobytes()) for row, count in zip(rows, counts, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Return rank 0's `value` (plain JSON, possibly large) on every rank; the values of others are ignored."""
        if self.size == 1:
            return value
        payload = torch.empty(0, dtype=torch.uint8)
        if self.rank == 0:
            text = zlib.compress(json.dumps(value).encode(), level=1)
            payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        length = torch.tensor([payload.numel()], dtype=torch.int64, device=self.device)
        self.broadcast(length)
        data = (
            payload.to(self.device) if self.rank == 0 else length.new_empty(int(self._read(length)), dtype=torch.uint8)
        )
        self.broadcast(data)
        return json.loads(zlib.decompress(self._read(data).numpy().tobytes()))

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the host. Background threads pass only host tensors, which need no wait."""
        if tensor.device.type == "cpu":
            return tensor
        with self.heartbeat.synchronise():
            return tensor.cpu()

    def copy_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy a small tensor to the host; `read` of the result waits only if the copy has not finished."""
        return HostCopy(tensor, self.heartbeat)

    def raise_on_all_ranks(self, error: BaseException | None) -> None:
        """Raise an error on every rank if any rank passes one; return on all ranks otherwise.

        Raises ConfigError (or CheckpointError): that of the first failing rank. Raises RemoteError: the first failing
        rank has another error; this is raised on ranks without an error and names that rank. A rank with an error other
        than ConfigError raises that error, as only this rank has its traceback."""
        report = None if error is None else [_kind(error), str(error)]
        reports = self.gather_json(report)
        first = next((index for index, each in enumerate(reports) if each is not None), None)
        if first is None:
            return
        if error is not None and (report == reports[first] or not isinstance(error, ConfigError)):
            raise error
        name, message = reports[first]
        kind = {"CheckpointError": CheckpointError, "ConfigError": ConfigError}.get(name)
        if kind is None:
            raise RemoteError(f"rank {self.ranks[first]} failed: {name}: {message}")
        raise kind(message)

    @contextlib.contextmanager
    def errors_on_all_ranks(self, kinds: type[Exception] = ConfigError) -> Iterator[None]:
        """Run local work in the block; an error of these kinds on any rank is raised on all ranks at its end.

        Otherwise the ranks without the error would wait forever in the next collective.

        Collectives: `raise_on_all_ranks`, at the end."""
        found: Exception | None = None
        try:
            yield
        except kinds as error:
            found = error
        self.raise_on_all_ranks(found)


def _started(work: Work | None) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


class RemoteError(RuntimeError):
    """Another rank has failed, and this one has not: `rank 2 failed: KeyError: ...`."""


def _kind(error: BaseException) -> str:
    """Return the name of a class that other ranks can build from a message; a subclass may need more arguments."""
    kinds = (kind for kind in (CheckpointError, ConfigError) if isinstance(error, kind))
    return next(kinds, type(error)).__name__


Half = Callable[[torch.Tensor], torch.Tensor]  # forward or backward of an autograd function


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Half, backward: Half) -> torch.Tensor:
        ctx.half = backward
        y = forward(x)
        if y is x:  # reduced in place
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("a collective has no second derivative: call backward without create_graph=True")
        return ctx.half(grad), None, None


def conjugate(x: torch.Tensor, forward: Half, backward: Half) -> torch.Tensor:
    """Return `forward(x)` with the gradient `backward(grad)`; neither function may save an activation.

    Collectives: those of `forward` / those of `backward`."""
    return _Conjugate.apply(x, forward, backward)


ProcessGroups = MutableMapping[tuple[str, tuple[int, ...]], Any]
"""(kind, ranks) -> process group or shared memory that exists already."""

FAN_OUT = 16  # most ranks of a gloo group in a tree over all ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeGroup(Group):
    """A tree of gloo groups over many ranks, for JSON and few numbers. `FAN_OUT` ranks form a group, the first ranks of
    these groups form groups again, and so on. gloo connects every two ranks of a group: one group of 3,072 ranks would
    need 4.7 million connections, the tree needs 25,000."""

    levels: tuple[Group, ...]  # the groups of this rank, lowest level first

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum") -> None:
        for level in self.levels:
            level.all_reduce(tensor, op=op)
        for level in reversed(self.levels):
            level.broadcast(tensor)

    def gather_json(self, value: Any) -> list[Any]:
        rows = [value]
        for level in self.levels:
            rows = [row for part in level.gather_json(rows) for row in part]
        return list(self.broadcast_json(rows))

    def broadcast_json(self, value: Any) -> Any:
        for level in reversed(self.levels):
            value = level.broadcast_json(value)
        return value


def host_group(
    world: Group, name: str, *, timeout: datetime.timedelta, reuse: ProcessGroups | None = None, fan_out: int = FAN_OUT
) -> Group:
    """Create a group of all ranks on gloo and the CPU, for JSON and all-reduces of few numbers only. `timeout`: limit
    for live peers; if a peer dies, the wait ends at once. `reuse`: process groups to reuse and extend.

    Collectives: creates process groups; every rank calls it at the same time."""
    own_rank, ranks, levels = world.ranks[world.rank], world.ranks, list[Group]()
    reuse = {} if reuse is None else reuse
    while len(ranks) > 1:
        for part in (ranks[first : first + fan_out] for first in range(0, len(ranks), fan_out)):
            if len(part) > 1 and (name, part) not in reuse:
                reuse[name, part] = dist.new_group(list(part), timeout=timeout, backend="gloo")
            if len(part) > 1 and own_rank in part:
                levels.append(Group(name, part, part.index(own_rank), reuse[name, part], world.heartbeat))
        ranks = ranks[::fan_out]
    if world.size <= fan_out:
        return levels[0] if levels else world
    none: Any = dist.GroupMember.NON_GROUP_MEMBER  # other collectives must fail, not run on the default group
    return TreeGroup(name, world.ranks, world.rank, none, world.heartbeat, levels=tuple(levels))
